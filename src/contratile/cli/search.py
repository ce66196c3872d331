"""`contratile search`: the nearest of a run's held-out images or texts to a query. It reads the run's folder alone."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.errors import bad_value
from contratile.printable import printable

if TYPE_CHECKING:
    from contratile.report.gallery import Side
    from contratile.report.html import SheetRow


def parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = Parser(prog="contratile search", description="Look for something in a run's gallery.")
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("query", nargs="+", help='what to look for, for example "arrow pointing left"')
    parser.add_argument("--k", type=int, default=8, help="how many to show (default: 8)")
    parser.add_argument(
        "--among",
        choices=("left", "right"),
        help="the side of the pairs that is looked in; the query is of the other one. Default: left where that holds "
        "images, for a text; right of text pairs, for a text of the left column. An image (its path) is looked for "
        "with right",
    )
    parser.add_argument("--out", type=Path, help="the contact sheet (default: search.png in the run's folder)")
    return parser


def search(argv: Sequence[str]) -> int:
    """The nearest of a run's held-out images (or texts) to a query."""
    options = parser().parse_args(argv)
    if missing("search", TRAIN, "train"):
        return 1
    quiet_progress()
    _search(options)
    return 0


def _search(options: Any) -> None:
    import torch

    from contratile.data.images import SUFFIXES
    from contratile.report.gallery import found_rows, load_gallery
    from contratile.train.checkpoint import step_name
    from contratile.train.finish import load_run

    run, query = options.run, printable(" ".join(options.query))
    if options.out is not None and options.out.is_dir():
        bad_value("out", expected="the name of a picture", got=f"the folder {options.out}", remedy="Add a name.")
    if not query.strip():
        bad_value("query", expected="a text, or the path of a picture", got=repr(query), remedy="Say what to look for.")
    gallery = load_gallery(run)
    pictures = gallery.kinds[0] == "image"
    among: Side = options.among or ("left" if pictures else "right")
    # The weights that made the gallery's features, which need not be the best ones.
    towers, _, _ = load_run(run, step_name(gallery.step))
    tower = towers.right if among == "left" else towers.left
    if tower.kind == "text" and pictures and Path(query).suffix.lower() in SUFFIXES and Path(query).is_file():
        remedy = "Pass --among right to look for the texts of that picture."
        bad_value("query", expected="a text", got=f"a picture, {query}", remedy=remedy)
    asked: Any = query if tower.kind == "text" else _picture(query)
    with torch.no_grad():
        features = tower(tower.prepare([asked])).float()
    (row,) = found_rows(gallery, [query], features, k=options.k, among=among)
    if pictures and among == "left":
        _show_pictures(row, options.out or run / "search.png", options.k)
        return
    if options.out is not None:
        remedy = "Drop it: texts are printed."
        bad_value("out", expected="a search that finds images", got=options.out, remedy=remedy)
    side = gallery.sides[0 if among == "left" else 1]
    print(printable(f'nearest to "{query}" among {side}'))
    for line in lines(row):
        print(line)


def lines(row: "SheetRow") -> list[str]:
    """What was found, a line each: score, name if there is one, text."""
    names = row.names or [""] * len(row.captions)
    found = zip(row.scores, names, row.captions, row.hits, strict=True)
    return [
        printable("  ".join(filter(None, (f"{score:.3f}", name, text + " (its own)" * hit))))
        for score, name, text, hit in found
    ]


def _show_pictures(row: "SheetRow", out: Path, k: int) -> None:
    from rich.console import Console

    from contratile.data.files import written_whole
    from contratile.report.html import contact_sheet, png
    from contratile.report.preview import preview

    console = Console()
    if console.is_terminal:
        preview(row, console)
    else:
        print(f'nearest to "{printable(row.query)}"', *lines(row), sep="\n")
    with written_whole(out) as draft:
        draft.write_bytes(png(contact_sheet([row], columns=k)))
    absent = sum(image is None for image in row.images)
    if absent:
        print(f"{absent} of {len(row.images)} pictures are not in the gallery and left blank")
    print(f"contact sheet: {out}")


def _picture(path: str) -> Any:
    from contratile.data.images import decode
    from contratile.data.sample import Broken

    try:
        return decode(Path(path), path)
    except (Broken, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, Broken) else str(error)
        bad_value(
            "query",
            expected="the path of a picture with --among right",
            got=f"{path!r} ({reason})",
            remedy="To look for images with a text, drop --among.",
        )

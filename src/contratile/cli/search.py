"""`contratile search`: find the images or texts of a run, or of embedded features, that are nearest to a query."""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.cli.corpus import add_corpus
from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.errors import bad_value, check_count
from contratile.printable import printable

if TYPE_CHECKING:
    from torch import Tensor

    from contratile.models.towers import Towers
    from contratile.report.corpus import Corpus, Side
    from contratile.report.sheets import SheetRow


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = Parser(
        prog="contratile search",
        description="Search the gallery of a finished run, or features that `contratile embed` wrote. A gallery holds "
        "the held-out pairs, and for small data (or with `contratile train --gallery all`) the training pairs too; "
        "each result says which it is.",
    )
    add_corpus(parser)
    parser.words = "query"
    parser.add_argument("query", nargs="*", help='what to search for: one query, for example "battery charging"')
    parser.add_argument(
        "--queries", nargs="+", default=[], help='several queries, for example "arrow left" "arrow right"'
    )
    parser.add_argument(
        "--text", action="store_true", help="queries that end like the name of a picture (logo.png) are texts too"
    )
    parser.add_argument("--k", type=int, default=8, help="number of results (default: 8)")
    parser.add_argument(
        "--among",
        choices=("left", "right"),
        help="the side of the pairs to search; the query is of the other side. Left if that holds images, so that the "
        "query is a text; right for text pairs, so that it is a text of the left column. For an image, pass its "
        "path and right to find texts, left to find similar images",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="where to write the contact sheet, a name that ends in .png (default: search.png in the folder, "
        "NAME.search.png next to NAME.npy)",
    )
    return parser


def search(argv: Sequence[str]) -> int:
    """Search a run or embedded features.

    Args:
        argv: The words after `contratile search`.

    Returns:
        The exit code.
    """
    options = parser().parse_args(argv)
    if missing("search", TRAIN, "train"):
        return 1
    quiet_progress()
    _search(options)
    return 0


def _search(options: Any) -> None:
    import torch

    from contratile.embed.open_corpus import open_corpus
    from contratile.report.corpus import searched_side, sheet_rows

    queries = _queries(options)
    check_count("--k", options.k, least=1)
    if options.out is not None:
        _check_out(options.out)
    corpus, towers, _, sheet = open_corpus(options.corpus, run=options.run, pictures=options.pictures)
    among: Side = options.among or searched_side(corpus.kinds, corpus.searchable)
    finds_pictures = corpus.kinds[0] == "image" and among == "left"
    if options.out is not None and not finds_pictures:
        remedy = "Drop it: texts are printed."
        bad_value("--out", expected="a search that finds images", got=options.out, remedy=remedy)
    if options.text and (towers.right if among == "left" else towers.left).kind != "text":
        remedy = "Drop it, or search among the images (--among left)." if towers.right.kind == "text" else "Drop it."
        bad_value("--text", expected="a search with texts", got="one with pictures", remedy=remedy)
    encoded = partial(_features, towers, among=among, chosen=options.among is not None, text=options.text)
    features = [encoded(query) for query in queries]
    rows = sheet_rows(corpus, queries, torch.cat(features), k=options.k, among=among)
    if finds_pictures:
        _show_pictures(rows, corpus, options.out or sheet, options.k)
        return
    side = corpus.sides[0 if among == "left" else 1]
    for row in rows:
        print(printable(f'nearest to "{row.query}" among {side}'), *lines(row), sep="\n")


def _check_out(out: Path) -> None:
    """Refuse a name that the contact sheet cannot be written to, before anything is encoded. Makes its folder."""
    if out.suffix.lower() != ".png" or out.is_dir():
        got = f"the folder {out}" if out.is_dir() else out
        remedy = "The contact sheet is a PNG: choose a name such as found.png."
        bad_value("--out", expected="the name of a picture that ends in .png", got=got, remedy=remedy)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass  # access rights are not enough: the file system may be read-only
    except OSError as error:
        got = f"{out.parent} ({error.strerror or error})"
        bad_value("--out", expected="a folder to write to", got=got, remedy="Choose another folder.")


def _queries(options: Any) -> list[str]:
    """The words as one query, and those of --queries."""
    if not options.query and not options.queries:
        remedy = 'Say what to search for: contratile search RUN "battery charging".'
        bad_value("query", expected="a text, or the path of a picture", got="nothing", remedy=remedy)
    queries = [*([" ".join(options.query)] if options.query else []), *options.queries]
    for query in queries:
        if not printable(query).strip():
            remedy = "Say what to search for."
            bad_value("query", expected="a text, or the path of a picture", got=repr(query), remedy=remedy)
    return [printable(query) for query in queries]


def _features(towers: "Towers", query: str, among: "Side", *, chosen: bool, text: bool) -> "Tensor":
    """Encode one query, a text or the path of a picture, with the encoder it needs.

    Args:
        towers: The encoders.
        query: The query.
        among: The side that is searched.
        chosen: Whether the user named that side.
        text: The query is a text, even if it reads like the path of a picture.
    """
    from contratile.data.images import SUFFIXES
    from contratile.train.gallery_search import encode_queries

    tower = towers.right if among == "left" else towers.left
    if tower.kind == "text" and towers.left.kind == "image" and Path(query).suffix.lower() in SUFFIXES and not text:
        if not Path(query).is_file():  # a mistyped path, taken as a text, would find something too
            remedy = "Check the path, or pass --text to search for these words."
            bad_value("query", expected="a text, or the path of a picture", got=f"nothing at {query}", remedy=remedy)
        if not chosen:
            remedy = "Pass --among right to find the texts of that picture, or --among left to find similar pictures."
            bad_value("query", expected="a text", got=f"a picture, {query}", remedy=remedy)
        tower = towers.left
    asked: Any = query if tower.kind == "text" else _picture(query, views=towers.left is towers.right)
    return encode_queries(tower, [asked])


def lines(row: "SheetRow") -> list[str]:
    """A line per result: score, name if there is one, text, and whether it was trained on."""
    names = row.names or [""] * len(row.captions)
    marks = [f" ({row.mark(place)})" if row.trained else "" for place in range(len(row.captions))]
    found = zip(row.scores, names, row.captions, row.hits, marks, strict=True)
    return [
        printable("  ".join(filter(None, (f"{score:.3f}", name, text + " (match)" * hit + mark))))
        for score, name, text, hit, mark in found
    ]


def _show_pictures(rows: "list[SheetRow]", corpus: "Corpus", out: Path, k: int) -> None:
    from rich.console import Console

    from contratile.data.files import written_whole
    from contratile.report.preview import preview
    from contratile.report.sheets import contact_sheet, png

    console = Console()
    for row in rows:
        if console.is_terminal:
            preview(row, console)
        else:
            print(f'nearest to "{printable(row.query)}"', *lines(row), sep="\n")
    with written_whole(out) as draft:
        draft.write_bytes(png(contact_sheet(rows, columns=k)))
    images = [image for row in rows for image in row.images]
    absent = sum(image is None for image in images)
    if absent:
        why = f": {corpus.remark}" if corpus.remark else ""
        print(printable(f"{absent} of {len(images)} pictures are missing and left blank{why}"))
    print(f"contact sheet: {out}")


def _picture(path: str, *, views: bool) -> Any:
    from contratile.data.images import decode
    from contratile.data.sample import Broken

    try:
        return decode(Path(path), path)
    except (Broken, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, Broken) else str(error)
        bad_value(
            "query",
            expected="the path of a picture",
            got=f"{path!r} ({reason})",
            remedy="This run has no text encoder." if views else "To search images with a text, drop --among.",
        )

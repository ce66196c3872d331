"""`contratile search`: the nearest of a run's held-out images to a text."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from contratile.cli.extras import TRAIN, missing


def parser() -> argparse.ArgumentParser:
    """Its options."""
    parser = argparse.ArgumentParser(prog="contratile search", description="Look for something in a run's gallery.")
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("query", nargs="+", help='what to look for, for example "arrow pointing left"')
    parser.add_argument("--k", type=int, default=8, help="how many to show (default: 8)")
    parser.add_argument("--out", type=Path, help="the contact sheet (default: search.png in the run's folder)")
    return parser


def search(argv: Sequence[str]) -> int:
    """The nearest of a run's held-out images (or texts) to a text."""
    options = parser().parse_args(argv)
    if missing("search", TRAIN, "train"):
        return 1
    try:
        _search(options.run, " ".join(options.query), options.k, options.out or options.run / "search.png")
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"contratile search: {error}", file=sys.stderr)
        return 2
    return 0


def _search(run: Path, query: str, k: int, out: Path) -> None:
    import torch
    from rich.console import Console

    from contratile.data.catalog import open_source
    from contratile.metrics import nearest
    from contratile.train.checkpoint import step_name
    from contratile.train.evaluate import load_gallery
    from contratile.train.finish import found_rows, load_run
    from contratile.train.preview import preview
    from contratile.train.report import contact_sheet, png

    gallery = load_gallery(run)
    # The weights that made the gallery's features, which need not be the best ones.
    towers, config, _ = load_run(run, step_name(gallery.step))
    with torch.no_grad():
        features = towers.right(towers.right.prepare([query])).float()
    console = Console()
    if towers.kinds[0] == "text" or int(gallery.places.min()) < 0:
        scores, places = nearest(features, gallery.left, k)
        for score, place in zip(scores[0].tolist(), places[0].tolist(), strict=True):
            console.print(f"{score:.3f}  {gallery.keys[place]}  {gallery.texts[place]}", markup=False, highlight=False)
        return
    source = open_source(config.data, "test")
    (row,) = found_rows(source, [query], features, gallery.left, gallery.places, gallery.texts, k)
    preview(row, console)
    partial = out.with_suffix(".partial")
    partial.write_bytes(png(contact_sheet([row], columns=k)))
    partial.replace(out)
    console.print(f"contact sheet: {out}", highlight=False, soft_wrap=True)

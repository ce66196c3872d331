"""`contratile train`, `contratile eval` and `contratile search`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.cli.extras import missing

if TYPE_CHECKING:
    from contratile.train.config import TrainConfig

NEEDED = ("accelerate", "transformers", "safetensors", "tyro", "rich", "PIL")


def train(argv: Sequence[str]) -> int:
    """Train two encoders; everything is an option, and a recipe sets many at once."""
    if missing("train", NEEDED, "train"):
        return 1
    try:
        config = parse(argv)
        return _train(config)
    except (ValueError, TypeError, ImportError, OSError, FloatingPointError) as error:
        print(f"contratile train: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> "TrainConfig":
    """The options, on top of those of `--config RECIPE`."""
    import tyro

    from contratile.train.config import TrainConfig, load_config

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    known, rest = first.parse_known_args(list(argv))
    default = TrainConfig() if known.config is None else load_config(known.config)
    about = "Train two encoders with a contrastive loss at any batch size. --config RECIPE.toml sets options at once."
    return tyro.cli(
        TrainConfig,
        args=rest,
        default=default,
        prog="contratile train",
        description=about,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _train(config: "TrainConfig") -> int:
    from rich.console import Console

    from contratile.tiles import plan_tiles
    from contratile.train.config import to_toml
    from contratile.train.evaluate import chance
    from contratile.train.finish import CONFIG, finish
    from contratile.train.loop import Trainer

    console = Console(stderr=True)
    with console.status("preparing data and towers") as status:
        trainer = Trainer(config, notify=status.update)
    run = config.run.out
    if trainer.main:
        partial = run / f"{CONFIG}.partial"
        partial.write_text(to_toml(config), encoding="utf-8")
        partial.replace(run / CONFIG)
        if trainer.resumed is not None:
            console.print(f"continuing at step {trainer.step} of {trainer.steps}", highlight=False)
    outcome = trainer.run()
    if not trainer.main:
        return 0
    if not outcome.finished:
        print(f"stopped at step {outcome.step}; the same command continues from there ({run})", file=sys.stderr)
        return 0
    if outcome.encoded is None:  # it had been finished before
        print(f"nothing left to do: {run} has all {outcome.step} steps", file=sys.stderr)
        return 0
    width = outcome.encoded.left.shape[1]
    workspace = plan_tiles(config.run.batch, config.run.batch, width).workspace_bytes
    written = finish(run, config, trainer.held_out, outcome.encoded, outcome.metrics, workspace)
    guess = chance(len(outcome.encoded.keys))
    for name, value in outcome.metrics.items():
        times = f" ({value / guess[name]:.0f} times chance)" if name in guess else ""
        print(f"{name:28} {value:.4f}{times}")
    print(f"report: {written.report}")
    if written.sheet is not None:
        print(f"contact sheet: {written.sheet}")
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """Metrics of a trained pair of encoders on any data."""
    parser = argparse.ArgumentParser(
        prog="contratile eval", description="Retrieval metrics, and zero-shot classification if class names are given."
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--data", help="other data than the run's held-out pairs, named as in `contratile train`")
    parser.add_argument("--split", choices=("train", "test"), default="test", help="of the data (default: test)")
    parser.add_argument("--classes", type=Path, help="a file with one class name per line: zero-shot classification")
    parser.add_argument("--templates", type=Path, help="a file with one prompt per line, {} stands for the name")
    parser.add_argument("--limit", type=int, default=0, help="pairs at most (default: all)")
    parser.add_argument("--chunk", type=int, default=256, help="pairs that are encoded at once (default: 256)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if missing("eval", NEEDED, "train"):
        return 1
    try:
        metrics = _evaluate(options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"contratile eval: {error}", file=sys.stderr)
        return 2
    import json

    if options.json:
        print(json.dumps(metrics))
    else:
        for name, value in metrics.items():
            print(f"{name:28} {value:.4f}")
    return 0


def _evaluate(options: Any) -> dict[str, float]:
    from dataclasses import replace

    from contratile.data.catalog import open_source
    from contratile.train.evaluate import TEMPLATES, encode, retrieval, zero_shot
    from contratile.train.finish import load_run
    from contratile.train.loop import check_kinds

    towers, config = load_run(options.run)
    data = config.data if options.data is None else replace(config.data, data=options.data, test_data="")
    source = open_source(data, options.split)
    check_kinds(source, towers.kinds)
    found = encode(towers, source, chunk=options.chunk, limit=options.limit)
    metrics = {"pairs": float(len(found.keys)), **retrieval(found)}
    if options.classes is not None:
        names = lines(options.classes)
        metrics |= zero_shot(towers, found, names, lines(options.templates) if options.templates else TEMPLATES)
    return metrics


def lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def search(argv: Sequence[str]) -> int:
    """The nearest of a run's held-out images (or texts) to a text."""
    parser = argparse.ArgumentParser(prog="contratile search", description="Look for something in a run's gallery.")
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("query", nargs="+", help='what to look for, for example "arrow pointing left"')
    parser.add_argument("--k", type=int, default=8, help="how many to show (default: 8)")
    parser.add_argument("--out", type=Path, help="the contact sheet (default: search.png in the run's folder)")
    options = parser.parse_args(argv)
    if missing("search", NEEDED, "train"):
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
    from contratile.train.evaluate import load_gallery
    from contratile.train.finish import found_rows, load_run
    from contratile.train.preview import preview
    from contratile.train.report import contact_sheet, png

    towers, config = load_run(run)
    gallery = load_gallery(run)
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

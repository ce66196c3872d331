"""`contratile bench loss`, `family`, `ring`, `scale`, `cache`, `data`, `plan` and `plot`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from contratile.cli.extras import missing
from contratile.cli.options import Parser, check_options, options_of

WIDTH = 120
"""Columns of the printed tables if the output is not a terminal."""
EXTRA = ("tyro", "rich", "matplotlib")


def loss(argv: Sequence[str]) -> int:
    """The symmetric loss in one process against other packages."""
    return _measure("bench loss", argv)


def family(argv: Sequence[str]) -> int:
    """Each loss in one process against the package people use for it."""
    return _measure("bench family", argv)


def ring(argv: Sequence[str]) -> int:
    """The symmetric loss over ranks of this machine against other ways to compute it."""
    return _measure("bench ring", argv)


def scale(argv: Sequence[str]) -> int:
    """Memory per device of the symmetric loss up to a million pairs on many ranks."""
    return _measure("bench scale", argv)


def cache(argv: Sequence[str]) -> int:
    """Training steps in chunks against other gradient caches."""
    return _measure("bench cache", argv)


def data(argv: Sequence[str]) -> int:
    """Samples per second of the loader against other loaders."""
    return _measure("bench data", argv)


def plan(argv: Sequence[str]) -> int:
    """Predicted against measured memory and time of training steps."""
    return _measure("bench plan", argv)


def _measure(name: str, argv: Sequence[str]) -> int:
    """Measure, record, draw, and print the tables."""
    if missing(name, EXTRA, "bench"):
        return 1
    import tyro
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from contratile.bench.plots import draw
    from contratile.bench.rows import save_rows
    from contratile.bench.runner import Benchmark, run
    from contratile.cli.tables import notes, tables

    bench: Benchmark[Any] = import_module(f"contratile.{name.replace(' ', '.')}").BENCH
    start = bench.quick if "--quick" in argv else bench.default
    check_options(name, argv, options_of(start))
    config = tyro.cli(type(start), args=list(argv), default=start, prog=f"contratile {name}")
    command = shlex.join(["contratile", *name.split(), *argv])
    # A console of its own, because contestants are silenced by redirecting sys.stderr.
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        recording = run(
            bench,
            config,
            command=command,
            notify=lambda text: progress.update(task, description=text),
            keep=lambda rows: save_rows(rows, config.out),  # an interrupted run keeps its rows
        )
    paths = (*save_rows(recording, config.out), *draw(recording, config.out))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables(recording):
        console.print(table)
    for note in notes(recording):
        console.print(note, markup=False, highlight=False)
    console.print("written: " + ", ".join(map(str, paths)), soft_wrap=True, highlight=False)
    return 0


def plot_parser() -> argparse.ArgumentParser:
    """Return the options of `bench plot`."""
    parser = Parser(prog="contratile bench plot", description="Draw the plots of a recorded run again.")
    written = "a JSON file of rows written by `contratile bench`"
    parser.add_argument("results", type=Path, help=written)
    parser.add_argument("--out", type=Path, help="folder for the plots (default: the folder of the results)")
    return parser


def plot(argv: Sequence[str]) -> int:
    """Draw the plots of a recording again."""
    options = plot_parser().parse_args(argv)
    if missing("bench plot", EXTRA, "bench"):
        return 1
    from contratile.bench.plots import draw
    from contratile.bench.rows import load_rows

    recording = load_rows(options.results)
    folder = options.out or options.results.parent
    folder.mkdir(parents=True, exist_ok=True)
    print("written: " + ", ".join(map(str, draw(recording, folder))))
    return 0

"""`contratile bench loss`, `family`, `ring`, `cache` and `plot`: run a benchmark, show it, draw it."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from contratile.cli.extras import missing
from contratile.cli.options import Parser, check_options, options_of

if TYPE_CHECKING:
    from contratile.bench.config import BenchConfig
    from contratile.bench.rows import Recording

WIDTH = 120
"""Of the printed table where there is no terminal to ask."""
EXTRA = ("tyro", "rich", "matplotlib")
C = TypeVar("C", bound="BenchConfig")


def loss(argv: Sequence[str]) -> int:
    """The loss in one process against other packages."""
    from contratile.bench.loss import QUICK, LossConfig, run

    return _measure("bench loss", argv, LossConfig(), QUICK, run)


def family(argv: Sequence[str]) -> int:
    """Each loss in one process against the package people use for it."""
    from contratile.bench.family import QUICK, FamilyConfig, run

    return _measure("bench family", argv, FamilyConfig(), QUICK, run)


def ring(argv: Sequence[str]) -> int:
    """The loss over ranks of this machine against other ways to compute it."""
    from contratile.bench.ring import QUICK, RingConfig, run

    return _measure("bench ring", argv, RingConfig(), QUICK, run)


def cache(argv: Sequence[str]) -> int:
    """Training steps of encoders and loss in chunks against other ways to do them."""
    from contratile.bench.cache import QUICK, CacheConfig, run

    return _measure("bench cache", argv, CacheConfig(), QUICK, run)


def _measure(name: str, argv: Sequence[str], default: C, quick: C, run: "Callable[..., Recording[Any]]") -> int:
    """Measure, record, draw, and print the tables."""
    if missing(name, EXTRA, "bench"):
        return 1
    import tyro
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from contratile.bench.plots import draw
    from contratile.bench.rows import save
    from contratile.cli.tables import notes, tables

    start = quick if "--quick" in argv else default
    check_options(name, argv, options_of(start))
    config = tyro.cli(type(start), args=list(argv), default=start, prog=f"contratile {name}")
    command = shlex.join(["contratile", *name.split(), *argv])
    # Progress goes to stderr through a handle of its own: contestants are silenced by redirecting sys.stderr.
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        recording = run(
            config,
            command=command,
            notify=lambda text: progress.update(task, description=text),
            keep=lambda rows: save(rows, config.out),  # a run that is broken off leaves what it has found
        )
    paths = (*save(recording, config.out), *draw(recording, config.out))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables(recording):
        console.print(table)
    for note in notes(recording):
        console.print(note, markup=False, highlight=False)
    console.print("written: " + ", ".join(map(str, paths)), soft_wrap=True, highlight=False)
    return 0


def plot_parser() -> argparse.ArgumentParser:
    """Options of `bench plot`."""
    parser = Parser(prog="contratile bench plot", description="Draw the plots of a recorded run.")
    written = "a loss.json, family.json, ring.json or cache.json written by `contratile bench`"
    parser.add_argument("results", type=Path, help=written)
    parser.add_argument("--out", type=Path, help="folder for the plots (default: that of the results)")
    return parser


def plot(argv: Sequence[str]) -> int:
    """Draw recorded rows again."""
    options = plot_parser().parse_args(argv)
    if missing("bench plot", EXTRA, "bench"):
        return 1
    from contratile.bench.plots import draw
    from contratile.bench.rows import load

    recording = load(options.results)
    folder = options.out or options.results.parent
    folder.mkdir(parents=True, exist_ok=True)
    print("written: " + ", ".join(map(str, draw(recording, folder))))
    return 0

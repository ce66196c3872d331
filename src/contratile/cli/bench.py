"""`contratile bench loss` and `contratile bench plot`: run the benchmark, show it, draw it."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from contratile.bench.rows import Recording, Row

WIDTH = 120
"""Of the printed table where there is no terminal to ask."""
EXTRA = ("tyro", "rich", "matplotlib")
HEADINGS = ("N", "contestant", "best", "median", "% limit", "x ours", "MiB", "err loss", "err grad")


def loss(argv: Sequence[str]) -> int:
    """Measure, record, draw, and print the table."""
    if _missing("bench loss"):
        return 1
    import tyro
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from contratile.bench.loss import QUICK, LossConfig, run
    from contratile.bench.plots import draw
    from contratile.bench.rows import save

    default = QUICK if "--quick" in argv else LossConfig()
    try:
        config = tyro.cli(LossConfig, args=list(argv), default=default, prog="contratile bench loss")
    except (ValueError, TypeError) as error:
        print(f"contratile bench loss: {error}", file=sys.stderr)
        return 2
    command = shlex.join(["contratile", "bench", "loss", *argv])
    # Progress goes to stderr through a handle of its own: contestants are silenced by redirecting sys.stderr.
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(file=sys.stderr), refresh_per_second=2, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        recording = run(config, command=command, notify=lambda text: progress.update(task, description=text))
    paths = (*save(recording, config.out), *draw(recording, config.out))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in _tables(recording):
        console.print(table)
    for note in _notes(recording):
        console.print(note, markup=False, highlight=False)
    console.print("written: " + ", ".join(map(str, paths)), soft_wrap=True, highlight=False)
    return 0


def plot(argv: Sequence[str]) -> int:
    """Draw recorded rows again."""
    parser = argparse.ArgumentParser(prog="contratile bench plot", description="Draw the plots of a recorded run.")
    parser.add_argument("results", type=Path, help="a loss.json written by `contratile bench loss`")
    parser.add_argument("--out", type=Path, help="folder for the plots (default: that of the results)")
    options = parser.parse_args(argv)
    if _missing("bench plot"):
        return 1
    from contratile.bench.plots import draw
    from contratile.bench.rows import load

    try:
        recording = load(options.results)
    except (OSError, ValueError) as error:
        print(f"contratile bench plot: {error}", file=sys.stderr)
        return 2
    folder = options.out or options.results.parent
    folder.mkdir(parents=True, exist_ok=True)
    print("written: " + ", ".join(map(str, draw(recording, folder))))
    return 0


def _missing(command: str) -> bool:
    """Say what to install if the extra is not there."""
    missing = []
    for name in EXTRA:
        try:
            import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        remedy = 'pip install "contratile[bench]"'
        print(f"contratile {command}: needs {', '.join(missing)}; install with: {remedy}", file=sys.stderr)
    return bool(missing)


def _tables(recording: "Recording") -> "list[Table]":
    """A table for each D: sizes below each other, contestants from fast to slow."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    facts = recording.environment
    tables = []
    for d in sorted({row.d for row in recording.rows}):
        title = f"D = {d} · {facts['cpu']} · {facts['threads']} threads · torch {facts['torch']}"
        table = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.caption = (
            "seconds: best and median of the rounds; % limit: time of four plain matrix products over best; x ours: "
            "best over contratile's; MiB: peak beyond inputs and gradients; errors: relative, against fp64"
        )
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading == "contestant" else "right", no_wrap=True)
        rows = [row for row in recording.rows if row.d == d and (row.seconds_best or row.peak_extra_mib is not None)]
        for n in sorted({row.n for row in rows}):
            group = sorted((row for row in rows if row.n == n), key=lambda row: row.seconds_best or float("inf"))
            for row in group:
                style = "bold" if row.contestant == "contratile" else None
                table.add_row(*_cells(row), style=style, end_section=row is group[-1])
        tables.append(table)
    return tables


def _cells(row: "Row") -> list[str]:
    def show(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    return [
        str(row.n),
        row.contestant,
        show(row.seconds_best, "{:.3f}"),
        show(row.seconds_median, "{:.3f}"),
        show(row.percent_of_limit, "{:.0f}"),
        show(row.ratio_to_contratile, "{:.2f}"),
        show(row.peak_extra_mib, "{:.1f}"),
        show(row.error_value, "{:.0e}"),
        show(row.error_grad, "{:.0e}"),
    ]


def _notes(recording: "Recording") -> list[str]:
    """What was not measured and why, the sizes of one reason together."""
    sizes: dict[tuple[str, int, str], list[str]] = {}
    for row in recording.rows:
        if row.status not in ("ok", "memory only"):
            sizes.setdefault((row.contestant, row.d, row.status), []).append(str(row.n))
    return [f"{name}, D={d}, N={', '.join(ns)}: {status}" for (name, d, status), ns in sizes.items()]

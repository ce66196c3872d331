"""Pages of text and tables, in colour if rich is installed."""

import sys
from collections.abc import Sequence

Grid = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, headings, rows."""
WRONG = "WRONG"
"""Last cell of a row that is shown in red."""
WIDTH = 120
"""Columns of the page if the output is not a terminal."""


def show_page(facts: Sequence[str], grids: Sequence[Grid], remarks: Sequence[str], verdict: str, *, bad: bool) -> None:
    """Print facts, tables, remarks and a last line, which is red if `bad`."""
    try:
        from rich.console import Console
    except ImportError:
        print("\n".join(_plain(facts, grids, remarks, verdict)))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if facts:
        console.print("\n".join(facts), markup=False)
    for title, headings, rows in grids:
        console.print(title, style="italic", markup=False)  # as a title of the table it would wrap at its width
        table = Table(*headings, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*row, style="bold red" if row[-1] == WRONG else None)
        console.print(table)
    if remarks:
        console.print("\n".join(remarks), markup=False)
    console.print(verdict, style="bold red" if bad else "bold green", markup=False)


def _plain(facts: Sequence[str], grids: Sequence[Grid], remarks: Sequence[str], verdict: str) -> list[str]:
    lines = [*facts]
    for title, headings, rows in grids:
        lines += ["", title, *_aligned(headings, rows)]
    return [*lines, "", *remarks, verdict]


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in every]

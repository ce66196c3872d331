"""The loss over ranks: memory, time and traffic."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contratile.bench.plots.panels import Panel, figure_of, lines_of, memory_scale, time_panel
from contratile.bench.rows import Recording, RingRow, threads_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_ring(recording: Recording[RingRow], folder: Path) -> tuple[Path, ...]:
    """One figure: for each D, memory against the batch size, time and traffic against the number of ranks."""
    grid = []
    for d in sorted({row.d for row in recording.rows}):
        rows = [row for row in recording.rows if row.d == d]
        most = max(row.world for row in rows)
        n = _compared(rows)
        at_n = [row for row in rows if row.n == n]
        grid.append(
            [
                Panel([row for row in rows if row.world == most], _rank_memory_panel, f"global batch N, P = {most}"),
                Panel(at_n, _rank_time_panel, f"ranks P, N = {n}"),
                Panel(at_n, _traffic_panel, f"ranks P, N = {n}"),
            ]
        )
        grid[-1] = [panel._replace(label=f"{panel.label}, D = {d}") for panel in grid[-1]]
    title = "The loss over ranks on one machine, forward + backward"
    path = folder / "ring.png"
    figure_of(grid, title, threads_text(recording), recording.environment, path)
    return (path,)


def _compared(rows: Sequence[RingRow]) -> int:
    """Return the batch size with the most timed rows; of several, the largest."""
    timed = [row.n for row in rows if row.seconds_best] or [row.n for row in rows]
    return max(set(timed), key=lambda n: (timed.count(n), n))


def _rank_memory_panel(axes: "Axes", rows: Sequence[RingRow], facts: dict[str, str]) -> None:
    lines_of(axes, rows, "n", "peak_extra_mib")
    memory_scale(axes, facts, rows[0].world)
    axes.set_ylabel("peak extra memory per rank")


def _rank_time_panel(axes: "Axes", rows: Sequence[RingRow], facts: dict[str, str]) -> None:
    time_panel(axes, rows, facts, x="world")


def _traffic_panel(axes: "Axes", rows: Sequence[RingRow], facts: dict[str, str]) -> None:
    lines_of(axes, rows, "world", "sent_mib")
    axes.set_ylabel("sent per rank and step")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda mib, _: f"{mib:g} MiB")

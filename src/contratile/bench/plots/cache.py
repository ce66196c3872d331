"""Memory and time of a training step in chunks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contratile.bench.plots.panels import Panel, figure_of, memory_panel, time_panel
from contratile.bench.rows import CacheRow, Recording, threads_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_cache(recording: Recording[CacheRow], folder: Path) -> tuple[Path, ...]:
    """One figure: memory and time of a training step against the batch size."""
    grid = []
    for d in sorted({row.d for row in recording.rows}):
        rows = [row for row in recording.rows if row.d == d]
        label = f"batch size N (pairs), chunks of {rows[0].chunk}, width {d}"
        grid.append([Panel(rows, memory_panel, label), Panel(rows, _step_panel, label)])
    first = recording.rows[0]
    texts = f"{first.tokens} tokens" if first.tokens else f"texts of {first.lengths} lengths"
    title = f"A training step: transformer of {first.layers} layers over {texts}, dropout, and the loss"
    path = folder / "cache.png"
    figure_of(grid, title, threads_text(recording), recording.environment, path)
    return (path,)


def _step_panel(axes: "Axes", rows: Sequence[CacheRow], facts: dict[str, str]) -> None:
    time_panel(axes, rows, facts, limit="two forwards, one backward")

"""Memory and time of the symmetric loss against the batch size."""

from pathlib import Path

from contratile.bench.plots.panels import Panel, figure_of, memory_panel, time_panel
from contratile.bench.rows import LossRow, Recording, threads_text


def draw_loss(recording: Recording[LossRow], folder: Path) -> tuple[Path, ...]:
    """Two figures, each with one panel per D."""
    titles = {
        folder / "loss_memory.png": "Peak memory of the loss beyond inputs and gradients, forward + backward",
        folder / "loss_time.png": "Time of the loss, forward + backward (best of rounds)",
    }
    for (path, title), paint in zip(titles.items(), (memory_panel, time_panel), strict=True):
        panels = []
        for d in sorted({row.d for row in recording.rows}):
            rows = [row for row in recording.rows if row.d == d]
            panels.append(Panel(rows, paint, f"batch size N (pairs), D = {d}"))
        figure_of([panels], title, threads_text(recording), recording.environment, path)
    return tuple(titles)

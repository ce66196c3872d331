"""Predicted against measured memory and seconds of training steps."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from contratile.bench.plots.style import bytes_text, finish
from contratile.bench.rows import PlanRow, Recording, threads_text

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
LEAST = 300.0
"""MiB: smaller runs are left out of the errors."""


def errors(rows: Sequence[PlanRow], column: str) -> list[float]:
    """Relative errors of a predicted column, as shares; of memory only runs above 300 MiB."""
    against = "seconds_best" if column == "predicted_seconds" else "measured_mib"
    found = []
    for row in rows:
        predicted, measured = getattr(row, column), getattr(row, against)
        if predicted is not None and measured and (row.measured_mib or 0) > LEAST:
            found.append(predicted / measured - 1)
    return found


def error_lines(rows: Sequence[PlanRow]) -> list[str]:
    """Median and worst error of each kind of prediction."""
    names = {
        "predicted_mib": "memory from the definition",
        "calibrated_mib": "memory, calibrated",
        "predicted_seconds": "time",
    }
    lines = []
    for column, name in names.items():
        found = [abs(error) for error in errors(rows, column)]
        if found:
            lines.append(f"{name}: median error {median(found):.1%}, worst {max(found):.1%}, {len(found)} runs")
    return lines


def draw_plan(recording: Recording[PlanRow], folder: Path) -> tuple[Path, ...]:
    """One figure: a scatter plot of memory from the definition, one calibrated, one of seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        ("measured_mib", "predicted_mib", "from the definition"),
        ("measured_mib", "calibrated_mib", "calibrated"),
        ("seconds_best", "predicted_seconds", "seconds of a step"),
    ]
    rows = [row for row in recording.rows if row.measured_mib]
    panels = [panel for panel in panels if any(getattr(row, panel[1]) for row in rows)]
    figure = Figure(figsize=(4.4 * len(panels) + 1.4, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    (grid,) = figure.subplots(1, len(panels), squeeze=False)
    for axes, (measured, predicted, title) in zip(grid, panels, strict=True):
        points = [(getattr(row, measured), getattr(row, predicted), row.contestant) for row in rows]
        points = [point for point in points if point[0] and point[1]]
        ends = [min(min(x, y) for x, y, _ in points), max(max(x, y) for x, y, _ in points)]
        axes.plot(ends, ends, color="#777777", linewidth=1)
        for color, name in zip(COLORS, dict.fromkeys(row.contestant for row in rows), strict=False):
            mine = [(x, y) for x, y, model in points if model == name]
            axes.plot([x for x, _ in mine], [y for _, y in mine], "o", color=color, label=name, markersize=5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(f"measured, {title}")
        axes.grid(True, color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if measured == "measured_mib":
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda mib, _: bytes_text(mib))
    grid[0].set_ylabel("predicted")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    path = folder / "plan.png"
    finish(
        figure, grid[0], "Training steps: predicted and measured", threads_text(recording), recording.environment, path
    )
    return (path,)

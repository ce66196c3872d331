"""Panels of lines against the batch size or the number of ranks, and the figure that holds them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contratile.bench.plots.style import LABELS, STYLES, bytes_text, count_text, finish, seconds_text
from contratile.bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

XY = tuple[int, float]


class Panel(NamedTuple):
    """One pair of axes: the rows, the function that paints them, and the label below."""

    rows: Sequence[Any]
    paint: Callable[["Axes", Sequence[Any], dict[str, str]], None]
    label: str


def memory_panel(axes: "Axes", rows: Sequence[Row], facts: dict[str, str]) -> None:
    measured = lines_of(axes, rows, "n", "peak_extra_mib")
    last_n = max((n for points in measured.values() for n, _ in points), default=0)
    dense = measured.get("dense", [])
    if dense and dense[-1][0] < last_n:
        (n, mib), style = dense[-1], STYLES["dense"]
        axes.plot(
            [n, last_n], [mib, mib * (last_n / n) ** 2], "--", color=style["color"], label="dense, extrapolated (N²)"
        )
    memory_scale(axes, facts, 1)


def memory_scale(axes: "Axes", facts: dict[str, str], ranks: int) -> None:
    """Scale the axis in powers of four, and draw each rank's share of the machine's memory."""
    total = float(facts.get("memory_gib", 0)) * 1024
    if total:
        whole = f"this machine's memory ({total / 1024:.0f} GiB)"
        label = whole if ranks == 1 else f"{whole} / {ranks}"
        axes.axhline(total / ranks, linestyle="--", linewidth=1.2, color="#777777", label=label)
    axes.set_ylabel("peak extra memory")
    axes.set_yscale("log", base=4)  # ticks at 1, 4, 16, ... MiB
    axes.yaxis.set_major_formatter(lambda mib, _: bytes_text(mib))


def time_panel(
    axes: "Axes", rows: Sequence[Row], facts: dict[str, str], x: str = "n", limit: str = "4 matrix products"
) -> None:
    from matplotlib.ticker import LogLocator

    lines_of(axes, rows, x, "seconds_best")
    limits: dict[int, float] = {}
    for row in rows:
        if row.limit_seconds:
            at = getattr(row, x)
            limits[at] = min(row.limit_seconds, limits.get(at, row.limit_seconds))
    if limits:
        points = zip(*sorted(limits.items()), strict=True)
        axes.plot(*points, ":", linewidth=2.0, color="#777777", label=f"limit: {limit}")
    axes.set_ylabel("time per step")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda seconds, _: seconds_text(seconds))


def lines_of(axes: "Axes", rows: Sequence[Row], x: str, y: str) -> dict[str, list[XY]]:
    """Draw one line per contestant: column `y` of its rows against column `x`."""
    lines: dict[str, list[XY]] = {}
    for row in rows:
        value = getattr(row, y)
        if value:
            lines.setdefault(row.contestant, []).append((getattr(row, x), value))
    for name, points in lines.items():
        points.sort()
        style: dict[str, Any] = {"marker": "o", "linewidth": 1.6, "markersize": 6} | STYLES.get(name, {})
        x_values, y_values = zip(*points, strict=True)
        label = LABELS.get(name, name)
        axes.plot(x_values, y_values, label=label, markeredgecolor="white", markeredgewidth=0.5, **style)
    return lines


def figure_of(grid: list[list[Panel]], title: str, threads_used: str, facts: dict[str, str], path: Path) -> None:
    """Draw a grid of panels with a common legend. Panels of the same kind share their y axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height, width = len(grid), len(grid[0])
    alike = len({panel.paint for panel in grid[0]}) == 1
    figure = Figure(figsize=((5.6 if alike else 4.6) * width + 3.0, 4.4 * height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes_grid = figure.subplots(height, width, squeeze=False, sharey=alike)
    named: dict[str, Any] = {}
    for row_of_axes, panels in zip(axes_grid, grid, strict=True):
        for axes, panel in zip(row_of_axes, panels, strict=True):
            axes.set_xscale("log", base=2)
            panel.paint(axes, panel.rows, facts)
            # The x values of axhline are fractions of the axes, not data.
            spans = (line for line in axes.lines if line.get_transform() == axes.transData)
            ticks = sorted({int(x) for line in spans for x in line.get_xdata()})
            axes.set_xticks(ticks, [count_text(x) for x in ticks])
            axes.minorticks_off()
            axes.grid(True, color="#dddddd", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlabel(panel.label)
            handles, labels = axes.get_legend_handles_labels()
            named |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in named}
        if alike:
            for axes in row_of_axes[1:]:
                axes.set_ylabel("")
    figure.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    finish(figure, axes_grid[0][0], title, threads_used, facts, path)

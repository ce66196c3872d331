"""Each loss beside the package that people use for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.bench.plots.style import LABELS, STYLES, bytes_text, count_text, finish, seconds_text
from contratile.bench.rows import FamilyRow, Recording, threads_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAMILY_LABELS = LABELS | {
    "nt_xent": "nt_xent (2N views)",
    "siglip": "siglip_loss",
    "multiple_negatives": "multiple negatives, both ways",
    "dense": "dense reference",
    "lightly": "lightly NTXentLoss",
    "pytorch_metric_learning": "pytorch-metric-learning SupConLoss",
    "open_clip": "open_clip SigLipLoss",
    "sentence_transformers": "sentence-transformers",
    "sentence_transformers_cached": "sentence-transformers cached",
    "sentence_transformers_products": "sentence-transformers, products",
    "info_nce_pytorch": "info-nce-pytorch",
}


def draw_family(recording: Recording[FamilyRow], folder: Path) -> tuple[Path, ...]:
    """One figure: for each D, time and memory of all contestants, grouped by loss."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dims = sorted({row.d for row in recording.rows})
    lines = _family_lines(recording.rows)
    figure = Figure(figsize=(12.0, (0.27 * len(lines) + 1.3) * len(dims) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(dims), 2, squeeze=False, sharey=True)
    for (left, right), d in zip(grid, dims, strict=True):
        rows = [row for row in recording.rows if row.d == d]
        _ratio_panel(left, rows, lines)
        _footprint_panel(right, rows, lines)
        for axes in (left, right):
            axes.grid(True, axis="x", color="#dddddd", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.minorticks_off()
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.set_xlabel(f"{axes.get_xlabel()}, D = {d}")
    left = grid[0][0]
    named = [contestant or loss for loss, contestant in lines]
    left.set_yticks(range(len(lines)), [FAMILY_LABELS.get(name, name) for name in named])
    for label, (_, contestant) in zip(left.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if contestant is None else "normal")
    left.set_ylim(len(lines) - 0.5, -0.7)
    path = folder / "family.png"
    title = "Each loss and the package people use for it, forward + backward"
    finish(figure, left, title, threads_text(recording), recording.environment, path)
    return (path,)


def _family_lines(rows: Sequence[FamilyRow]) -> list[tuple[str, str | None]]:
    """The lines of the figure: (loss, None) as a heading, then (loss, contestant) for each measured contestant."""
    lines: dict[tuple[str, str | None], None] = {}
    for row in rows:
        if row.seconds_best or row.peak_extra_mib is not None:
            lines |= {(row.loss, None): None, (row.loss, row.contestant): None}
    return list(lines)


def _family_color(row: FamilyRow) -> str:
    ours = row.contestant.startswith("contratile")
    return str(STYLES["contratile" if ours else "open_clip" if row.package else "dense"]["color"])


def _ratio_panel(axes: "Axes", rows: Sequence[FamilyRow], lines: list[tuple[str, str | None]]) -> None:
    """Time divided by ours at the largest timed size; a grey bar shows the limit of each loss."""
    n = max((row.n for row in rows if row.ratio_to_contratile), default=0)
    axes.axvline(1, color=STYLES["contratile"]["color"], linewidth=0.8)
    axes.set_xscale("log")
    for row in rows:
        ratio = row.ratio_to_contratile
        if row.n != n or not ratio or not row.seconds_best or not row.limit_seconds:
            continue
        y, color = lines.index((row.loss, row.contestant)), _family_color(row)
        axes.plot([1, max(1, ratio)], [y, y], color=color, linewidth=1.2, alpha=0.5)
        axes.plot(ratio, y, "o", color=color, markersize=7)
        times = seconds_text(float(f"{row.seconds_best:.3g}"))
        text = times if row.contestant == "contratile" else f"{ratio:.2g}x  {times}"
        axes.annotate(text, (ratio, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize="small")
        if row.contestant == "contratile":
            axes.plot(row.limit_seconds / row.seconds_best, y, "|", color="#777777", markersize=13, markeredgewidth=2)
            limit = f"limit (grey): {row.limit}"
            where = (1.0, lines.index((row.loss, None)))
            axes.annotate(limit, where, xytext=(7, 0), textcoords="offset points", va="center", fontsize="small")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.45), max(3.0, high) * 1.9)  # room for the text beside the last point
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xlabel(f"time over contratile's, N = {count_text(n)}")


def _footprint_panel(axes: "Axes", rows: Sequence[FamilyRow], lines: list[tuple[str, str | None]]) -> None:
    """Peak memory: filled markers at the size whose times are compared, hollow ones at the largest size."""
    least = 1.0  # MiB; less than that is a few pages and not a measurement
    timed = max((row.n for row in rows if row.ratio_to_contratile), default=0)
    most = max((row.n for row in rows if row.peak_extra_mib is not None), default=0)
    axes.set_xscale("log", base=4)
    for row in rows:
        if row.peak_extra_mib is None or row.n not in (timed, most):
            continue
        y, color, filled = lines.index((row.loss, row.contestant)), _family_color(row), row.n == timed
        mib = max(least, row.peak_extra_mib)
        axes.plot(mib, y, "o", color=color, markersize=7, markerfacecolor=color if filled else "white")
        if filled or row.contestant == "contratile":
            text, side = bytes_text(float(f"{mib:.3g}")), -1 if filled else 1
            place: Any = {"xytext": (7 * side, 0), "ha": "left" if side > 0 else "right", "va": "center"}
            axes.annotate(text, (mib, y), textcoords="offset points", fontsize="small", **place)
    low, high = axes.get_xlim()
    axes.set_xlim(low / 4, high * 4)
    axes.xaxis.set_major_formatter(lambda mib, _: bytes_text(mib))
    sizes = f"N = {count_text(timed)}" + (f" (filled) and {count_text(most)} (hollow)" if most > timed else "")
    axes.set_xlabel(f"peak extra memory, {sizes}")

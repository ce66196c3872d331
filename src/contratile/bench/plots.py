"""Plots of recorded rows.

    memory_png, time_png = draw(load(Path("bench-loss/loss.json")), Path("bench-loss"))
    (family_png,) = draw(load(Path("bench-family/family.json")), Path("bench-family"))
    (ring_png,) = draw(load(Path("bench-ring/ring.json")), Path("bench-ring"))
    (cache_png,) = draw(load(Path("bench-cache/cache.json")), Path("bench-cache"))
    (data_png,) = draw(load(Path("bench-data/data.json")), Path("bench-data"))

Every marker is a measurement. Lines that were not measured are dashed, and their label says so.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contratile.bench.rows import (
    CacheRow,
    DataRow,
    FamilyRow,
    LossRow,
    Recording,
    RingRow,
    Row,
    hardware_text,
    threads_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito for the colour-blind; markers differ too, for prints without colour.
_STYLES: dict[str, dict[str, Any]] = {
    "contratile": {"color": "#0072B2", "marker": "o", "linewidth": 2.6, "markersize": 7, "zorder": 5},
    "contratile_cached": {"color": "#0072B2", "marker": "^", "linestyle": "-.", "zorder": 4},
    "contratile_bf16": {"color": "#0072B2", "marker": "v", "linestyle": ":", "zorder": 4},
    "dense": {"color": "#000000", "marker": "s"},
    "open_clip": {"color": "#E69F00", "marker": "D"},
    "inf_cl_ring": {"color": "#D55E00", "marker": "P", "markersize": 8},
    "sentence_transformers": {"color": "#CC79A7", "marker": "X", "markersize": 8},
    "cut_ce": {"color": "#009E73", "marker": "h"},
    "keops": {"color": "#56B4E9", "marker": "*", "markersize": 9},
    "open_clip_grad": {"color": "#E69F00", "marker": "s", "markersize": 10, "linestyle": "-.", "zorder": 1.5},
    "open_clip_local": {"color": "#CC79A7", "marker": "X", "markersize": 8},
    "disco": {"color": "#009E73", "marker": "h"},
    "plain": {"color": "#000000", "marker": "s"},
    "grad_cache": {"color": "#009E73", "marker": "h"},
    "contratile_table": {"color": "#0072B2", "marker": "^", "alpha": 0.5},
    "webdataset": {"color": "#009E73", "marker": "h"},
}
_LABELS = {
    "contratile_cached": "contratile, tiles cached",
    "contratile_bf16": "contratile, bf16 features",
    "contratile_ids": "contratile, ids",
    "contratile_margin": "contratile, margin",
    "dense": "dense (N x N logits)",
    "open_clip": "open_clip ClipLoss",
    "inf_cl_ring": "inf-cl ring (PyTorch path)",
    "sentence_transformers": "sentence-transformers cached",
    "cut_ce": "cut-cross-entropy (torch.compile)",
    "keops": "KeOps",
    "open_clip_grad": "open_clip, gather_with_grad",
    "open_clip_local": "open_clip, local_loss + grad",
    "disco": "DisCo-style gather",
    "plain": "plain training",
    "grad_cache": "GradCache package",
    "contratile_table": "contratile, table of files",
}
_DATA_LABELS = _LABELS | {"contratile": "contratile, shards", "open_clip": "open_clip get_data"}
_FAMILY_LABELS = _LABELS | {
    "nt_xent": "nt_xent (2N views)",
    "siglip": "siglip_loss",
    "multiple_negatives": "multiple negatives, both ways",
    "dense": "dense reference",
    "lightly": "lightly NTXentLoss",
    "pytorch_metric_learning": "pytorch-metric-learning SupConLoss",
    "open_clip": "open_clip SigLipLoss",
    "sentence_transformers": "sentence-transformers",
    "sentence_transformers_cached": "sentence-transformers cached",
    "info_nce_pytorch": "info-nce-pytorch",
}
XY = tuple[int, float]


class Panel(NamedTuple):
    """One pair of axes: the rows, the function that paints them, and the label below."""

    rows: Sequence[Any]
    paint: Callable[["Axes", Sequence[Any], dict[str, str]], None]
    label: str


def draw(recording: Recording[Any], folder: Path) -> tuple[Path, ...]:
    """Draw the plots of a recording: loss_memory.png and loss_time.png, or KIND.png.

    Args:
        recording: The rows.
        folder: Where the plots are written.

    Returns:
        The paths of the plots.
    """
    make: dict[str, Callable[[Recording[Any], Path], tuple[Path, ...]]]
    make = {
        "loss": _draw_loss,
        "family": _draw_family,
        "ring": _draw_ring,
        "cache": _draw_cache,
        "data": _draw_data,
    }
    return make[recording.kind](recording, folder)


def _draw_loss(recording: Recording[LossRow], folder: Path) -> tuple[Path, ...]:
    """Two figures, each with one panel per D."""
    titles = {
        folder / "loss_memory.png": "Peak memory of the loss beyond inputs and gradients, forward + backward",
        folder / "loss_time.png": "Time of the loss, forward + backward (best of rounds)",
    }
    for (path, title), paint in zip(titles.items(), (_memory_panel, _time_panel), strict=True):
        panels = []
        for d in sorted({row.d for row in recording.rows}):
            rows = [row for row in recording.rows if row.d == d]
            panels.append(Panel(rows, paint, f"batch size N (pairs), D = {d}"))
        _figure([panels], title, threads_text(recording), recording.environment, path)
    return tuple(titles)


def _draw_ring(recording: Recording[RingRow], folder: Path) -> tuple[Path, ...]:
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
    _figure(grid, title, threads_text(recording), recording.environment, path)
    return (path,)


def _draw_cache(recording: Recording[CacheRow], folder: Path) -> tuple[Path, ...]:
    """One figure: memory and time of a training step against the batch size."""
    grid = []
    for d in sorted({row.d for row in recording.rows}):
        rows = [row for row in recording.rows if row.d == d]
        label = f"batch size N (pairs), chunks of {rows[0].chunk}, width {d}"
        grid.append([Panel(rows, _memory_panel, label), Panel(rows, _step_panel, label)])
    first = recording.rows[0]
    title = f"A training step: transformer of {first.layers} layers over {first.tokens} tokens, dropout, and the loss"
    path = folder / "cache.png"
    _figure(grid, title, threads_text(recording), recording.environment, path)
    return (path,)


def _draw_data(recording: Recording[DataRow], folder: Path) -> tuple[Path, ...]:
    """One figure: for each size of images, bars of samples per second by number of workers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys((row.pixels, row.d) for row in recording.rows))
    names = list(dict.fromkeys(row.contestant for row in recording.rows if row.samples_per_second))
    figure = Figure(figsize=(4.8 * len(sizes) + 3.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    (grid,) = figure.subplots(1, len(sizes), squeeze=False)
    width = 0.8 / max(1, len(names))
    for axes, (pixels, d) in zip(grid, sizes, strict=True):
        rows = [row for row in recording.rows if (row.pixels, row.d) == (pixels, d)]
        workers = sorted({row.workers for row in rows})
        for place, name in enumerate(names):
            mine = {row.workers: row.samples_per_second or 0.0 for row in rows if row.contestant == name}
            left = [i + width * (place - (len(names) - 1) / 2) for i in range(len(workers))]
            style = {key: value for key, value in _STYLES.get(name, {}).items() if key in ("color", "alpha")}
            label = _DATA_LABELS.get(name, name)
            bars = axes.bar(left, [mine.get(n, 0.0) for n in workers], width, label=label, **style)
            axes.bar_label(bars, fmt=lambda value: f"{value:.0f}" if value else "", fontsize="x-small", padding=1)
        axes.set_xticks(range(len(workers)), [str(n) for n in workers])
        axes.set_xlabel(f"workers; JPEGs of {pixels} pixels to {d}")
        axes.grid(True, axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("samples per second")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    path = folder / "data.png"
    title = "Loading pairs: JPEGs decoded, cropped, scaled, normalised; captions tokenized"
    _finish(figure, grid[0], title, threads_text(recording), recording.environment, path)
    return (path,)


def _draw_family(recording: Recording[FamilyRow], folder: Path) -> tuple[Path, ...]:
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
    left.set_yticks(range(len(lines)), [_FAMILY_LABELS.get(name, name) for name in named])
    for label, (_, contestant) in zip(left.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if contestant is None else "normal")
    left.set_ylim(len(lines) - 0.5, -0.7)
    path = folder / "family.png"
    title = "Each loss and the package people use for it, forward + backward"
    _finish(figure, left, title, threads_text(recording), recording.environment, path)
    return (path,)


def _family_lines(rows: Sequence[FamilyRow]) -> list[tuple[str, str | None]]:
    """The lines of the figure: (loss, None) as a heading, then (loss, contestant) for everybody who was measured."""
    lines: dict[tuple[str, str | None], None] = {}
    for row in rows:
        if row.seconds_best or row.peak_extra_mib is not None:
            lines |= {(row.loss, None): None, (row.loss, row.contestant): None}
    return list(lines)


def _family_color(row: FamilyRow) -> str:
    ours = row.contestant.startswith("contratile")
    return str(_STYLES["contratile" if ours else "open_clip" if row.package else "dense"]["color"])


def _ratio_panel(axes: "Axes", rows: Sequence[FamilyRow], lines: list[tuple[str, str | None]]) -> None:
    """Time divided by ours at the largest timed size; a grey bar shows the limit of each loss."""
    n = max((row.n for row in rows if row.ratio_to_contratile), default=0)
    axes.axvline(1, color=_STYLES["contratile"]["color"], linewidth=0.8)
    axes.set_xscale("log")
    for row in rows:
        ratio = row.ratio_to_contratile
        if row.n != n or not ratio or not row.seconds_best or not row.limit_seconds:
            continue
        y, color = lines.index((row.loss, row.contestant)), _family_color(row)
        axes.plot([1, max(1, ratio)], [y, y], color=color, linewidth=1.2, alpha=0.5)
        axes.plot(ratio, y, "o", color=color, markersize=7)
        times = _seconds(float(f"{row.seconds_best:.3g}"))
        text = times if row.contestant == "contratile" else f"{ratio:.2g}x  {times}"
        axes.annotate(text, (ratio, y), xytext=(7, 0), textcoords="offset points", va="center", fontsize="small")
        if row.contestant == "contratile":
            axes.plot(row.limit_seconds / row.seconds_best, y, "|", color="#777777", markersize=13, markeredgewidth=2)
            views = "N" if row.views == 1 else f"{row.views}N"
            limit = f"limit (grey): {row.products} products of {views} x {views}"
            where = (1.0, lines.index((row.loss, None)))
            axes.annotate(limit, where, xytext=(7, 0), textcoords="offset points", va="center", fontsize="small")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.45), max(3.0, high) * 1.9)  # room for the text beside the last point
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64) if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.set_xlabel(f"time over contratile's, N = {_count(n)}")


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
            text, side = _bytes(float(f"{mib:.3g}")), -1 if filled else 1
            place: Any = {"xytext": (7 * side, 0), "ha": "left" if side > 0 else "right", "va": "center"}
            axes.annotate(text, (mib, y), textcoords="offset points", fontsize="small", **place)
    low, high = axes.get_xlim()
    axes.set_xlim(low / 4, high * 4)
    axes.xaxis.set_major_formatter(lambda mib, _: _bytes(mib))
    sizes = f"N = {_count(timed)}" + (f" (filled) and {_count(most)} (hollow)" if most > timed else "")
    axes.set_xlabel(f"peak extra memory, {sizes}")


def _compared(rows: Sequence[RingRow]) -> int:
    """Return the batch size with the most timed rows; of several, the largest."""
    timed = [row.n for row in rows if row.seconds_best] or [row.n for row in rows]
    return max(set(timed), key=lambda n: (timed.count(n), n))


def _memory_panel(axes: "Axes", rows: Sequence[Row], facts: dict[str, str]) -> None:
    measured = _lines(axes, rows, "n", "peak_extra_mib")
    last_n = max((n for points in measured.values() for n, _ in points), default=0)
    dense = measured.get("dense", [])
    if dense and dense[-1][0] < last_n:
        (n, mib), style = dense[-1], _STYLES["dense"]
        axes.plot(
            [n, last_n], [mib, mib * (last_n / n) ** 2], "--", color=style["color"], label="dense, extrapolated (N²)"
        )
    _memory_scale(axes, facts, 1)


def _rank_memory_panel(axes: "Axes", rows: Sequence[RingRow], facts: dict[str, str]) -> None:
    _lines(axes, rows, "n", "peak_extra_mib")
    _memory_scale(axes, facts, rows[0].world)
    axes.set_ylabel("peak extra memory per rank")


def _memory_scale(axes: "Axes", facts: dict[str, str], ranks: int) -> None:
    """Scale the axis in powers of four, and draw each rank's share of the machine's memory."""
    total = float(facts.get("memory_gib", 0)) * 1024
    if total:
        whole = f"this machine's memory ({total / 1024:.0f} GiB)"
        label = whole if ranks == 1 else f"{whole} / {ranks}"
        axes.axhline(total / ranks, linestyle="--", linewidth=1.2, color="#777777", label=label)
    axes.set_ylabel("peak extra memory")
    axes.set_yscale("log", base=4)  # ticks at 1, 4, 16, ... MiB
    axes.yaxis.set_major_formatter(lambda mib, _: _bytes(mib))


def _time_panel(
    axes: "Axes", rows: Sequence[Row], facts: dict[str, str], x: str = "n", limit: str = "4 matrix products"
) -> None:
    from matplotlib.ticker import LogLocator

    _lines(axes, rows, x, "seconds_best")
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
    axes.yaxis.set_major_formatter(lambda seconds, _: _seconds(seconds))


def _step_panel(axes: "Axes", rows: Sequence[CacheRow], facts: dict[str, str]) -> None:
    _time_panel(axes, rows, facts, limit="two forwards, one backward")


def _rank_time_panel(axes: "Axes", rows: Sequence[RingRow], facts: dict[str, str]) -> None:
    _time_panel(axes, rows, facts, x="world")


def _traffic_panel(axes: "Axes", rows: Sequence[RingRow], facts: dict[str, str]) -> None:
    _lines(axes, rows, "world", "sent_mib")
    axes.set_ylabel("sent per rank and step")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda mib, _: f"{mib:g} MiB")


def _lines(axes: "Axes", rows: Sequence[Row], x: str, y: str) -> dict[str, list[XY]]:
    """Draw one line per contestant: column `y` of its rows against column `x`."""
    lines: dict[str, list[XY]] = {}
    for row in rows:
        value = getattr(row, y)
        if value:
            lines.setdefault(row.contestant, []).append((getattr(row, x), value))
    for name, points in lines.items():
        points.sort()
        style: dict[str, Any] = {"marker": "o", "linewidth": 1.6, "markersize": 6} | _STYLES.get(name, {})
        x_values, y_values = zip(*points, strict=True)
        label = _LABELS.get(name, name)
        axes.plot(x_values, y_values, label=label, markeredgecolor="white", markeredgewidth=0.5, **style)
    return lines


def _figure(grid: list[list[Panel]], title: str, threads_used: str, facts: dict[str, str], path: Path) -> None:
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
            axes.set_xticks(ticks, [_count(x) for x in ticks])
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
    _finish(figure, axes_grid[0][0], title, threads_used, facts, path)


def _finish(figure: "Figure", first: "Axes", title: str, threads_used: str, facts: dict[str, str], path: Path) -> None:
    """Add title and hardware, and write the file."""
    figure.suptitle(title, fontsize="large", fontweight="bold", x=0.01, ha="left")
    hardware = f"{hardware_text(facts)}, {threads_used}, torch {facts['torch']}, commit {facts['commit']}"
    first.set_title(hardware, fontsize="small", color="#555555", loc="left")
    draft = path.with_name(f".{path.name}.part")
    figure.savefig(draft, dpi=150, format="png")
    draft.replace(path)


def _count(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _bytes(mib: float) -> str:
    return f"{mib / 1024:.3g} GiB" if mib >= 1024 else f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"

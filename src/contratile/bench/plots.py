"""Plots of recorded rows: memory and time against batch size.

    memory_png, time_png = draw(load(Path("bench-loss/loss.json")), Path("bench-loss"))

Every marker is a measurement. What was not measured is dashed and its label says so.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.bench.rows import Recording, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, told apart by the colour-blind; markers tell the lines apart without any colour.
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
}
_LABELS = {
    "contratile_cached": "contratile, tiles cached",
    "contratile_bf16": "contratile, bf16 features",
    "dense": "dense (N x N logits)",
    "open_clip": "open_clip ClipLoss",
    "inf_cl_ring": "inf-cl ring (PyTorch path)",
    "sentence_transformers": "sentence-transformers cached",
    "cut_ce": "cut-cross-entropy (torch.compile)",
    "keops": "KeOps",
}
Point = tuple[int, float]


def draw(recording: Recording, folder: Path) -> tuple[Path, Path]:
    """Write loss_memory.png and loss_time.png."""
    memory, time = folder / "loss_memory.png", folder / "loss_time.png"
    _figure(recording, _memory_panel, "Peak memory of the loss beyond inputs and gradients, forward + backward", memory)
    _figure(recording, _time_panel, "Time of the loss, forward + backward (best of rounds)", time)
    return memory, time


def _memory_panel(axes: "Axes", rows: list[Row], facts: dict[str, str]) -> None:
    measured = _lines(axes, rows, lambda row: row.peak_extra_mib)
    last_n = max((n for points in measured.values() for n, _ in points), default=0)
    dense = measured.get("dense", [])
    if dense and dense[-1][0] < last_n:
        (n, mib), style = dense[-1], _STYLES["dense"]
        axes.plot(
            [n, last_n], [mib, mib * (last_n / n) ** 2], "--", color=style["color"], label="dense, extrapolated (N²)"
        )
    total = float(facts.get("memory_gib", 0)) * 1024
    if total:
        label = f"this machine's memory ({total / 1024:.0f} GiB)"
        axes.axhline(total, linestyle="--", linewidth=1.2, color="#777777", label=label)
    axes.set_ylabel("peak extra memory")
    axes.set_yscale("log", base=4)  # ticks at 1, 4, 16, ... MiB
    axes.yaxis.set_major_formatter(lambda mib, _: _bytes(mib))


def _time_panel(axes: "Axes", rows: list[Row], facts: dict[str, str]) -> None:
    from matplotlib.ticker import LogLocator

    _lines(axes, rows, lambda row: row.seconds_best)
    limits: dict[int, float] = {}
    for row in rows:
        if row.limit_seconds:
            limits[row.n] = min(row.limit_seconds, limits.get(row.n, row.limit_seconds))
    if limits:
        label = "limit: 4 matrix products"
        axes.plot(*zip(*sorted(limits.items()), strict=True), "--", linewidth=1.4, color="#777777", label=label)
    axes.set_ylabel("time per step")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda seconds, _: _seconds(seconds))


def _lines(axes: "Axes", rows: list[Row], value: Callable[[Row], float | None]) -> dict[str, list[Point]]:
    """A line per contestant through what was measured."""
    lines: dict[str, list[Point]] = {}
    for row in rows:
        y = value(row)
        if y:
            lines.setdefault(row.contestant, []).append((row.n, y))
    for name, points in lines.items():
        points.sort()
        style: dict[str, Any] = {"marker": "o", "linewidth": 1.6, "markersize": 6} | _STYLES.get(name, {})
        x, y_values = zip(*points, strict=True)
        axes.plot(x, y_values, label=_LABELS.get(name, name), markeredgecolor="white", markeredgewidth=0.5, **style)
    return lines


def _figure(
    recording: Recording,
    panel: Callable[["Axes", list[Row], dict[str, str]], None],
    title: str,
    path: Path,
) -> None:
    """One panel per D, the legend beside them, the hardware in the title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dims = sorted({row.d for row in recording.rows})
    facts = recording.environment
    figure = Figure(figsize=(5.6 * len(dims) + 3.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(dims), squeeze=False, sharey=True)[0]
    named: dict[str, Any] = {}
    for axes, d in zip(panels, dims, strict=True):
        rows = [row for row in recording.rows if row.d == d]
        axes.set_xscale("log", base=2)
        panel(axes, rows, facts)
        # axhline's x is in parts of the axes, not in pairs.
        ticks = sorted({int(n) for line in axes.lines for n in line.get_xdata() if n > 1})
        axes.set_xticks(ticks, [_count(n) for n in ticks])
        axes.minorticks_off()
        axes.grid(True, color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(f"batch size N (pairs), D = {d}")
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    for axes in panels[1:]:
        axes.set_ylabel("")
    figure.legend(named.values(), named.keys(), loc="outside right center", frameon=False)
    figure.suptitle(title, fontsize="large", fontweight="bold", x=0.01, ha="left")
    hardware = f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, commit {facts['commit']}"
    panels[0].set_title(hardware, fontsize="small", color="#555555", loc="left")
    draft = path.with_name(f".{path.name}.part")
    figure.savefig(draft, dpi=150, format="png")
    draft.replace(path)


def _count(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _bytes(mib: float) -> str:
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"

"""Flat ring and ring over nodes: time against the speed of the links between nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contratile.bench.plots.style import STYLES, finish, seconds_text
from contratile.bench.rows import NodesRow, Recording, threads_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {"flat": ("flat ring", "inf_cl_ring"), "nodes": ("ring over nodes", "contratile")}


def draw_nodes(recording: Recording[NodesRow], folder: Path) -> tuple[Path, ...]:
    """One figure: median time of both rings at each speed, and how much faster the second one is."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rates = list(dict.fromkeys(row.link_mbit for row in recording.rows))
    rates.sort(key=lambda rate: rate or float("inf"))
    for ring, (label, style) in LOOKS.items():
        times = {row.link_mbit: row.seconds_median or 0.0 for row in recording.rows if row.contestant == ring}
        axes.plot(range(len(rates)), [times[rate] for rate in rates], label=label, **STYLES[style])
    _label(axes, rates, [row for row in recording.rows if row.contestant == "nodes"])
    first = recording.rows[0]
    title = f"{first.nodes} emulated nodes of {first.world // first.nodes} ranks, N = {first.n}, D = {first.d}"
    path = folder / "nodes.png"
    finish(figure, axes, title, threads_text(recording), recording.environment, path)
    return (path,)


def _label(axes: "Axes", rates: list[int], rows: Sequence[NodesRow]) -> None:
    """Rates below, and the speed-up at each of them."""
    from matplotlib.ticker import LogLocator

    for row in rows:
        place = rates.index(row.link_mbit), row.seconds_median or 0.0
        axes.annotate(f"{row.speedup:.2f}x", place, xytext=(0, -16), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(rates)), [f"{rate}" if rate else "not\nshaped" for rate in rates])
    axes.set_xlabel("link of a rank between nodes, Mbit/s")
    axes.set_ylabel("median time per step")
    axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda seconds, _: seconds_text(seconds))
    axes.minorticks_off()
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)

"""A picture of a plan: the memory of each phase of a step and the memory available."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from contratile.data.files import written_whole
from contratile.planner.memory import PHASES
from contratile.planner.plan_text import decimal_size, heading

if TYPE_CHECKING:
    from contratile.planner.run_plan import Plan

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#777777", "#BBBBBB")
"""The palette of Okabe and Ito for the colour-blind, and greys."""
SMALL = 0.005
"""Terms below this share of the peak are drawn as one."""


def draw(plan: Plan, path: Path) -> None:
    """Write bars of memory to a PNG file.

    Args:
        plan: What to draw.
        path: The file; it is replaced when the picture is complete.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    memory = plan.memory
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    large = [term for term in memory.terms if term.bytes >= SMALL * memory.peak]
    large.sort(key=lambda term: -term.bytes)
    left = dict.fromkeys(PHASES, 0.0)
    for index, term in enumerate(large):
        color, name = COLORS[index % len(COLORS)], f"{term.name} ({decimal_size(term.bytes)})"
        for phase in term.phases:
            axes.barh(phase, term.bytes / 1e9, left=left[phase] / 1e9, color=color, label=name, edgecolor="white")
            left[phase] += term.bytes
            name = "_nolegend_"
    if memory.available < 20 * memory.peak:
        axes.axvline(
            memory.available / 1e9, color="#777777", linestyle="--", label=f"there are {decimal_size(memory.available)}"
        )
    axes.invert_yaxis()
    axes.set_xlabel("GB on each device (predicted)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    title, options = heading(plan)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    axes.set_title(options, loc="left", fontsize="small", color="#555555")
    with written_whole(path) as draft:
        figure.savefig(draft, dpi=150, format="png")

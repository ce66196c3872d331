"""The paper's figure 1: memory per device against the batch size, a panel for each number of ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contratile.bench.plots.panels import Panel, figure_of
from contratile.bench.plots.style import LABELS, STYLES, bytes_text
from contratile.bench.rows import Recording, ScaleRow, threads_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DEVICE_MIB = 80 * 1024
"""Memory of the paper's GPUs."""


def draw_scale(recording: Recording[ScaleRow], folder: Path) -> tuple[Path, ...]:
    """One figure: markers are measured on a simulated rank, dashed lines are formulas."""
    rows = [row for row in recording.rows if "real ranks" not in row.how]
    worlds = sorted({row.world for row in rows})
    grid = [
        [
            Panel(
                [row for row in rows if (row.world, row.d) == (world, d)], _paint, f"batch size, {world} ranks, D = {d}"
            )
            for world in worlds
        ]
        for d in sorted({row.d for row in rows})
    ]
    path = folder / "scale.png"
    figure_of(grid, "Memory of the loss per device", threads_text(recording), recording.environment, path)
    return (path,)


def _paint(axes: "Axes", rows: Sequence[ScaleRow], facts: dict[str, str]) -> None:
    for name in dict.fromkeys(row.contestant for row in rows):
        mine = sorted((row for row in rows if row.contestant == name), key=lambda row: row.n)
        style, label = dict(STYLES[name]), LABELS.get(name, name)
        axes.plot(
            [row.n for row in mine],
            [row.formula_mib for row in mine],
            linestyle="--",
            linewidth=1.4,
            color=style["color"],
            label=f"{label}, formula",
        )
        measured = [row for row in mine if row.peak_extra_mib is not None]
        if measured:
            found = [row.peak_extra_mib for row in measured]
            style |= {"linestyle": "", "markeredgecolor": "white"}
            axes.plot([row.n for row in measured], found, label=f"{label}, measured", **style)  # type: ignore[arg-type]
    axes.axhline(DEVICE_MIB, linestyle=":", linewidth=1.2, color="#777777", label="80 GiB, the paper's GPUs")
    axes.set_ylabel("memory beyond inputs and gradients")
    axes.set_yscale("log", base=4)
    axes.yaxis.set_major_formatter(lambda mib, _: bytes_text(mib))

"""The picture on the front page: peak memory of the loss against the batch size.

    python -m contratile.bench.front_page                # from the repository: recorded rows -> docs/memory.svg
    python -m contratile.bench.front_page results/*/loss.json --out memory.png

Markers are measurements. The dashed line is the dense loss extrapolated with N², and it is labelled so.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from contratile.bench.rows import LossRow, Recording, load_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECORDINGS = (Path("benchmarks/results/cpu-d512/loss.json"), Path("benchmarks/results/cpu-memory/loss.json"))
BLUE, RED, GREY, INK = "#0072B2", "#D55E00", "#777777", "#222222"
GIB = 1024.0
Points = list[tuple[int, float]]


class MemoryCurves(NamedTuple):
    """What the picture shows, in MiB."""

    ours: Points
    dense: Points
    machine: float
    d: int
    hardware: str


def collect(recordings: Sequence[Recording[LossRow]], d: int = 512) -> MemoryCurves:
    """Merge the memory rows of several runs on machines of the same size."""
    facts = recordings[0].environment
    sizes = {recording.environment["memory_gib"] for recording in recordings}
    if len(sizes) > 1:
        raise ValueError(f"recordings: expected machines of one memory size, got {sorted(sizes)} GiB. Draw them apart.")

    def points(contestant: str) -> Points:
        rows = (row for recording in recordings for row in recording.rows)
        return sorted(
            {
                (row.n, row.peak_extra_mib)
                for row in rows
                if row.contestant == contestant and row.d == d and row.peak_extra_mib
            }
        )

    hardware = f"{facts['cpu']}, fp32, D = {d}, torch {facts['torch'].split('+')[0]}"
    return MemoryCurves(points("contratile"), points("dense"), float(facts["memory_gib"]) * GIB, d, hardware)


def draw(memory: MemoryCurves, path: Path) -> None:
    """Write the picture as SVG or PNG, on a white card so that it can be read on light and dark pages."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "contratile", "font.size": 11, "text.color": INK}):
        figure = Figure(figsize=(8.6, 4.4), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        paint(axes, memory)
        figure.suptitle("Peak memory of one loss step, forward and backward", x=0.02, ha="left", fontweight="bold")
        axes.set_title(f"beyond features and gradients; {memory.hardware}", loc="left", fontsize=9.5, color=GREY)
        dateless = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=dateless)


def paint(axes: "Axes", memory: MemoryCurves) -> None:
    """The two lines, the extrapolation and the machine's memory, each labelled where it is."""
    ours, dense = memory.ours, memory.dense
    (last_n, last_mib), largest = dense[-1], ours[-1][0]
    ahead = [last_n]
    while ahead[-1] < largest:
        ahead.append(2 * ahead[-1])
    beyond = [(n, last_mib * (n / last_n) ** 2) for n in ahead]

    axes.axhline(memory.machine, color=GREY, linewidth=1.2)
    axes.plot(*zip(*dense, strict=True), "s-", color=RED, markersize=6, linewidth=2)
    axes.plot(*zip(*beyond, strict=True), "--", color=RED, linewidth=2)
    axes.plot(*zip(*ours, strict=True), "o-", color=BLUE, markersize=7, linewidth=2.6)

    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=4)
    axes.set_xlim(ours[0][0] / 1.15, largest * 2.1)
    axes.set_ylim(4, beyond[-1][1] * 3)
    ticks = [n for n, _ in ours]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize=9.5)
    axes.set_yticks([4, 16, 64, 256, GIB, 4 * GIB, 16 * GIB, 64 * GIB, 256 * GIB])
    axes.yaxis.set_major_formatter(lambda mib, _: mib_label(mib))
    axes.minorticks_off()
    axes.grid(True, color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("batch size N (pairs)")

    label(axes, f"RAM of this machine: {memory.machine / GIB:.1f} GiB", (ours[0][0], memory.machine), (0, 5), GREY)
    label(axes, "dense loss, measured", (last_n, last_mib), (-8, 4), RED, right=True)
    label(axes, "dense loss, extrapolated (N²)", beyond[-1], (-14, 6), RED, right=True)
    label(axes, mib_label(beyond[-1][1]), beyond[-1], (8, -4), RED)
    label(axes, "Contratile, measured", ours[len(ours) // 2], (0, 10), BLUE)
    label(axes, mib_label(ours[-1][1]), ours[-1], (8, -4), BLUE)


def label(
    axes: "Axes", text: str, at: tuple[float, float], offset: tuple[int, int], color: str, *, right: bool = False
) -> None:
    axes.annotate(
        text, at, xytext=offset, textcoords="offset points", color=color, ha="right" if right else "left", weight="bold"
    )


def mib_label(mib: float) -> str:
    return f"{mib / GIB:.0f} GiB" if mib >= GIB else f"{mib:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.front_page", description=__doc__)
    parser.add_argument(
        "results", type=Path, nargs="*", default=RECORDINGS, help="loss.json of `contratile bench loss`"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/memory.svg"), help="an .svg or .png file")
    options = parser.parse_args()
    draw(collect([load_rows(path) for path in options.results]), options.out)
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()

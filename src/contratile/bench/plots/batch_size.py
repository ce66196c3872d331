"""Accuracy against the batch size at equal samples seen: a panel per source, a line per data size, a band of seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.bench.plots.style import count_text, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
COLOURS = ("#56B4E9", "#0072B2", "#000000", "#D55E00")
MARKERS = ("o", "s", "D", "P")


def by_point(rows: Sequence[Record], value: str = "recall_10") -> dict[tuple[str, int, int], list[float]]:
    """The values of the reported runs by (data, size, batch): one per seed."""
    found: dict[tuple[str, int, int], list[float]] = {}
    for row in rows:
        if row["purpose"] == "run":
            found.setdefault((row["data"], row["size"], row["batch"]), []).append(row[value])
    return found


def draw_batch_size(rows: Sequence[Record], folder: Path) -> Path:
    """Write batch-size.png and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sources = list(dict.fromkeys(row["data"] for row in rows if row["purpose"] == "run"))
    figure, grid = pyplot.subplots(1, len(sources), figsize=(6.2 * len(sources), 4.6), squeeze=False, layout="tight")
    for axes, source in zip(grid[0], sources, strict=True):
        _panel(axes, source, rows)
    path = folder / "batch-size.png"
    facts = dict(rows[-1])
    count = facts["threads"]
    title = "Accuracy against batch size"
    finish(figure, grid[0][0], title, f"{count} thread{'s' * (count != '1')}", facts, path)
    pyplot.close(figure)
    return path


def _panel(axes: "Axes", source: str, rows: Sequence[Record]) -> None:
    points = {key[1:]: values for key, values in by_point(rows).items() if key[0] == source}
    for size, colour, marker in zip(sorted({size for size, _ in points}), COLOURS, MARKERS, strict=False):
        batches = sorted(batch for other, batch in points if other == size)
        values = [points[size, batch] for batch in batches]
        means = [sum(seeds) / len(seeds) for seeds in values]
        axes.fill_between(batches, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.2, lw=0)
        axes.plot(batches, means, color=colour, marker=marker, label=f"{size:,} training pairs")
    samples = next(row["samples"] for row in rows if row["data"] == source)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({batch for _, batch in points}))
    axes.xaxis.set_major_formatter(lambda batch, _: count_text(int(batch)))
    axes.set_xlabel(f"batch size ({source}, {samples:,} samples seen)")
    axes.set_ylabel("R@10 among 1,024 (mean, worst to best seed)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")

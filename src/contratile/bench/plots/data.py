"""Samples per second of the data loaders."""

from pathlib import Path

from contratile.bench.plots.style import LABELS, STYLES, finish
from contratile.bench.rows import DataRow, Recording, threads_text

DATA_LABELS = LABELS | {"contratile": "contratile, shards", "open_clip": "open_clip get_data"}


def draw_data(recording: Recording[DataRow], folder: Path) -> tuple[Path, ...]:
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
            style = {key: value for key, value in STYLES.get(name, {}).items() if key in ("color", "alpha")}
            label = DATA_LABELS.get(name, name)
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
    finish(figure, grid[0], title, threads_text(recording), recording.environment, path)
    return (path,)

"""The rows of `bench.batch_size` as Markdown: means and spreads over seeds, learning rates, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contratile.bench.plots.batch_size import by_point

Record = dict[str, Any]


def batch_size_tables(
    rows: Sequence[Record], batches: dict[str, Sequence[int]], sizes: dict[str, Sequence[int]]
) -> str:
    """R@10 by source, data size and batch size, a block per source.

    Args:
        rows: Recorded runs.
        batches: Batch sizes by source.
        sizes: Data sizes by source.
    """
    found = by_point(rows)
    blocks = []
    for source in batches:
        lines = ["| training pairs | " + " | ".join(f"{batch:,}" for batch in batches[source]) + " |"]
        lines += ["| --- " * (len(batches[source]) + 1) + "|"]
        for size in sizes[source]:
            cells = [_cell(found.get((source, size, batch), [])) for batch in batches[source]]
            lines.append(f"| {source}, {size:,} | " + " | ".join(cells) + " |")
        rates = [_rate(rows, source, batch) for batch in batches[source]]
        lines.append("| learning rate | " + " | ".join(rates) + " |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _cell(values: Sequence[float]) -> str:
    """Mean of the seeds, from worst to best, and the number of seeds if it is not three."""
    if not values:
        return "not run"
    mean = sum(values) / len(values)
    few = f", {len(values)} of 3 seeds" if len(values) != 3 else ""
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f}{few})"


def _rate(rows: Sequence[Record], source: str, batch: int) -> str:
    rates = {row["lr"] for row in rows if (row["purpose"], row["data"], row["batch"]) == ("run", source, batch)}
    return ", ".join(f"{rate:g}" for rate in sorted(rates)) or "not run"

"""Batch size against accuracy on real data, with equal samples seen: rows that are appended, and done ones skipped.

    python -m contratile.bench.batch_size --wordnet FOLDER          # continues OUT/rows.jsonl
    python -m contratile.bench.batch_size --draw                    # batch-size.png and .md from the rows

Icons and their names, WordNet's words and their definitions: five batch sizes, three data sizes, three seeds each. The
learning rate of a batch size is the best of four on the middle data size, with a seed that is not used again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from contratile.bench.batch_size_data import DataName, PairData, load_pairs
from contratile.bench.batch_size_run import train
from contratile.bench.batch_size_table import batch_size_tables
from contratile.machine import environment

Record = dict[str, Any]
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2)
TRIAL_SEED = 100


@dataclass(frozen=True)
class BatchGrid:
    """The sizes, batches and learning rates that are run on one source."""

    batches: tuple[int, ...]
    sizes: tuple[int, ...]
    """Training pairs."""

    samples: int
    """Samples seen by every run."""


GRIDS: dict[DataName, BatchGrid] = {
    "icons": BatchGrid((64, 256, 512, 1024, 2048), (3072, 6144, 12288), 131072),
    "wordnet": BatchGrid((64, 256, 512, 1024, 2048), (8192, 32768, 131072), 131072),
}


class GridRun(NamedTuple):
    """One training run of the grid."""

    purpose: str
    """`rate`: to choose the learning rate; `run`: what is reported."""

    data: DataName
    size: int
    batch: int
    seed: int
    lr: float


def points(grids: dict[DataName, BatchGrid], rows: list[Record]) -> Iterator[GridRun]:
    """Yield all runs in order. Reported runs use learning rates chosen from `rows`, which grows during iteration."""
    for data, grid in grids.items():
        middle = grid.sizes[len(grid.sizes) // 2]
        for batch, lr in product(grid.batches, RATES):
            yield GridRun("rate", data, middle, batch, TRIAL_SEED, lr)
    for seed, data in product(SEEDS, grids):
        for size, batch in product(grids[data].sizes, grids[data].batches):
            yield GridRun("run", data, size, batch, seed, chosen_rate(rows, data, batch))


def chosen_rate(rows: list[Record], data: str, batch: int) -> float:
    """The learning rate of a batch size: the one with the highest R@10."""
    tried = [row for row in rows if (row["purpose"], row["data"], row["batch"]) == ("rate", data, batch)]
    return float(max(tried, key=lambda row: row["recall_10"])["lr"])


def read_rows(path: Path) -> list[Record]:
    """Read the rows; a last line that was cut off is dropped."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise
    return rows


def key_of(row: Record) -> GridRun:
    """The run that a row describes."""
    return GridRun(**{name: row[name] for name in GridRun._fields})


def run_all(grids: dict[DataName, BatchGrid], out: Path, wordnet: Path | None, command: str) -> list[Record]:
    """Run what is missing and append a row for each; return all rows."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "rows.jsonl"
    rows = read_rows(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = environment()
    keep = {name: facts[name] for name in ("commit", "torch", "cpu", "threads")} | {"command": command}

    @cache
    def pairs(data: DataName) -> PairData:
        return load_pairs(data, wordnet)

    done = {key_of(row) for row in rows}
    for point in points(grids, rows):
        if point in done:
            continue
        samples, start = grids[point.data].samples, time.process_time()
        data = pairs(point.data)
        found = train(data, size=point.size, batch=point.batch, samples=samples, lr=point.lr, seed=point.seed)
        spent = {"samples": samples, "steps": samples // point.batch, "cpu_seconds": time.process_time() - start}
        row = {**point._asdict(), **found, **spent, **keep}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        score = f"R@10 {found['recall_10']:.3f}, {spent['cpu_seconds']:.1f} CPU seconds"
        print(f"{len(rows)}: {' '.join(map(str, point))}: {score}", flush=True)
    return rows


def show(out: Path) -> tuple[Path, Path]:
    """Write batch-size.png and batch-size.md from the recorded rows."""
    from contratile.bench.plots.batch_size import draw_batch_size

    rows = read_rows(out / "rows.jsonl")
    text = batch_size_tables(
        rows, {name: grid.batches for name, grid in GRIDS.items()}, {name: grid.sizes for name, grid in GRIDS.items()}
    )
    path = out / "batch-size.md"
    draft = path.with_name(f".{path.name}.part")
    draft.write_text("# R@10 among 1,024 held-out pairs: mean of the seeds (worst to best)\n\n" + text)
    draft.replace(path)
    return draw_batch_size(rows, out), path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.batch_size", description=__doc__)
    parser.add_argument("--data", nargs="+", choices=get_args(DataName), default=list(GRIDS))
    parser.add_argument("--wordnet", type=Path, help="folder of WordNet's files, if not in a usual place")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/batch-size"))
    parser.add_argument("--draw", action="store_true", help="draw the recorded rows, run nothing")
    options = parser.parse_args()
    if options.draw:
        print("written: " + ", ".join(map(str, show(options.out))))
        return
    torch.set_num_threads(options.threads)
    command = f"python -m contratile.bench.batch_size --data {' '.join(options.data)} --threads {options.threads}"
    run_all({name: GRIDS[name] for name in options.data}, options.out, options.wordnet, command)


if __name__ == "__main__":
    main()

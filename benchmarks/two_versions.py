"""A cached step with tensors of equal length: two versions of the package, in turns.

    git worktree add --detach ../before c06aae7
    python benchmarks/two_versions.py ../before/src src --rounds 12

Each version runs in a process of its own and does a step when it is asked to, so that both see the same machine. Prints
the best time of each and the median of the ratios of neighbouring steps, new over old: 1.02 is 2 % slower.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

WORKER = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
import contratile as ct
from contratile.bench.contestants.cache_model import Encoder, tokens
torch.manual_seed(0)
pairs, chunk, width, layers = map(int, sys.argv[2:6])
encoder, sides = Encoder(width, layers), [tokens(pairs, seed=1), tokens(pairs, seed=2)]
cache = ct.GradCache(encoder, lambda q, d: ct.info_nce(q, d, 20.0, group=None), chunk)
for _ in sys.stdin:
    encoder.zero_grad()
    start = time.perf_counter()
    cache.step(*sides)
    print(time.perf_counter() - start, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs=2, help="folders that hold the package: the old one, the new one")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    sizes = [options.threads, options.pairs, options.chunk, options.width, options.layers]
    words = [sys.executable, "-c", WORKER, *map(str, sizes)]
    workers = []
    for source in options.sources:
        environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment))

    def step(worker: subprocess.Popen[str]) -> float:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())

    for worker in workers:
        step(worker)  # the first step pays for threads and memory
    times: list[list[float]] = [[], []]
    for turn in range(options.rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            times[which].append(step(workers[which]))
    for worker in workers:
        worker.communicate()
    ratios = [new / old for old, new in zip(*times, strict=True)]
    best = [min(found) for found in times]
    print(f"old {best[0]:.4f} s, new {best[1]:.4f} s, ratio of the best {best[1] / best[0]:.3f}, ", end="")
    print(f"median ratio {median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()

"""The process that measures the peak memory of one step, started by `contratile.bench.memory`.

    python -m contratile.bench.memory_point loss --contestant dense --n 4096 --d 512
    python -m contratile.bench.memory_point cache --contestant plain --n 1024 --d 128 --chunk 64

prints one JSON object such as {"status": "ok", "peak_extra_mib": 193.2}.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch

from contratile.bench.clock import clock_for
from contratile.bench.contestants.cache import CACHE_CONTESTANTS, CacheProblem
from contratile.bench.contestants.cache_model import LAYERS
from contratile.bench.contestants.cache_texts import LENGTHS
from contratile.bench.contestants.family import CASES
from contratile.bench.contestants.loss import DTYPES, LossProblem, LossStep
from contratile.bench.harness import describe, quiet
from contratile.bench.memory import Peak, extra_peak

WARM_UP = 256


def warm_up(step: LossStep, make: Callable[[int], LossProblem]) -> None:
    """Run small steps, so that threads, connections, BLAS workspaces and compiled code exist before the measurement."""
    for rows in (WARM_UP // 2, WARM_UP):
        make(rows).bind(step)()


def loss_peak(options: argparse.Namespace) -> Peak:
    """Measure a step of a loss."""
    case = CASES[options.case]
    contestant = case.contestants[options.contestant]
    clock, dtype = clock_for(options.device), contestant.dtype or getattr(torch, options.dtype)
    step = contestant.load()
    make = partial(case.problem, d=options.d, scale=options.scale, dtype=dtype, device=clock.device)
    warm_up(step, make)
    problem = make(options.n)
    return extra_peak(problem.bind(step), problem.leaves, clock=clock)


def cache_peak(options: argparse.Namespace) -> Peak:
    """Measure a training step."""
    load = CACHE_CONTESTANTS[options.contestant].load
    make = partial(CacheProblem, chunk=options.chunk, width=options.d, layers=options.layers, lengths=options.lengths)
    load(make(min(options.n, 2 * options.chunk)))()
    problem = make(options.n)
    return extra_peak(load(problem), problem.parameters)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.memory_point", description=__doc__)
    kinds = parser.add_subparsers(required=True)
    loss, cache = kinds.add_parser("loss"), kinds.add_parser("cache")
    loss.set_defaults(peak=loss_peak)
    loss.add_argument("--case", choices=CASES, default="clip")
    loss.add_argument("--contestant", required=True)
    loss.add_argument("--scale", type=float, default=14.3)
    loss.add_argument("--device", default="cpu")
    loss.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    cache.set_defaults(peak=cache_peak)
    cache.add_argument("--contestant", choices=CACHE_CONTESTANTS, required=True)
    cache.add_argument("--chunk", type=int, required=True)
    cache.add_argument("--layers", type=int, default=LAYERS)
    cache.add_argument("--lengths", choices=LENGTHS, default="equal")
    for kind in (loss, cache):
        kind.add_argument("--n", type=int, required=True)
        kind.add_argument("--d", type=int, required=True)
        kind.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    if "case" in options and options.contestant not in CASES[options.case].contestants:
        loss.error(f"--contestant: expected one of {', '.join(CASES[options.case].contestants)}")
    torch.set_num_threads(options.threads)
    try:
        with quiet():
            found = options.peak(options)
    except Exception as error:
        found = Peak(describe(error))
    print(json.dumps({"status": found.status, "peak_extra_mib": found.mib}))


if __name__ == "__main__":
    main()

"""The process that measures one point of `contratile bench scale`.

    python -m contratile.bench.scale_point --contestant contratile --local 8192 --d 768 --world 3

prints one JSON object such as {"status": "ok", "peak_extra_mib": 143.2, "sent_bytes": 176160768}.
"""

import argparse
import json
from functools import partial

import torch

from contratile.bench.contestants.loss import LossProblem
from contratile.bench.contestants.scale import simulated
from contratile.bench.harness import describe, quiet
from contratile.bench.memory import Peak, extra_peak
from contratile.bench.memory_point import warm_up


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Peak memory of one step of the simulated rank, and the bytes that ours sent."""
    step, rank = simulated(options.contestant, options.world, options.nodes)
    make = partial(LossProblem.make, d=options.d, scale=options.scale)
    warm_up(step, make)
    image, text, scale = make(options.local).args
    if options.queries < options.local:
        image = image.detach()[: options.queries].clone().requires_grad_()
    problem = LossProblem((image, text, scale))
    if rank is not None:
        rank.log.restart()
    peak = extra_peak(problem.bind(step), problem.leaves)
    sent = None if rank is None else sum(rank.log.sent.values())
    return {"status": peak.status, "peak_extra_mib": peak.mib, "sent_bytes": sent}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.scale_point", description=__doc__)
    parser.add_argument("--contestant", required=True)
    for name in ("local", "d", "world"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--queries", type=int)
    parser.add_argument("--scale", type=float, default=14.3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    options.queries = options.local if options.queries is None else options.queries
    torch.set_num_threads(options.threads)
    try:
        with quiet():
            found = measure(options)
    except Exception as error:
        found = {"status": Peak(describe(error)).status, "peak_extra_mib": None, "sent_bytes": None}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""One rank of a point of `contratile bench ring`, started by `launch`.

Rank 0 says what is being done and what came out of it. A rank in which a contestant fails says so and ends: the
others cannot go on without it. Figures are agreed upon by all ranks: the slowest one's time, the largest one's memory,
the bytes of the one that sent most.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from contratile.bench.contestants.loss import Problem, quiet
from contratile.bench.contestants.loss import Step as LossStep
from contratile.bench.contestants.ring import RING_CONTESTANTS
from contratile.bench.harness import GemmLimit, Step, Timing, describe, interleave, turn, wall_time
from contratile.bench.memory import extra_peak, warm_up
from contratile.bench.traffic import bytes_sent
from contratile.engine.passes import KeyBlock, KeyGrad
from contratile.ring.ring import Ring, RingPass, record_waits
from contratile.ring.team import Team

OURS = "contratile"


@dataclass(kw_only=True)
class Measurement:
    """What was found out about a contestant at a point."""

    note: str = "ok"
    """Why there is no memory figure, if so."""

    peak_extra_mib: float | None = None
    sent_bytes: int | None = None
    seconds_best: float | None = None
    seconds_median: float | None = None
    limit_seconds: float | None = None
    transfer_seconds: float | None = None
    waited_seconds: float | None = None
    exposed_seconds: float | None = None


def say(event: str, **facts: Any) -> None:
    """One line to the parent, past whatever a contestant's standard output is redirected to."""
    assert sys.__stdout__ is not None
    sys.__stdout__.write(json.dumps({"event": event, **facts}) + "\n")
    sys.__stdout__.flush()


def agreed(value: float, op: Any = dist.ReduceOp.MAX) -> float:
    """The same number on every rank: the largest one, or as `op` says."""
    shared = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(shared, op)
    return shared.item()


def common_time(step: Step) -> float:
    """Seconds of the slowest rank, all having started together."""
    dist.barrier()
    return agreed(wall_time(step))


class Point:
    """The measurements at one global batch, in this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local, self.d = options.batch // self.world, options.d
        self.found = {name: Measurement() for name in options.contestants}
        self.steps: dict[str, LossStep] = {}

    def run(self) -> None:
        for name in self.found:
            with self.under_way(name, "loading"):
                self.steps[name] = RING_CONTESTANTS[name].load()
        for name in self.found:
            with self.under_way(name, "memory and traffic"):
                warm_up(self.steps[name], partial(Problem.make, d=self.d, scale=self.options.scale))
                self.weigh(name)
            self.report(name)
        if self.options.rounds:
            self.time()

    @contextmanager
    def under_way(self, name: str, doing: str | None = None) -> Iterator[None]:
        """What is done for a contestant, and the end of this rank if that fails. Ranks go on together."""
        if doing:
            self.tell(name, f"{name}: {doing}")
        try:
            yield
            if doing:
                dist.barrier()
        except Exception as error:
            say("failed", contestant=name, status=describe(error))
            sys.exit(1)

    def tell(self, name: str, text: str) -> None:
        if self.rank == 0:
            say("doing", contestant=name, text=text)

    def report(self, name: str) -> None:
        if self.rank == 0:
            say("measured", contestant=name, found=asdict(self.found[name]))

    def problem(self) -> Problem:
        return Problem.make(self.local, self.d, scale=self.options.scale, seed=self.rank)

    def weigh(self, name: str) -> None:
        """Peak memory and bytes sent of one step between two barriers, less the bytes of a barrier."""
        found, problem = self.found[name], self.problem()
        dist.barrier()
        marks = [bytes_sent()]
        dist.barrier()
        marks.append(bytes_sent())
        peak = extra_peak(self.steps[name], problem, processes=self.world)
        dist.barrier()  # what this rank sent has arrived, and so has left
        marks.append(bytes_sent())
        barrier, step = (None if a is None or b is None else b - a for a, b in pairwise(marks))
        if step is not None and barrier is not None:
            found.sent_bytes = int(agreed(step - barrier))
        found.note = peak.status
        if peak.mib is not None:
            found.peak_extra_mib = agreed(peak.mib)

    def time(self) -> None:
        """A warm-up, the rounds, and for our ring the transfers alone."""
        problem, waits = self.problem(), list[list[float]]()
        steps: dict[str, Step] = {}
        for name, step in self.steps.items():
            bound = problem.bind(step)
            with self.under_way(name, "warm-up"):
                bound()
            steps[name] = self.guarded(name, waiting(bound, waits) if name == OURS else bound)
        limit, rounds = GemmLimit(self.local, self.d, self.options.batch), self.options.rounds
        timings = interleave(
            steps, limit, rounds=rounds, clock=common_time, notify=lambda text: self.tell(text.split(",")[0], text)
        )
        if OURS in steps and self.world > 1:
            self.overlap(timings[OURS], waits, rounds)
        for name, timing in timings.items():
            found = self.found[name]
            found.seconds_best, found.seconds_median = timing.best, timing.median
            found.limit_seconds = timing.limit
            self.report(name)

    def guarded(self, name: str, step: Step) -> Step:
        def call() -> None:
            with self.under_way(name):
                step()

        return call

    def overlap(self, timing: Timing, waits: list[list[float]], rounds: int) -> None:
        """Of the best step. Who comes last to a hop waits for the transfer alone, the others for that rank too."""
        found = self.found[OURS]
        hops = waits[timing.steps.index(timing.best)]
        found.waited_seconds = agreed(sum(hops), dist.ReduceOp.SUM) / self.world
        found.exposed_seconds = sum(agreed(hop, dist.ReduceOp.MIN) for hop in hops)
        with self.under_way(OURS, "transfers alone"):
            alone = transfers(self.local, self.d)
            alone()
            found.transfer_seconds = min(seconds for _ in range(rounds) for seconds in turn(alone, common_time))


def waiting(step: Step, waits: list[list[float]]) -> Step:
    """The step, which notes for each call how long it waited at every hop of the ring."""

    def call() -> None:
        with record_waits() as hops:
            step()
        waits.append(hops)

    return call


class Vectors(NamedTuple):
    """What the forward pass gathers for a block: two numbers per key."""

    level: Tensor
    total: Tensor

    def merge_(self, other: Vectors) -> None:
        """Nothing: only the transfer is timed."""


def transfers(n: int, d: int) -> Callable[[], None]:
    """The two ring passes of a symmetric step with nothing computed between posting and waiting."""
    team = Team.of("auto")
    ring = Ring.flat(team, (n,) * team.size, total=n * team.size)
    block, vector = torch.randn(n, d), torch.randn(n)

    def call() -> None:
        forward: RingPass[KeyBlock, Vectors] = RingPass(ring, KeyBlock(block))
        for visit in forward:
            visit.gathered = Vectors(visit.zeros(vector), visit.zeros(vector))
        backward: RingPass[KeyBlock, KeyGrad] = RingPass(ring, KeyBlock(block, lse=vector, grad=vector))
        for back in backward:
            back.gathered = KeyGrad(back.zeros(block))

    return call


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.ring_rank", description=__doc__)
    for name in ("rank", "world", "batch", "d", "rounds", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--store", required=True, help="a file by which the ranks find each other")
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--contestants", nargs="+", choices=RING_CONTESTANTS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where: dict[str, Any] = {"init_method": f"file://{options.store}", "rank": options.rank}
    dist.init_process_group("gloo", world_size=options.world, **where)
    with quiet():
        Point(options).run()
    dist.barrier()
    if options.rank == 0:
        say("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

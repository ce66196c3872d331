"""One rank of a point of `contratile bench ring`, started by `launch`.

Rank 0 reports what is being done and what was measured. A rank in which a contestant fails says so and exits, because
the others cannot go on without it. Ranks agree on every figure: the time of the slowest one, the memory of the largest,
the bytes of the one that sent most.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from contratile.bench.clock import Step, wall_time
from contratile.bench.contestants.loss import LossProblem, LossStep
from contratile.bench.contestants.ring import RING_CONTESTANTS
from contratile.bench.harness import GemmLimit, Turns, describe, interleave, quiet, turn
from contratile.bench.memory import extra_peak
from contratile.bench.memory_point import warm_up
from contratile.bench.runner import OURS, Measured
from contratile.bench.traffic import bytes_sent
from contratile.engine.visitors import KeyBlock, KeyGrad
from contratile.ring.ring import Ring, RingPass, record_waits
from contratile.ring.team import Team


@dataclass(kw_only=True)
class RankMeasured(Measured):
    """What was measured for one contestant over ranks; see `rows.RingRow`."""

    sent_bytes: int | None = None
    transfer_seconds: float | None = None
    waited_seconds: float | None = None
    exposed_seconds: float | None = None


def say(event: str, **facts: Any) -> None:
    """Send a line to the parent through the original standard output, which `quiet` does not redirect."""
    assert sys.__stdout__ is not None
    sys.__stdout__.write(json.dumps({"event": event, **facts}) + "\n")
    sys.__stdout__.flush()


def agreed(value: float, op: Any = dist.ReduceOp.MAX) -> float:
    """Reduce a number over all ranks, by default to the largest one."""
    shared = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(shared, op)
    return shared.item()


def common_time(step: Step) -> float:
    """Return the seconds of the slowest rank, all starting together."""
    dist.barrier()
    return agreed(wall_time(step))


class RankPoint:
    """The measurements at one global batch size, in this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local, self.d = options.batch // self.world, options.d
        self.found = {name: RankMeasured() for name in options.contestants}
        self.steps: dict[str, LossStep] = {}

    def run(self) -> None:
        for name in self.found:
            with self.under_way(name, "loading"):
                self.steps[name] = RING_CONTESTANTS[name].load()
        for name in self.found:
            with self.under_way(name, "memory and traffic"):
                warm_up(self.steps[name], partial(LossProblem.make, d=self.d, scale=self.options.scale))
                self.weigh(name)
            self.report(name)
        if self.options.rounds:
            self.time()

    @contextmanager
    def under_way(self, name: str, doing: str | None = None) -> Iterator[None]:
        """Report what is done for a contestant; exit if it fails, else wait for the other ranks."""
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

    def problem(self) -> LossProblem:
        return LossProblem.make(self.local, self.d, scale=self.options.scale, seed=self.rank)

    def weigh(self, name: str) -> None:
        """Measure peak memory and bytes sent of one step between two barriers, minus the bytes of a barrier."""
        found, problem = self.found[name], self.problem()
        dist.barrier()
        marks = [bytes_sent()]
        dist.barrier()
        marks.append(bytes_sent())
        peak = extra_peak(problem.bind(self.steps[name]), problem.leaves, processes=self.world)
        dist.barrier()  # everything this rank sent has arrived
        marks.append(bytes_sent())
        barrier, step = (None if a is None or b is None else b - a for a, b in pairwise(marks))
        if step is not None and barrier is not None:
            found.sent_bytes = int(agreed(step - barrier))
        found.status = peak.status
        if peak.mib is not None:
            found.peak_extra_mib = agreed(peak.mib)

    def time(self) -> None:
        """Warm up, time in rounds, and for our ring also time the transfers alone."""
        problem, waits = self.problem(), list[list[float]]()
        steps: dict[str, Step] = {}
        for name, step in self.steps.items():
            bound = problem.bind(step)
            with self.under_way(name, "warm-up"):
                bound()
            steps[name] = self.guarded(name, waiting(bound, waits) if name == OURS else bound)
        limit, rounds = GemmLimit(self.local, self.d, self.options.batch), self.options.rounds
        timed = interleave(
            steps, limit, rounds=rounds, clock=common_time, notify=lambda text: self.tell(text.split(",")[0], text)
        )
        if OURS in steps and self.world > 1:
            self.overlap(timed[OURS], waits, rounds)
        for name, turns in timed.items():
            self.found[name].add(turns)
            self.report(name)

    def guarded(self, name: str, step: Step) -> Step:
        """Return the step, which ends this rank if it raises."""

        def call() -> None:
            with self.under_way(name):
                step()

        return call

    def overlap(self, turns: Turns, waits: list[list[float]], rounds: int) -> None:
        """Measure how much of the transfers the best step hides behind compute.

        The last rank to reach a hop waits for the transfer only, the others wait for that rank as well.
        """
        found = self.found[OURS]
        hops = waits[turns.steps.index(turns.best)]
        found.waited_seconds = agreed(sum(hops), dist.ReduceOp.SUM) / self.world
        found.exposed_seconds = sum(agreed(hop, dist.ReduceOp.MIN) for hop in hops)
        with self.under_way(OURS, "transfers alone"):
            alone = transfers(self.local, self.d)
            alone()
            found.transfer_seconds = min(seconds for _ in range(rounds) for seconds in turn(alone, common_time))


def waiting(step: Step, waits: list[list[float]]) -> Step:
    """Return the step, which appends to `waits` how long each call waited at every hop of the ring."""

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
        """Do nothing: only the transfers are timed."""


def transfers(n: int, d: int) -> Step:
    """Return the two ring passes of a symmetric step with nothing computed between posting and waiting."""
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
    parser.add_argument("--store", required=True, help="file through which the ranks find each other")
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--contestants", nargs="+", choices=RING_CONTESTANTS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where: dict[str, Any] = {"init_method": f"file://{options.store}", "rank": options.rank}
    dist.init_process_group("gloo", world_size=options.world, **where)
    with quiet():
        RankPoint(options).run()
    dist.barrier()
    if options.rank == 0:
        say("finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

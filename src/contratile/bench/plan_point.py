"""The process that runs points of `contratile bench plan`, started by `contratile.bench.plan`.

    echo '{"model": "tiny", "batch": 1024, "chunk": 256, "threads": 1}' | python -m contratile.bench.plan_point

For each line of standard input one JSON object is printed: the peak of its memory, the seconds of its step, and the
rates of this machine. A line with `"calibrate": true` runs two small chunks instead and prints the fitted lines. Every
point runs in processes of its own, one per rank, that are forked from this one, which has imported the libraries and
computed nothing.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import nn

from contratile import GradCache
from contratile.bench.harness import describe, quiet
from contratile.bench.plan_points import PlanPoint, definition
from contratile.bench.plug import plug_holes
from contratile.grad_cache.chunks import Nest
from contratile.host_memory import restart_peak, status_bytes
from contratile.losses.modules import ClipLoss
from contratile.planner.calibration import calibrate, materialised, real_rows
from contratile.planner.cpu_rates import cpu_rates, process_clock
from contratile.planner.devices import parse_devices
from contratile.planner.encoder_cost import encoder_cost
from contratile.planner.tower_inputs import EncoderExample
from contratile.planner.workload import Workload, by_name, count_optimizer

AGAIN = 2
"""Steps of the whole batch besides the first one, if they are timed; the fastest counts."""
FEW = 2
"""Rows of a rank's first step, which creates gradients and the optimiser's state. The second one has all rows."""


def measure(point: PlanPoint, sides: tuple[EncoderExample, EncoderExample], timed: bool) -> dict[str, Any]:
    """Run the steps of a point in this process.

    Memory is that of the process beyond what it had before it built anything, pages of libraries left out.
    """
    _warm_up()
    _join(point.world)
    plug_holes()
    restart_peak()
    before = status_bytes("RssAnon")
    modules = {id(side.module): materialised(side.module) for side in sides}
    encoders = [modules[id(side.module)] for side in sides]
    trained = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    scale = nn.Parameter(torch.tensor(2.66))
    optimizer = torch.optim.AdamW([*trained, scale], lr=1e-5)
    if point.world > 1:
        wrapped = {key: nn.parallel.DistributedDataParallel(module) for key, module in modules.items()}
        encoders = [wrapped[id(side.module)] for side in sides]
    cache = GradCache(encoders, ClipLoss(), chunk_size=point.chunk, offload=point.offload)  # type: ignore[arg-type]
    clock = process_clock()

    def step(rows: int) -> float:
        start = clock()
        optimizer.zero_grad()
        cache.step(_chunks(sides, rows, point.chunk), logit_scale=scale.exp())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return clock() - start

    share = point.batch // point.world
    step(FEW)
    seconds = [step(share)]
    found: dict[str, Any] = {"peak": status_bytes("VmHWM") - status_bytes("RssFile") - before}
    if timed:  # the machine's rates are measured between steps, so that a busy neighbour slows both
        found["rates"] = asdict(cpu_rates())
        seconds += [step(share) for _ in range(AGAIN)]
        found["seconds"] = min(seconds)
    return found


def _chunks(sides: Any, rows: int, chunk: int) -> Iterator[tuple[Nest, ...]]:
    for start in range(0, rows, chunk):
        yield tuple(real_rows(side.inputs, min(chunk, rows - start)) for side in sides)


def _warm_up() -> None:
    """Threads and libraries exist before the measurement."""
    layer = nn.Linear(64, 64)
    cache = GradCache(layer, ClipLoss(), chunk_size=16)
    cache.step(torch.randn(64, 64), torch.randn(64, 64), logit_scale=10.0)


def _join(world: int) -> None:
    if world == 1:
        return
    rank = int(os.environ["RANK"])
    store = f"file://{os.environ['CONTRATILE_STORE']}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)


def fit(sides: tuple[EncoderExample, EncoderExample]) -> dict[str, Any]:
    """Two small chunks of the encoders of a point."""
    devices = parse_devices("cpu")
    _warm_up()
    plug_holes()
    every = sides[:1] if sides[0].module is sides[1].module else sides
    clock = devices.clock("fp32")
    costs = [encoder_cost(side.module, side.inputs, rows=(8, 16), clock=clock) for side in every]
    optimizer = count_optimizer([side.module for side in sides], by_name("adamw"), "adamw", clock)
    work = Workload(batch=16, chunk=16, ranks=1, sides=(costs[0], costs[-1]), optimizer=optimizer)
    return asdict(calibrate(sides, work, devices))


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What a line asks for, from forked processes."""
    calibrated, timed = asked.pop("calibrate", False), asked.pop("timed", False)
    torch.set_num_threads(asked.pop("threads", torch.get_num_threads()))
    point = PlanPoint(**asked)
    sides = definition(point)  # imports what its models need
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CONTRATILE_STORE"] = f"{folder}/store"
        hold, release = os.pipe()
        ranks = []
        for rank in range(point.world):
            ranks.append(_fork(rank, hold, release, lambda: fit(sides) if calibrated else measure(point, sides, timed)))
        told = [rank.said() for rank in ranks]
        os.close(release)
        os.close(hold)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1]) for rank in ranks]
    found: list[dict[str, Any]] = []
    for text in told:
        try:
            found.append(json.loads(text))
        except ValueError:
            return {"status": f"failed: process ended with code {next((code for code in codes if code), 0)}"}
    failures = [one for one in found if "status" in one]
    # Report the first failure: the other ranks only lost their peer.
    return {"status": min(failures, key=lambda one: one["at"])["status"]} if failures else found[0] | _most(found)


def _most(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The highest peak of all ranks, and the seconds of the slowest."""
    return {key: max(one[key] for one in found) for key in ("peak", "seconds") if key in found[0]}


class Rank(NamedTuple):
    """A forked process."""

    pid: int
    answers: int

    def said(self) -> str:
        with os.fdopen(self.answers) as answers:
            return answers.read()


def _fork(rank: int, hold: int, release: int, work: Callable[[], dict[str, Any]]) -> Rank:
    """Do some work in a process that ends once all are done: no rank loses its peers in the middle of a step.

    One that failed ends at once, so that its peers lose their connection and end too, instead of waiting for it.
    """
    answers, send = os.pipe()
    pid = os.fork()
    if pid:
        os.close(send)
        return Rank(pid, answers)
    try:
        os.close(release)
        os.environ["RANK"] = str(rank)
        try:
            with quiet():
                found = work()
        except Exception as error:
            found = {"status": describe(error), "at": time.monotonic()}
        with os.fdopen(send, "w") as said:
            said.write(json.dumps(found))
        if "status" not in found:
            os.read(hold, 1)
    finally:  # without destructors: that of a process group may wait for a thread that waits for Python's lock
        os._exit(0)


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

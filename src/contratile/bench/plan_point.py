"""The process that runs one point of `contratile bench plan`, started by `contratile.bench.plan`.

    python -m contratile.bench.plan_point '{"model": "tiny", "batch": 1024, "chunk": 256}'

prints one JSON object: peak memory beyond what the process had before it built anything, seconds of the best step, and
the rates of this machine. With `--calibrate` it runs two small chunks instead and prints the fitted lines.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from contratile import GradCache
from contratile.bench.harness import quiet
from contratile.bench.plan_points import Point, definition
from contratile.grad_cache.chunks import Nest
from contratile.host_memory import status_bytes, trim
from contratile.losses.modules import ClipLoss
from contratile.planner.calibration import calibrate, materialised, real_rows
from contratile.planner.devices import cpu_rates, parse_devices
from contratile.planner.encoder_cost import encoder_cost
from contratile.planner.workload import Workload, by_name, count_optimizer

STEPS = 2
"""Steps of a point: the optimiser's state exists from the first one on."""


def measure(point: Point) -> dict[str, Any]:
    """Run the steps of a point in this process."""
    sides = definition(point)
    _warm_up()
    ranks = _join(point.world)
    rates = cpu_rates()
    trim()
    before = status_bytes("VmRSS")
    modules = {id(side.module): materialised(side.module) for side in sides}
    encoders = [modules[id(side.module)] for side in sides]
    trained = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
    scale = nn.Parameter(torch.tensor(2.66))
    optimizer = torch.optim.AdamW([*trained, scale], lr=1e-5)
    if point.world > 1:
        wrapped = {key: nn.parallel.DistributedDataParallel(module) for key, module in modules.items()}
        encoders = [wrapped[id(side.module)] for side in sides]
    cache = GradCache(encoders, ClipLoss(), chunk_size=point.chunk, offload=point.offload)  # type: ignore[arg-type]
    share, seconds = point.batch // point.world, []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        cache.step(_chunks(sides, share, point.chunk), logit_scale=scale.exp())
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    peak = status_bytes("VmHWM") - before
    if ranks is not None:
        most = torch.tensor([float(peak), min(seconds)])
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        peak, best = int(most[0]), float(most[1])
        torch.distributed.destroy_process_group()
    else:
        best = min(seconds)
    return {"peak": peak, "seconds": best, "flops": rates.flops["fp32"], "bandwidth": rates.bandwidth}


def _chunks(sides: Any, rows: int, chunk: int) -> Iterator[tuple[Nest, ...]]:
    for start in range(0, rows, chunk):
        yield tuple(real_rows(side.inputs, min(chunk, rows - start)) for side in sides)


def _warm_up() -> None:
    """Threads and libraries exist before the measurement."""
    layer = nn.Linear(64, 64)
    cache = GradCache(layer, ClipLoss(), chunk_size=16)
    cache.step(torch.randn(64, 64), torch.randn(64, 64), logit_scale=10.0)


def _join(world: int) -> int | None:
    if world == 1:
        return None
    rank = int(os.environ["RANK"])
    store = f"file://{os.environ['CONTRATILE_STORE']}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    return rank


def fit(point: Point) -> dict[str, Any]:
    """Two small chunks of the encoders of a point."""
    sides, devices = definition(point), parse_devices("cpu")
    _warm_up()
    every = sides[:1] if sides[0].module is sides[1].module else sides
    costs = [encoder_cost(side.module, side.inputs, rows=(8, 16)) for side in every]
    optimizer = count_optimizer([side.module for side in sides], by_name("adamw"), "adamw")
    work = Workload(batch=16, chunk=16, ranks=1, sides=(costs[0], costs[-1]), optimizer=optimizer)
    return asdict(calibrate(sides, work, devices))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.plan_point", description=__doc__)
    parser.add_argument("point", help="a point as JSON")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    point = Point(**json.loads(options.point))
    with quiet():
        found = fit(point) if options.calibrate else measure(point)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

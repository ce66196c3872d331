"""Calibrates a plan with two small chunks that are run for real on this machine.

    found = calibrate(sides, work, devices)
    work = replace(work, measured=found.memory)

The allocator, threads and scratch memory of operators decide how much more than the counted bytes a process holds, and
caches decide how fast operators are. Both are fitted as lines through the two chunks and extrapolated to larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from contratile.errors import bad_value
from contratile.grad_cache import GradCache
from contratile.grad_cache.chunks import Nest, map_tensors
from contratile.host_memory import peak_growth
from contratile.losses.modules import ClipLoss
from contratile.planner.cpu_rates import process_clock
from contratile.planner.devices import Devices
from contratile.planner.encoder_cost import DTYPES, EncoderPrecision
from contratile.planner.memory import device_memory
from contratile.planner.step_seconds import StepSeconds, step_seconds
from contratile.planner.tower_inputs import EncoderExample
from contratile.planner.workload import Line, Workload

TARGETS = (100 << 20, 200 << 20)
"""Counted bytes of the two chunks: large enough for the allocator to behave as with large ones."""
REPEATS = 2
"""Steps of each size."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What two small steps needed."""

    memory: Line
    """Chunks: measured bytes, by counted ones."""

    seconds: float
    """Measured over predicted time of the encoders."""

    chunks: tuple[int, int]
    """Rows of the two chunks."""

    def corrected_time(self, found: StepSeconds) -> StepSeconds:
        """Return the step with encoders that take as long as measured."""
        names = ("encode", "encode again", "backward")
        terms = [
            replace(term, seconds=term.seconds * (self.seconds if term.name in names else 1.0)) for term in found.terms
        ]
        return replace(found, terms=tuple(terms), utilisation=found.utilisation / self.seconds)


def calibrate(
    sides: Sequence[EncoderExample],
    work: Workload,
    devices: Devices,
    notify: Callable[[str], object] = lambda text: None,
) -> Calibration:
    """Run two small steps of gradient caching with one chunk each.

    Encoders without weights get random ones. Gradients of modules that have weights are as before afterwards.

    Args:
        sides: Encoders with example inputs.
        work: What was counted for them.
        devices: This machine.
        notify: Called with a line about progress.

    Raises:
        ValueError: Memory cannot be measured on this system.
    """
    small, large = (_rows(work, target) for target in TARGETS)
    modules = {id(side.module): materialised(side.module) for side in sides}
    encoders = [modules[id(side.module)] for side in sides]
    before = [(p, p.grad) for module in modules.values() for p in module.parameters()]
    counted, held, seconds = [], [], 0.0
    try:
        for rows in (2, small, large):
            notify(f"calibrating: a chunk of {rows:,}")
            grown, seconds = _step(encoders, [real_rows(side.inputs, rows) for side in sides], before, work.precision)
            here = device_memory(replace(work, batch=rows, chunk=rows, ranks=1), devices)
            chunk = sum(term.bytes for term in here.terms if term.name in CHUNK_TERMS)
            rest = sum(term.bytes for term in here.terms if term.name in ("gradients", "gradients of features"))
            counted.append(chunk)
            held.append(grown - rest)
    finally:
        for p, grad in before:
            p.grad = grad
    expected = step_seconds(replace(work, batch=large, chunk=large, ranks=1), devices)
    names = ("encode", "encode again", "backward")
    predicted = sum(term.seconds for term in expected.terms if term.name in names)
    line = _line(counted[1:], held[1:])
    return Calibration(memory=line, seconds=seconds / predicted if predicted else 1.0, chunks=(small, large))


CHUNK_TERMS = ("activations of a chunk", "freed, not reused")


def _rows(work: Workload, target: float) -> int:
    """Rows whose activations are counted as about `target` bytes, from 2 to 4096."""
    per_row = max((cost.large.peak + cost.large.unreused) / cost.large.rows for cost in work.encoders)
    return int(min(4096, max(2, target / max(1.0, per_row))))


def _line(counted: Sequence[float], measured: Sequence[float]) -> Line:
    """The line through both points if it rises; otherwise the line through the larger one and zero."""
    rise = counted[1] - counted[0]
    slope = (measured[1] - measured[0]) / rise if rise > 0 else 0.0
    offset = measured[1] - slope * counted[1]
    if not 0.5 < slope < 2.0 or offset < 0:
        share = measured[1] / counted[1] if counted[1] else 1.0
        return Line(slope=share if share > 0 else 1.0, offset=0.0)
    return Line(slope=slope, offset=offset)


def _step(
    encoders: list[nn.Module],
    inputs: list[Nest],
    parameters: Sequence[tuple[nn.Parameter, Tensor | None]],
    precision: EncoderPrecision,
) -> tuple[int, float]:
    """The peak of two steps beyond what there was before, gradients included, and the seconds of the faster one."""
    cache = GradCache(encoders, ClipLoss(group=None), chunk_size=1 << 30, group=None)
    seconds: list[float] = []
    clock = process_clock()

    def steps() -> None:
        for _ in range(REPEATS):
            start = clock()
            for p, _ in parameters:
                p.grad = None
            with torch.autocast("cpu", dtype=DTYPES[precision], enabled=precision != "fp32"):
                cache.step(*(x if isinstance(x, tuple | dict) else (x,) for x in inputs), logit_scale=10.0)
            seconds.append(clock() - start)

    for p, _ in parameters:
        p.grad = None
    grown = peak_growth(steps)
    if grown is None:
        bad_value("calibrate", expected="Linux, which tells a process its peak memory", got="none", remedy="Drop it.")
    return grown, min(seconds)


def materialised(module: nn.Module) -> nn.Module:
    """The module with random weights for those it lacks. A module with all its weights is returned unchanged."""
    if not any(x.is_meta for x in (*module.parameters(), *module.buffers())):
        return module
    import copy

    made = copy.deepcopy(module).to_empty(device="cpu")
    with torch.no_grad():
        for x in (*made.parameters(), *made.buffers()):
            if x.is_floating_point():
                x.normal_(0, 0.02)
            else:
                x.zero_()
    return made


def real_rows(inputs: Nest, rows: int) -> Nest:
    """Inputs of some rows with the shapes of others, filled with small numbers."""

    def fill(x: Tensor) -> Tensor:
        shape = (rows, *x.shape[1:]) if x.dim() else ()
        return torch.rand(shape).to(x.dtype) if x.is_floating_point() else torch.ones(shape, dtype=x.dtype)

    return map_tensors(fill, inputs)

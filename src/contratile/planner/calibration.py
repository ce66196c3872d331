"""Two small chunks, run for real on this machine: what their definition cannot tell.

    found = calibrate(sides, costs, "fp32", devices)
    cost = found.corrected(cost, 0)

The allocator, threads and scratch memory of operators decide how much more than the counted bytes a process holds, and
caches how fast operators are. Both are fitted as lines through two chunks and extended to larger ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from contratile.errors import bad_value
from contratile.grad_cache.chunks import Nest, call, map_tensors
from contratile.host_memory import peak_growth
from contratile.planner.devices import Devices
from contratile.planner.encoder_cost import DTYPES, EncoderCost, PassCost, Precision
from contratile.planner.step_seconds import StepSeconds, pass_seconds
from contratile.planner.tower_inputs import Side

TARGETS = (100 << 20, 200 << 20)
"""Counted bytes of the two chunks: large enough for the allocator to behave as with large ones."""
REPEATS = 2
"""Runs of each chunk. The last one counts: by then memory that is freed and taken again is in use."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Measured bytes as a line of the counted ones."""

    slope: float
    offset: float

    def __call__(self, counted: float) -> float:
        return max(0.0, self.slope * counted + self.offset)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What two chunks of each encoder took."""

    memory: tuple[Line, ...]
    """By side: activations."""

    seconds: float
    """Measured over predicted time of the encoders."""

    chunks: tuple[tuple[int, int], ...]
    """Rows of the two chunks, by side."""

    def corrected(self, cost: EncoderCost, index: int) -> EncoderCost:
        """An encoder whose activations are those that were measured."""
        line = self.memory[min(index, len(self.memory) - 1)]
        return replace(cost, small=_corrected(cost.small, line), large=_corrected(cost.large, line))

    def corrected_time(self, found: StepSeconds) -> StepSeconds:
        """A step whose encoders take as long as measured."""
        names = ("encode", "encode again", "backward")
        terms = [
            replace(term, seconds=term.seconds * (self.seconds if term.name in names else 1.0)) for term in found.terms
        ]
        return replace(found, terms=tuple(terms), utilisation=found.utilisation / self.seconds)


def _corrected(one: PassCost, line: Line) -> PassCost:
    measured = line(one.peak + one.unreused)
    factor = measured / one.peak if one.peak else 1.0
    return replace(one, peak=measured, unreused=0.0, saved=one.saved * factor)


def calibrate(
    sides: Sequence[Side],
    costs: Sequence[EncoderCost],
    precision: Precision,
    devices: Devices,
    notify: Callable[[str], object] = lambda text: None,
) -> Calibration:
    """Run two small chunks of each encoder, forward and backward.

    Encoders without weights get random ones. Gradients of modules that have weights are as before afterwards.

    Args:
        sides: Encoders with example inputs.
        costs: What was counted for them.
        precision: Of the encoders.
        devices: This machine.
        notify: Called with a line about progress.

    Raises:
        ValueError: Memory cannot be measured on this system.
    """
    lines, chunks = [], []
    measured = predicted = 0.0
    for index, (side, cost) in enumerate(zip(sides, costs, strict=True)):
        if index and cost is costs[0]:
            break
        sizes = tuple(_rows(cost, target) for target in TARGETS)
        notify(f"calibrating: chunks of {sizes[0]:,} and {sizes[1]:,}")
        runs = _measure(side, sizes, precision)
        counted = [one.peak + one.unreused for one in map(cost.at, sizes)]
        lines.append(_line(counted, [held for held, _ in runs]))
        chunks.append((sizes[0], sizes[1]))
        measured += runs[-1][1]
        predicted += sum(pass_seconds(cost.at(sizes[-1]), devices, precision))
    return Calibration(memory=tuple(lines), seconds=measured / predicted if predicted else 1.0, chunks=tuple(chunks))


def _rows(cost: EncoderCost, target: float) -> int:
    """Rows whose activations are counted as about `target` bytes, from 2 to 4096."""
    per_row = (cost.large.peak + cost.large.unreused) / cost.large.rows
    return int(min(4096, max(2, target / max(1.0, per_row))))


def _line(counted: Sequence[float], measured: Sequence[float]) -> Line:
    """Through both points if it rises as a line of bytes should; else through the larger one and zero."""
    rise = counted[1] - counted[0]
    slope = (measured[1] - measured[0]) / rise if rise > 0 else 0.0
    if not 0.5 < slope < 2.0:
        return Line(slope=measured[1] / counted[1] if counted[1] else 1.0, offset=0.0)
    return Line(slope=slope, offset=measured[1] - slope * counted[1])


def _measure(side: Side, sizes: Sequence[int], precision: Precision) -> list[tuple[int, float]]:
    module = materialised(side.module)
    before = [(p, p.grad) for p in module.parameters()]
    try:
        for p, _ in before:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        run(module, real_rows(side.inputs, 2), precision)  # what is allocated once only
        return [_one(module, real_rows(side.inputs, size), precision) for size in sizes]
    finally:
        for p, grad in before:
            p.grad = grad


def _one(module: nn.Module, chunk: Nest, precision: Precision) -> tuple[int, float]:
    seconds, held = [], 0

    def timed() -> None:
        start = time.perf_counter()
        run(module, chunk, precision)
        seconds.append(time.perf_counter() - start)

    for _ in range(REPEATS):
        grown = peak_growth(timed)
        if grown is None:
            bad_value(
                "calibrate", expected="Linux, which tells a process its peak memory", got="none", remedy="Drop it."
            )
        held = max(held, grown)
    return held, min(seconds)


def run(module: nn.Module, chunk: Nest, precision: Precision) -> None:
    """Forward and backward of a chunk."""
    with torch.autocast("cpu", dtype=DTYPES[precision], enabled=precision != "fp32"):
        found = call(module, chunk)
    if found.requires_grad:
        torch.autograd.backward(found, torch.full_like(found, 1e-3))


def materialised(module: nn.Module) -> nn.Module:
    """A module with random weights in place of those it lacks; one that has all its weights is returned as it is."""
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

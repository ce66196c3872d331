"""Find the largest chunk that fits into memory by trial: sizes double from 8 rows on, then bisection.

    size = largest_chunk(cost, most=4096, limit=1 << 30)        # cost(rows) -> bytes, or inf if it did not fit

A size is not tried if a linear extrapolation of earlier trials exceeds the limit: on a CPU the process could be killed.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from contratile.errors import bad_value
from contratile.grad_cache.chunks import Nest, map_tensors, repeat_rows, tensors_of
from contratile.grad_cache.encoded import EncoderSide
from contratile.grad_cache.replay import RandomState, copy_buffers, devices_of, restore_buffers
from contratile.grad_cache.wrappers import unsynchronised, without_buffer_broadcast
from contratile.host_memory import available_bytes, peak_growth

START = 8
"""Rows of the first trial. More than one, which batch norm cannot train on."""
FINE = 8
"""The search ends when the gap between sizes that fit and sizes that do not is below 1/FINE of the size."""

NO_ROOM = "Raise memory_limit=, use a smaller encoder, or activation checkpointing inside it."


def largest_chunk(
    cost: Callable[[int], float],
    *,
    most: int,
    limit: float,
    option: str = "chunk_size='auto'",
    remedy: str = NO_ROOM,
) -> int:
    """The largest number of rows, up to `most`, whose cost is within the limit; accurate to an eighth.

    Args:
        cost: Bytes that some rows take; inf if they do not fit.
        most: Rows to try at most.
        limit: Bytes that they may take.
        option: What the error message calls the option.
        remedy: What it suggests.

    Raises:
        ValueError: Not even one row fits.
    """
    tried: list[tuple[int, float]] = []

    def fits(size: int) -> bool:
        if _expected(tried, size) > limit:
            return False
        tried.append((size, cost(size)))
        return tried[-1][1] <= limit

    good, bad = 0, min(START, most)
    while bad <= most and fits(bad):
        good, bad = bad, min(2 * bad, most) if bad < most else most + 1
    while bad - good > max(1, good // FINE):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    if good == 0:
        bad_value(option, expected="room for a chunk of one row", got=_told(tried), remedy=remedy)
    return good


def _expected(tried: list[tuple[int, float]], size: int) -> float:
    """Extrapolated cost of a size, linear through the smallest and the largest trial; 0 before two trials."""
    known = sorted((n, bytes_) for n, bytes_ in tried if math.isfinite(bytes_))
    if len(known) < 2:
        return 0.0
    (n, first), (m, last) = known[0], known[-1]
    return last + (size - m) * max(0.0, last - first) / (m - n)


def _told(tried: list[tuple[int, float]]) -> str:
    return ", ".join(f"{n}: {bytes_ / (1 << 20):.0f} MiB" for n, bytes_ in tried)


@dataclass
class Trial:
    """Forward and backward of some rows, without side effects on gradients, random state or buffers.

    Rows beyond those of the block repeat them.
    """

    side: EncoderSide
    block: Nest

    def cost(self, size: int) -> float:
        """Peak memory in bytes; on an accelerator inf if the chunk does not fit, 0 if its peak cannot be measured."""
        if self.side.device.type == "cpu":
            growth = peak_growth(lambda: self._run(size))
            if growth is None:
                remedy = "Pass a number of rows."
                bad_value("chunk_size", expected="a number: 'auto' on a CPU needs Linux", got="'auto'", remedy=remedy)
            return growth
        memory = torch.get_device_module(self.side.device)
        measured = hasattr(memory, "max_memory_allocated")
        before = 0
        if measured:
            memory.reset_peak_memory_stats(self.side.device)
            before = memory.memory_allocated(self.side.device)
        try:
            self._run(size)
            return float(memory.max_memory_allocated(self.side.device) - before) if measured else 0.0
        except torch.OutOfMemoryError:
            return math.inf
        finally:
            gc.collect()
            memory.empty_cache()

    def limit(self, given: int | None) -> float:
        """The limit in bytes on the CPU, by default half of the available memory; none on an accelerator."""
        if self.side.device.type != "cpu":
            return sys.float_info.max
        return available_bytes() / 2 if given is None else given

    def rows(self, size: int) -> Nest:
        """The inputs."""
        return repeat_rows(self.block, size)

    def encode(self, chunk: Nest) -> Nest:
        """The forward pass."""
        return self.side.encode(chunk)

    def _run(self, size: int) -> None:
        owner, device = self.side.owner, self.side.device
        chunk = map_tensors(lambda x: x.to(device), self.rows(size))
        kept = [(p, p.grad) for p in owner.parameters()]
        state = RandomState.now(devices_of([*owner.parameters(), *tensors_of(chunk)]))
        buffers = copy_buffers([owner])
        # A step adds to gradients that exist already: here, too, no more than one of them is there twice at a time.
        there = [p for p, grad in kept if grad is not None and p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in there]  # type: ignore[no-untyped-call]
        try:
            for p, _ in kept:
                p.grad = None
            with unsynchronised(self.side.wrappers), without_buffer_broadcast(self.side.wrappers):
                output = [x for x in tensors_of(self.encode(chunk)) if x.requires_grad]
                if output:
                    torch.autograd.backward(output, [torch.zeros_like(x) for x in output])
        finally:
            for hook in hooks:
                hook.remove()
            for p, grad in kept:
                p.grad = grad
            state.restore()
            restore_buffers(buffers)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None

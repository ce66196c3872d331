"""The largest chunk that fits, found by trying: from 8 rows sizes double while they fit, then the gap is halved.

    size = largest_chunk(cost, most=4096, limit=1 << 30)        # cost(rows) -> bytes, or inf if it did not fit

A size that must be expected to exceed the limit, on the line through what was measured, is not tried: on a CPU it could
take the process down.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from contratile.errors import bad_value
from contratile.grad_cache.chunks import Nest, first_rows, map_tensors, tensors_of
from contratile.grad_cache.encoded import Side
from contratile.grad_cache.replay import RandomState, copy_buffers, devices_of, put_back
from contratile.grad_cache.wrappers import unsynchronised
from contratile.host_memory import available_bytes, peak_growth

START = 8
"""Rows of the first trial: batch norms cannot train on one."""
FINE = 8
"""The search ends when the sizes that fit and do not fit are closer than this part of them."""


def largest_chunk(cost: Callable[[int], float], *, most: int, limit: float) -> int:
    """The largest number of rows up to `most` whose cost stays within the limit, to an eighth."""
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
        remedy = "Raise memory_limit=, use a smaller encoder, or activation checkpointing inside it."
        bad_value("chunk_size='auto'", expected="room for a chunk of one row", got=_told(tried), remedy=remedy)
    return good


def _expected(tried: list[tuple[int, float]], size: int) -> float:
    """What a size will cost if costs grow as they did from the smallest to the largest that was tried."""
    known = sorted((n, bytes_) for n, bytes_ in tried if math.isfinite(bytes_))
    if len(known) < 2:
        return 0.0
    (n, first), (m, last) = known[0], known[-1]
    return last + (size - m) * max(0.0, last - first) / (m - n)


def _told(tried: list[tuple[int, float]]) -> str:
    return ", ".join(f"{n}: {bytes_ / (1 << 20):.0f} MiB" for n, bytes_ in tried)


@dataclass
class Trial:
    """Forward and backward of some rows, of which nothing remains: no gradient, no random number, no buffer."""

    side: Side
    block: Nest

    def cost(self, size: int) -> float:
        """On the CPU the peak of resident memory; on an accelerator 0, or inf if there is no room."""
        if self.side.device.type == "cpu":
            growth = peak_growth(lambda: self._run(size))
            if growth is None:
                remedy = "Pass a number of rows."
                bad_value("chunk_size", expected="'auto' on Linux only", got="another system", remedy=remedy)
            return growth
        try:
            self._run(size)
            return 0.0
        except torch.OutOfMemoryError:
            return math.inf
        finally:
            gc.collect()
            torch.get_device_module(self.side.device).empty_cache()

    def limit(self, given: int | None) -> float:
        """Bytes; by default half of what is available."""
        return available_bytes() / 2 if given is None else given

    def _run(self, size: int) -> None:
        owner, device = self.side.owner, self.side.device
        chunk = map_tensors(lambda x: x.to(device), first_rows(self.block, size))
        kept = [(p, p.grad) for p in owner.parameters()]
        state = RandomState.now(devices_of([*owner.parameters(), *tensors_of(chunk)]))
        buffers = copy_buffers([owner])
        try:
            for p, _ in kept:
                p.grad = None
            with unsynchronised(self.side.wrappers):
                output = [x for x in tensors_of(self.side.encode(chunk)) if x.requires_grad]
                if output:
                    torch.autograd.backward(output, [torch.zeros_like(x) for x in output])
        finally:
            for p, grad in kept:
                p.grad = grad
            state.restore()
            put_back(buffers)

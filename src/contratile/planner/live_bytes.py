"""Counts memory, flops and traffic of code that runs on fake tensors: shapes and lifetimes without any computation.

    with fake_tensors(), LiveBytes() as live:
        model(inputs).sum().backward()
    live.peak, live.flops, live.moved

Every operator below autograd is seen once. A storage counts from the operator that makes it until nothing refers to it,
so `peak` is what an allocator without overhead would hold, temporaries of the backward pass included. Scratch memory
inside an operator is not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contratile.planner.cpu_rates import OperatorClock


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves modes unannotated
    """Counts the bytes of all storages that operators make while it is active.

    Attributes:
        now: Bytes that are alive.
        peak: Most bytes that were alive at once.
        peak_with_holes: Most of `now` plus `holes * hole_share`.
        holes: Bytes freed while autograd was recording, whose neighbours are still alive. See `HOLE_SHARE`.
        flops: Floating point operations of products, convolutions and attention.
        product_bytes: Bytes that those operators read and wrote.
        moved: Bytes that all other operators read and wrote, views not counted.
        operators: Operators that read or wrote anything.
        seconds: Seconds of all operators, as a clock estimates them.
        grown_seconds: The part of them spent on new pages where the heap grows. A pass without gradients keeps nothing
            and does not grow the heap, so it does not need them.
    """

    def __init__(self, hole_share: float = 0.0, clock: OperatorClock | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hole_share, self.clock = hole_share, clock
        self.seconds = self.grown_seconds = 0.0
        self._small = self._most_small = 0
        self.now = self.peak = self.flops = self.product_bytes = self.moved = self.operators = 0
        self.holes = self.peak_with_holes = 0.0
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return _some_value(args[0])
        found = func(*args, **given)
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        if not made:  # a query about a tensor, not a computation
            return found
        taken = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        old = {_storage(x) for x in taken}
        new = [x for x in made if _storage(x) not in old]
        for x in new:
            self._add(x)
        if new or func._schema.is_mutable:
            self._count(func, args, given, found, [*taken, *new])
        return found

    def _add(self, x: Tensor) -> None:
        storage, key = x.untyped_storage(), _storage(x)
        if key in self._alive:
            return
        size = storage.nbytes()
        self._alive[key] = weakref.ref(storage, lambda _: self._remove(key)), size
        self.now += size
        self._touch(size)
        self._note()

    def _touch(self, size: int) -> None:
        """Large tensors get new pages; small ones only if they make the heap grow."""
        if self.clock is None:
            return
        if size >= self.clock.mapped_from:
            self.seconds += self.clock.faults(size)
            return
        self._small += size
        if self._small > self._most_small:
            seconds = self.clock.faults(self._small - self._most_small)
            self._most_small = self._small
            self.seconds, self.grown_seconds = self.seconds + seconds, self.grown_seconds + seconds

    def _remove(self, key: int) -> None:
        _, size = self._alive.pop(key)
        if torch.is_grad_enabled():
            self.holes += size
        else:  # a backward pass frees the tensors around the holes, which merge with them
            self.holes *= max(0, self.now - size) / self.now if self.now else 0.0
        self.now -= size
        if self.clock is not None and size < self.clock.mapped_from:
            self._small -= size
        self._note()

    def _note(self) -> None:
        self.peak = max(self.peak, self.now)
        self.peak_with_holes = max(self.peak_with_holes, self.now + self.hole_share * self.holes)

    def _count(self, func: Any, args: Any, kwargs: Any, found: Any, touched: list[Tensor]) -> None:
        from torch.utils.flop_counter import flop_registry

        size = sum(x.numel() * x.element_size() for x in touched)
        count = flop_registry.get(func._overloadpacket, _CPU_ATTENTION.get(func._overloadpacket))
        flops = 0 if count is None else int(count(*args, **kwargs, out_val=found))
        if count is None:
            self.moved += size
        else:
            self.flops += flops
            self.product_bytes += size
        if self.clock is not None:
            self.seconds += self.clock(func._overloadpacket.__name__, args, touched, flops)
        self.operators += 1


def _some_value(x: Tensor) -> float | int | bool:
    """The number that code reads from a tensor: 0.5, 1 or True, since there are no values."""
    return 0.5 if x.is_floating_point() else x.dtype == torch.bool or 1


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Two products per head: scores, and their product with the values."""
    n, heads, rows, width = query.shape
    return 2 * n * heads * rows * key.shape[2] * (width + value.shape[3])


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Five products: the scores again, and four for the three gradients."""
    return _attention(query, key, value) * 5 // 2


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Operators that torch's own table of flops lacks."""


def _storage(x: Tensor) -> int:
    key: int = x.untyped_storage()._cdata
    return key

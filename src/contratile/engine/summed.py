"""One gradient buffer for features that several calls use.

    query = summed(query)                                  # the same numbers
    pair_stats(ring, Inputs(query, key, scale), spec)      # both calls add to one buffer,
    pair_stats(ring, Inputs(query, None, scale), spec)     # which becomes the gradient of the original features

With autograd alone each call would return a gradient of its own, which needs memory in addition to the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from contratile.errors import transform_under_way


class GradSum:
    """The sum of the gradients so far, within one backward pass."""

    def __init__(self) -> None:
        self._task, self._total = -1, torch.empty(0)

    def total(self, like: Tensor) -> Tensor:
        """The buffer to add to."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # an earlier pass may have stopped before the sum was taken
            self._task, self._total = task, torch.zeros_like(like, memory_format=torch.contiguous_format)
        return self._total

    def take(self) -> Tensor | None:
        """Return the sum and forget it; None if nothing was added in this pass."""
        mine = self._task == torch._C._current_graph_task_id()
        total, self._task, self._total = self._total, -1, torch.empty(0)
        return total if mine else None


_SUMS: Any = WeakTensorKeyDictionary()


def summed(x: Tensor) -> Tensor:
    """A view of the features whose gradients from several calls are added up in one buffer.

    Returns the features themselves where this does not apply: 16 bit (see `autograd.stand_in`), compilers, transforms.
    """
    wanted = x.requires_grad and torch.is_grad_enabled() and x.dtype in (torch.float32, torch.float64)
    if not wanted or torch.compiler.is_compiling() or transform_under_way((x,)):
        return x
    sums = GradSum()
    view: Tensor = _Summed.apply(x, sums)  # type: ignore[no-untyped-call]
    _SUMS[view] = sums
    return view


def sums_of(x: Tensor | None) -> GradSum | None:
    """The buffer to which a call adds its gradient of these features. None: the call returns its gradient."""
    if x is None or not len(_SUMS) or torch.compiler.is_compiling():
        return None
    found: GradSum | None = _SUMS.get(x)
    return found


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: GradSum) -> Tensor:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """`grad`: the gradient from calls that did not use the buffer."""
        total = ctx.sums.take()
        if total is None or grad is None:
            return total if grad is None else grad, None
        return total.add_(grad), None

"""Checks whether an encoder gives the same features without padding, as it does if it uses its mask.

    difference = disagreement(side, pool)       # "" if the features agree within rounding, None without padding

A few rows, the shortest, are encoded with and without their padding, in evaluation mode and without gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from contratile.grad_cache.chunks import Nest, map_tensors, tensors_of
from contratile.grad_cache.encoded import EncoderSide
from contratile.grad_cache.lengths import Pool
from contratile.grad_cache.replay import RandomState, copy_buffers, devices_of, restore_buffers
from contratile.grad_cache.wrappers import without_buffer_broadcast

ROWS = 8
"""How many rows are compared."""

_CLOSE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Largest allowed difference, relative to the largest feature: the rounding of an encoder with a dozen layers. Padding
that is not masked changes features by far more. For 16-bit numbers: `_CLOSE_HALF`."""
_CLOSE_HALF = 5e-2
_CLOSE_TF32 = 2e-3


def disagreement(side: EncoderSide, pool: Pool, *, always: bool = False) -> str | None:
    """What differs between features of rows with and without padding; "" if nothing does.

    None if nothing can be compared: no row has padding, or none has finite features. `always`: encode some rows even
    then, because ranks that have padding wait for this one.
    """
    rows = torch.argsort(pool.lengths, stable=True)[:ROWS]
    padded = rows[pool.lengths[rows] < pool.width]
    if not len(padded) and not always:
        return None
    rows = padded if len(padded) else rows
    length = int(pool.lengths[rows].max())
    device = side.device
    cut, whole = (map_tensors(lambda x: x.to(device), pool.take(rows, width)) for width in (length, pool.width))
    with _undisturbed(side, [*tensors_of(cut)]):
        want = tensors_of(side.encode(whole))
        try:
            got = tensors_of(side.encode(cut))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return f"it raised {type(error).__name__} for them: {error}"
    return _difference(got, want, side.owner, cut) if len(padded) else None


def _difference(got: list[Tensor], want: list[Tensor], owner: nn.Module, chunk: Nest) -> str | None:
    shapes = [[list(x.shape) for x in tensors] for tensors in (got, want)]
    if shapes[0] != shapes[1]:
        return f"their shapes are {shapes[0]} instead of {shapes[1]}"
    tolerance = max([_CLOSE[torch.float64], *(_tolerance(x) for x in (*got, *owner.parameters()))])
    if any(torch.is_autocast_enabled(device.type) for device in devices_of([*got, *tensors_of(chunk)])):
        tolerance = _CLOSE_HALF
    compared = False
    for cut, whole in zip(got, want, strict=True):
        known = whole.isfinite()  # features of rows without tokens may be NaN
        a, b = cut[known].double(), whole[known].double()
        if not b.numel():
            continue
        compared = True
        gap, largest = float((a - b).abs().max()), float(b.abs().max())
        if not gap <= tolerance * largest:
            return f"they differ by {gap:.2g}, the largest entry is {largest:.2g}"
    return "" if compared else None


def _tolerance(x: Tensor) -> float:
    if not x.is_floating_point():
        return 0.0
    if x.dtype == torch.float32 and x.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        return _CLOSE_TF32
    return _CLOSE.get(x.dtype, _CLOSE_HALF)


@contextmanager
def _undisturbed(side: EncoderSide, inputs: list[Tensor]) -> Iterator[None]:
    """Evaluation mode without gradients; flags, random state and buffers are as before afterwards."""
    flags = {module: module.training for module in side.owner.modules()}
    state = RandomState.now(devices_of([*side.owner.parameters(), *inputs]))
    buffers = copy_buffers([side.owner])
    try:
        for module in flags:
            module.training = False
        with torch.no_grad(), without_buffer_broadcast(side.wrappers):
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag
        state.restore()
        restore_buffers(buffers)
        torch.clear_autocast_cache()

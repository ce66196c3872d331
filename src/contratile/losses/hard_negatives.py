"""Products of each query with its own hard negatives, without an fp32 copy of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contratile.errors import transform_under_way

CHUNK = 256
"""Queries per chunk."""


def own_products(
    query: Tensor,
    hard: Tensor,
    mask: Tensor | None = None,
    stand_in: Tensor | None = None,
    hard_stand_in: Tensor | None = None,
) -> Tensor:
    """The products <query[n], hard[n, h]> [N, H], 0 where the mask is False.

    If there are stand-ins, they receive the gradients instead of the features: see `engine.autograd.stand_in`.
    """
    if torch.compiler.is_compiling() or transform_under_way((query, hard)):  # a compiler fuses this anyway
        acc = torch.promote_types(query.dtype, torch.float32)
        hard = hard if mask is None else hard.masked_fill(~mask.unsqueeze(2), 0)
        return (hard.to(acc) * query.to(acc).unsqueeze(1)).sum(2)
    return _OwnProducts.apply(query, hard, mask, stand_in, hard_stand_in)  # type: ignore[no-any-return, no-untyped-call]


class _OwnProducts(torch.autograd.Function):
    """Computes in the accumulation dtype, a chunk of queries at a time."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, hard: Tensor, mask: Tensor | None, *stand_ins: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, hard, mask)
        acc = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty(hard.shape[:2], dtype=acc, device=query.device)
        for start in range(0, len(query), CHUNK):
            at = slice(start, start + CHUNK)
            torch.bmm(hard[at].to(acc), query[at].to(acc).unsqueeze(2), out=out[at].unsqueeze(2))
        return out if mask is None else out.masked_fill_(~mask, 0)  # padding may hold anything, even NaN

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, hard, mask = ctx.saved_tensors
        wants_query, wants_hard, _, full, full_hard = ctx.needs_input_grad
        dtype = grad.dtype if full else query.dtype
        dquery = torch.empty(query.shape, dtype=dtype, device=query.device) if wants_query or full else None
        dtype = grad.dtype if full_hard else hard.dtype
        dhard = torch.empty(hard.shape, dtype=dtype, device=hard.device) if wants_hard or full_hard else None
        for start in range(0, len(query), CHUNK):
            at = slice(start, start + CHUNK)
            if dquery is not None:
                hard_RHD = hard[at].to(grad.dtype)
                if mask is not None:
                    hard_RHD = hard_RHD.masked_fill(~mask[at].unsqueeze(2), 0)
                dquery[at] = (grad[at].unsqueeze(2) * hard_RHD).sum(1)  # not bmm: autocast would round it
            if dhard is not None:
                dhard[at] = grad[at].unsqueeze(2) * query[at].to(grad.dtype).unsqueeze(1)
        of_query = (None, dquery) if full else (dquery, None)
        of_hard = (None, dhard) if full_hard else (dhard, None)
        return of_query[0], of_hard[0], None, of_query[1], of_hard[1]

"""The primitive: row and column log-sum-exps and positives of S = scale * Q K^T, in linear memory, with gradients.

    forward   (q, k, scale, pair rule) -> row_lse [N], col_lse [M], pos [N]         1 matrix product
    backward  G = a exp(S - row_lse) + b exp(S - col_lse) + c [positive]            3 matrix products
              dq = scale G k,  dk = scale G^T q,  dscale = sum(G * q k^T)

Both are `torch.library` operators, so they trace under `torch.compile`. Inside they work in base 2; the natural
logarithm appears where the results leave. No collective is used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from contratile import reference
from contratile.backends import Backend, torch_tiles
from contratile.backends.torch_tiles import Direction, accumulation_dtype
from contratile.errors import bad_value
from contratile.pairs import PairRule
from contratile.reference import PairStats
from contratile.stats import Stats, lowest
from contratile.tiles import TilePlan, plan_tiles

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def pair_stats(
    query: Tensor,
    key: Tensor | None,
    scale: Tensor | float,
    rule: PairRule,
    *,
    rows: bool = True,
    cols: bool = True,
    backend: Backend = "auto",
    tile: int | None = None,
    cache_bytes: int = 0,
) -> PairStats:
    """What `reference.pair_stats` computes, tile by tile. Arguments are taken as checked.

    `key=None` stands for the queries: row and column statistics are then the same thing, returned as both.
    """
    if backend == "dense":
        return reference.pair_stats(
            query,
            key,
            scale,
            labels=rule.labels,
            exclude_self=rule.exclude_self,
            query_ids=rule.query_ids,
            key_ids=rule.key_ids,
            rows=rows,
            cols=cols,
        )
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=accumulation_dtype(query.dtype), device=query.device)
    inputs = [query, scale] if key is None else [query, key, scale]
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    row_lse2, col_lse2, pos2, _ = _forward_op(
        query,
        key,
        scale.reshape(()),
        rule.labels,
        rule.query_ids,
        rule.key_ids,
        rule.exclude_self,
        rows or (key is None and cols),
        cols and key is not None,
        tile or 0,
        cache_bytes if wants_grad else 0,
    )
    row_lse, col_lse, pos = row_lse2 * LN2, col_lse2 * LN2, pos2 * LN2
    return PairStats(row_lse, row_lse if key is None and cols else col_lse, pos)


@torch.library.custom_op("contratile::pair_lse", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor | None,
    scale: Tensor,
    labels: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    exclude_self: bool,
    rows: bool,
    cols: bool,
    tile: int,
    cache_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """row_lse2, col_lse2, pos2 in base 2 (empty where not asked for), and the score tiles kept for the backward."""
    n, m = len(q), len(q if k is None else k)
    rule = PairRule(labels=labels, exclude_self=exclude_self, query_ids=query_ids, key_ids=key_ids)
    plan = _plan(q, k, tile)
    acc: dict[str, Any] = {"dtype": accumulation_dtype(q.dtype), "device": q.device}
    if labels is not None:
        _check_labels(labels, m)
    row_stats = Stats.empty(n, **acc) if rows else None
    col_stats = Stats.empty(m, **acc) if cols else None
    pos2 = torch.zeros(0 if labels is None else n, **acc)
    cache = torch.empty(plan.cached_items(cache_bytes), **acc)
    with _full_precision(q):
        torch_tiles.forward(
            q,
            k,
            _alpha(scale, acc["dtype"]),
            rule,
            plan,
            row_stats=row_stats,
            col_stats=col_stats,
            pos=None if labels is None else pos2,
            cache=cache,
        )
    row_lse2 = torch.empty(0, **acc) if row_stats is None else row_stats.lse2()
    col_lse2 = torch.empty(0, **acc) if col_stats is None else col_stats.lse2()
    if labels is not None:
        # A log-sum-exp is never below one of its terms; where rounding says otherwise a loss would be negative.
        if rows:
            row_lse2 = torch.maximum(row_lse2, pos2)
        if cols:
            col_lse2.scatter_reduce_(0, labels, pos2, "amax")
    return row_lse2, col_lse2, pos2, cache


@_forward_op.register_fake
def _(
    q: Tensor,
    k: Tensor | None,
    scale: Tensor,
    labels: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    exclude_self: bool,
    rows: bool,
    cols: bool,
    tile: int,
    cache_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, m = q.shape[0], (q if k is None else k).shape[0]
    dtype = accumulation_dtype(q.dtype)
    return (
        q.new_empty(n if rows else 0, dtype=dtype),
        q.new_empty(m if cols else 0, dtype=dtype),
        q.new_empty(0 if labels is None else n, dtype=dtype),
        q.new_empty(_plan(q, k, tile).cached_items(cache_bytes) if cache_bytes else 0, dtype=dtype),
    )


@torch.library.custom_op("contratile::pair_lse_backward", mutates_args=())
def _backward_op(
    q: Tensor,
    k: Tensor | None,
    scale: Tensor,
    labels: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    exclude_self: bool,
    tile: int,
    row_lse2: Tensor,
    col_lse2: Tensor,
    cache: Tensor,
    row_grad: Tensor | None,
    col_grad: Tensor | None,
    pos_grad: Tensor | None,
    wants_q: bool,
    wants_k: bool,
    wants_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dscale; empty where not wanted. A gradient that is None counts as zero and costs nothing."""
    rule = PairRule(labels=labels, exclude_self=exclude_self, query_ids=query_ids, key_ids=key_ids)
    acc: dict[str, Any] = {"dtype": accumulation_dtype(q.dtype), "device": q.device}
    alpha = _alpha(scale, acc["dtype"])
    if k is None:
        dk = torch.zeros(q.shape, **acc) if wants_q else None
        dq = dk
    else:
        dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if wants_q else None
        dk = torch.zeros(k.shape, **acc) if wants_k else None
    dalpha = torch.zeros((), **acc) if wants_scale else None
    with _full_precision(q):
        torch_tiles.backward(
            q,
            k,
            alpha,
            rule,
            _plan(q, k, tile),
            row=_direction(row_lse2, row_grad),
            col=_direction(col_lse2, col_grad),
            pos_grad=None if labels is None else pos_grad,
            dq=dq,
            dk=dk,
            dalpha=dalpha,
            cache=cache,
        )
    none = torch.empty(0, dtype=q.dtype, device=q.device)
    return (
        none if dq is None else dq.to(q.dtype),
        none.clone() if dk is None or k is None else dk.to(k.dtype),
        scale.new_empty(0) if dalpha is None else (dalpha * LOG2E).to(scale.dtype),
    )


@_backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor | None,
    scale: Tensor,
    labels: Tensor | None,
    query_ids: Tensor | None,
    key_ids: Tensor | None,
    exclude_self: bool,
    tile: int,
    row_lse2: Tensor,
    col_lse2: Tensor,
    cache: Tensor,
    row_grad: Tensor | None,
    col_grad: Tensor | None,
    pos_grad: Tensor | None,
    wants_q: bool,
    wants_k: bool,
    wants_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape if wants_q else 0),
        q.new_empty(0) if k is None or not wants_k else k.new_empty(k.shape),
        scale.new_empty(() if wants_scale else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, scale, labels, query_ids, key_ids, exclude_self, _, _, tile, _ = inputs
    row_lse2, col_lse2, _, cache = output
    ctx.save_for_backward(q, k, scale, labels, query_ids, key_ids, row_lse2, col_lse2, cache)
    ctx.options = exclude_self, tile
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, row_grad: Tensor | None, col_grad: Tensor | None, pos_grad: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, scale, labels, query_ids, key_ids, row_lse2, col_lse2, cache = ctx.saved_tensors
    wants = ctx.needs_input_grad[:3]
    grads = _backward_op(
        *(q, k, scale, labels, query_ids, key_ids, *ctx.options, row_lse2, col_lse2, cache),
        *(row_grad, col_grad, pos_grad, *wants),
    )
    return (*(grad if wanted else None for grad, wanted in zip(grads, wants, strict=True)), *[None] * 8)


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "contratile losses have no second derivative: expected one backward pass, got a gradient of a gradient. "
        "Use backend='dense' where a double backward is needed (gradient penalties, meta-learning)."
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)
_backward_op.register_autograd(_no_second_derivative)


def _plan(q: Tensor, k: Tensor | None, tile: int) -> TilePlan:
    n, m = q.shape[0], (q if k is None else k).shape[0]
    itemsize = accumulation_dtype(q.dtype).itemsize
    return plan_tiles(n, m, q.shape[1], tile=tile or None, itemsize=itemsize, symmetric=k is None)


def _alpha(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of base-2 scores. At scale 0 a factor too small to change any exp2 keeps dscale computable."""
    alpha = scale.to(dtype) * LOG2E
    return torch.where(alpha == 0, 2.0**-40 if dtype == torch.float32 else 2.0**-80, alpha)


def _direction(lse2: Tensor, grad: Tensor | None) -> Direction | None:
    """A row without any pair has lse2 = -inf; the finite floor keeps -inf - (-inf) out of the tiles."""
    return None if grad is None or not len(lse2) else Direction(lse2.clamp(min=lowest(lse2.dtype)), grad)


def _check_labels(labels: Tensor, m: int) -> None:
    if labels.is_cpu:
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= m:
            remedy = "Labels index this rank's keys: row i's positive is key[labels[i]]."
            bad_value("labels", expected=f"indices from 0 to {m - 1}", got=f"{low} to {high}", remedy=remedy)
    else:
        torch._assert_async(((labels >= 0) & (labels < m)).all())  # an accelerator reports without being stalled


@contextmanager
def _full_precision(q: Tensor) -> Iterator[None]:
    """Features keep the dtype they arrive in: autocast must not round the tiles."""
    if not torch.is_autocast_enabled(q.device.type):
        yield
        return
    with torch.autocast(q.device.type, enabled=False):
        yield

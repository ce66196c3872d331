"""The primitive: row and column log-sum-exps and positives of S = scale * Q K^T, in linear memory, with gradients.

    forward   (q, k, scale, pair rule) -> row_lse [N], col_lse [M], pos [N]         1 matrix product
    backward  G = a exp(S - row_lse) + b exp(S - col_lse) + c [positive]            3 matrix products
              dq = scale G k,  dk = scale G^T q,  dscale = sum(G * q k^T)

`_forward` and `_backward` are the algorithm: blocks of keys visit (one block, if there is one process) and the tile
engine works on each. Around them stands an autograd function with two ring passes, keys and column statistics forward,
keys and their gradient backward; and for `torch.compile`, two `torch.library` operators that it can trace. Everything
is in base 2; a loss takes the factor ln 2 where it has others to apply.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile import reference
from contratile.backends import Backend, torch_tiles
from contratile.backends.torch_tiles import Direction, Positives, accumulation_dtype
from contratile.errors import check_labels
from contratile.pairs import PairRule
from contratile.ring import Ring, RingPass
from contratile.stats import Stats
from contratile.team import ALONE
from contratile.tiles import TilePlan, plan_tiles

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


class Engine(NamedTuple):
    """How a call is carried out: by whom, with which tiles."""

    ring: Ring
    backend: Backend = "auto"
    tile: int | None = None
    cache_bytes: int = 0


class LogStats(NamedTuple):
    """Statistics in units of `unit` nats (ln 2 where they are in base 2). What was not asked for is empty."""

    row_lse: Tensor
    col_lse: Tensor
    pos: Tensor
    unit: float


def pair_stats(
    query: Tensor,
    key: Tensor | None,
    scale: Tensor | float,
    rule: PairRule,
    engine: Engine,
    *,
    rows: bool = True,
    cols: bool = True,
) -> LogStats:
    """What `reference.pair_stats` computes, tile by tile, over the keys of all ranks. Arguments are taken as checked.

    `key=None` stands for the queries: row and column statistics are then the same thing, returned as both.
    """
    if engine.backend == "dense":
        dense = reference.pair_stats(
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
        return LogStats(*dense, unit=1.0)
    if key is None and rule.labels is not None and rule.query_ids is not None:
        key = query  # a positive is spared for its own query only, so the pairs that count need not be symmetric
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=accumulation_dtype(query.dtype), device=query.device)
    inputs = [query, scale] if key is None else [query, key, scale]
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    arguments = (
        *(query, key, scale.reshape(()), rule.labels, rule.query_ids, rule.key_ids, rule.exclude_self),
        *(rows or (key is None and cols), cols and key is not None),
        *(engine.tile or 0, engine.cache_bytes if wants_grad else 0),
    )
    if not torch.compiler.is_compiling():
        outputs = _PairLse.apply(engine.ring, *arguments)  # type: ignore[no-untyped-call]
    elif engine.ring.team.size == 1:
        outputs = _forward_op(*arguments)
    else:
        outputs = _eager_apply()(engine.ring, *arguments)
    row_lse2, col_lse2, pos2 = outputs[:3]
    if key is None:
        row_lse2, col_lse2 = (row_lse2 if wanted else col_lse2 for wanted in (rows, cols))
    return LogStats(row_lse2, col_lse2, pos2, unit=LN2)


def _forward(
    ring: Ring,
    q: Tensor,
    k: Tensor | None,
    scale: Tensor,
    rule: PairRule,
    *,
    rows: bool,
    cols: bool,
    tile: int,
    cache_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """row_lse2 [N], col_lse2 [M], pos2 [N] (empty where not asked for), and the score tiles kept for the backward."""
    acc: dict[str, Any] = {"dtype": accumulation_dtype(q.dtype), "device": q.device}
    labels, alpha = rule.labels, _alpha(scale, acc["dtype"])
    row_stats: Stats | None = None
    pos2 = torch.zeros(0 if labels is None else len(q), **acc)
    items = _cached_items(ring, q, k, tile, cache_bytes)
    cache = torch.empty(sum(items), **acc)
    caches = iter(torch.split(cache, items))
    trip = RingPass(
        ring,
        _carried(q if k is None else k, rule.key_ids),
        merge=lambda into, other: Stats(*into).merge_(*other),
    )
    for block in trip:
        new_rows, new_cols = torch_tiles.forward(
            q,
            None if k is None and block.home else block.carried[0],
            alpha,
            _rule_for(block.home, rule, block.carried[1:]),
            _plan(q, ring.sizes[block.source], tile, symmetric=k is None and block.home),
            rows=rows,
            cols=cols,
            pos=pos2 if labels is not None and block.home else None,
            cache=next(caches),
        )
        if row_stats is None:
            row_stats = new_rows
        elif new_rows is not None:
            row_stats.merge_(*new_rows)
        block.gathered = new_cols or ()
    row_lse2 = torch.empty(0, **acc) if row_stats is None else row_stats.lse2()
    col_lse2 = Stats(*trip.home).lse2() if cols else torch.empty(0, **acc)
    if labels is not None:
        # A log-sum-exp is never below one of its terms; where rounding says otherwise a loss would be negative.
        if rows:
            row_lse2 = torch.maximum(row_lse2, pos2)
        if cols:
            col_lse2.scatter_reduce_(0, labels, pos2, "amax")
    return row_lse2, col_lse2, pos2, cache


def _backward(
    ring: Ring,
    q: Tensor,
    k: Tensor | None,
    scale: Tensor,
    rule: PairRule,
    *,
    row: Direction | None,
    col: Direction | None,
    pos: Positives | None,
    wants: tuple[bool, bool, bool],
    tile: int,
    cache: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of q, k and scale that are wanted. A direction or gradient that is None costs nothing."""
    acc: dict[str, Any] = {"dtype": accumulation_dtype(q.dtype), "device": q.device}
    alpha = _alpha(scale, acc["dtype"])
    wants_q, wants_k, wants_scale = wants
    # Several blocks, or both sides of a tile, add to dq: in full precision. One block writes each row once.
    dq_dtype = q.dtype if k is not None and ring.team.size == 1 else acc["dtype"]
    dq = torch.zeros(q.shape, dtype=dq_dtype, device=q.device) if wants_q else None
    dscale = torch.zeros((), **acc) if wants_scale else None
    caches = iter(torch.split(cache, _cached_items(ring, q, k, tile, cache.nbytes)))
    # Symmetric scores: a visitor's rows are this rank's columns.
    visitors = row if k is None else col
    trip = RingPass(
        ring,
        _carried(q if k is None else k, rule.key_ids, *(() if visitors is None else (visitors.lse2, visitors.grad))),
        fresh=lambda size: (torch.zeros(size, q.shape[1], **acc),) if wants_k and k is not None else (),
        merge=_add,
    )
    for block in trip:
        symmetric = k is None and block.home
        ids, sides = block.carried[1:2], block.carried[-2:]
        dalpha = None if dscale is None else torch.zeros_like(dscale)
        torch_tiles.backward(
            q,
            None if symmetric else block.carried[0],
            alpha,
            _rule_for(block.home, rule, ids if rule.key_ids is not None else ()),
            _plan(q, ring.sizes[block.source], tile, symmetric=symmetric),
            row=row,
            col=None if visitors is None or symmetric else Direction(*sides),
            pos=pos if block.home else None,
            dq=dq,
            dk=dq if symmetric else block.gathered[0] if block.gathered else None,
            dalpha=dalpha,
            cache=next(caches),
        )
        if dscale is not None and dalpha is not None:
            # Of symmetric scores two ranks compute the tiles between them, each for both.
            dscale += dalpha * (LOG2E / 2 if k is None and not block.home else LOG2E)
    dk = trip.home[0].to(q.dtype) if trip.home else None
    return None if dq is None else dq.to(q.dtype), dk, None if dscale is None else dscale.to(scale.dtype)


def _add(into: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for x, y in zip(into, other, strict=True):
        x.add_(y)


def _carried(k: Tensor, *vectors: Tensor | None) -> tuple[Tensor, ...]:
    return (k, *(x for x in vectors if x is not None))


def _rule_for(home: bool, rule: PairRule, key_ids: tuple[Tensor, ...]) -> PairRule:
    """Positives and selves are at home; ids are compared with every visitor's."""
    return rule if home else PairRule(query_ids=rule.query_ids, key_ids=key_ids[0] if key_ids else None)


def _plan(q: Tensor, keys: int, tile: int, *, symmetric: bool) -> TilePlan:
    itemsize = accumulation_dtype(q.dtype).itemsize
    return plan_tiles(q.shape[0], keys, q.shape[1], tile=tile or None, itemsize=itemsize, symmetric=symmetric)


def _cached_items(ring: Ring, q: Tensor, k: Tensor | None, tile: int, cache_bytes: int) -> list[int]:
    """How many scores of each visiting block find room in `cache_bytes`, in the order of the visits."""
    if cache_bytes == 0:
        return [0] * ring.team.size
    items = []
    for step in range(ring.team.size):
        source = ring.schedule.source(ring.team.rank, step)
        plan = _plan(q, ring.sizes[source], tile, symmetric=k is None and source == ring.team.rank)
        items.append(plan.cached_items(cache_bytes))
        cache_bytes -= items[-1] * plan.itemsize
    return items


# --- compiled: operators that torch.compile can trace -----------------------------------------------------------


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
    rule = PairRule(labels=labels, exclude_self=exclude_self, query_ids=query_ids, key_ids=key_ids)
    key = q if k is None else k
    if labels is not None:
        check_labels(labels, len(key))
    return _forward(_solo(key), q, k, scale, rule, rows=rows, cols=cols, tile=tile, cache_bytes=cache_bytes)


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
    key = q if k is None else k
    dtype = accumulation_dtype(q.dtype)
    return (
        q.new_empty(q.shape[0] if rows else 0, dtype=dtype),
        q.new_empty(key.shape[0] if cols else 0, dtype=dtype),
        q.new_empty(0 if labels is None else q.shape[0], dtype=dtype),
        q.new_empty(_cached_items(_solo(key), q, k, tile, cache_bytes)[0] if cache_bytes else 0, dtype=dtype),
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
    pos2: Tensor,
    cache: Tensor,
    row_grad: Tensor | None,
    col_grad: Tensor | None,
    pos_grad: Tensor | None,
    wants_q: bool,
    wants_k: bool,
    wants_scale: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dscale; empty where not wanted."""
    dq, dk, dscale = _backward(
        _solo(q if k is None else k),
        q,
        k,
        scale,
        PairRule(labels=labels, exclude_self=exclude_self, query_ids=query_ids, key_ids=key_ids),
        row=None if row_grad is None or not len(row_lse2) else Direction(row_lse2, row_grad),
        col=None if col_grad is None or not len(col_lse2) else Direction(col_lse2, col_grad),
        pos=None if labels is None or pos_grad is None else Positives(pos2, pos_grad),
        wants=(wants_q, wants_k, wants_scale),
        tile=tile,
        cache=cache,
    )
    return (
        q.new_empty(0) if dq is None else dq,
        q.new_empty(0) if dk is None else dk,
        scale.new_empty(0) if dscale is None else dscale,
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
    pos2: Tensor,
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
    ctx.save_for_backward(q, k, scale, labels, query_ids, key_ids, *output)
    ctx.options = exclude_self, tile
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs, outputs = ctx.saved_tensors[:6], ctx.saved_tensors[6:]
    wants = ctx.needs_input_grad[:3]
    out = _backward_op(*inputs, *ctx.options, *outputs, *grads[:3], *wants)
    return (*(grad if wanted else None for grad, wanted in zip(out, wants, strict=True)), *[None] * 8)


def _no_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "contratile losses have no second derivative: expected one backward pass, got a gradient of a gradient. "
        "Use backend='dense' where a double backward is needed (gradient penalties, meta-learning)."
    )


_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
_backward_op.register_autograd(_no_second_derivative)


# --- eager: an autograd function, over one rank or many ---------------------------------------------------------


class _PairLse(torch.autograd.Function):
    """Forward and backward are one ring pass each, on every rank."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, *inputs: Any) -> tuple[Tensor, ...]:
        q, k, scale, labels, query_ids, key_ids, exclude_self, rows, cols, tile, cache_bytes = inputs
        rule = PairRule(labels=labels, exclude_self=exclude_self, query_ids=query_ids, key_ids=key_ids)
        out = _forward(ring, q, k, scale, rule, rows=rows, cols=cols, tile=tile, cache_bytes=cache_bytes)
        _setup_context(ctx, inputs, out)
        ctx.ring, ctx.sides = ring, (rows, cols)
        ctx.mark_non_differentiable(out[3])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, scale, labels, query_ids, key_ids, row_lse2, col_lse2, pos2, cache = ctx.saved_tensors
        exclude_self, tile = ctx.options
        with torch.no_grad():
            directions = []
            for used, lse2, grad in zip(ctx.sides, (row_lse2, col_lse2), grads[:2], strict=True):
                # What travels must be the same on every rank: a direction that nothing was built on has gradient 0.
                if grad is None and used and ctx.ring.team.size > 1:
                    grad = torch.zeros_like(lse2)
                directions.append(Direction(lse2, grad) if used and grad is not None else None)
            out = _backward(
                ctx.ring,
                q,
                k,
                scale,
                PairRule(labels=labels, exclude_self=exclude_self, query_ids=query_ids, key_ids=key_ids),
                row=directions[0],
                col=directions[1],
                pos=None if labels is None or grads[2] is None else Positives(pos2, grads[2]),
                wants=ctx.needs_input_grad[1:4],
                tile=tile,
                cache=cache,
            )
        if torch.is_grad_enabled():  # create_graph=True: these gradients may be used, but not differentiated
            anchor = next(x for x in (q, k, scale, *grads) if x is not None and x.requires_grad)
            return None, *(None if x is None else _Final.apply(x, anchor) for x in out), *[None] * 8  # type: ignore[no-untyped-call]
        return None, *out, *[None] * 8


class _Final(torch.autograd.Function):
    """A gradient that has no gradient of its own, and says so."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, anchor: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        _no_second_derivative(ctx)


@cache
def _eager_apply() -> Callable[..., tuple[Tensor, ...]]:
    """Collectives run eagerly: a clean graph break under torch.compile, which is not imported before it is needed."""
    return torch.compiler.disable(_PairLse.apply)  # type: ignore[no-any-return, no-untyped-call]


def _solo(key: Tensor) -> Ring:
    return Ring.flat(ALONE, (key.shape[0],), total=key.shape[0])


def _alpha(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of base-2 scores. At scale 0 a factor too small to change any exp2 keeps dscale computable."""
    tiny = 2.0**-70 if dtype == torch.float32 else 2.0**-200
    if scale.is_cpu:
        return torch.scalar_tensor(scale.item() * LOG2E or tiny, dtype=dtype)
    alpha = scale.to(dtype) * LOG2E
    return torch.where(alpha == 0, tiny, alpha)

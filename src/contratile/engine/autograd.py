"""The engine's entry: statistics of the scores S = scale * Q K^T + bias over the keys of all ranks, in linear memory.

    stats = pair_stats(ring, Inputs(q, k, scale, labels=labels), Spec())
    stats.row.total, stats.col.total     log-sum-exps of rows and columns (or sums of softplus), differentiable
    stats.pos                            the positives' scores
    stats.nats(stats.row.total)          the same in nats

In eager mode the passes are one autograd function, whose forward and backward are a ring pass each. `torch.compile`
gets operators that it can trace (`compiled.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from contratile.engine import compiled
from contratile.engine.backends import dense
from contratile.engine.compiled import no_second_derivative
from contratile.engine.passes import backward, forward
from contratile.engine.spec import DIFFERENTIABLE, InputGrads, Inputs, PairStats, SideStats, Spec, Wanted
from contratile.engine.summed import GradSum, sums_of
from contratile.errors import transform_under_way
from contratile.ring.ring import Ring

SMALL = 1 << 20
"""Scores of up to this many bytes are always kept for the backward pass: less than one tile takes otherwise."""


def pair_stats(ring: Ring, x: Inputs, spec: Spec) -> PairStats:
    """What `reference.pair_stats` computes, tile by tile, over the keys of all ranks. Arguments are not checked here.

    With `key=None` the keys are the queries. Row and column statistics are then the same, and are returned as both.
    """
    if spec.backend == "dense":
        return dense.pair_stats(x, spec)
    if x.key is None and x.labels is not None and x.query_ids is not None:
        x = x._replace(key=x.query)  # with ids a positive counts for its own query only: the scores are not symmetric
    symmetric, own = x.key is None, spec
    if symmetric and spec.cols:
        own = own._replace(rows=True, cols=False)
    compiling, alone = torch.compiler.is_compiling(), ring.team.size == 1
    if not _wants_grad(x) or spec.prefixes:  # a tile of scores for each prefix would take several times the memory
        own = own._replace(cache_bytes=0) if own.cache_bytes else own
    elif not compiling and spec.cache_bytes < SMALL and _is_small(ring, x, spec):
        own = own._replace(cache_bytes=SMALL)
    if compiling and alone:
        tensors = compiled.pair_stats(x, own).tensors()
    else:
        apply = _graph_break() if compiling else _Pairs.apply
        sums = (sums_of(x.query), sums_of(x.key)) if alone else (None, None)
        tensors = apply(ring, own, sums, x, *x[:DIFFERENTIABLE])
    stats = PairStats.of(tensors, spec.unit)
    if symmetric and spec.cols:
        return stats._replace(row=stats.row if spec.rows else SideStats(), col=stats.row)
    return stats


def _is_small(ring: Ring, x: Inputs, spec: Spec) -> bool:
    """Whether all scores fit into SMALL bytes on a CPU, where a product costs more than reading its scores again."""
    mine = x.query.is_cpu and spec.backend != "triton" and spec.tile is None
    return mine and x.query.shape[0] * sum(ring.sizes) * 4 <= SMALL


def _wants_grad(x: Inputs) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in x[:DIFFERENTIABLE])


@cache
def _graph_break() -> Callable[..., tuple[Any, ...]]:
    """Run collectives eagerly under `torch.compile`. Cached, so that its modules are imported only when needed."""
    return torch.compiler.disable(lambda *arguments: _Pairs.apply(*arguments))  # type: ignore[no-any-return, no-untyped-call]


_untracked = torch._C._AutoDispatchBelowAutograd
"""Context manager: operators inside skip autograd's part of the dispatch, which `torch.no_grad` would run."""


class _Pairs(torch.autograd.Function):
    """Forward and backward are one ring pass each, on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        spec: Spec,
        sums: tuple[GradSum | None, GradSum | None],
        x: Inputs,
        *differentiable: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """`differentiable`: the inputs of `x` that may get gradients, which autograd must receive one by one."""
        with _untracked():
            results = forward(ring, x, spec)
        tensors = results.tensors()
        ctx.ring, ctx.spec, ctx.sums = ring, spec, sums
        ctx.save_for_backward(*x, *tensors)  # all of it is freed by backward
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in results.constants() if t is not None])
        return *tensors[:-1], None  # without the cache

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ring, spec, saved, inputs = ctx.ring, ctx.spec, ctx.saved_tensors, len(Inputs._fields)
        x = Inputs(*saved[:inputs])
        results, given = PairStats.of(saved[inputs:]), PairStats.of(grads)
        if ring.team.size > 1:  # what travels must be the same on every rank
            given = _with_zeros(given, results)
        *_, query, key, scale, bias, key_bias, stand_in = ctx.needs_input_grad
        wanted = Wanted(query or stand_in, key, scale, bias, key_bias)
        of_query, of_key = (None, None) if torch.is_grad_enabled() else ctx.sums
        query_sum = None if of_query is None or not wanted.query else of_query.total(x.query)
        key_sum = None if of_key is None or not wanted.key else of_key.total(x.keys)
        with _untracked():
            out = backward(ring, x, spec, results, given, wanted, query_sum, key_sum)
        if torch.is_grad_enabled():  # create_graph=True: these gradients may be used, but not differentiated
            anchors = [t for t in (*x, *grads) if t is not None and t.requires_grad]
            out = InputGrads(*(None if t is None else _Final.apply(t, *anchors) for t in out))  # type: ignore[no-untyped-call]
        of_query, *others = out
        own = (of_query, *others, None) if x.stand_in is None else (None, *others, of_query)
        return None, None, None, None, *own


def _with_zeros(grads: PairStats, results: PairStats) -> PairStats:
    """Zero gradients for differentiable results that the caller did not use."""

    def filled(grad: Tensor | None, result: Tensor | None) -> Tensor | None:
        return torch.zeros_like(result) if grad is None and result is not None else grad

    row, col = (
        grad._replace(
            total=filled(grad.total, side.total),
            sums=filled(grad.sums, side.sums),
            cross=filled(grad.cross, side.cross),
        )
        for grad, side in ((grads.row, results.row), (grads.col, results.col))
    )
    return grads._replace(row=row, col=col, pos=filled(grads.pos, results.pos))


class _Final(torch.autograd.Function):
    """A gradient that raises if it is differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *anchors: Tensor) -> Tensor:
        """`anchors`: tensors that the gradient depends on; differentiating with respect to any of them raises."""
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        no_second_derivative(ctx)


def stand_in(query: Tensor) -> Tensor | None:
    """For `Inputs.stand_in`: adds up the gradients of 16-bit queries from several calls in fp32, and rounds once.

    Autograd alone would round every share. None where there is nothing to gain.
    """
    wanted = query.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not wanted or query.dtype not in (torch.float16, torch.bfloat16) or transform_under_way((query,)):
        return None
    return _StandIn.apply(query)  # type: ignore[no-any-return, no-untyped-call]


class _StandIn(torch.autograd.Function):
    """An fp32 tensor with the shape of the features that takes no memory."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.dtype = features.dtype
        return features.new_zeros((), dtype=torch.float32).expand(features.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)

"""The primitive: statistics of the scores S = scale * Q K^T + bias over the keys of all ranks, in linear memory.

    stats, unit = pair_stats(Inputs(q, k, scale, labels=labels), Task(), engine)
    stats["row"], stats["col"]      log-sum-exps of rows and columns (or sums of softplus), differentiable
    stats["pos"]                    the positives' scores

The passes are wrapped as an autograd function, whose forward and backward are a ring pass each; under `torch.compile`
and on one process, as operators that it can trace.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile import reference
from contratile.engine import compiled as operators
from contratile.engine.backends import Backend
from contratile.engine.backends.block import accumulation_dtype
from contratile.engine.backends.precision import Precision
from contratile.engine.compiled import no_second_derivative
from contratile.engine.passes import backward, forward
from contratile.engine.spec import DIFFERENTIABLE, Inputs, Results, Task
from contratile.ring.ring import Ring


class Engine(NamedTuple):
    """How a call is carried out: by whom, with which tiles, how exactly."""

    ring: Ring
    backend: Backend = "auto"
    tile: int | None = None
    cache_bytes: int = 0
    extra: Ring | None = None
    """The ring of extra keys, if there are any."""

    precision: Precision | None = None


def pair_stats(x: Inputs, task: Task, engine: Engine, place: Tensor | None = None) -> tuple[Results, float]:
    """What `reference.pair_stats` computes, tile by tile, over the keys of all ranks. Arguments are taken as checked.

    The results are in units of so many nats: ln 2 where they are in base 2. `key=None` stands for the queries: row and
    column statistics are then the same thing, returned as both. `place`, if given, receives the gradient of the queries
    in full precision: see `contrast.GradientPlace`.
    """
    if engine.backend == "dense":
        acc = accumulation_dtype(x.query.dtype)
        x = x._replace(query=x.query.to(acc), key=None if x.key is None else x.key.to(acc))
        device = x.query.device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            return reference.pair_stats(**x._asdict(), **task.definition()), 1.0
    if x.key is None and x.labels is not None and x.query_ids is not None:
        x = x._replace(key=x.query)  # a positive is spared for its own query only: who meets whom need not be symmetric
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*x[:4], place))
    own = task._replace(
        rows=task.rows or (x.key is None and task.cols),
        cols=task.cols and x.key is not None,
        tile=engine.tile or 0,
        cache_bytes=engine.cache_bytes if wants_grad else 0,
        backend=engine.backend,
        precision=engine.precision or "",
    )
    if not torch.compiler.is_compiling():
        results = _run(engine.ring, x, own, place)
    elif engine.ring.team.size == 1:
        results = operators.named(x, own, operators.pair_statistics(*x, *own))
    else:
        results = _run_eagerly()(engine.ring, x, own)
    if x.key is None and task.cols:
        sides = ["row", "col"] if task.rows else ["col"]
        results = {name.replace("row", side): value for side in sides for name, value in results.items()}
    return results, task.unit


def _run(ring: Ring, x: Inputs, task: Task, place: Tensor | None = None) -> Results:
    names: list[str] = []
    outputs = _Pairs.apply(names, ring, task, place, *x)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return dict(zip(names, outputs, strict=True))


@cache
def _run_eagerly() -> Callable[..., Results]:
    """Collectives run eagerly: a clean graph break under torch.compile, which is not imported before it is needed."""
    return torch.compiler.disable(_run)  # type: ignore[no-any-return, no-untyped-call]


class _Pairs(torch.autograd.Function):
    """Forward and backward are one ring pass each, on every rank."""

    @staticmethod
    def forward(
        ctx: Any, names: list[str], ring: Ring, task: Task, place: Tensor | None, *inputs: Any
    ) -> tuple[Tensor, ...]:
        """`names` is filled with the names of the results."""
        results = forward(ring, Inputs(*inputs), task)
        cache = results.pop("cache", None)
        names += results
        ctx.save_for_backward(*inputs, *results.values(), cache)  # freed by backward, all of them
        ctx.ring, ctx.task, ctx.names = ring, task, names
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for name, x in results.items() if name not in DIFFERENTIABLE))
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(Inputs._fields)
        *saved, cache = ctx.saved_tensors
        x, results = Inputs(*saved[:count]), dict(zip(ctx.names, saved[count:], strict=True))
        given = {}
        for name, grad in zip(ctx.names, grads, strict=True):
            # What travels must be the same on every rank: a result that nothing was built on has gradient 0.
            if grad is None and name in DIFFERENTIABLE and ctx.ring.team.size > 1:
                grad = torch.zeros_like(results[name])
            if grad is not None and name in DIFFERENTIABLE:
                given[name] = grad
        if cache is not None:
            results["cache"] = cache
        with torch.no_grad():
            full, query, *others = ctx.needs_input_grad[3:8]
            out = backward(ctx.ring, x, ctx.task, results, given, (full or query, *others), full=full)
        if torch.is_grad_enabled():  # create_graph=True: these gradients may be used, but not differentiated
            anchor = next(t for t in (*x, *grads) if t is not None and t.requires_grad)
            out = [None if grad is None else _Final.apply(grad, anchor) for grad in out]  # type: ignore[no-untyped-call]
        dq, *out = out
        return None, None, None, *((dq, None) if full else (None, dq)), *out, *[None] * (count - 4)


class _Final(torch.autograd.Function):
    """A gradient that has no gradient of its own, and says so."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, anchor: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> None:
        no_second_derivative(ctx)

"""The two passes of the primitive: ring x backend, without autograd.

    forward   scores S = scale Q K^T + bias -> statistics of rows and columns             1 matrix product
    backward  G = dL/dS -> dq = scale G k, dk = scale G^T q, dscale, dbias                3 matrix products

Blocks of keys visit (one block, if there is one process) and the backend works on each: keys and column statistics
travel forward, keys and their gradient backward.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from contratile.engine import reserve
from contratile.engine.backends import registry, torch_tiles
from contratile.engine.backends.block import Given, Gradients, Levels, Scores, Side, accumulation_dtype
from contratile.engine.backends.precision import library_products, resolve
from contratile.engine.classes import add_class_grads, class_sums
from contratile.engine.plan import TilePlan, plan_tiles
from contratile.engine.rule import PairRule
from contratile.engine.spec import Inputs, Results, Task
from contratile.engine.stats import Stats
from contratile.ring.ring import Ring, RingPass, Tensors

SIDES = ("row", "col")


def forward(ring: Ring, x: Inputs, task: Task) -> Results:
    """One trip round the ring. `cache`, if it was asked for, is empty where nothing fits into it."""
    task = _resolved(task, x)
    alpha = _alpha(x.scale, task, accumulation_dtype(x.query.dtype))
    pos = None if x.labels is None else alpha.new_zeros(len(x.query))
    items = cached_items(ring, x, task)
    cache = reserve.take(sum(items), alpha)
    caches = _pieces(cache, items)
    mine = {"key": x.query if x.key is None else x.key, "ids": x.key_ids, "classes": x.key_classes}
    own_level = x.query_level
    tiles = registry.choose(x, task)
    if task.knows_positives and pos is not None:
        assert tiles is torch_tiles, "kernels do not compare with positives"
        home = _block(ring, ring.team.rank, x, mine, task, alpha, cache[:0])
        own_level = torch.zeros_like(pos)
        torch_tiles.positives(home, own_level)
        home.score_(pos.copy_(own_level))
        if task.cols:
            mine["level"] = _by_key(own_level, x, otherwise=torch.inf)
    merge = partial(_merge, statistics=task.reduce == "lse")
    trip, names = _trip(ring, mine, merge=merge)
    rows: Tensors | None = None
    for block in trip:
        visitor = dict(zip(names, block.carried, strict=True))
        scores = _block(ring, block.source, x, visitor, task, alpha, next(caches))
        levels = Levels(own_level, visitor.get("level"))
        reads = pos if block.home and not task.knows_positives else None
        with library_products(task.precision, x.query):
            new_rows, block.gathered = tiles.forward(scores, task, levels, reads)
        if x.query_classes is not None:
            sums = _class_parts(x.query_classes, visitor["classes"], scores, task)
            new_rows, block.gathered = new_rows + sums[0], block.gathered + sums[1]
        if rows is None:
            rows = new_rows
        else:
            merge(rows, new_rows)
    assert rows is not None
    row_term, col_term = _terms(pos, x, task)
    results = _named("row", rows, x, task, row_term) | _named("col", trip.home, x, task, col_term)
    if pos is not None:
        results["pos"] = pos
        if task.knows_positives and own_level is not None:
            results["level"] = own_level
    if task.cache_bytes:
        results["cache"] = cache
    return results


def backward(
    ring: Ring,
    x: Inputs,
    task: Task,
    results: Results,
    grads: Results,
    wants: tuple[bool, bool, bool, bool],
    *,
    full: bool = False,
) -> list[Tensor | None]:
    """The gradients of query, key, scale and bias that are wanted, from those of the results.

    A result whose gradient is missing costs nothing. `full`: that of the queries is not rounded to their dtype.
    """
    wants_q, wants_k, wants_scale, wants_bias = wants
    task = _resolved(task, x)
    alpha = _alpha(x.scale, task, accumulation_dtype(x.query.dtype))
    symmetric, alone = x.key is None, ring.team.size == 1
    # Several blocks, both sides of a tile, or class sums add to dq: in full precision. Else each row is written once.
    once = alone and not symmetric and x.query_classes is None
    dtype = x.query.dtype if once and not full else alpha.dtype
    make = torch.empty if once and ring.sizes[0] else torch.zeros
    dq = make(x.query.shape, dtype=dtype, device=x.query.device) if wants_q else None
    dscale, dbias = (alpha.new_zeros(()) if wanted else None for wanted in (wants_scale, wants_bias))
    pos = results.get("pos")
    cache = results.get("cache", alpha.new_empty(0))
    caches = _pieces(cache, cached_items(ring, x, task))
    own_level = results.get("level", x.query_level)
    tiles = registry.choose(x, task)
    lse = task.reduce == "lse"
    weighed = {side: grads[side] * results[f"{side}_slack"] if lse else grads[side] for side in SIDES if side in grads}
    row = Side(results["row"] if lse else None, weighed["row"], own_level) if "row" in grads else None
    # Symmetric scores: a visitor's rows are this rank's columns.
    side = "row" if symmetric else "col"
    mine = {"key": x.query if x.key is None else x.key, "ids": x.key_ids}
    if side in grads:
        level = _by_key(own_level, x, otherwise=torch.inf) if own_level is not None and task.filters else None
        mine |= {"lse": results[side] if lse else None, "grad": weighed[side], "level": level}
    sums_grad = grads.get("row_sums"), grads.get(f"{side}_sums")
    if any(grad is not None for grad in sums_grad):
        mine |= {"classes": x.key_classes, "sums_grad": sums_grad[1]}

    gathers = (alpha.new_empty(0, x.query.shape[1]),) if wants_k and not symmetric else ()
    trip, names = _trip(ring, mine, gathers=gathers, merge=partial(_merge, statistics=False))
    for block in trip:
        visitor = dict(zip(names, block.carried, strict=True))
        scores = _block(ring, block.source, x, visitor, task, alpha, next(caches))
        mirrored = scores.k is None
        col = None
        if "grad" in visitor and not mirrored:
            col = Side(visitor.get("lse"), visitor["grad"], visitor.get("level"))
        given = Given(row, col, pos, grads.get("pos") if block.home else None)
        dk = block.gathered[0] if block.gathered else None
        # Of symmetric scores two ranks compute the tiles between them, each for both.
        dalpha = alpha.new_zeros(()) if dscale is not None and symmetric and not block.home else dscale
        into = Gradients(dq, dq if mirrored else dk, dalpha, dbias, once)
        with library_products(task.precision, x.query):
            tiles.backward(scores, task, given, into)
        if dscale is not None and dalpha is not None and dalpha is not dscale:
            dscale += dalpha / 2
        if "classes" in visitor and x.query_classes is not None:
            own, theirs = x.query_classes, visitor["classes"]
            u, v = sums_grad[0], visitor.get("sums_grad")
            which = {"differ": task.differ, "others": scores.rule.exclude_self}
            if dq is not None:
                add_class_grads(dq, visitor["key"], alpha, own, theirs, u, v, **which)
            if dk is not None:
                add_class_grads(dk, x.query, alpha, theirs, own, v, u, **which)
    if dscale is not None:
        for name in ("row_sums", "col_sums"):
            if name in grads:
                dscale += (grads[name] * results[name]).sum() / alpha
        dscale = (dscale / task.unit).to(x.scale.dtype)
    return [
        dq if dq is None or full else dq.to(x.query.dtype),
        trip.home[0].to(x.query.dtype) if trip.home else None,
        dscale,
        None if dbias is None or x.bias is None else dbias.to(x.bias.dtype),
    ]


def _resolved(task: Task, x: Inputs) -> Task:
    return task._replace(precision=resolve(task.precision, x.query, task.backend))


def _trip(ring: Ring, mine: dict[str, Tensor | None], **how: Any) -> tuple[RingPass, list[str]]:
    """A ring pass of the tensors that there are, and their names."""
    carried = {name: tensor for name, tensor in mine.items() if tensor is not None}
    return RingPass(ring, tuple(carried.values()), **how), list(carried)


def _block(
    ring: Ring, source: int, x: Inputs, visitor: Mapping[str, Tensor | None], task: Task, alpha: Tensor, cache: Tensor
) -> Scores:
    """The scores of this rank's queries with a visitor's keys."""
    home = source == ring.team.rank
    # Positives and selves are at home; ids are compared with every visitor's.
    rule = PairRule(
        labels=x.labels if home else None,
        exclude_self=task.exclude_self and home,
        query_ids=x.query_ids,
        key_ids=visitor.get("ids"),
        keys=ring.sizes[source],
    )
    key = None if x.key is None and home else visitor["key"]
    # With `key=None` two ranks compute their shared tiles, each for itself: as products, which are the same on both.
    folded = not task.knows_positives and (home or x.key is not None)
    return Scores(x.query, key, alpha, x.bias, rule, _plan(ring, source, x, task), cache, folded)


def _class_parts(query_classes: Tensor, key_classes: Tensor, scores: Scores, task: Task) -> tuple[Tensors, Tensors]:
    """Sums and counts of the rows, and those of the columns if they are asked for."""
    rows, cols = task.rows, task.cols
    others = scores.rule.exclude_self
    assert not others or scores.k is None, "selves are left out of sums over one set"
    which = {"rows": rows, "cols": cols, "differ": task.differ, "others": others}
    sums = class_sums(scores.q, scores.key, scores.alpha, query_classes, key_classes, **which)
    return sums[:2] if rows else (), sums[2:] if cols else ()


def _merge(into: Tensors, other: Tensors, *, statistics: bool) -> None:
    """Add what two blocks gave; of log-sum-exps the first two tensors are running statistics."""
    if statistics and into:
        Stats(into[0], into[1]).merge_(other[0], other[1])
        into, other = into[2:], other[2:]
    for x, y in zip(into, other, strict=True):
        x.add_(y)


def _named(side: str, parts: Tensors, x: Inputs, task: Task, term: Tensor | None) -> Results:
    """The complete parts of one side as results, in the order in which they were gathered."""
    if not parts:
        return {}
    names = [side]
    if task.reduce == "lse":
        names.append(f"{side}_slack")
        parts = (*Stats(parts[0], parts[1]).finish(term), *parts[2:])
    if task.ranks:
        names.append(f"{side}_higher")
    if task.ties:
        names.append(f"{side}_equal")
    if x.query_classes is not None:
        names += [f"{side}_sums", f"{side}_counts"]
    return dict(zip(names, parts, strict=True))


def _terms(pos: Tensor | None, x: Inputs, task: Task) -> tuple[Tensor | None, Tensor | None]:
    """A term of each row's and of each column's log-sum-exp: the positive's score."""
    if pos is None:
        return None, None
    if task.exclude_self and x.labels is not None:  # a row that is its own positive has no such term
        pos = pos.masked_fill(x.labels == torch.arange(len(pos), device=pos.device), -torch.inf)
    return pos, _by_key(pos, x, otherwise=-torch.inf) if task.cols else None


def _by_key(of_query: Tensor, x: Inputs, *, otherwise: float) -> Tensor:
    """For each key the highest value of a query whose positive it is."""
    assert x.labels is not None
    keys = (x.query if x.key is None else x.key).shape[0]
    return of_query.new_full((keys,), otherwise).scatter_reduce_(0, x.labels, of_query, "amax", include_self=False)


def _plan(ring: Ring, source: int, x: Inputs, task: Task) -> TilePlan:
    itemsize = accumulation_dtype(x.query.dtype).itemsize
    symmetric = x.key is None and source == ring.team.rank
    n, d = x.query.shape
    m = ring.sizes[source]
    # The sizes that a compiler traces with may be symbols, which no table can hold.
    make = _known_plan if type(n) is type(m) is type(d) is int else plan_tiles
    # Of one set two ranks see the same tiles, one of them transposed.
    flip = x.key is None and source < ring.team.rank
    plan = make(*((m, n) if flip else (n, m)), d, tile=task.tile or None, itemsize=itemsize, symmetric=symmetric)
    return plan.transposed() if flip else plan


_known_plan = lru_cache(maxsize=1024)(plan_tiles)


def cached_items(ring: Ring, x: Inputs, task: Task) -> list[int]:
    """How many scores of each visiting block find room in the cache, in the order of the visits."""
    room = task.cache_bytes
    if room == 0:
        return [0] * ring.team.size
    items = []
    for step in range(ring.team.size):
        plan = _plan(ring, ring.schedule.source(ring.team.rank, step), x, task)
        items.append(plan.cached_items(room))
        room -= items[-1] * plan.itemsize
    return items


def _pieces(cache: Tensor, items: list[int]) -> Iterator[Tensor]:
    """The part of the cache of each visiting block."""
    return iter(torch.split(cache, items)) if len(cache) else repeat(cache)


def _alpha(scale: Tensor, task: Task, dtype: torch.dtype) -> Tensor:
    """The factor of the scores in the unit of the results. At scale 0 one too small to change any result keeps
    dscale computable."""
    tiny = 2.0**-70 if dtype == torch.float32 else 2.0**-200
    if scale.is_cpu:
        return torch.scalar_tensor(scale.item() / task.unit or tiny, dtype=dtype)
    alpha = scale.to(dtype) / task.unit
    return torch.where(alpha == 0, tiny, alpha)

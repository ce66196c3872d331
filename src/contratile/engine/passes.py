"""The two passes of the engine: ring x backend, without autograd.

    forward   scores S = scale Q K^T + bias -> statistics of rows and columns             1 matrix product
    backward  G = dL/dS -> dq = scale G k, dk = scale G^T q, dscale, dbias                3 matrix products

Scores of prefixes of the features (`prefixes.py`) are parts of the same products.

Blocks of keys visit (one block, if there is one process) and the backend works on each: keys and column statistics
travel forward, keys and their gradient backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine import reserve, tuned
from contratile.engine.backends import registry, torch_tiles
from contratile.engine.backends.block import Beside, Given, Gradients, Scores, SideGrad, Taughts
from contratile.engine.backends.precision import library_products, resolve
from contratile.engine.beside import centres, teacher_grad
from contratile.engine.plan import TilePlan, plan_tiles
from contratile.engine.prefixes import Prefixes, add_norm_grads_, reciprocal_norms
from contratile.engine.rule import PairRule
from contratile.engine.spec import InputGrads, Inputs, PairStats, SideStats, Spec, Wanted, number
from contratile.engine.stats import SideParts, Taught, accumulation_dtype
from contratile.ring.ring import Ring, RingPass


class KeyBlock(NamedTuple):
    """A rank's keys as they travel, with what other ranks need to know about them."""

    key: Tensor
    ids: Tensor | None = None
    classes: Tensor | None = None
    level: Tensor | None = None
    bias: Tensor | None = None
    """In the unit of the scores."""

    lse: Tensor | None = None
    grad: Tensor | None = None
    sums_grad: Tensor | None = None
    """Backward only: the keys' log-sum-exps, and the gradients of these and of their class sums."""

    factor: Tensor | None = None
    """[M, prefixes] reciprocal norms, see `Spec.normalize`."""
    teacher: Tensor | None = None
    centre: Tensor | None = None
    teacher_lse: Tensor | None = None
    teacher_grad: Tensor | None = None
    """The teacher's features; forward only, `stats.Taught.centre`; backward only, as `lse` and `grad`."""

    guide: Tensor | None = None
    guide_level: Tensor | None = None


class KeyGrad(NamedTuple):
    """The gradients of a block of keys, of their biases and norms, as they travel back to their owner."""

    dk: Tensor | None
    dbias: Tensor | None = None
    dnorm: Tensor | None = None

    def merge_(self, other: KeyGrad) -> None:
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.add_(theirs)


class Own(NamedTuple):
    """Numbers of this rank's queries that tiles compare theirs with."""

    centre: Tensor | None = None
    teacher_pos: Tensor | None = None
    guide_level: Tensor | None = None
    factor: Tensor | None = None
    """[N, prefixes] reciprocal norms."""


NOTHING = Own()


def forward(ring: Ring, x: Inputs, spec: Spec) -> PairStats:
    """One trip round the ring. The cache, if asked for, is empty where nothing fits into it."""
    spec = _resolved(spec, x)
    alpha = _alpha(x.scale, spec, accumulation_dtype(x.query.dtype))
    prefixes = [len(spec.prefixes)] if spec.prefixes else []
    pos = None if x.labels is None else alpha.new_zeros(x.query.shape[0], *prefixes)
    factors = _factors(x, spec)
    items = cached_items(ring, x, spec)
    cache = reserve.take(sum(items), alpha) if spec.cache_bytes else None
    caches = _pieces(cache, items)
    mine = _block(x, spec, alpha)._replace(classes=x.key_classes, factor=factors.key)
    level = x.query_level
    tiles = registry.choose(x, spec)
    centre, teacher_pos = centres(x, alpha), None if x.teacher_query is None or pos is None else torch.zeros_like(pos)
    guide_level = x.guide_level
    if x.guide_query is not None and pos is not None:
        guide_level = torch.zeros_like(pos)
        home = _scores(ring, ring.team.rank, x, mine, spec, alpha, None, level)
        assert home.guide is not None
        with library_products(spec.precision, x.query):
            torch_tiles.guide_positives(home, home.guide, guide_level)
    if spec.cols:
        mine = mine._replace(
            centre=None if centre is None else _by_key(centre, x, spec, otherwise=0.0),
            guide_level=None if guide_level is None else _by_key(guide_level, x, spec, otherwise=torch.inf),
        )
    own = Own(centre, teacher_pos, guide_level, factors.query)
    if spec.compares and pos is not None:
        level = torch.zeros_like(pos)
        home = _scores(ring, ring.team.rank, x, mine, spec, alpha, None, level)
        tiles.positives(home, spec, level)
        torch_tiles.score_positives_(home, pos.copy_(level))
        if spec.cols:
            mine = mine._replace(level=_by_key(level, x, spec, otherwise=torch.inf))
    trip: RingPass[KeyBlock, SideParts] = RingPass(ring, mine)
    rows: SideParts | None = None
    for block in trip:
        visitor = block.carried
        scores = _scores(ring, block.source, x, visitor, spec, alpha, next(caches), level, own)
        reads = pos if block.home and not spec.compares else None
        with library_products(spec.precision, x.query):
            new_rows, cols = tiles.forward(scores, spec, reads)
        if ring.team.size > 1:
            new_rows, cols = new_rows.spread(), cols.spread()
        block.gathered = cols if spec.cols else None
        if rows is None:
            rows = new_rows
        else:
            rows.merge_(new_rows)
    assert rows is not None
    row_term, col_term = _terms(pos, x, spec)
    row_taught, col_taught = _taught(x, spec, own, mine)
    return PairStats(
        row=rows.finish(row_term, row_taught) if spec.rows else SideStats(),
        col=SideStats() if trip.home is None else trip.home.finish(col_term, col_taught),
        pos=pos,
        level=level if spec.compares and pos is not None else None,
        cache=cache,
        teacher_pos=teacher_pos,
        guide_level=guide_level if pos is not None else None,
    )


def backward(
    ring: Ring,
    x: Inputs,
    spec: Spec,
    results: PairStats,
    grads: PairStats,
    wanted: Wanted,
    into: InputGrads | None = None,
) -> InputGrads:
    """The gradients of the inputs from those of the results. A result without gradient costs nothing.

    With a stand-in the gradient of the queries is not rounded to their dtype. `into` has tensors of the accumulation
    dtype that those of queries and keys are added to, on one process.
    """
    spec = _resolved(spec, x)
    alpha = _alpha(x.scale, spec, accumulation_dtype(x.query.dtype))
    symmetric, alone = x.key is None, ring.team.size == 1
    full = x.stand_in is not None
    # dq accumulates in full precision over several blocks, both sides of a tile, or class sums. Otherwise each row is
    # written once.
    query_sum, key_sum = (None, None) if into is None else into[:2]
    once = alone and not symmetric and not spec.sums and not spec.prefixes and query_sum is None
    dtype = x.query.dtype if once and not full else alpha.dtype
    make = torch.empty if once and ring.sizes[0] else torch.zeros
    dq = query_sum
    if dq is None and wanted.query:
        dq = make(x.query.shape, dtype=dtype, device=x.query.device)
    dscale = alpha.new_zeros(()) if wanted.scale else None
    dbias = alpha.new_zeros(()) if wanted.bias else None
    caches = _pieces(results.cache, cached_items(ring, x, spec))
    level = x.query_level if results.level is None else results.level
    guide_level = x.guide_level if results.guide_level is None else results.guide_level
    if guide_level is not None:
        level = guide_level
    tiles = registry.choose(x, spec)
    row = _side_grad(results.row, grads.row, spec, level)
    # A visitor's rows are this rank's columns if the scores are symmetric.
    col = row if symmetric else _side_grad(results.col, grads.col, spec, None)
    col_sums_grad = grads.row.sums if symmetric else grads.col.sums
    factors = _factors(x, spec)
    own = Own(factor=factors.query)
    dnorm = factors.query.new_zeros(factors.query.shape) if dq is not None and factors.query is not None else None
    mine = _block(x, spec, alpha)._replace(factor=factors.key)
    if col is not None:
        mine = mine._replace(level=_level_by_key(level, x, spec), lse=col.lse, grad=col.grad)
    row_taught, col_taught = teacher_grad(results.row, grads.row), teacher_grad(results.col, grads.col)
    if col_taught is not None:
        mine = mine._replace(teacher_lse=col_taught.lse, teacher_grad=col_taught.grad)
    if grads.row.sums is not None or col_sums_grad is not None:
        mine = mine._replace(classes=x.key_classes, sums_grad=col_sums_grad)
    trip: RingPass[KeyBlock, KeyGrad] = RingPass(ring, mine)
    for block in trip:
        visitor = block.carried
        scores = _scores(ring, block.source, x, visitor, spec, alpha, next(caches), level, own)
        mirrored = scores.k is None
        theirs = None
        if visitor.grad is not None and not mirrored:
            theirs = SideGrad(visitor.lse, visitor.grad, visitor.level)
        pos_grad = grads.pos if block.home else None
        given = Given(row, theirs, results.pos, pos_grad, grads.row.sums, visitor.sums_grad)
        if results.teacher_pos is not None:
            theirs = None if visitor.teacher_grad is None else SideGrad(visitor.teacher_lse, visitor.teacher_grad, None)
            if row_taught is not None or theirs is not None:
                given = given._replace(teacher=Taughts(row_taught, theirs, results.teacher_pos))
        dk = key_sum
        if dk is None and wanted.key and not symmetric:
            dk = block.zeros(x.query, alpha.dtype)
        dkey_bias = block.zeros(x.key_bias, alpha.dtype) if wanted.key_bias and x.key_bias is not None else None
        dkey_norm = block.zeros(factors.key) if dk is not None and factors.key is not None else None
        if dk is not None or dkey_bias is not None:
            block.gathered = KeyGrad(dk, dkey_bias, dkey_norm)
        # With `key=None` both ranks compute their shared tiles, so each takes half.
        dalpha = alpha.new_zeros(()) if dscale is not None and symmetric and not block.home else dscale
        out = Gradients(dq, dq if mirrored else dk, dalpha, dbias, once, dkey_bias, dnorm, dkey_norm)
        with library_products(spec.precision, x.query):
            tiles.backward(scores, spec, given, out)
        if dscale is not None and dalpha is not None and dalpha is not dscale:
            dscale += dalpha / 2
    if dscale is not None:
        for result, grad in ((results.row.sums, grads.row.sums), (results.col.sums, grads.col.sums)):
            if result is not None and grad is not None:
                dscale += (grad * result).sum() / alpha
        dscale = (dscale / number(spec.unit, dscale)).to(x.scale.dtype)
    of_keys = trip.home or KeyGrad(None)
    if of_keys.dbias is not None:
        of_keys = of_keys._replace(dbias=of_keys.dbias / number(spec.unit, of_keys.dbias))
    add_norm_grads_(dq, x.query, spec.prefixes, factors.query, dnorm)
    add_norm_grads_(of_keys.dk, x.keys, spec.prefixes, factors.key, of_keys.dnorm)
    return InputGrads(
        query=dq if dq is None or full else dq.to(x.query.dtype),
        key=None if of_keys.dk is None else of_keys.dk.to(x.query.dtype),
        scale=dscale,
        bias=None if dbias is None or x.bias is None else dbias.to(x.bias.dtype),
        key_bias=None if of_keys.dbias is None or x.key_bias is None else of_keys.dbias.to(x.key_bias.dtype),
    )


def _block(x: Inputs, spec: Spec, alpha: Tensor) -> KeyBlock:
    """What of this rank's keys travels in both passes."""
    bias = _key_bias(x, spec, alpha)
    return KeyBlock(x.keys, x.key_ids, bias=bias, teacher=x.teacher_key, guide=x.guide_keys)


def _level_by_key(level: Tensor | None, x: Inputs, spec: Spec) -> Tensor | None:
    """What keys compare their columns with in the backward pass."""
    if level is None or not (spec.filters or x.guide_query is not None):
        return None
    return level if x.key is None else _by_key(level, x, spec, otherwise=torch.inf)


def _taught(x: Inputs, spec: Spec, own: Own, mine: KeyBlock) -> tuple[Taught | None, Taught | None]:
    """What the statistics of rows and columns need at the end."""
    if own.centre is None or own.teacher_pos is None:
        return None, None
    row = Taught(own.centre, own.teacher_pos)
    if mine.centre is None:
        return row, None
    return row, Taught(mine.centre, _by_key(own.teacher_pos, x, spec, otherwise=-torch.inf))


class Factors(NamedTuple):
    """Reciprocal norms of this rank's rows, by prefix."""

    query: Tensor | None = None
    key: Tensor | None = None


def _factors(x: Inputs, spec: Spec) -> Factors:
    if not spec.normalize:
        return Factors()
    return Factors(reciprocal_norms(x.query, spec.prefixes), reciprocal_norms(x.keys, spec.prefixes))


def _key_bias(x: Inputs, spec: Spec, alpha: Tensor) -> Tensor | None:
    return None if x.key_bias is None else x.key_bias.to(alpha.dtype) / spec.unit


def _hardness(alpha: Tensor, spec: Spec) -> Tensor | None:
    """NaN for a negative scale, which losses refuse where they can read it: a row would not know its hard negatives."""
    if not spec.hardness:
        return None
    return torch.where(alpha > 0, alpha + spec.hardness / spec.unit, torch.nan)


def _resolved(spec: Spec, x: Inputs) -> Spec:
    if spec.precision is None and x.query.is_cpu and spec.backend != "triton":
        return spec  # a CPU has no choice
    return spec._replace(precision=resolve(spec.precision, x.query, spec.backend))


def _side_grad(side: SideStats, grad: SideStats, spec: Spec, level: Tensor | None) -> SideGrad | None:
    """Inputs of the backward pass for one side; None if nothing was built on its totals."""
    if grad.total is None:
        return None
    if spec.reduce == "softplus":
        return SideGrad(None, grad.total, level)
    assert side.slack is not None
    return SideGrad(side.total, grad.total * side.slack, level)


def _scores(
    ring: Ring,
    source: int,
    x: Inputs,
    visitor: KeyBlock,
    spec: Spec,
    alpha: Tensor,
    cache: Tensor | None,
    level: Tensor | None,
    own: Own = NOTHING,
) -> Scores:
    """The scores of this rank's queries with a visitor's keys."""
    home = source == ring.team.rank
    # Positives and self-pairs occur only in a rank's own block; ids are compared with every visitor's.
    rule = PairRule(
        labels=x.labels if home else None,
        paired=spec.paired,
        exclude_self=spec.exclude_self and home,
        query_ids=x.query_ids,
        key_ids=visitor.ids,
        same_id=spec.same_id,
        keys=ring.sizes[source],
    )
    key = None if x.key is None and home else visitor.key
    # With `key=None` two ranks compute the same tiles: as unscaled products, which come out the same on both.
    folded = not spec.compares and (home or x.key is not None)
    plan = _plan(ring, source, x, spec)
    return Scores(
        *(x.query, key, alpha, x.bias, rule, plan, level, visitor.level, cache),
        query_classes=x.query_classes,
        key_classes=visitor.classes,
        folded=folded,
        col_bias=visitor.bias,
        prefixes=Prefixes.of(spec.prefixes, own.factor, visitor.factor),
        hardness=_hardness(alpha, spec),
        teacher=_teacher(x, visitor, spec, own, home=home),
        guide=_guide(x, visitor, alpha, own),
    )


def _teacher(x: Inputs, visitor: KeyBlock, spec: Spec, own: Own, *, home: bool) -> Beside | None:
    if x.teacher_query is None or visitor.teacher is None or x.teacher_scale is None:
        return None
    factor = _alpha(x.teacher_scale, spec, accumulation_dtype(x.query.dtype))
    pos = own.teacher_pos if home else None
    return Beside(x.teacher_query, visitor.teacher, factor, own.centre, visitor.centre, pos)


def _guide(x: Inputs, visitor: KeyBlock, alpha: Tensor, own: Own) -> Beside | None:
    if x.guide_query is None or visitor.guide is None:
        return None
    return Beside(x.guide_query, visitor.guide, torch.ones_like(alpha), own.guide_level, visitor.guide_level)


def _terms(pos: Tensor | None, x: Inputs, spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """A term of each row's and of each column's log-sum-exp: the positive's score."""
    if pos is None:
        return None, None
    if spec.exclude_self and x.labels is not None:  # a row that is its own positive has no such term
        pos = pos.masked_fill(x.labels == torch.arange(len(pos), device=pos.device), -torch.inf)
    return pos, _by_key(pos, x, spec, otherwise=-torch.inf) if spec.cols else None


def _by_key(of_query: Tensor, x: Inputs, spec: Spec, *, otherwise: float) -> Tensor:
    """For each key the highest value of a query whose positive it is."""
    assert x.labels is not None
    if spec.paired and x.keys.shape[0] == of_query.shape[0]:
        return of_query
    found = of_query.new_full((x.keys.shape[0], *of_query.shape[1:]), otherwise)
    labels = x.labels if of_query.dim() == 1 else x.labels.unsqueeze(1).expand_as(of_query)
    return found.scatter_reduce_(0, labels, of_query, "amax", include_self=False)


def _plan(ring: Ring, source: int, x: Inputs, spec: Spec) -> TilePlan:
    itemsize = accumulation_dtype(x.query.dtype).itemsize
    symmetric = x.key is None and source == ring.team.rank
    n, d = x.query.shape
    m = ring.sizes[source]
    # Sizes may be symbols while a compiler traces, and a cache cannot hold those.
    make = _known_plan if type(n) is type(m) is type(d) is int else plan_tiles
    # With `key=None` two ranks compute the same tiles, one of them transposed.
    flip = x.key is None and source < ring.team.rank
    # Tuned on one machine, so not for tiles that several ranks have to cut alike.
    of_other = x.teacher_query if x.guide_query is None else x.guide_query
    beside = 0 if of_other is None else of_other.shape[1]
    own = ring.team.size == 1 and x.key is not None and x.query.is_cpu and spec.tile is None
    own = own and not spec.prefixes and not beside
    shape = tuned.tiles(d, itemsize) if own else None
    plan = make(
        *((m, n) if flip else (n, m)),
        d,
        tile=spec.tile,
        itemsize=itemsize,
        symmetric=symmetric,
        shape=shape,
        prefixes=len(spec.prefixes),
        beside=beside,
    )
    return plan.transposed() if flip else plan


_known_plan = lru_cache(maxsize=1024)(plan_tiles)


def cached_items(ring: Ring, x: Inputs, spec: Spec) -> list[int]:
    """How many scores of each visiting block fit into the cache, in the order of the visits."""
    room = spec.cache_bytes
    if room == 0:
        return [0] * ring.team.size
    items = []
    for source in ring.route.visits():
        plan = _plan(ring, source, x, spec)
        items.append(plan.cached_items(room))
        room -= items[-1] * plan.itemsize
    return items


def _pieces(cache: Tensor | None, items: list[int]) -> Iterator[Tensor | None]:
    """The part of the cache of each visiting block."""
    return repeat(None) if cache is None else iter(torch.split(cache, items))


def _alpha(scale: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    """The factor of the scores in the unit of the results.

    A scale of 0 is replaced by one too small to change any result, so that dscale stays computable.
    """
    tiny = 2.0**-70 if dtype == torch.float32 else 2.0**-200
    if scale.is_cpu:
        return torch.scalar_tensor(scale.item() / spec.unit or tiny, dtype=dtype)
    alpha = scale.to(dtype) / spec.unit
    return torch.where(alpha == 0, tiny, alpha)

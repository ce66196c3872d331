"""The two passes of the engine: ring x backend, without autograd.

    forward   scores S = scale Q K^T + bias -> statistics of rows and columns             1 matrix product
    backward  G = dL/dS -> dq = scale G k, dk = scale G^T q, dscale, dbias                3 matrix products

Scores of prefixes of the features (`prefixes.py`) are parts of the same products.

Blocks of keys visit (one block, if there is one process) and the backend works on each: keys and column statistics
travel forward, keys and their gradient backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine import reserve
from contratile.engine.backends import registry, torch_tiles
from contratile.engine.backends.block import Given, Gradients, Scores, SideGrad, TeacherGrads, Tiles
from contratile.engine.backends.precision import library_products, resolve
from contratile.engine.beside import centres, teacher_grad
from contratile.engine.cuts import cached_items, cuts_of, pieces
from contratile.engine.prefixes import add_norm_grads_
from contratile.engine.spec import InputGrads, Inputs, PairStats, SideStats, Spec, Wanted, number
from contratile.engine.stats import SideParts, TeacherSide, accumulation_dtype
from contratile.engine.visitors import (
    Factors,
    KeyBlock,
    KeyGrad,
    Own,
    alpha_of,
    by_key,
    factors_of,
    key_block,
    scores_of,
)
from contratile.ring.ring import Block, Ring, RingPass


def forward(ring: Ring, x: Inputs, spec: Spec) -> PairStats:
    """One trip round the ring. The cache, if asked for, is empty where nothing fits into it."""
    spec = _resolved(spec, x)
    alpha = alpha_of(x.scale, spec, accumulation_dtype(x.query.dtype))
    prefixes = [len(spec.prefixes)] if spec.prefixes else []
    pos = None if x.labels is None else alpha.new_zeros(x.query.shape[0], *prefixes)
    factors = factors_of(x, spec)
    cuts = cuts_of(ring, x, spec)
    cache = reserve.take(cached_items(cuts), alpha) if spec.cache_bytes else None
    mine = key_block(x, spec, alpha, classes=x.key_classes, factor=factors.key)
    own = Own(x.query_level, guide_level=x.guide_level, factor=factors.query)
    tiles = registry.choose(x, spec)
    if x.teacher_query is not None:
        own, mine = _with_teacher(own, mine, x, spec, alpha, pos)
    if pos is not None and (x.guide_query is not None or spec.compares):
        home = scores_of(ring, ring.team.rank, cuts[0].plan, x, mine, spec, alpha, Own(x.query_level))
        own, mine = _with_levels(own, mine, x, spec, tiles, home, pos)
    trip: RingPass[KeyBlock, SideParts] = RingPass(ring, mine)
    rows: SideParts | None = None
    for block, cut, kept in zip(trip, cuts, pieces(cache, cuts), strict=True):
        scores = scores_of(ring, block.source, cut.plan, x, block.carried, spec, alpha, own, kept)
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
        level=own.level if spec.compares and pos is not None else None,
        cache=cache,
        teacher_pos=own.teacher_pos,
        guide_level=own.guide_level if pos is not None else None,
    )


def _with_teacher(
    own: Own, mine: KeyBlock, x: Inputs, spec: Spec, alpha: Tensor, pos: Tensor | None
) -> tuple[Own, KeyBlock]:
    centre = centres(x, alpha)
    own = own._replace(centre=centre, teacher_pos=None if pos is None else torch.zeros_like(pos))
    if spec.cols and centre is not None:
        mine = mine._replace(centre=by_key(centre, x, spec, otherwise=0.0))
    return own, mine


def _with_levels(
    own: Own, mine: KeyBlock, x: Inputs, spec: Spec, tiles: Tiles, home: Scores, pos: Tensor
) -> tuple[Own, KeyBlock]:
    """What pairs are compared with, by rows and by columns: products of the positives, and the guide's."""
    if home.guide is not None:
        guide_level = torch.zeros_like(pos)
        with library_products(spec.precision, x.query):
            torch_tiles.guide_positives(home, home.guide, guide_level)
        own = own._replace(guide_level=guide_level)
        if spec.cols:
            mine = mine._replace(guide_level=by_key(guide_level, x, spec, otherwise=torch.inf))
    if spec.compares:
        level = torch.zeros_like(pos)
        tiles.positives(home, spec, level)
        torch_tiles.score_positives_(home, pos.copy_(level))
        own = own._replace(level=level)
        if spec.cols:
            mine = mine._replace(level=by_key(level, x, spec, otherwise=torch.inf))
    return own, mine


def backward(
    ring: Ring,
    x: Inputs,
    spec: Spec,
    results: PairStats,
    grads: PairStats,
    wanted: Wanted,
    query_sum: Tensor | None = None,
    key_sum: Tensor | None = None,
) -> InputGrads:
    """The gradients of the inputs from those of the results. A result without gradient costs nothing.

    With a stand-in the gradient of the queries is not rounded to their dtype. On one process there may be tensors of
    the accumulation dtype that those of queries and keys are added to, instead of being returned.
    """
    spec = _resolved(spec, x)
    alpha = alpha_of(x.scale, spec, accumulation_dtype(x.query.dtype))
    factors = factors_of(x, spec)
    level = _level(x, results)
    row, row_taught = _side_grad(results.row, grads.row, spec, level), teacher_grad(results.row, grads.row)
    own = Own(level, factor=factors.query)
    mine = _with_gradients(key_block(x, spec, alpha, factor=factors.key), x, spec, results, grads, row)
    into = _own_gradients(ring, x, spec, alpha, wanted, factors, query_sum, key_sum)
    tiles = registry.choose(x, spec)
    trip: RingPass[KeyBlock, KeyGrad] = RingPass(ring, mine)
    cuts = cuts_of(ring, x, spec)
    for block, cut, kept in zip(trip, cuts, pieces(results.cache, cuts), strict=True):
        visitor = block.carried
        scores = scores_of(ring, block.source, cut.plan, x, visitor, spec, alpha, own, kept)
        mirrored = scores.k is None
        col = None if visitor.grad is None or mirrored else SideGrad(visitor.lse, visitor.grad, visitor.level)
        given = Given(row, col, results.pos, grads.pos if block.home else None, grads.row.sums, visitor.sums_grad)
        if results.teacher_pos is not None:
            given = given._replace(teacher=_taught_grads(row_taught, visitor, results.teacher_pos))
        keys = _key_gradients(block, x, alpha, wanted, factors, key_sum)
        # With `key=None` both ranks compute their shared tiles, so each takes half.
        halved = x.key is None and not block.home and into.dalpha is not None
        out = into._replace(
            dk=into.dq if mirrored else keys.dk,
            dalpha=alpha.new_zeros(()) if halved else into.dalpha,
            dcol_bias=keys.dbias,
            dcol_norm=keys.dnorm,
        )
        with library_products(spec.precision, x.query):
            tiles.backward(scores, spec, given, out)
        if halved and into.dalpha is not None and out.dalpha is not None:
            into.dalpha.add_(out.dalpha / 2)
    of_keys = trip.home or KeyGrad(None)
    if spec.normalize:
        add_norm_grads_(into.dq, x.query, spec.prefixes, factors.query, into.drow_norm)
        add_norm_grads_(of_keys.dk, x.keys, spec.prefixes, factors.key, of_keys.dnorm)
    dq = None if into.dq is None or query_sum is not None else into.dq
    return InputGrads(
        query=dq if dq is None or x.stand_in is not None else dq.to(x.query.dtype),
        key=None if of_keys.dk is None or key_sum is not None else of_keys.dk.to(x.query.dtype),
        scale=_scale_grad(into.dalpha, x, spec, alpha, results, grads),
        bias=None if into.dbias is None or x.bias is None else into.dbias.to(x.bias.dtype),
        key_bias=_key_bias_grad(of_keys.dbias, x, spec),
    )


def _level(x: Inputs, results: PairStats) -> Tensor | None:
    """What rows compare their products with, or a guide's products."""
    for level in (results.guide_level, x.guide_level, results.level):
        if level is not None:
            return level
    return x.query_level


def _with_gradients(
    mine: KeyBlock, x: Inputs, spec: Spec, results: PairStats, grads: PairStats, row: SideGrad | None
) -> KeyBlock:
    """This rank's keys with the gradients of their columns; with symmetric scores these are a visitor's rows."""
    symmetric = x.key is None
    col = row if symmetric else _side_grad(results.col, grads.col, spec, None)
    if col is not None:
        mine = mine._replace(level=_level_by_key(_level(x, results), x, spec), lse=col.lse, grad=col.grad)
    taught = teacher_grad(results.col, grads.col)
    if taught is not None:
        mine = mine._replace(teacher_lse=taught.lse, teacher_grad=taught.grad)
    sums_grad = grads.row.sums if symmetric else grads.col.sums
    if spec.sums and (grads.row.sums is not None or sums_grad is not None):
        mine = mine._replace(classes=x.key_classes, sums_grad=sums_grad)
    return mine


def _own_gradients(
    ring: Ring,
    x: Inputs,
    spec: Spec,
    alpha: Tensor,
    wanted: Wanted,
    factors: Factors,
    query_sum: Tensor | None,
    key_sum: Tensor | None,
) -> Gradients:
    """What all blocks add to: the gradients of this rank's queries, of the scale and of the bias."""
    # dq accumulates in full precision over several blocks, both sides of a tile, or class sums. Otherwise each row is
    # written once.
    alone, symmetric = ring.team.size == 1, x.key is None
    once = alone and not symmetric and not spec.sums and not spec.prefixes and query_sum is None
    dq = query_sum
    if dq is None and wanted.query:
        dtype = x.query.dtype if once and x.stand_in is None else alpha.dtype
        make = torch.empty if once and ring.sizes[0] else torch.zeros
        dq = make(x.query.shape, dtype=dtype, device=x.query.device)
    return Gradients(
        dq,
        dk=None,
        dalpha=alpha.new_zeros(()) if wanted.scale else None,
        dbias=alpha.new_zeros(()) if wanted.bias else None,
        once=once,
        drow_norm=None if dq is None or factors.query is None else torch.zeros_like(factors.query),
        shared=query_sum is not None or key_sum is not None,
    )


def _key_gradients(
    block: Block[KeyBlock, KeyGrad], x: Inputs, alpha: Tensor, wanted: Wanted, factors: Factors, key_sum: Tensor | None
) -> KeyGrad:
    """What the gradients of a block's keys are added to; it travels on with them."""
    dk = key_sum
    if dk is None and wanted.key and x.key is not None:
        dk = block.zeros(x.query, alpha.dtype)
    dbias = block.zeros(x.key_bias, alpha.dtype) if wanted.key_bias and x.key_bias is not None else None
    dnorm = block.zeros(factors.key) if dk is not None and factors.key is not None else None
    keys = KeyGrad(dk, dbias, dnorm)
    if dk is not None or dbias is not None:
        block.gathered = keys
    return keys


def _taught_grads(row: SideGrad | None, visitor: KeyBlock, teacher_pos: Tensor) -> TeacherGrads | None:
    col = None if visitor.teacher_grad is None else SideGrad(visitor.teacher_lse, visitor.teacher_grad, None)
    return None if row is None and col is None else TeacherGrads(row, col, teacher_pos)


def _scale_grad(
    dalpha: Tensor | None, x: Inputs, spec: Spec, alpha: Tensor, results: PairStats, grads: PairStats
) -> Tensor | None:
    """From the gradient of alpha, and the sums of scores, which are proportional to the scale."""
    if dalpha is None:
        return None
    sides = ((results.row.sums, grads.row.sums), (results.col.sums, grads.col.sums)) if spec.sums else ()
    for result, grad in sides:
        if result is not None and grad is not None:
            dalpha += (grad * result).sum() / alpha
    return (dalpha / number(spec.unit, dalpha)).to(x.scale.dtype)


def _key_bias_grad(dbias: Tensor | None, x: Inputs, spec: Spec) -> Tensor | None:
    if dbias is None or x.key_bias is None:
        return None
    return (dbias / number(spec.unit, dbias)).to(x.key_bias.dtype)


def _level_by_key(level: Tensor | None, x: Inputs, spec: Spec) -> Tensor | None:
    """What keys compare their columns with in the backward pass."""
    if level is None or not (spec.filters or x.guide_query is not None):
        return None
    return level if x.key is None else by_key(level, x, spec, otherwise=torch.inf)


def _taught(x: Inputs, spec: Spec, own: Own, mine: KeyBlock) -> tuple[TeacherSide | None, TeacherSide | None]:
    """What the statistics of rows and columns need at the end."""
    if own.centre is None or own.teacher_pos is None:
        return None, None
    row = TeacherSide(own.centre, own.teacher_pos)
    if mine.centre is None:
        return row, None
    return row, TeacherSide(mine.centre, by_key(own.teacher_pos, x, spec, otherwise=-torch.inf))


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


def _terms(pos: Tensor | None, x: Inputs, spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """A term of each row's and of each column's log-sum-exp: the positive's score."""
    if pos is None:
        return None, None
    if spec.exclude_self and x.labels is not None:  # a row that is its own positive has no such term
        pos = pos.masked_fill(x.labels == torch.arange(len(pos), device=pos.device), -torch.inf)
    return pos, by_key(pos, x, spec, otherwise=-torch.inf) if spec.cols else None

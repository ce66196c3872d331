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
from contratile.engine.backends.block import Given, Gradients, SideGrad, TeacherGrads
from contratile.engine.backends.precision import library_products, resolve
from contratile.engine.beside import centres, teacher_grad
from contratile.engine.cuts import cached_items, cuts_of, pieces
from contratile.engine.prefixes import add_norm_grads_
from contratile.engine.spec import InputGrads, Inputs, PairStats, SideStats, Spec, Wanted, number
from contratile.engine.stats import SideParts, TeacherSide, accumulation_dtype
from contratile.engine.visitors import KeyBlock, KeyGrad, Own, alpha_of, by_key, factors_of, key_block, scores_of
from contratile.ring.ring import Ring, RingPass


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
    level = x.query_level
    tiles = registry.choose(x, spec)
    centre, teacher_pos = centres(x, alpha), None if x.teacher_query is None or pos is None else torch.zeros_like(pos)
    guide_level = x.guide_level
    if x.guide_query is not None and pos is not None:
        guide_level = torch.zeros_like(pos)
        home = scores_of(ring, ring.team.rank, cuts[0].plan, x, mine, spec, alpha, Own(level))
        assert home.guide is not None
        with library_products(spec.precision, x.query):
            torch_tiles.guide_positives(home, home.guide, guide_level)
    if spec.cols and not (centre is None and guide_level is None):
        mine = mine._replace(
            centre=None if centre is None else by_key(centre, x, spec, otherwise=0.0),
            guide_level=None if guide_level is None else by_key(guide_level, x, spec, otherwise=torch.inf),
        )
    if spec.compares and pos is not None:
        level = torch.zeros_like(pos)
        home = scores_of(ring, ring.team.rank, cuts[0].plan, x, mine, spec, alpha, Own(level))
        tiles.positives(home, spec, level)
        torch_tiles.score_positives_(home, pos.copy_(level))
        if spec.cols:
            mine = mine._replace(level=by_key(level, x, spec, otherwise=torch.inf))
    own = Own(level, centre, teacher_pos, guide_level, factors.query)
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
    query_sum: Tensor | None = None,
    key_sum: Tensor | None = None,
) -> InputGrads:
    """The gradients of the inputs from those of the results. A result without gradient costs nothing.

    With a stand-in the gradient of the queries is not rounded to their dtype. On one process there may be tensors of
    the accumulation dtype that those of queries and keys are added to, instead of being returned.
    """
    spec = _resolved(spec, x)
    alpha = alpha_of(x.scale, spec, accumulation_dtype(x.query.dtype))
    symmetric, alone = x.key is None, ring.team.size == 1
    full = x.stand_in is not None
    # dq accumulates in full precision over several blocks, both sides of a tile, or class sums. Otherwise each row is
    # written once.
    shared = query_sum is not None or key_sum is not None
    once = alone and not symmetric and not spec.sums and not spec.prefixes and query_sum is None
    dtype = x.query.dtype if once and not full else alpha.dtype
    make = torch.empty if once and ring.sizes[0] else torch.zeros
    dq = query_sum
    if dq is None and wanted.query:
        dq = make(x.query.shape, dtype=dtype, device=x.query.device)
    dscale = alpha.new_zeros(()) if wanted.scale else None
    dbias = alpha.new_zeros(()) if wanted.bias else None
    level = x.query_level if results.level is None else results.level
    guide_level = x.guide_level if results.guide_level is None else results.guide_level
    if guide_level is not None:
        level = guide_level
    tiles = registry.choose(x, spec)
    row = _side_grad(results.row, grads.row, spec, level)
    # With symmetric scores a visitor's rows are this rank's columns.
    col = row if symmetric else _side_grad(results.col, grads.col, spec, None)
    col_sums_grad = grads.row.sums if symmetric else grads.col.sums
    factors = factors_of(x, spec)
    own = Own(level, factor=factors.query)
    dnorm = factors.query.new_zeros(factors.query.shape) if dq is not None and factors.query is not None else None
    column = {} if col is None else {"level": _level_by_key(level, x, spec), "lse": col.lse, "grad": col.grad}
    mine = key_block(x, spec, alpha, factor=factors.key, **column)
    row_taught, col_taught = teacher_grad(results.row, grads.row), teacher_grad(results.col, grads.col)
    if col_taught is not None:
        mine = mine._replace(teacher_lse=col_taught.lse, teacher_grad=col_taught.grad)
    if spec.sums and (grads.row.sums is not None or col_sums_grad is not None):
        mine = mine._replace(classes=x.key_classes, sums_grad=col_sums_grad)
    trip: RingPass[KeyBlock, KeyGrad] = RingPass(ring, mine)
    cuts = cuts_of(ring, x, spec)
    for block, cut, kept in zip(trip, cuts, pieces(results.cache, cuts), strict=True):
        visitor = block.carried
        scores = scores_of(ring, block.source, cut.plan, x, visitor, spec, alpha, own, kept)
        mirrored = scores.k is None
        theirs = None
        if visitor.grad is not None and not mirrored:
            theirs = SideGrad(visitor.lse, visitor.grad, visitor.level)
        pos_grad = grads.pos if block.home else None
        given = Given(row, theirs, results.pos, pos_grad, grads.row.sums, visitor.sums_grad)
        if results.teacher_pos is not None:
            theirs = None if visitor.teacher_grad is None else SideGrad(visitor.teacher_lse, visitor.teacher_grad, None)
            if row_taught is not None or theirs is not None:
                given = given._replace(teacher=TeacherGrads(row_taught, theirs, results.teacher_pos))
        dk = key_sum
        if dk is None and wanted.key and not symmetric:
            dk = block.zeros(x.query, alpha.dtype)
        dkey_bias = block.zeros(x.key_bias, alpha.dtype) if wanted.key_bias and x.key_bias is not None else None
        dkey_norm = block.zeros(factors.key) if dk is not None and factors.key is not None else None
        if dk is not None or dkey_bias is not None:
            block.gathered = KeyGrad(dk, dkey_bias, dkey_norm)
        # With `key=None` both ranks compute their shared tiles, so each takes half.
        dalpha = alpha.new_zeros(()) if dscale is not None and symmetric and not block.home else dscale
        out = Gradients(dq, dq if mirrored else dk, dalpha, dbias, once, dkey_bias, dnorm, dkey_norm, shared)
        with library_products(spec.precision, x.query):
            tiles.backward(scores, spec, given, out)
        if dscale is not None and dalpha is not None and dalpha is not dscale:
            dscale += dalpha / 2
    if dscale is not None:
        sides = ((results.row.sums, grads.row.sums), (results.col.sums, grads.col.sums)) if spec.sums else ()
        for result, grad in sides:
            if result is not None and grad is not None:
                dscale += (grad * result).sum() / alpha
        dscale = (dscale / number(spec.unit, dscale)).to(x.scale.dtype)
    of_keys = trip.home or KeyGrad(None)
    if of_keys.dbias is not None:
        of_keys = of_keys._replace(dbias=of_keys.dbias / number(spec.unit, of_keys.dbias))
    if spec.normalize:
        add_norm_grads_(dq, x.query, spec.prefixes, factors.query, dnorm)
        add_norm_grads_(of_keys.dk, x.keys, spec.prefixes, factors.key, of_keys.dnorm)
    return InputGrads(
        query=None if dq is None or query_sum is not None else dq if full else dq.to(x.query.dtype),
        key=None if of_keys.dk is None or key_sum is not None else of_keys.dk.to(x.query.dtype),
        scale=dscale,
        bias=None if dbias is None or x.bias is None else dbias.to(x.bias.dtype),
        key_bias=None if of_keys.dbias is None or x.key_bias is None else of_keys.dbias.to(x.key_bias.dtype),
    )


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

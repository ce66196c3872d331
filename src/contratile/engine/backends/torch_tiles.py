"""The tile engine in plain PyTorch: BLAS per tile, any device.

Shapes: N queries, M keys, D features; a tile has R rows and C columns:

    s_RC = (alpha * q_RD) k_CD^T + bias        alpha = scale * log2(e) for log-sum-exps in base 2

A tile costs one product forward and up to three backward (scores again, query gradient, key gradient), and serves both
directions. The loops over tiles are here; what happens to a tile is in `torch_reductions.py`. Products are written into
buffers, which also keeps autocast from rounding them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contratile.engine.backends.block import Beside, Given, Gradients, Scores, SideGrad
from contratile.engine.backends.torch_guide import GuidedReader, GuidedWeights, guide_limit
from contratile.engine.backends.torch_hardness import Hardness, HardReader, HardWeights
from contratile.engine.backends.torch_ranks import Beaten, RankReader
from contratile.engine.backends.torch_reductions import LseReader, LseSide, LseWeights, Reader, Sums, Weights
from contratile.engine.backends.torch_softplus import SoftplusReader, SoftplusWeights
from contratile.engine.backends.torch_sums import add_sum_grads, with_class_sums
from contratile.engine.backends.torch_teacher import CrossSums, TeacherReader, TeacherWeights
from contratile.engine.backends.torch_workspace import Workspace, as_tile
from contratile.engine.plan import Tile
from contratile.engine.prefixes import features
from contratile.engine.rule import PairRule
from contratile.engine.spec import Spec
from contratile.engine.stats import SideParts, lowest, part


def forward(scores: Scores, spec: Spec, pos: Tensor | None) -> tuple[SideParts, SideParts]:
    """Compute every tile and let the readers reduce it; write each row's positive score to `pos`."""
    plan, rule, prefixes = scores.plan, scores.rule, scores.prefixes
    ws = Workspace(plan, scores.q, scores.key)
    readers, ranks = [_reader(scores, spec, ws) for _ in prefixes.blocks], _rank_reader(scores, spec)
    of_prefix = [pos] * len(readers) if pos is None or not prefixes.asked else pos.unbind(1)
    for block, tiles in plan.blocks():
        q_RD = ws.query(scores.q, block, scores.query_factor)
        for tile in tiles:
            p_RC, spare_RC = _cached(scores, tile), ws.tile(1, tile)
            p_RC = ws.tile(0, tile) if p_RC is None else p_RC
            k_CD = ws.key(scores.key, tile.cols)
            for at, (reader, known) in enumerate(zip(readers, of_prefix, strict=True)):
                products(scores, q_RD, k_CD, tile, p_RC, spare_RC, at)
                s_RC = p_RC
                if prefixes.asked:
                    s_RC = _times_factor(p_RC, prefixes.factor(at, tile, spare_RC), out=ws.tile(2, tile))
                if not spec.compares:
                    score_(scores, s_RC, tile, bias=not scores.biased_late)
                    if known is not None:
                        _read_positives(s_RC, tile, rule, known)
                rule.exclude_(s_RC, tile)
                if ranks is not None:
                    ranks.read(s_RC, spare_RC, tile)
                if spec.compares and not spec.filters:
                    score_(scores, s_RC, tile, bias=not scores.biased_late)
                reader.read(s_RC, spare_RC, tile)
    if pos is not None and scores.biased_late and scores.col_bias is not None:
        pos.add_(rule.of_positives(scores.col_bias))
    parts = [reader.parts() for reader in readers]
    rows, cols = map(SideParts.stacked, zip(*parts, strict=True)) if prefixes.asked else parts[0]
    if ranks is not None:
        row_ranks, col_ranks = ranks.parts()
        rows = rows._replace(higher=row_ranks.higher, equal=row_ranks.equal)
        cols = cols._replace(higher=col_ranks.higher, equal=col_ranks.equal)
    return with_class_sums(rows, cols, scores, spec) if spec.sums else (rows, cols)


def products(
    scores: Scores, q_RD: Tensor, k_CD: Tensor, tile: Tile, out: Tensor, spare: Tensor, prefix: int = 0
) -> Tensor:
    """The products of a tile, or of its next prefix, which builds on the one before in `out`.

    On the diagonal of symmetric scores they are made symmetric to the last bit.
    """
    block_D = scores.prefixes.blocks[prefix]
    if block_D is not None:
        assert scores.k is not None, "prefixes are for two sets"
        return out.addmm_(features(q_RD, block_D), features(k_CD, block_D).t(), beta=min(prefix, 1))
    if scores.plan.flipped:
        torch.mm(k_CD, q_RD.t(), out=out.t())
    else:
        torch.mm(q_RD, k_CD.t(), out=out)
    if scores.k is None and tile.rows == tile.cols:
        torch.maximum(out, spare.copy_(out.t()), out=out)  # <a, b> and <b, a> may round differently
    return out


def _times_factor(p_RC: Tensor, factor_RC: Tensor | None, *, out: Tensor) -> Tensor:
    return out.copy_(p_RC) if factor_RC is None else torch.mul(p_RC, factor_RC, out=out)


def score_(scores: Scores, x_RC: Tensor, tile: Tile, *, bias: bool = True) -> Tensor:
    """Turn products into scores, in place."""
    if not scores.folded:
        x_RC.mul_(scores.alpha.abs())
    return _biased(scores, x_RC, tile, out=x_RC) if bias else x_RC


def _biased(scores: Scores, x_RC: Tensor, tile: Tile, *, out: Tensor) -> Tensor:
    """Add the biases; x itself if there are none."""
    if scores.bias is not None:
        x_RC = torch.add(x_RC, scores.bias, out=out)
    return x_RC if scores.col_bias is None else torch.add(x_RC, part(scores.col_bias, tile.cols), out=out)


def score_positives_(scores: Scores, products: Tensor) -> None:
    """Turn the positives' products into scores, in place, as `score_` does with a tile. Alpha is not in them yet."""
    products.mul_(scores.alpha.abs())
    if scores.bias is not None:
        products.add_(scores.bias)
    if scores.col_bias is not None:
        products.add_(scores.rule.of_positives(scores.col_bias))


def _cached(scores: Scores, tile: Tile) -> Tensor | None:
    """The place of a tile in the cache, if it has one."""
    cache = scores.cache
    if cache is None or tile.end > cache.shape[0]:
        return None
    return as_tile(part(cache, slice(tile.offset, tile.end)), tile, scores.plan)


def _reader(scores: Scores, spec: Spec, ws: Workspace) -> Reader:
    n, m, alpha, rule = scores.plan.n, scores.plan.m, scores.alpha, scores.rule
    if spec.reduce == "softplus":
        return SoftplusReader(rule, alpha.new_zeros(n), alpha.new_zeros(m) if spec.cols else None)
    row_limit, col_limit = _limits(scores, spec)
    row = Sums(n, alpha, row_limit) if spec.rows else None
    col = Sums(m, alpha, col_limit) if spec.cols else None
    if scores.guide is not None:
        return GuidedReader(rule, row, col, BesideProducts(scores, scores.guide))
    if scores.hardness is not None:
        return HardReader(Hardness(scores, rule, scores.hardness), row, col, partial(ws.tile, 2))
    reader, teacher = LseReader(rule, row, col, partial(score_, scores)), scores.teacher
    if teacher is None:
        return reader
    taught_row, taught_col = (
        CrossSums(length, alpha, centre) if wanted and centre is not None else None
        for length, centre, wanted in ((n, teacher.row, spec.rows), (m, teacher.col, spec.cols))
    )
    return TeacherReader(reader, rule, taught_row, taught_col, BesideProducts(scores, teacher), teacher.pos)


def _rank_reader(scores: Scores, spec: Spec) -> RankReader | None:
    if not spec.ranks:
        return None
    assert scores.row_level is not None
    row = Beaten(scores.row_level, ties=spec.ties)
    col = None if scores.col_level is None or not spec.cols else Beaten(scores.col_level, ties=spec.ties)
    return RankReader(scores.rule, row, col)


def _limits(scores: Scores, spec: Spec) -> tuple[Tensor | None, Tensor | None]:
    """The limits of rows and columns: the highest product that counts, or guide product if there is a guide."""
    if scores.guide is not None:
        return guide_limit(scores.guide.row, spec), guide_limit(scores.guide.col, spec)
    return _limit(scores.row_level, spec), _limit(scores.col_level, spec)


def _limit(level: Tensor | None, spec: Spec) -> Tensor | None:
    return level - spec.margin if level is not None and spec.filters else None


def guide_positives(scores: Scores, guide: Beside, level: Tensor) -> None:
    """Write the guide's product of each row with its positive, exactly as both passes compute it."""
    products = BesideProducts(scores, guide)
    spare = Workspace(scores.plan, scores.q, scores.key)
    for tile in scores.plan.tiles():
        if any(True for _ in scores.rule.places(spare.tile(0, tile), tile)):
            _read_positives(products(tile, spare.tile(0, tile)), tile, scores.rule, level)


def positives(scores: Scores, spec: Spec, level: Tensor) -> None:
    """Write each row's product with its positive: computes the tiles that hold one, exactly as `forward` will."""
    plan = scores.plan
    ws = Workspace(plan, scores.q, scores.key)
    for block, tiles in plan.blocks():
        q_RD = ws.query(scores.q, block, scores.query_factor)
        for tile in tiles:
            s_RC = ws.tile(0, tile)
            if any(True for _ in scores.rule.places(s_RC, tile)):
                products(scores, q_RD, ws.key(scores.key, tile.cols), tile, s_RC, ws.tile(1, tile))
                _read_positives(s_RC, tile, scores.rule, level)


def _read_positives(s_RC: Tensor, tile: Tile, rule: PairRule, pos: Tensor) -> None:
    for at in rule.places(s_RC, tile):
        known = part(pos, at.rows)
        known.copy_(at.get(known))


def backward(scores: Scores, spec: Spec, given: Given, into: Gradients) -> None:
    """Add this block's share to the gradients.

    g_RC = weights of s_RC, + pos_grad where a column is the row's positive
    dq += alpha g k,   dk += g^T (alpha q),   dalpha += sum(g * (s - bias)) / alpha,   dbias += sum(g)

    Each prefix has its own g; a block of features is multiplied by the sum of the g of all prefixes that contain it.
    """
    plan, (dq, dk, dalpha, _, once, *_) = scores.plan, into
    assert dk is None or dk.dtype == scores.alpha.dtype, "key gradients accumulate over row blocks, in full precision"
    step = _TileGradient(scores, spec, given, into)
    ws, alpha = step.ws, scores.alpha
    # One row block whose gradient is written once needs no buffer. Several do: BLAS rounds by alignment in memory.
    direct = dq if once and dq is not None and dq.dtype == alpha.dtype and plan.rows >= plan.n else None
    for block, tiles in plan.blocks() if plan.m else ():
        plain_RD = ws.query(scores.q, block, scores.query_factor)
        q_RD = plain_RD if scores.folded else ws.scaled_query(scores.q, block, alpha)
        dq_RD = ws.query_grad(block) if direct is None else direct
        for number, tile in enumerate(tiles):
            # A diagonal tile of symmetric scores is its own transpose: with the weights of both sides, one product
            # replaces two and counts every pair twice.
            twice = tile.rows == tile.cols and scores.k is None and dq is not None
            if twice:
                tile = tile._replace(mirrored=True)
            k_CD = ws.key(scores.key, tile.cols)
            s_RC = step.weigh(tile, plain_RD, k_CD)
            step.multiply(tile, q_RD, k_CD, dq_RD, first=number == 0, twice=twice)
            if dalpha is not None and twice:
                dalpha -= torch.dot(q_RD.flatten(), dq_RD.flatten()) / (2 * alpha)
            if dalpha is not None and step.keep_scores:
                dalpha += step.of_scores(tile, s_RC)
        if dalpha is not None and not step.keep_scores:
            dalpha += torch.dot(q_RD.flatten(), dq_RD.flatten()) / alpha
        if dq is not None and once:
            torch.mul(dq_RD, alpha, out=part(dq, block))
        elif dq is not None:
            part(dq, block).add_(dq_RD.mul_(alpha))
    if given.row_sums is not None or given.col_sums is not None:
        add_sum_grads(dq, None if scores.k is None else dk, scores, spec, given)


class _TileGradient:
    """What the backward pass does with one tile: the gradient g of its scores, then its products with keys and queries.

    Buffers: 0 is g, or with prefixes the product; 1 is scratch; 2 holds the scores, or the factors of a prefix; 3 and
    those after it are the g of each prefix.
    """

    def __init__(self, scores: Scores, spec: Spec, given: Given, into: Gradients) -> None:
        self.scores, self.spec, self.into, self.pos = scores, spec, into, given.pos
        self.nested = scores.prefixes.asked
        self.weights = [_weights(scores, spec, x) for x in given.by_prefix(scores.prefixes)]
        # sum(g * s) = <alpha q, g k>, so dalpha is free with a query gradient; without one the scores must be kept.
        self.of_query = into.dq is not None or (into.dalpha is not None and self.nested)
        self.keep_scores = into.dalpha is not None and not self.of_query
        # Scores are kept without biases, which would round them.
        biased = not (scores.bias is None and scores.col_bias is None)
        self.apart = self.keep_scores and not spec.filters and not scores.biased_late and biased
        self.ws = Workspace(scores.plan, scores.q, scores.key)

    def g(self, tile: Tile, prefix: int) -> Tensor:
        return self.ws.tile(3 + prefix if self.nested else 0, tile)

    def weigh(self, tile: Tile, q_RD: Tensor, k_CD: Tensor) -> Tensor:
        """Compute the scores and write g, of every prefix. Returns the scores, which g may have overwritten."""
        scores, rule, into, ws = self.scores, self.scores.rule, self.into, self.ws
        spare_RC, factor_RC, s_RC = ws.tile(1, tile), None, k_CD
        for prefix, weigher in enumerate(self.weights):
            g_RC = self.g(tile, prefix)
            kept_RC = None if self.apart else _cached(scores, tile)
            s_RC = p_RC = ws.tile(2 if self.keep_scores else 0, tile) if kept_RC is None else kept_RC
            if kept_RC is None:
                products(scores, q_RD, k_CD, tile, p_RC, spare_RC, prefix)
                if self.nested:
                    factor_RC = scores.prefixes.factor(prefix, tile, ws.tile(2, tile))
                    s_RC = _times_factor(p_RC, factor_RC, out=g_RC)
                if not self.spec.filters:
                    score_(scores, s_RC, tile, bias=not (self.apart or scores.biased_late))
                rule.exclude_(s_RC, tile)
            weigher.weigh(_biased(scores, s_RC, tile, out=g_RC) if self.apart else s_RC, g_RC, spare_RC, tile)
            for at in rule.places(g_RC, tile):
                at.put_(weigher.positive(at.rows, both=scores.k is not None or tile.mirrored))
            if into.dbias is not None:
                into.dbias.add_(g_RC.sum())
            if into.dcol_bias is not None:
                part(into.dcol_bias, tile.cols).add_(g_RC.sum(0))
            if factor_RC is not None:
                _add_norm_sums(g_RC.mul_(factor_RC), p_RC, spare_RC, tile, prefix, into)
        return s_RC

    def multiply(self, tile: Tile, q_RD: Tensor, k_CD: Tensor, dq_RD: Tensor, *, first: bool, twice: bool) -> None:
        """Add the products of g with keys to dq, and with queries to dk. `first`: overwrite dq."""
        dk = self.into.dk
        for prefix in reversed(range(len(self.weights))):
            g_RC, block_D = self.g(tile, prefix), self.scores.prefixes.blocks[prefix]
            if prefix + 1 < len(self.weights):
                g_RC.add_(self.g(tile, prefix + 1))
            if self.of_query:
                features(dq_RD, block_D).addmm_(g_RC, features(k_CD, block_D), beta=0 if first else 1)
            if dk is not None and not twice:
                features(part(dk, tile.cols), block_D).addmm_(g_RC.t(), features(q_RD, block_D))

    def of_scores(self, tile: Tile, s_RC: Tensor) -> Tensor:
        """The tile's share of dalpha, from its scores."""
        scores, spare_RC = self.scores, self.ws.tile(1, tile)
        # Excluded pairs have s = -inf and g = 0: clamp s so that the product is 0, not NaN.
        torch.clamp(s_RC, min=lowest(s_RC.dtype), out=spare_RC)
        if self.pos is not None and scores.rule.exclude_self:
            assert not self.apart
            for at in scores.rule.places(spare_RC, tile):
                at.put_(self.pos[at.rows])
        factor = scores.query_factor if self.spec.filters else scores.alpha
        return spare_RC.mul_(self.g(tile, 0)).sum() / factor


def _add_norm_sums(w_RC: Tensor, p_RC: Tensor, spare_RC: Tensor, tile: Tile, prefix: int, into: Gradients) -> None:
    """The sums of score times gradient of one prefix: weights w = g r c, products p."""
    torch.mul(w_RC, p_RC, out=spare_RC)
    if into.drow_norm is not None:
        into.drow_norm[tile.rows, prefix] += spare_RC.sum(1)
    if into.dcol_norm is not None:
        into.dcol_norm[tile.cols, prefix] += spare_RC.sum(0)


# --- helpers of the loops -------------------------------------------------------------------------------------------


def _weights(scores: Scores, spec: Spec, given: Given) -> Weights:
    alpha = scores.alpha
    rule, pos, pos_grad = scores.rule, given.pos, given.pos_grad
    if spec.reduce == "softplus":
        sums = alpha.new_zeros(scores.plan.n) if given.row is None else given.row.grad
        col_sums = None if given.col is None else given.col.grad
        return SoftplusWeights(sums, col_sums, rule=rule, pos=pos, pos_grad=pos_grad)
    row, col = _direction(given.row, scores, spec), _direction(given.col, scores, spec)
    factor = alpha.abs() if spec.filters else None
    own: dict[str, Any] = {"rule": rule, "pos": pos, "pos_grad": pos_grad, "mirrored": scores.k is None}
    if scores.guide is not None:
        return GuidedWeights(row, col, **own, products=BesideProducts(scores, scores.guide))
    weights = LseWeights(row, col, **own, factor=factor, col_bias=scores.col_bias)
    if scores.hardness is not None:
        return HardWeights(Hardness(scores, rule, scores.hardness), weights)
    taught, teacher = given.teacher, scores.teacher
    if taught is None or teacher is None:
        return weights
    row, col = _direction(taught.row, scores, spec), _direction(taught.col, scores, spec)
    of_teacher = LseWeights(row, col, rule=rule, pos=taught.pos, pos_grad=None, mirrored=False)
    return TeacherWeights(weights, of_teacher, rule, BesideProducts(scores, teacher))


def _direction(side: SideGrad | None, scores: Scores, spec: Spec) -> LseSide | None:
    if side is None:
        return None
    lse = side.lse
    assert lse is not None
    if scores.guide is not None:
        # The guide may drop all pairs of a row: any finite number will do, because all its weights are set to 0.
        lse = lse.masked_fill(lse == -torch.inf, 0)
        return LseSide(lse, side.grad, guide_limit(side.level, spec))
    # A row whose pairs are all excluded, by a bias of -inf too, has -inf: use a finite floor instead.
    if spec.exclude_self or spec.filters or scores.rule.query_ids is not None or scores.col_bias is not None:
        lse = lse.clamp(min=lowest(lse.dtype))
    return LseSide(lse, side.grad, _limit(side.level, spec))


class BesideProducts:
    """The `Products` of the features in a `Beside`."""

    def __init__(self, scores: Scores, beside: Beside) -> None:
        self.scores, self.beside = scores, beside
        plan = replace(scores.plan, d=beside.q.shape[1])
        self._ws = Workspace(plan, beside.q, beside.k)
        self._rows: slice | None = None

    def __call__(self, tile: Tile, spare_RC: Tensor) -> Tensor:
        if tile.rows != self._rows:
            self._rows, self._q_RD = tile.rows, self._ws.query(self.beside.q, tile.rows, self.beside.factor)
        k_CD = self._ws.key(self.beside.k, tile.cols)
        return products(self.scores, self._q_RD, k_CD, tile, self._ws.tile(0, tile), spare_RC)

    def spare(self, tile: Tile) -> Tensor:
        return self._ws.tile(1, tile)

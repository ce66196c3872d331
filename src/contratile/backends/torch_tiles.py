"""The tile engine in plain PyTorch: BLAS per tile, any device.

Shapes: N queries, M keys, D features; a tile has R rows and C columns. Everything is in base 2:

    s_RC = (alpha * q_RD) k_CD^T        alpha = scale * log2(e)

One tile costs one product forward and up to three backward (scores again, query gradient, key gradient), and
serves both directions. `forward` adds a block of keys to running statistics and `backward` adds its share to
running gradients, so a ring calls them once per visiting block and one process calls them once. Products are
written in place or into given buffers, which also keeps autocast from rounding them.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from contratile.pairs import PairRule
from contratile.stats import Stats, lowest
from contratile.tiles import Tile, TilePlan


class Direction(NamedTuple):
    """What the backward pass knows of the rows (or columns): their log-sum-exps and the gradients of those."""

    lse2: Tensor  # [N] or [M]
    grad: Tensor

    def at(self, index: slice) -> "Direction":
        return Direction(self.lse2[index], self.grad[index])


class Positives(NamedTuple):
    """The positives' scores, as the forward pass read them, and the gradients of those."""

    score2: Tensor  # [N]
    grad: Tensor


def forward(
    q: Tensor,
    k: Tensor | None,
    alpha: Tensor,
    rule: PairRule,
    plan: TilePlan,
    *,
    row_stats: Stats | None,
    col_stats: Stats | None,
    pos: Tensor | None,
    cache: Tensor,
) -> None:
    """Merge the scores of q against k into the statistics, and write each row's positive score to `pos`.

    `k=None` stands for the queries themselves: the scores are symmetric, only the upper triangle of tiles is
    computed, and `row_stats` takes both sides of a tile. `cache` keeps the score tiles that fit into it.
    """
    key = q if k is None else k
    ws = _Workspace(plan, q, key, tiles=2)
    shift: float | None = 0.0
    for rows in plan.row_slices():
        q_RD = ws.query(q, rows, alpha)
        for tile in plan.tiles_of(rows):
            s_RC = _cached(cache, tile) if tile.end <= len(cache) else ws.tile(0, tile)
            torch.mm(q_RD, ws.key(key, tile.cols).t(), out=s_RC)
            if pos is not None:
                for s, r, c in _orientations(s_RC, tile):
                    column, inside = rule.positives(r, c)
                    pos[r] = torch.where(inside, s.gather(1, column).squeeze(1), pos[r])
            rule.exclude_(s_RC, tile.rows, tile.cols)
            shift = _accumulate(s_RC, ws.tile(1, tile), _sides(tile, row_stats, col_stats), shift)


def backward(
    q: Tensor,
    k: Tensor | None,
    alpha: Tensor,
    rule: PairRule,
    plan: TilePlan,
    *,
    row: Direction | None,
    col: Direction | None,
    pos: Positives | None,
    dq: Tensor | None,
    dk: Tensor | None,
    dalpha: Tensor | None,
    cache: Tensor,
) -> None:
    """Add this block's share to the gradients that are wanted: dq [N, D], dk [M, D], dalpha (0-d).

        g_RC = row.grad * exp2(s - row.lse2) + col.grad * exp2(s - col.lse2) + pos.grad * [column is the positive]
        dq  += alpha * g k        dk += g^T (alpha q)        dalpha += sum(g * s) / alpha

    `dk`, which every row block adds to, must have the accumulation dtype; `dq` may have the queries'. With
    `k=None` both are one tensor.
    """
    key = q if k is None else k
    assert dk is None or dk.dtype == alpha.dtype, "key gradients accumulate over row blocks, in full precision"
    # sum(g * s) = <alpha q, g k>, so a query gradient gives dalpha at no cost; without one the scores must be kept.
    keep_scores = dalpha is not None and dq is None
    ws = _Workspace(plan, q, key, tiles=3 if keep_scores else 2)
    for rows in plan.row_slices():
        q_RD = ws.query(q, rows, alpha)
        dq_RD = ws.query_grad(rows)
        for tile in plan.tiles_of(rows):
            k_CD = ws.key(key, tile.cols)
            g_RC, spare_RC = ws.tile(0, tile), ws.tile(1, tile)
            if tile.end <= len(cache):
                s_RC = _cached(cache, tile)
            else:
                s_RC = torch.mm(q_RD, k_CD.t(), out=ws.tile(2, tile) if keep_scores else g_RC)
                rule.exclude_(s_RC, tile.rows, tile.cols)
            sides = _sides(tile, row, col)
            _weigh(s_RC, g_RC, spare_RC, sides)
            if pos is not None:
                _weigh_positives(g_RC, tile, rule, sides, pos)
            if dq is not None:
                dq_RD.addmm_(g_RC, k_CD)
            if dk is not None:
                dk[tile.cols].addmm_(g_RC.t(), q_RD)
            if dalpha is not None and keep_scores:
                # An excluded pair has s = -inf and g = 0: its product is 0, not NaN. Positives always have a score.
                torch.clamp(s_RC, min=lowest(s_RC.dtype), out=spare_RC)
                if pos is not None and rule.excludes:
                    for s, r, c in _orientations(spare_RC, tile):
                        _put(s, rule.positives(r, c), pos.score2[r])
                dalpha += spare_RC.mul_(g_RC).sum() / alpha
        if dalpha is not None and not keep_scores:
            dalpha += torch.dot(q_RD.flatten(), dq_RD.flatten()) / alpha
        if dq is not None:
            dq[rows] += dq_RD.mul_(alpha)


_T = TypeVar("_T", Stats, Direction)


def _orientations(x_RC: Tensor, tile: Tile) -> Iterator[tuple[Tensor, slice, slice]]:
    yield x_RC, tile.rows, tile.cols
    if tile.mirrored:
        yield x_RC.t(), tile.cols, tile.rows


def _sides(tile: Tile, row: _T | None, col: _T | None) -> list[tuple[int, _T]]:
    """The vectors that a tile meets, each with the dimension that a reduction to it removes."""
    sides = []
    if row is not None:
        sides.append((1, row.at(tile.rows)))
        if tile.mirrored:
            sides.append((0, row.at(tile.cols)))
    if col is not None:
        sides.append((0, col.at(tile.cols)))
    return sides


def _cached(cache: Tensor, tile: Tile) -> Tensor:
    return cache[tile.offset : tile.end].view(tile.shape)


# --- one exp2 for both directions -------------------------------------------------------------------------------
#
# exp2(s - shift) serves the rows and the columns of a tile if no row and no column lies so far from the shift that
# its terms overflow or underflow. Within SPAN of the shift, a term that underflows is below 2**-60 of its row's
# sum and of its column's: far under the rounding error. Anything else gets an exp2 per direction, each with
# its own maximum or log-sum-exp as shift, which is exact for every finite input.

_SPAN = {torch.float32: 60.0, torch.float64: 480.0}


def _shared_shift(levels: list[Tensor]) -> float | None:
    """A shift within SPAN of every level, if there is one. `levels` are maxima (forward) or log-sum-exps (backward).

    To look at them would stall an accelerator, which has exponentials to spare: there the answer is None.
    """
    if not levels or not levels[0].is_cpu:
        return None
    span = _SPAN[levels[0].dtype]
    low, high = (bound.item() for bound in torch.cat(levels).aminmax())
    if -span <= low and high <= span:
        return 0.0
    return high if high - low <= span else None


def _exp2(s_RC: Tensor, shift: Tensor | float, out: Tensor) -> Tensor:
    if isinstance(shift, float) and shift == 0.0:
        return torch.exp2(s_RC, out=out)
    return torch.sub(s_RC, shift, out=out).exp2_()


def _accumulate(s_RC: Tensor, e_RC: Tensor, sides: list[tuple[int, Stats]], shift: float | None) -> float | None:
    """Merge one tile into the statistics of its sides; e_RC is scratch. Returns the shift to try on the next tile.

    The shift is a guess from the tile before, and the sums tell whether it was good: they are all in range, or
    the maxima are looked up and the tile is done again from them.
    """
    if shift is not None:
        _exp2(s_RC, shift, e_RC)
        totals = [e_RC.sum(dim) for dim, _ in sides]
        low, high = (bound.item() for bound in torch.cat(totals).aminmax())
        limit = 2 ** _SPAN[s_RC.dtype]
        if 1 / limit <= low and high <= limit**1.5:  # and room for the sums of many tiles
            for (_, stats), total in zip(sides, totals, strict=True):
                stats.merge_(shift, total)
            return shift
    peaks = [s_RC.amax(dim).clamp_min_(lowest(s_RC.dtype)) for dim, _ in sides]
    shift = _shared_shift(peaks)
    for (dim, stats), peak in zip(sides, peaks, strict=True):
        stats.merge_(peak, _exp2(s_RC, peak.unsqueeze(dim), e_RC).sum(dim))
    return shift


def _weigh(s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, sides: list[tuple[int, Direction]]) -> None:
    """g = sum over sides of grad * exp2(s - lse2). g_RC may be s_RC itself."""
    if not sides:
        g_RC.zero_()
        return
    shift = _shared_shift([side.lse2 for _, side in sides]) if len(sides) == 2 else None
    if shift is not None:
        rows, cols = (side.grad * (shift - side.lse2).exp2_() for _, side in sides)
        _exp2(s_RC, shift, g_RC).mul_(torch.add(rows.unsqueeze(1), cols, out=spare_RC))
        return
    # The last side goes first and aside, as writing g may overwrite s.
    for (dim, side), out in reversed(list(zip(sides, (g_RC, spare_RC), strict=False))):
        _exp2(s_RC, side.lse2.unsqueeze(dim), out).mul_(side.grad.unsqueeze(dim))
    if len(sides) == 2:
        g_RC.add_(spare_RC)


def _weigh_positives(
    g_RC: Tensor, tile: Tile, rule: PairRule, sides: list[tuple[int, Direction]], pos: Positives
) -> None:
    """Add the positives' own gradient where they stand.

    Late in training exp2(s - lse2) of a positive is 1 and this sum cancels to almost nothing. So the positives are
    weighed again first, one by one: the shared exp2 rounds twice, which would be all that is left.
    """
    views = list(_orientations(g_RC, tile))
    places = [rule.positives(r, c) for _, r, c in views]
    for flipped, ((g, r, _), (column, inside)) in enumerate(zip(views, places, strict=True)):
        exact = torch.zeros_like(pos.score2[r])
        for dim, side in sides:
            lse2, grad = side if dim != flipped else (x[column.squeeze(1)] for x in side)
            exact.addcmul_(grad, (pos.score2[r] - lse2).exp2_())
        shared = g.gather(1, column).squeeze(1)
        _put(g, (column, inside & (shared != 0)), exact)  # an excluded positive has no share in the sums
    for (g, r, _), (column, inside) in zip(views, places, strict=True):
        g.scatter_add_(1, column, torch.where(inside, pos.grad[r], 0).unsqueeze(1))


def _put(x: Tensor, place: tuple[Tensor, Tensor], values: Tensor) -> None:
    """Write one value per row at its column, where the place is valid."""
    column, valid = place
    x.scatter_(1, column, torch.where(valid, values, x.gather(1, column).squeeze(1)).unsqueeze(1))


class _Workspace:
    """The buffers that every tile of a pass is written into."""

    def __init__(self, plan: TilePlan, q: Tensor, k: Tensor, *, tiles: int) -> None:
        dtype = accumulation_dtype(q.dtype)
        self._tiles = [torch.empty(plan.rows * plan.cols, dtype=dtype, device=q.device) for _ in range(tiles)]
        self._query = torch.empty(plan.rows, plan.d, dtype=dtype, device=q.device)
        self._query_grad = torch.empty_like(self._query)
        as_is = k.dtype == dtype and k.stride(1) == 1 and k.stride(0) >= k.shape[1]
        self._key = None if as_is else torch.empty(plan.cols, plan.d, dtype=dtype, device=k.device)

    def tile(self, index: int, tile: Tile) -> Tensor:
        return self._tiles[index][: tile.end - tile.offset].view(tile.shape)

    def query(self, q: Tensor, rows: slice, alpha: Tensor) -> Tensor:
        """A block of queries in the accumulation dtype, alpha folded in."""
        block = q[rows]
        return self._query[: len(block)].copy_(block).mul_(alpha)

    def query_grad(self, rows: slice) -> Tensor:
        return self._query_grad[: rows.stop - rows.start].zero_()

    def key(self, k: Tensor, cols: slice) -> Tensor:
        """A block of keys that BLAS takes: a view of the keys if their layout allows, else a copy of the block."""
        block = k[cols]
        return block if self._key is None else self._key[: len(block)].copy_(block)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 computes in fp64, everything else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

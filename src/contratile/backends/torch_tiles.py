"""The tile engine in plain PyTorch: BLAS per tile, any device.

Shapes: N queries, M keys, D features; a tile has R rows and C columns. Everything is in base 2:

    s_RC = (alpha * q_RD) k_CD^T        alpha = scale * log2(e)

One tile costs one product forward and up to three backward (scores again, query gradient, key gradient), and
serves both directions. `forward` gives the statistics of a block of keys, ready to be merged with those of others,
and `backward` adds a block's share to running gradients: a ring calls them for every visiting block, one process
once. Products are written in place or into given buffers, which also keeps autocast from rounding them.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from contratile.pairs import PairRule
from contratile.stats import Stats, lowest
from contratile.tiles import Tile, TilePlan


class Direction:
    """What the backward pass knows of the rows (or columns): their log-sum-exps and the gradients of those."""

    def __init__(self, lse2: Tensor, grad: Tensor) -> None:
        # A row without any pair has lse2 = -inf; the finite floor keeps -inf - (-inf) out of the tiles.
        self.lse2 = lse2.clamp(min=lowest(lse2.dtype))
        self.grad = grad
        self._bounds: dict[int, tuple[float, float]] = {}
        self._weights: tuple[float, Tensor] | None = None

    def bounds(self, index: slice) -> tuple[float, float]:
        """The lowest and the highest log-sum-exp of a block, looked up once."""
        if index.start not in self._bounds:
            low, high = self.lse2[index].aminmax()
            self._bounds[index.start] = low.item(), high.item()
        return self._bounds[index.start]

    def weights(self, shift: float) -> Tensor:
        """grad * exp2(shift - lse2), the factor of exp2(s - shift). Most tiles in a row share their shift."""
        if self._weights is None or self._weights[0] != shift:
            self._weights = shift, (shift - self.lse2).exp2_().mul_(self.grad)
        return self._weights[1]


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
    rows: bool,
    cols: bool,
    pos: Tensor | None,
    cache: Tensor,
) -> tuple[Stats | None, Stats | None]:
    """The statistics of the rows and of the columns of q against k; each row's positive score is written to `pos`.

    `k=None` stands for the queries themselves: the scores are symmetric, only the upper triangle of tiles is
    computed, and the rows take both sides of a tile. `cache` keeps the score tiles that fit into it.
    """
    key = q if k is None else k
    ws = _Workspace(plan, q, key, tiles=2)
    row_sums, col_sums = (_Sums(n, alpha) if wanted else None for wanted, n in ((rows, plan.n), (cols, plan.m)))
    shift: float | None = 0.0
    for block in plan.row_slices():
        q_RD = ws.query(q, block, alpha)
        for tile in plan.tiles_of(block):
            s_RC = _cached(cache, tile) if tile.end <= len(cache) else ws.tile(0, tile)
            torch.mm(q_RD, ws.key(key, tile.cols).t(), out=s_RC)
            if pos is not None:
                for at in _positives(s_RC, tile, rule):
                    pos[at.rows] = at.get(pos[at.rows])
            rule.exclude_(s_RC, tile.rows, tile.cols)
            better = _accumulate(s_RC, ws.tile(1, tile), _sides(tile, row_sums, col_sums), shift)
            if better != shift:
                _flush(shift, row_sums, col_sums)
                shift = better
    _flush(shift, row_sums, col_sums)
    return row_sums.stats if row_sums else None, col_sums.stats if col_sums else None


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
    if pos is not None and rule.labels is not None:
        weights = _positive_weights(pos, rule.labels, row, row if k is None else col)
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
            _weigh(s_RC, g_RC, spare_RC, _sides(tile, row, col))
            if pos is not None:
                # Places first and gradients second: two queries that are each other's positive share a place.
                places = list(_positives(g_RC, tile, rule))
                for at in places:
                    at.put_(weights[k is not None or tile.mirrored][at.rows], spare_excluded=rule.excludes)
                for at in places:
                    at.add_(pos.grad[at.rows])
            if dq is not None:
                dq_RD.addmm_(g_RC, k_CD)
            if dk is not None:
                dk[tile.cols].addmm_(g_RC.t(), q_RD)
            if dalpha is not None and keep_scores:
                # An excluded pair has s = -inf and g = 0: its product is 0, not NaN. Positives always have a score.
                torch.clamp(s_RC, min=lowest(s_RC.dtype), out=spare_RC)
                if pos is not None and rule.excludes:
                    for at in _positives(spare_RC, tile, rule):
                        at.put_(pos.score2[at.rows])
                dalpha += spare_RC.mul_(g_RC).sum() / alpha
        if dalpha is not None and not keep_scores:
            dalpha += torch.dot(q_RD.flatten(), dq_RD.flatten()) / alpha
        if dq is not None:
            dq[rows].add_(dq_RD.mul_(alpha))


_T = TypeVar("_T")
_Side = tuple[int, _T, slice]


def _sides(tile: Tile, row: _T | None, col: _T | None) -> list[_Side[_T]]:
    """The vectors that a tile meets: the dimension that a reduction to each removes, and the part of it."""
    sides = []
    if row is not None:
        sides.append((1, row, tile.rows))
        if tile.mirrored:
            sides.append((0, row, tile.cols))
    if col is not None:
        sides.append((0, col, tile.cols))
    return sides


class _Places(NamedTuple):
    """Where positives stand in a tile, seen from one side."""

    tile: Tensor  # the tile, or its transpose, with queries as rows
    rows: slice
    column: Tensor  # [rows, 1]
    inside: Tensor | None  # [rows]; None stands for all

    def get(self, otherwise: Tensor) -> Tensor:
        """One value per query: from the tile, or the other one if its positive is not here."""
        found = self.tile.gather(1, self.column).squeeze(1)
        return found if self.inside is None else torch.where(self.inside, found, otherwise)

    def put_(self, values: Tensor, *, spare_excluded: bool = False) -> None:
        """Write one value per query; weights of excluded pairs, which are 0, can be left as they are."""
        if spare_excluded or self.inside is not None:
            present = self.tile.gather(1, self.column).squeeze(1)
            if spare_excluded:
                values = torch.where(present != 0, values, present)
            if self.inside is not None:
                values = torch.where(self.inside, values, present)
        self.tile.scatter_(1, self.column, values.unsqueeze(1))

    def add_(self, values: Tensor) -> None:
        """Add one value per query."""
        values = values if self.inside is None else torch.where(self.inside, values, 0)
        self.tile.scatter_add_(1, self.column, values.unsqueeze(1))


def _positives(x_RC: Tensor, tile: Tile, rule: PairRule) -> Iterator[_Places]:
    """The positives of the tile's rows, and of its columns if it stands for its transpose too."""
    views = [(x_RC, tile.rows, tile.cols), (x_RC.t(), tile.cols, tile.rows)]
    for x, rows, cols in views if tile.mirrored else views[:1]:
        place = rule.positives(rows, cols)
        if place is not None:
            yield _Places(x, rows, *place)


def _cached(cache: Tensor, tile: Tile) -> Tensor:
    return cache[tile.offset : tile.end].view(tile.shape)


# --- one exp2 for both directions -------------------------------------------------------------------------------
#
# exp2(s - shift) serves the rows and the columns of a tile if no row and no column lies so far from the shift that
# its terms overflow or underflow. Within SPAN of the shift, a term that underflows is below 2**-60 of its row's
# sum and of its column's: far under the rounding error. Anything else gets an exp2 per direction, each with
# its own maximum or log-sum-exp as shift, which is exact for every finite input.

_SPAN = {torch.float32: 60.0, torch.float64: 480.0}


def _shared_shift(low: float, high: float, dtype: torch.dtype) -> float | None:
    """A shift within SPAN of all levels from low to high, if there is one: 0 saves a subtraction."""
    span = _SPAN[dtype]
    if -span <= low and high <= span:
        return 0.0
    return high if high - low <= span else None


def _exp2(s_RC: Tensor, shift: Tensor | float, out: Tensor) -> Tensor:
    if isinstance(shift, float) and shift == 0.0:
        return torch.exp2(s_RC, out=out)
    return torch.sub(s_RC, shift, out=out).exp2_()


class _Sums:
    """Statistics in the making, and beside them the sums of the tiles that share the present shift."""

    def __init__(self, n: int, like: Tensor) -> None:
        self.total = torch.zeros(n, dtype=like.dtype, device=like.device)
        self.stats: Stats | None = None

    def merge_(self, index: slice, level: Tensor, total: Tensor) -> None:
        if self.stats is None:
            self.stats = Stats.empty(len(self.total), dtype=total.dtype, device=total.device)
        self.stats.at(index).merge_(level, total)


def _flush(shift: float | None, *sides: _Sums | None) -> None:
    """Move what was summed at this shift into the statistics."""
    for sums in sides:
        if sums is None:
            continue
        level = torch.full_like(sums.total, lowest(sums.total.dtype))
        if shift is not None:
            level.masked_fill_(sums.total > 0, shift)
        if sums.stats is None:
            sums.stats, sums.total = Stats(level, sums.total), torch.zeros_like(sums.total)
        else:
            sums.stats.merge_(level, sums.total)
            sums.total.zero_()


def _accumulate(s_RC: Tensor, e_RC: Tensor, sides: list[_Side[_Sums]], shift: float | None) -> float | None:
    """Add one tile to the statistics of its sides; e_RC is scratch. Returns the shift to try on the next tile.

    The shift is a guess from the tile before, and the sums tell whether it was good: they are all in range, or
    the maxima are looked up and every side gets its own exp2. To look would stall an accelerator, which has
    exponentials to spare: there it is always so.
    """
    if shift is not None and s_RC.is_cpu:
        _exp2(s_RC, shift, e_RC)
        totals = [e_RC.sum(dim) for dim, _, _ in sides]
        bounds = [bound.item() for total in totals for bound in total.aminmax()]
        limit = 2 ** _SPAN[s_RC.dtype]
        # min and max would pass over a NaN; the upper bound leaves room for the sums of many tiles.
        if all(1 / limit <= bound <= limit**1.5 for bound in bounds):
            for (_, sums, index), total in zip(sides, totals, strict=True):
                sums.total[index].add_(total)
            return shift
    peaks = [s_RC.amax(dim).clamp_min_(lowest(s_RC.dtype)) for dim, _, _ in sides]
    for (dim, sums, index), peak in zip(sides, peaks, strict=True):
        sums.merge_(index, peak, _exp2(s_RC, peak.unsqueeze(dim), e_RC).sum(dim))
    if not s_RC.is_cpu or not peaks:
        return None
    low, high = torch.cat(peaks).aminmax()
    return _shared_shift(low.item(), high.item(), s_RC.dtype)


def _weigh(s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, sides: list[_Side[Direction]]) -> None:
    """g = sum over sides of grad * exp2(s - lse2). g_RC may be s_RC itself."""
    if not sides:
        g_RC.zero_()
        return
    if len(sides) == 2 and s_RC.is_cpu:
        lows, highs = zip(*(side.bounds(index) for _, side, index in sides), strict=True)
        shift = _shared_shift(min(lows), max(highs), s_RC.dtype)
        if shift is not None:
            rows, cols = (side.weights(shift)[index] for _, side, index in sides)
            _exp2(s_RC, shift, g_RC).mul_(torch.add(rows.unsqueeze(1), cols, out=spare_RC))
            return
    # The last side goes first and aside, as writing g may overwrite s.
    for (dim, side, index), out in reversed(list(zip(sides, (g_RC, spare_RC), strict=False))):
        _exp2(s_RC, side.lse2[index].unsqueeze(dim), out).mul_(side.grad[index].unsqueeze(dim))
    if len(sides) == 2:
        g_RC.add_(spare_RC)


def _positive_weights(pos: Positives, labels: Tensor, row: Direction | None, col: Direction | None) -> list[Tensor]:
    """What g holds at each query's positive: in a tile that only its row meets, and in one that its column meets too.

    Late in training exp2(s - lse2) of a positive is 1 and cancels against the positive's own gradient to almost
    nothing. So positives are weighed one by one: a shared exp2 rounds twice, which would be all that is left.
    """
    own = torch.zeros_like(pos.score2) if row is None else row.grad * (pos.score2 - row.lse2).exp2_()
    if col is None:
        return [own, own]
    return [own, torch.addcmul(own, col.grad[labels], (pos.score2 - col.lse2[labels]).exp2_())]


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

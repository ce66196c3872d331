"""What is made of a tile of scores: readers gather vectors from it, weights turn it into the gradient g.

    log-sum-exp   row and column statistics                      g = row.grad exp2(s - row.lse2) + col.grad exp2(...)
    softplus      row sums of softplus(s), positives' of -s      g = row.grad sigmoid(s), positives' -sigmoid(-s)
    ranks         how many keys score above a row's positive     none

Scores of excluded pairs are -inf: they add nothing to any of them. A `limit` drops, for one side only, the pairs whose
product is above it, except the positive. Whatever is compared with the positives is compared as products, before alpha:
its rounding would break ties, and make others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from contratile.engine.backends.block import SideParts
from contratile.engine.plan import Tile
from contratile.engine.rule import PairRule
from contratile.engine.stats import Stats, lowest, part, take


class Reader(Protocol):
    """Sees every tile of a block once."""

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        """Take what is needed from the scores, which stay as they are; `spare_RC` is scratch."""

    def parts(self) -> tuple[SideParts, SideParts]:
        """After the last tile: what was gathered for the rows and for the columns."""


class Weights(Protocol):
    """The gradient of the scores."""

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        """Write g, which may be s itself."""

    def positive(self, rows: slice, *, both: bool) -> Tensor:
        """g at the positives of some rows, exactly, with the gradient of the positives' own scores; `both` says that
        the tile counts for its columns too."""


_T = TypeVar("_T")


def sides_of(tile: Tile, row: _T | None, col: _T | None) -> list[tuple[int, _T, slice]]:
    """The sides that a tile contributes to: (dimension that the reduction removes, side, its slice)."""
    sides = []
    if row is not None:
        sides.append((1, row, tile.rows))
        if tile.mirrored:
            sides.append((0, row, tile.cols))
    if col is not None:
        sides.append((0, col, tile.cols))
    return sides


# --- log-sum-exp --------------------------------------------------------------------------------------------------
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


class Sums:
    """The statistics of one side in the making, and beside them the sums of the tiles that share the present shift."""

    def __init__(self, n: int, like: Tensor, limit: Tensor | None = None) -> None:
        self.n, self.like, self.limit = n, like, limit
        self.total: Tensor | None = None
        self.stats: Stats | None = None

    def add_(self, index: slice, total: Tensor) -> None:
        """Add the sums of a tile at the present shift."""
        if self.total is None and total.shape[0] == self.n:
            self.total = total
            return
        if self.total is None:
            self.total = self.like.new_zeros(self.n)
        part(self.total, index).add_(total)

    def merge_(self, index: slice, level: Tensor, total: Tensor) -> None:
        """Add the sums of a tile at levels of its own."""
        if self.stats is None:
            self.stats = self._nothing()
        self.stats.at(index).merge_(level, total)

    def flush(self, shift: float | None) -> Stats:
        """The statistics, with what was summed at this shift moved into them."""
        total, self.total = self.total, None
        if total is None or shift is None:
            self.stats = self.stats or self._nothing()
        elif self.stats is None:  # all tiles shared the shift: every sum is positive
            self.stats = Stats(torch.full_like(total, shift), total)
        else:
            level = torch.full_like(total, shift).masked_fill_(total == 0, lowest(total.dtype))
            self.stats.merge_(level, total)
        return self.stats

    def _nothing(self) -> Stats:
        return Stats.empty(self.n, dtype=self.like.dtype, device=self.like.device)


class LseReader:
    """Log-sum-exps of the rows, the columns, or both.

    The shift is a guess from the tile before, and the sums tell whether it was good: they are all in range, or the
    maxima are looked up and every side gets its own exp2. To look would stall an accelerator, which has exponentials
    to spare: there, and where sides have limits of their own, it is always so.
    """

    def __init__(
        self, rule: PairRule, row: Sums | None, col: Sums | None, score_: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Where sides have limits, tiles come as products, and `score_` turns those that count into scores."""
        self.rule, self.row, self.col, self.score_ = rule, row, col, score_
        self.shift: float | None = 0.0
        if any(side is not None and side.limit is not None for side in (row, col)):
            self.shift = None

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        sides = sides_of(tile, self.row, self.col)
        if self.shift is not None and s_RC.is_cpu and self._read_shared(s_RC, spare_RC, sides):
            return
        peaks = []
        for dim, side, index in sides:
            counted = (
                s_RC
                if side.limit is None
                else self._below(part(side.limit, index).unsqueeze(dim), s_RC, spare_RC, tile)
            )
            peaks.append(counted.amax(dim).clamp_min_(lowest(s_RC.dtype)))
            side.merge_(index, peaks[-1], _exp2(counted, peaks[-1].unsqueeze(dim), spare_RC).sum(dim))
        if s_RC.is_cpu and all(side.limit is None for _, side, _ in sides) and peaks:
            low, high = torch.cat(peaks).aminmax()
            better = _shared_shift(low.item(), high.item(), s_RC.dtype)
            if better != self.shift:
                for _, side, _ in sides:
                    side.flush(self.shift)
                self.shift = better

    def _read_shared(self, s_RC: Tensor, e_RC: Tensor, sides: list[tuple[int, Sums, slice]]) -> bool:
        assert self.shift is not None
        _exp2(s_RC, self.shift, e_RC)
        totals = [e_RC.sum(dim) for dim, _, _ in sides]
        bounds = [bound.item() for bound in torch.cat(totals).aminmax()] if totals else []
        limit = 2 ** _SPAN[s_RC.dtype]
        # min and max would pass over a NaN; the upper bound leaves room for the sums of many tiles.
        if not all(1 / limit <= bound <= limit**1.5 for bound in bounds):
            return False
        for (_, side, index), total in zip(sides, totals, strict=True):
            side.add_(index, total)
        return True

    def _below(self, limit: Tensor, s_RC: Tensor, out: Tensor, tile: Tile) -> Tensor:
        """The scores of the products up to a limit, and of the positives."""
        out.copy_(s_RC).masked_fill_(s_RC > limit, -torch.inf)
        for at, true in zip(self.rule.places(out, tile), self.rule.places(s_RC, tile), strict=True):
            at.put_(true.get())
        assert self.score_ is not None
        return self.score_(out)

    def parts(self) -> tuple[SideParts, SideParts]:
        row, col = (SideParts() if x is None else SideParts(*x.flush(self.shift)) for x in (self.row, self.col))
        return row, col


class Direction:
    """What the backward pass knows of the rows (or columns): their log-sum-exps and the gradients of those."""

    def __init__(self, lse2: Tensor, grad: Tensor, limit: Tensor | None = None) -> None:
        """No log-sum-exp may be -inf: -inf - (-inf) must stay out of the tiles."""
        self.lse2, self.grad, self.limit = lse2, grad, limit
        self._bounds: dict[tuple[int, int], tuple[float, float]] = {}
        self._weights: tuple[float, Tensor] | None = None

    def bounds(self, index: slice) -> tuple[float, float]:
        """The lowest and the highest log-sum-exp of a block, looked up once."""
        at = index.start, index.stop
        if at not in self._bounds:
            low, high = part(self.lse2, index).aminmax()
            self._bounds[at] = low.item(), high.item()
        return self._bounds[at]

    def weights(self, shift: float) -> Tensor:
        """grad * exp2(shift - lse2), the factor of exp2(s - shift). Most tiles in a row share their shift."""
        if self._weights is None or self._weights[0] != shift:
            distance = shift - self.lse2 if shift else -self.lse2
            self._weights = shift, distance.exp2_().mul_(self.grad)
        return self._weights[1]


class LseWeights:
    """g = sum over sides of grad * exp2(s - lse2).

    Late in training exp2(s - lse2) of a positive is 1 and cancels against the positive's own gradient to almost
    nothing. So positives are weighed one by one: a shared exp2 rounds twice, which would be all that is left. A row's
    two terms are added before the column's, so that what cancels is 0 to the last bit.
    """

    def __init__(
        self,
        row: Direction | None,
        col: Direction | None,
        *,
        labels: Tensor | None,
        pos: Tensor | None,
        pos_grad: Tensor | None,
        mirrored: bool,
        exclude_self: bool = False,
        factor: Tensor | None = None,
    ) -> None:
        """`labels` and `pos` lead to the rows' positives, whose scores have the gradient `pos_grad`. `mirrored`:
        symmetric scores, rows are columns too. Where sides have limits, tiles come as products, and `factor` times them
        are the scores."""
        self.row, self.col, self.factor = row, col, factor
        if labels is None or pos is None:
            return
        extra = torch.zeros_like(pos) if pos_grad is None else pos_grad
        own = torch.zeros_like(pos) if row is None else row.grad * (pos - row.lse2).exp2_()
        other = row if mirrored else col
        if other is None:
            back = torch.zeros_like(pos)
        else:
            back = take(other.grad, labels) * (pos - take(other.lse2, labels)).exp2_()
        if mirrored:  # two rows that are each other's positive share a place
            at = torch.arange(len(labels), device=labels.device)
            back += torch.where(take(labels, labels) == at, take(extra, labels), 0)
            self._both = (own + extra) + back
            if exclude_self:  # a row that is its own positive has no other gradient there
                alone = labels == at
                own, self._both = own.masked_fill(alone, 0), torch.where(alone, 2 * extra, self._both)
        else:
            self._both = (own + back) + extra
        self._own = own + extra

    def positive(self, rows: slice, *, both: bool) -> Tensor:
        return part(self._both if both else self._own, rows)

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        sides = sides_of(tile, self.row, self.col)
        if not sides:
            g_RC.zero_()
            return
        unlimited = all(side.limit is None for _, side, _ in sides)
        if len(sides) == 2 and s_RC.is_cpu and unlimited:
            lows, highs = zip(*(side.bounds(index) for _, side, index in sides), strict=True)
            shift = _shared_shift(min(lows), max(highs), s_RC.dtype)
            if shift is not None:
                rows, cols = (part(side.weights(shift), index) for _, side, index in sides)
                _exp2(s_RC, shift, g_RC).mul_(torch.add(rows.unsqueeze(1), cols, out=spare_RC))
                return
        # The last side goes first and aside, as writing g may overwrite s.
        for (dim, side, index), out in reversed(list(zip(sides, (g_RC, spare_RC), strict=False))):
            dropped = None if side.limit is None else s_RC > part(side.limit, index).unsqueeze(dim)
            scaled_RC = s_RC if self.factor is None else torch.mul(s_RC, self.factor, out=out)
            _exp2(scaled_RC, part(side.lse2, index).unsqueeze(dim), out).mul_(part(side.grad, index).unsqueeze(dim))
            if dropped is not None:
                out.masked_fill_(dropped, 0)
        if len(sides) == 2:
            g_RC.add_(spare_RC)


# --- softplus -----------------------------------------------------------------------------------------------------


class SoftplusReader:
    """Sums of softplus(s) over rows and, if asked for, columns. A positive counts with the opposite sign."""

    def __init__(self, rule: PairRule, row: Tensor, col: Tensor | None) -> None:
        """`row` and `col` are added to."""
        self.rule, self.row, self.col = rule, row, col

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        _softplus(s_RC, spare_RC)
        for at, score in zip(self.rule.places(spare_RC, tile), self.rule.places(s_RC, tile), strict=True):
            value = score.get().neg_()
            at.put_(_softplus(value, value))
        for dim, total, index in sides_of(tile, self.row, self.col):
            total[index] += spare_RC.sum(dim)

    def parts(self) -> tuple[SideParts, SideParts]:
        return SideParts(total=self.row), SideParts(total=self.col)


def _softplus(x: Tensor, out: Tensor) -> Tensor:
    """log(1 + exp(x)); beyond the threshold it is x to the last bit."""
    threshold = 20 if x.dtype == torch.float32 else 40
    result: Tensor = torch._C._nn.softplus(x, 1, threshold, out=out)  # type: ignore[call-arg]  # it has the argument
    return result


class SoftplusWeights:
    """g = (row.grad + col.grad) * sigmoid(s), and with both signs turned at positives."""

    def __init__(
        self, row: Tensor, col: Tensor | None, *, labels: Tensor | None, pos: Tensor | None, pos_grad: Tensor | None
    ) -> None:
        """The gradients of the sums; `labels` and `pos` lead to the rows' positives."""
        self.row, self.col = row, col
        if labels is not None and pos is not None:
            self._own = (-pos).sigmoid_().mul_(row if col is None else row + take(col, labels)).neg_()
            if pos_grad is not None:
                self._own += pos_grad

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        grad = part(self.row, tile.rows).unsqueeze(1)
        if self.col is not None:
            grad = torch.add(grad, self.col[tile.cols], out=spare_RC)
        torch.sigmoid(s_RC, out=g_RC).mul_(grad)

    def positive(self, rows: slice, *, both: bool) -> Tensor:
        return part(self._own, rows)


# --- ranks --------------------------------------------------------------------------------------------------------


class Beaten:
    """For the rows (or columns): the product to beat, how many beat it and, if asked for, how many equal it."""

    def __init__(self, level: Tensor, *, ties: bool) -> None:
        self.level = level
        self.higher = torch.zeros_like(level)
        self.equal = torch.zeros_like(level) if ties else None


class RankReader:
    """How many products lie strictly above, and how many at, each row's and each column's positive."""

    def __init__(self, row: Beaten, col: Beaten | None) -> None:
        self.row, self.col = row, col

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        """`s_RC` holds products."""
        for dim, side, index in sides_of(tile, self.row, self.col):
            level = part(side.level, index).unsqueeze(dim)
            # As floats of 0 and 1: a sum of booleans takes six times as long.
            part(side.higher, index).add_(torch.gt(s_RC, level, out=spare_RC).sum(dim))
            if side.equal is not None:
                part(side.equal, index).add_(torch.eq(s_RC, level, out=spare_RC).sum(dim))

    def parts(self) -> tuple[SideParts, SideParts]:
        row, col = (
            SideParts() if x is None else SideParts(higher=x.higher, equal=x.equal) for x in (self.row, self.col)
        )
        return row, col

"""What happens to a tile of scores: readers reduce it to vectors, weights turn it into the gradient g.

This file has them for log-sum-exps of rows and columns, with

    g = row.grad exp2(s - row.lse2) + col.grad exp2(s - col.lse2)

`torch_softplus.py` and `torch_ranks.py` (readers only) have others; `torch_guide.py`, `torch_hardness.py` and
`torch_teacher.py` extend the ones here.

Scores of excluded pairs are -inf and contribute nothing. A `limit` drops, for one side, the pairs whose product is
above it, except the positive. Comparisons with the positives use products, before alpha: rounding after the
multiplication would break ties and create others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from contratile.engine.plan import Tile
from contratile.engine.rule import PairRule
from contratile.engine.stats import SideParts, Stats, lowest, part, take


class Reader(Protocol):
    """Reads every tile of a block once."""

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        """Read the scores without changing them; `spare_RC` is scratch."""

    def parts(self) -> tuple[SideParts, SideParts]:
        """After the last tile: the statistics of the rows and of the columns."""


class Weights(Protocol):
    """The gradient of the scores."""

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        """Write g, which may be s itself."""

    def positive(self, rows: slice, *, both: bool) -> Tensor:
        """g at the positives of some rows, including the gradient of the positives' own scores. `both`: the tile also
        counts for its columns."""


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
# One exp2(s - shift) serves both the rows and the columns of a tile, unless a row or column is so far from the shift
# that its terms overflow or underflow. Within SPAN of the shift, a term that underflows is below 2**-60 of the sums of
# its row and column: far below the rounding error. All other tiles get an exp2 per direction, with the row or column
# maximum (or log-sum-exp) as shift, which is exact for every finite input.

_NO_LEVEL = torch.zeros(())
SPAN = {torch.float32: 60.0, torch.float64: 480.0}
SUMS = {dtype: (2**-span, 2 ** (1.5 * span)) for dtype, span in SPAN.items()}
"""Sums of exponentials at a good shift; the upper bound leaves room for the sums of many tiles."""


def shared_shift(low: float, high: float, dtype: torch.dtype) -> float | None:
    """A shift within SPAN of all levels from low to high, or None. 0 saves a subtraction."""
    span = SPAN[dtype]
    if -span <= low and high <= span:
        return 0.0
    return high if high - low <= span else None


def exp2(s_RC: Tensor, shift: Tensor | float, out: Tensor) -> Tensor:
    if isinstance(shift, float) and shift == 0.0:
        return torch.exp2(s_RC, out=out)
    return torch.sub(s_RC, shift, out=out).exp2_()


class Sums:
    """Partial statistics of one side, plus the sums of the tiles at the current shared shift."""

    def __init__(self, n: int, like: Tensor, limit: Tensor | None = None) -> None:
        self.n, self.like, self.limit = n, like, limit
        self.total: Tensor | None = None
        self.stats: Stats | None = None

    def add_(self, index: slice, total: Tensor) -> None:
        """Add the sums of a tile at the current shift."""
        if self.total is None and total.shape[0] == self.n:
            self.total = total
            return
        if self.total is None:
            self.total = self.like.new_zeros(self.n)
        part(self.total, index).add_(total)

    def merge_(self, index: slice, level: Tensor, total: Tensor) -> None:
        """Add the sums of a tile at its own levels."""
        if self.stats is None:
            self.stats = self._nothing()
        self.stats.at(index).merge_(level, total)

    def flush(self, shift: float | None) -> Stats:
        """Move the sums at this shift into the statistics, and return these."""
        total, self.total = self.total, None
        if total is None or shift is None:
            self.stats = self.stats or self._nothing()
        elif self.stats is None:  # all tiles shared the shift: every sum is positive
            self.stats = Stats(torch.full_like(total, shift), total)
        else:
            level = torch.full_like(total, shift).masked_fill_(total == 0, lowest(total.dtype))
            self.stats.merge_(level, total)
        return self.stats

    def finish(self, shift: float | None) -> Stats:
        """The statistics after the last tile."""
        if self.stats is None and self.total is not None and shift == 0:
            return Stats(_NO_LEVEL, self.total)
        return self.flush(shift)

    def _nothing(self) -> Stats:
        return Stats.empty(self.n, dtype=self.like.dtype, device=self.like.device)


class LseReader:
    """Log-sum-exps of the rows, the columns, or both.

    The shift is guessed from the previous tile. If all sums are in range the guess was good; otherwise the maxima are
    read and every side gets its own exp2. Reading the maxima would synchronise a GPU, so on GPUs, and with limits,
    every side always has its own exp2.
    """

    def __init__(
        self, rule: PairRule, row: Sums | None, col: Sums | None, score_: Callable[[Tensor, Tile], Tensor] | None = None
    ) -> None:
        """With limits, tiles are products, and `score_` turns those that count into scores."""
        self.rule, self.row, self.col, self.score_ = rule, row, col, score_
        self.by: Tensor | None = None  # compared with limits instead of the tile
        self.shares = (row is None or row.limit is None) and (col is None or col.limit is None)
        self.shift: float | None = 0.0 if self.shares else None

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
            side.merge_(index, peaks[-1], exp2(counted, peaks[-1].unsqueeze(dim), spare_RC).sum(dim))
            self.seen(spare_RC, dim, side, index, peaks[-1])
        if s_RC.is_cpu and self.shares and peaks:
            low, high = torch.cat(peaks).aminmax()
            better = shared_shift(low.item(), high.item(), s_RC.dtype)
            if better != self.shift:
                for _, side, _ in sides:
                    side.flush(self.shift)
                self.shift = better

    def _read_shared(self, s_RC: Tensor, e_RC: Tensor, sides: list[tuple[int, Sums, slice]]) -> bool:
        assert self.shift is not None
        exp2(s_RC, self.shift, e_RC)
        totals = self._totals(e_RC, sides)
        if totals:
            low, high = torch.cat(totals).aminmax()
            least, most = SUMS[s_RC.dtype]
            if not (least <= low.item() and high.item() <= most):  # False for NaN
                return False
        for (dim, side, index), total in zip(sides, totals, strict=True):
            side.add_(index, total)
            self.seen(e_RC, dim, side, index, None)
        return True

    def _totals(self, e_RC: Tensor, sides: list[tuple[int, Sums, slice]]) -> list[Tensor]:
        return [e_RC.sum(dim) for dim, _, _ in sides]

    def seen(self, e_RC: Tensor, dim: int, side: Sums, index: slice, level: Tensor | None) -> None:
        """Hook for subclasses: called after exponentials were added to a side, at a level or at the shared shift."""

    def _below(self, limit: Tensor, s_RC: Tensor, out: Tensor, tile: Tile) -> Tensor:
        """The scores of the positives and of all pairs within a limit."""
        out.copy_(s_RC).masked_fill_((s_RC if self.by is None else self.by) > limit, -torch.inf)
        for at, true in zip(self.rule.places(out, tile), self.rule.places(s_RC, tile), strict=True):
            at.put_(true.get())
        return out if self.score_ is None else self.score_(out, tile)

    def parts(self) -> tuple[SideParts, SideParts]:
        return self._of(self.row), self._of(self.col)

    def _of(self, side: Sums | None) -> SideParts:
        return SideParts() if side is None else SideParts(*side.finish(self.shift))


class LseSide:
    """Log-sum-exps of the rows (or columns), and their gradients."""

    def __init__(self, lse2: Tensor, grad: Tensor, limit: Tensor | None = None) -> None:
        """No log-sum-exp may be -inf, because -inf - (-inf) is NaN."""
        self.lse2, self.grad, self.limit = lse2, grad, limit
        self._bounds: dict[tuple[int, int], tuple[float, float]] = {}
        self._weights: tuple[float, Tensor] | None = None

    def bounds(self, index: slice) -> tuple[float, float]:
        """The lowest and the highest log-sum-exp of a block, computed once."""
        at = index.start, index.stop
        if at not in self._bounds:
            low, high = part(self.lse2, index).aminmax()
            self._bounds[at] = low.item(), high.item()
        return self._bounds[at]

    def weights(self, shift: float) -> Tensor:
        """grad * exp2(shift - lse2), the factor of exp2(s - shift). Consecutive tiles mostly share the shift."""
        if self._weights is None or self._weights[0] != shift:
            distance = shift - self.lse2 if shift else -self.lse2
            self._weights = shift, distance.exp2_().mul_(self.grad)
        return self._weights[1]


class LseWeights:
    """g = sum over sides of grad * exp2(s - lse2).

    Late in training exp2(s - lse2) of a positive is almost 1 and cancels with the gradient of the positive's own score.
    A shared exp2 rounds twice, and the error could exceed the difference, so positives are computed separately. The two
    terms of a row are added before the column's, so that an exact cancellation gives exactly 0.
    """

    def __init__(
        self,
        row: LseSide | None,
        col: LseSide | None,
        *,
        rule: PairRule,
        pos: Tensor | None,
        pos_grad: Tensor | None,
        mirrored: bool,
        factor: Tensor | None = None,
        col_bias: Tensor | None = None,
    ) -> None:
        """`pos` are the scores of the rows' positives, `pos_grad` the gradient of these scores.
        `mirrored`: scores are symmetric, so rows are columns too. With limits, tiles are products, and `factor` times
        the products plus `col_bias` are the scores."""
        self.row, self.col, self.factor, self.col_bias = row, col, factor, col_bias
        self.shares = (row is None or row.limit is None) and (col is None or col.limit is None)
        self.by: Tensor | None = None  # compared with limits instead of the tile
        labels = rule.labels
        if labels is None or pos is None:
            return
        extra = torch.zeros_like(pos) if pos_grad is None else pos_grad
        own = torch.zeros_like(pos) if row is None else row.grad * (pos - row.lse2).exp2_()
        other = row if mirrored else col
        if other is None:
            back = torch.zeros_like(pos)
        else:
            back = rule.of_positives(other.grad) * (pos - rule.of_positives(other.lse2)).exp2_()
        at = torch.arange(len(labels), device=labels.device) if mirrored or rule.exclude_self else labels
        if mirrored:  # two rows may be each other's positive
            back += torch.where(take(labels, labels) == at, take(extra, labels), 0)
            self._both = (own + extra) + back
        else:
            self._both = (own + back) + extra
        if rule.exclude_self:  # a row that is its own positive has no other gradient
            alone = labels == at
            own, self._both = own.masked_fill(alone, 0), torch.where(alone, (1 + mirrored) * extra, self._both)
        if mirrored:
            self._own = own + extra

    def positive(self, rows: slice, *, both: bool) -> Tensor:
        return part(self._both if both else self._own, rows)

    def one_side(self, *, row: bool) -> LseWeights:
        """The weights of the rows alone, or of the columns alone, without positives."""
        rule = PairRule()
        return LseWeights(
            self.row if row else None, None if row else self.col, rule=rule, pos=None, pos_grad=None, mirrored=False
        )

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        sides = sides_of(tile, self.row, self.col)
        if not sides:
            g_RC.zero_()
            return
        if self.shares and len(sides) == 2 and s_RC.is_cpu:
            (_, down, rows_at), (_, across, cols_at) = sides
            (low, high), (other_low, other_high) = down.bounds(rows_at), across.bounds(cols_at)
            shift = shared_shift(min(low, other_low), max(high, other_high), s_RC.dtype)
            if shift is not None:
                rows, cols = part(down.weights(shift), rows_at), part(across.weights(shift), cols_at)
                exp2(s_RC, shift, g_RC).mul_(torch.add(rows.unsqueeze(1), cols, out=spare_RC))
                return
        # The last side is written first, to scratch: writing g may overwrite s.
        for (dim, side, index), out in reversed(list(zip(sides, (g_RC, spare_RC), strict=False))):
            by_RC = s_RC if self.by is None else self.by
            dropped = None if side.limit is None else by_RC > part(side.limit, index).unsqueeze(dim)
            scaled_RC = s_RC if self.factor is None else torch.mul(s_RC, self.factor, out=out)
            if self.factor is not None and self.col_bias is not None:
                scaled_RC = scaled_RC.add_(part(self.col_bias, tile.cols))
            exp2(scaled_RC, part(side.lse2, index).unsqueeze(dim), out).mul_(part(side.grad, index).unsqueeze(dim))
            if dropped is not None:
                out.masked_fill_(dropped, 0)
        if len(sides) == 2:
            g_RC.add_(spare_RC)

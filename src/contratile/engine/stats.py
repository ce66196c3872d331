"""Running statistics: log-sum-exps in base 2 with the one merge that combines them, and what is gathered per side.

    stats = Stats.empty(n, dtype=torch.float32, device=device)
    stats.at(rows).merge_(level, total)      # once per tile; `total` is sum(exp2(s - level))
    stats.lse2()                             # log2(sum(exp2(s))) over everything merged

A log-sum-exp is held as (level, total) with lse2 = level + log2(total). The level is any reference that keeps the
total in range: a maximum, or a shift shared by a whole tile. Empty statistics have the lowest finite number as level
and a total of 0. A finite floor needs no special case: exp2 of a difference with it is 0 or 1, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.spec import SideStats


def lowest(dtype: torch.dtype) -> float:
    """The level of empty statistics: below every logit, but safe to subtract from itself."""
    return torch.finfo(dtype).min


def part(x: Tensor, index: slice) -> Tensor:
    """x[index], without making a view if the slice covers all of x."""
    return x if index.stop - index.start == x.shape[0] else x[index]


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; several times faster than indexing on a CPU."""
    return x.index_select(0, index)


class Stats(NamedTuple):
    """The statistics of n rows or n columns."""

    level: Tensor  # [n], or 0-d: 0 for all
    total: Tensor  # [n] sum of exp2(logit - level)

    @classmethod
    def empty(cls, n: int, *, dtype: torch.dtype, device: torch.device) -> Stats:
        level = torch.full((n,), lowest(dtype), dtype=dtype, device=device)
        return cls(level, torch.zeros(n, dtype=dtype, device=device))

    def at(self, index: slice) -> Stats:
        """A view: merging into it merges into these statistics."""
        return Stats(part(self.level, index), part(self.total, index))

    def merge_(self, level: Tensor | float, total: Tensor) -> None:
        """Add logits summarised as (level, total), in place.

        sum exp2(s) = total_1 * exp2(level_1) + total_2 * exp2(level_2), factored by exp2 of the higher level: no
        exponent is positive, so nothing overflows, and a term that underflows is too small to matter.
        """
        top = self.level.clamp(min=level)
        self.total.mul_((self.level - top).exp2_()).addcmul_(total, (level - top).exp2_())
        self.level.copy_(top)

    def lse2(self) -> Tensor:
        """log2 of the sum of exp2; -inf where nothing was merged."""
        return self.total.log2().add_(self.level) if self.level.dim() else self.total.log2()

    def _terms(self, logits: Tensor) -> Tensor:
        """What logits add to the totals."""
        return (logits - self.level).exp2_() if self.level.dim() else logits.exp2()

    def finish(self, term: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """lse2 and its slack, exp2(lse2) / true sum.

        Near a log-sum-exp of 1e6, fp32 numbers are 0.06 apart: rounding alone would change every weight exp2(s - lse2)
        by 4 %. The slack (close to 1) corrects for it: weights are exp2(s - lse2) * slack, and lse2 - log2(slack) is
        the log-sum-exp with extra digits.

        `term` is one of the summed logits of each entry, or -inf. The result is never below it, and equals it exactly
        if nothing else was added.
        """
        lse2 = self.lse2()
        if term is None:
            alone = self.total == 0
        else:  # this includes totals of 0
            alone = self.total <= self._terms(term)
            lse2 = torch.where(alone, term, torch.maximum(lse2, term))
        return lse2, self._terms(lse2).div_(self.total).masked_fill_(alone, 1)


class SideParts(NamedTuple):
    """Running statistics of the rows, or of the columns, over the blocks seen so far. None: not requested."""

    level: Tensor | None = None
    total: Tensor | None = None
    """Log-sum-exps as in `Stats`; sums of softplus have no level."""

    higher: Tensor | None = None
    equal: Tensor | None = None
    sums: Tensor | None = None
    counts: Tensor | None = None
    teacher_level: Tensor | None = None
    teacher: Tensor | None = None
    """Log-sum-exps of the teacher's scores."""

    cross_level: Tensor | None = None
    cross: Tensor | None = None
    """With the same exponentials as weights, sums of the scores minus the entry's centre."""

    def spread(self) -> SideParts:
        """The same statistics with a level for each entry, which merging and sending them needs."""
        levels = {}
        for name, of in _LEVELS.items():
            level, total = getattr(self, name), getattr(self, of)
            if level is not None and total is not None and not level.dim():
                levels[name] = torch.zeros_like(total)
        return self._replace(**levels) if levels else self

    @classmethod
    def stacked(cls, parts: Sequence[SideParts]) -> SideParts:
        """Stack the statistics of several prefixes along a last axis."""
        if not all(part.level is not None and part.level.dim() == 0 for part in parts):
            parts = [part.spread() for part in parts]
        stacked = [
            None if xs[0] is None else torch.stack(xs, -1) if xs[0].dim() else xs[0] for xs in zip(*parts, strict=True)
        ]
        return cls(*stacked)

    def merge_(self, other: SideParts) -> None:
        """Add the statistics of another block."""
        mine, theirs = self, other
        for name, of in _LEVELS.items():
            level, total, more = getattr(self, name), getattr(self, of), getattr(other, of)
            if level is not None and total is not None and more is not None:
                Stats(level, total).merge_(getattr(other, name), more)
                done = dict.fromkeys((name, of))
                mine, theirs = mine._replace(**done), theirs._replace(**done)
        for x, y in zip(mine, theirs, strict=True):
            if x is not None and y is not None:
                x.add_(y)

    def finish(self, term: Tensor | None, taught: TeacherSide | None = None) -> SideStats:
        """The statistics after the last block. `term` is a summed logit of each entry: see `Stats.finish`."""
        total, slack = self.total, None
        if self.level is not None and self.total is not None:
            total, slack = Stats(self.level, self.total).finish(term)
        found = SideStats(total, slack, self.sums, self.counts, self.higher, self.equal)
        if taught is None or self.teacher is None or self.cross is None:
            return found
        assert self.teacher_level is not None and self.cross_level is not None and term is not None
        mean = self.cross * (self.cross_level - self.teacher_level).exp2_() / self.teacher
        of_teacher, its_slack = Stats(self.teacher_level, self.teacher).finish(taught.pos)
        return found._replace(cross=mean + (taught.centre - term), teacher=of_teacher, teacher_slack=its_slack)


_LEVELS = {"level": "total", "teacher_level": "teacher", "cross_level": "cross"}
"""Fields of `SideParts` with levels, which are merged like log-sum-exps."""


class TeacherSide(NamedTuple):
    """What each row (or column) needs for the teacher's statistics."""

    centre: Tensor
    """A number near the positive's score, subtracted from all scores: where teacher and student agree, the difference
    is small."""

    pos: Tensor
    """The teacher's score of the positive."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 computes in fp64, everything else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

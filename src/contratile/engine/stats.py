"""Running log-sum-exp statistics in base 2, and the one merge that combines them.

    stats = Stats.empty(n, dtype=torch.float32, device=device)
    stats.at(rows).merge_(level, total)      # once per tile; `total` is sum(exp2(s - level))
    stats.lse2()                             # log2(sum(exp2(s))) over everything merged

A log-sum-exp is held as (level, total) with lse2 = level + log2(total). The level is any reference that keeps the
total in range: a maximum, or a shift that a whole tile shares. Where nothing was merged yet the level is the
lowest finite number and the total is 0; a finite floor needs no special case, as exp2 of a difference with it is
0 or 1 and never NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def lowest(dtype: torch.dtype) -> float:
    """The level of "nothing seen": below every logit, yet safe to subtract from itself."""
    return torch.finfo(dtype).min


def part(x: Tensor, index: slice) -> Tensor:
    """x[index]; a small batch is one tile, and all of a tensor needs no view of it."""
    return x if index.stop - index.start == x.shape[0] else x[index]  # len(x) would take twice as long


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; on a CPU several times faster than indexing."""
    return x.index_select(0, index)


class Stats(NamedTuple):
    """The statistics of n rows or n columns."""

    level: Tensor  # [n]
    total: Tensor  # [n] sum of exp2(logit - level)

    @classmethod
    def empty(cls, n: int, *, dtype: torch.dtype, device: torch.device) -> "Stats":
        level = torch.full((n,), lowest(dtype), dtype=dtype, device=device)
        return cls(level, torch.zeros(n, dtype=dtype, device=device))

    def at(self, index: slice) -> "Stats":
        """A view: merging into it merges into these statistics."""
        return Stats(part(self.level, index), part(self.total, index))

    def merge_(self, level: Tensor | float, total: Tensor) -> None:
        """Add logits summarised as (level, total), in place.

        sum exp2(s) = total_1 * exp2(level_1) + total_2 * exp2(level_2), factored by exp2 of the higher level: no
        exponent is positive, so nothing overflows, and a term that underflows could not have been seen in the sum.
        """
        top = self.level.clamp(min=level)
        self.total.mul_((self.level - top).exp2_()).addcmul_(total, (level - top).exp2_())
        self.level.copy_(top)

    def lse2(self) -> Tensor:
        """log2 of the sum of exp2; -inf where nothing was merged."""
        return self.total.log2() + self.level

    def finish(self, term: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """lse2 and its slack, exp2(lse2) over the true sum.

        The number next to a log-sum-exp of 1e6 is 0.06 away: rounding to it would change every weight exp2(s - lse2) by
        4 %. The slack, about 1, makes up for it: weights are exp2(s - lse2) * slack, and lse2 - log2(slack) is the
        log-sum-exp with more digits than a number has room for.

        `term` is one of the summed logits of each entry, or -inf: the result is never below it, and where nothing else
        was added it is the term itself, to the last bit.
        """
        lse2 = self.lse2()
        if term is None:
            alone = self.total == 0
        else:  # also where the total is 0
            alone = self.total <= (term - self.level).exp2_()
            lse2 = torch.where(alone, term, torch.maximum(lse2, term))
        return lse2, (lse2 - self.level).exp2_().div_(self.total).masked_fill_(alone, 1)

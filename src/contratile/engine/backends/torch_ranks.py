"""Ranks in plain PyTorch: how many keys score above (or the same as) a row's positive.

Products are compared, before alpha: rounding after the multiplication would break ties and create others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine.backends.torch_reductions import sides_of
from contratile.engine.plan import Tile
from contratile.engine.rule import PairRule
from contratile.engine.stats import SideParts, part


class Beaten:
    """Per row (or column): the positive's product, the number of higher products and, with `ties`, of equal ones."""

    def __init__(self, level: Tensor, *, ties: bool) -> None:
        self.level = level
        self.higher = torch.zeros_like(level)
        self.equal = torch.zeros_like(level) if ties else None


class RankReader:
    """Counts the products above (and equal to) each row's and each column's positive. Other positives do not count."""

    def __init__(self, rule: PairRule, row: Beaten, col: Beaten | None) -> None:
        self.rule, self.row, self.col = rule, row, col

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        """`s_RC` holds products."""
        more = self.rule.more_positives(tile)
        for dim, side, index in sides_of(tile, self.row, self.col):
            level = part(side.level, index).unsqueeze(dim)
            # As floats: summing booleans takes six times as long.
            for compare, count in ((torch.gt, side.higher), (torch.eq, side.equal)):
                if count is None:
                    continue
                compare(s_RC, level, out=spare_RC)
                if more is not None:
                    spare_RC.masked_fill_(more, 0)
                part(count, index).add_(spare_RC.sum(dim))

    def parts(self) -> tuple[SideParts, SideParts]:
        row, col = (
            SideParts() if x is None else SideParts(higher=x.higher, equal=x.equal) for x in (self.row, self.col)
        )
        return row, col

"""Log-sum-exps with a guide, and their gradients.

A guide is another model, whose features come with the call. For each tile of scores the guide's products of the same
pairs are computed. Pairs whose product is above the limit of their row (or column) are dropped, except positives. Both
passes compute the same products, so they drop the same pairs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from contratile import reference
from contratile.engine.backends.torch_reductions import (
    LseReader,
    LseWeights,
    Sums,
    exp2,
    shared_shift,
    sides_of,
)
from contratile.engine.plan import Tile
from contratile.engine.rule import PairRule
from contratile.engine.spec import Spec
from contratile.engine.stats import part


class Products(Protocol):
    """Computes another model's products for the tiles of a pass, one after the other."""

    def __call__(self, tile: Tile, spare_RC: Tensor) -> Tensor:
        """The products, in memory that the next call overwrites; `spare_RC` is scratch."""

    def spare(self, tile: Tile) -> Tensor:
        """Scratch memory of the tile's shape."""


def guide_limit(level: Tensor | None, spec: Spec) -> Tensor | None:
    """The highest guide product that counts, given the positive's; infinite where there is no positive."""
    return None if level is None else reference.guide_limit(level, spec.guide_margin, relative=spec.guide_relative)


class GuidedReader(LseReader):
    """`LseReader` that drops pairs beyond the limits of the sides."""

    def __init__(self, rule: PairRule, row: Sums | None, col: Sums | None, products: Products) -> None:
        super().__init__(rule, row, col)
        self.products = products
        self.shares, self.shift = True, 0.0

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        self.by, self._tile = self.products(tile, spare_RC), tile
        super().read(s_RC, spare_RC, tile)

    def _totals(self, e_RC: Tensor, sides: list[tuple[int, Sums, slice]]) -> list[Tensor]:
        assert self.by is not None
        within, totals = self.products.spare(self._tile), []
        for dim, side, index in sides:
            assert side.limit is not None
            self.rule.within(self.by, part(side.limit, index), dim, self._tile, out=within)
            totals.append(within.mul_(e_RC).sum(dim))
        return totals


class GuidedWeights(LseWeights):
    """`LseWeights` that drop pairs beyond the limits of the sides."""

    def __init__(self, *sides: Any, products: Products, **more: Any) -> None:
        super().__init__(*sides, **more)
        self.products = products

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        self.by = by_RC = self.products(tile, spare_RC)
        sides = sides_of(tile, self.row, self.col)
        bounds = [bound for _, side, index in sides if s_RC.is_cpu for bound in side.bounds(index)]
        shift = shared_shift(min(bounds), max(bounds), s_RC.dtype) if bounds else None
        if shift is None:
            return super().weigh(s_RC, g_RC, spare_RC, tile)
        for number, (dim, side, index) in enumerate(sides):
            assert side.limit is not None
            # Positives are written later, see `positive`. The last side may overwrite the guide's products.
            out = by_RC if number else spare_RC
            torch.le(by_RC, part(side.limit, index).unsqueeze(dim), out=out)
            out.mul_(part(side.weights(shift), index).unsqueeze(dim))
            if number:
                spare_RC.add_(out)
        # A dropped pair may score so high that its exponential overflows, and infinity times 0 is NaN. Pairs that count
        # are never above the log-sum-exps (1 allows for rounding).
        torch.clamp(s_RC, max=max(bounds) + 1, out=g_RC)
        exp2(g_RC, shift, g_RC).mul_(spare_RC)

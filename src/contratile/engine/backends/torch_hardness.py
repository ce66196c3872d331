"""Hardness: rows see larger scores for negatives than columns do, the larger the more similar the pair.

    row      (alpha + strength) <q, k> + bias, positives alpha <q, k> + bias       no gradient through the strength
    column    alpha             <q, k> + bias

Gradients flow through alpha <q, k> in both cases, so the weights of a tile are all that the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from contratile.engine.backends.block import Scores
from contratile.engine.backends.torch_reductions import LseReader, LseWeights, Sums
from contratile.engine.plan import Tile
from contratile.engine.rule import PairRule
from contratile.engine.stats import SideParts, part


class Hardness:
    """Computes the scores that rows use instead of the tile's."""

    def __init__(self, scores: Scores, rule: PairRule, factor: Tensor) -> None:
        """`factor` multiplies the products of negatives, instead of the scores' alpha."""
        assert scores.k is not None, "scores are not symmetric"
        self.rule, self.bias, self.times = rule, scores.col_bias, factor / scores.alpha

    def of(self, s_RC: Tensor, tile: Tile, out: Tensor) -> Tensor:
        """Write the rows' scores to `out`, which may be the tile of scores itself."""
        places = [at.get().clone() for at in self.rule.places(s_RC, tile)]
        torch.mul(s_RC, self.times, out=out)
        for at, positive in zip(self.rule.places(out, tile), places, strict=True):
            at.put_(positive)
        return self.biased(out, tile, out)

    def biased(self, s_RC: Tensor, tile: Tile, out: Tensor) -> Tensor:
        """With the biases, which the tile of scores lacks (`Scores.biased_late`)."""
        return s_RC if self.bias is None else torch.add(s_RC, part(self.bias, tile.cols), out=out)


class HardReader:
    """Log-sum-exps of rows and, of the scores without hardness, of columns."""

    def __init__(self, hardness: Hardness, row: Sums | None, col: Sums | None, room: Callable[[Tile], Tensor]) -> None:
        """`room` is memory for a tile."""
        self.hardness, self.room = hardness, room
        self.row = None if row is None else LseReader(hardness.rule, row, None)
        self.col = None if col is None else LseReader(hardness.rule, None, col)

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        if self.col is not None:
            self.col.read(self.hardness.biased(s_RC, tile, self.room(tile)), spare_RC, tile)
        if self.row is not None:
            self.row.read(self.hardness.of(s_RC, tile, self.room(tile)), spare_RC, tile)

    def parts(self) -> tuple[SideParts, SideParts]:
        row = SideParts() if self.row is None else self.row.parts()[0]
        return row, SideParts() if self.col is None else self.col.parts()[1]


class HardWeights:
    """The weights of rows and columns, each from its own scores."""

    def __init__(self, hardness: Hardness, both: LseWeights) -> None:
        self.hardness, self.both = hardness, both
        self.row, self.col = both.one_side(row=True), both.one_side(row=False)

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        if self.both.col is not None:
            self.col.weigh(self.hardness.biased(s_RC, tile, spare_RC), spare_RC, spare_RC, tile)
        self.row.weigh(self.hardness.of(s_RC, tile, g_RC), g_RC, g_RC, tile)
        if self.both.col is not None:
            g_RC.add_(spare_RC)

    def positive(self, rows: slice, *, both: bool) -> Tensor:
        return self.both.positive(rows, both=both)

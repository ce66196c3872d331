"""Sums of softplus in plain PyTorch: the reader and the weights of SigLIP's tiles.

    row sums of softplus(s), positives' of -s      g = row.grad sigmoid(s), positives' -sigmoid(-s)

Pairs that are positive by their ids have the opposite sign too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine.backends.torch_reductions import sides_of
from contratile.engine.plan import Tile
from contratile.engine.rule import PairRule
from contratile.engine.stats import SideParts, part


class SoftplusReader:
    """Sums of softplus(s) over rows and, if `col` is given, columns. A positive counts with the opposite sign."""

    def __init__(self, rule: PairRule, row: Tensor, col: Tensor | None) -> None:
        """Adds to `row` and `col`."""
        self.rule, self.row, self.col = rule, row, col

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        _softplus(_turned(s_RC, self.rule.more_positives(tile), spare_RC), spare_RC)
        for at, score in zip(self.rule.places(spare_RC, tile), self.rule.places(s_RC, tile), strict=True):
            value = score.get().neg()
            at.put_(_softplus(value, value))
        for dim, total, index in sides_of(tile, self.row, self.col):
            total[index] += spare_RC.sum(dim)

    def parts(self) -> tuple[SideParts, SideParts]:
        return SideParts(total=self.row), SideParts(total=self.col)


def _turned(x: Tensor, where: Tensor | None, out: Tensor) -> Tensor:
    """x with the opposite sign where a pair is positive: x itself if there are none, otherwise in `out`."""
    return x if where is None else torch.where(where, torch.neg(x), x, out=out)


def _softplus(x: Tensor, out: Tensor) -> Tensor:
    """log(1 + exp(x)); above the threshold it equals x."""
    threshold = 20 if x.dtype == torch.float32 else 40
    result: Tensor = torch._C._nn.softplus(x, 1, threshold, out=out)  # type: ignore[call-arg]  # it has the argument
    return result


class SoftplusWeights:
    """g = (row.grad + col.grad) * sigmoid(s); at positives -(row.grad + col.grad) * sigmoid(-s)."""

    def __init__(
        self, row: Tensor, col: Tensor | None, *, rule: PairRule, pos: Tensor | None, pos_grad: Tensor | None
    ) -> None:
        """`row` and `col` are the gradients of the sums, `pos` the scores of the rows' positives."""
        self.rule, self.row, self.col = rule, row, col
        if rule.labels is not None and pos is not None:
            self._own = (-pos).sigmoid_().mul_(row if col is None else row + rule.of_positives(col)).neg_()
            if pos_grad is not None:
                self._own += pos_grad

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        more = self.rule.more_positives(tile)
        torch.sigmoid(_turned(s_RC, more, g_RC), out=g_RC)
        _turned(g_RC, more, g_RC)
        grad = part(self.row, tile.rows).unsqueeze(1)
        if self.col is not None:
            grad = torch.add(grad, self.col[tile.cols], out=spare_RC)
        g_RC.mul_(grad)

    def positive(self, rows: slice, *, both: bool) -> Tensor:
        return part(self._own, rows)

"""The pair rule: which (query, key) pairs count, and which one is a query's positive.

A tile evaluates the rule from O(N) vectors and its own position; no N x M mask exists. Forward and backward ask
the same rule about the same tile, so both see exactly the same pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PairRule:
    """Positives and exclusions over a block of N queries and M keys."""

    labels: Tensor | None = None
    """[N] int64: key index of each query's positive."""

    exclude_self: bool = False
    """Query i never meets key i (queries and keys are the same set of views)."""

    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    """[N] and [M]: pairs of equal id are left out, except a query's own positive."""

    def __post_init__(self) -> None:
        assert (self.query_ids is None) == (self.key_ids is None), "ids come for both sides or for none"

    @property
    def excludes(self) -> bool:
        return self.exclude_self or self.query_ids is not None

    def positives(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """For each row of the tile: its positive's column in the tile (clamped), and whether it lies there."""
        assert self.labels is not None
        column = self.labels[rows] - cols.start
        inside = (column >= 0) & (column < cols.stop - cols.start)
        return column.clamp_(0, cols.stop - cols.start - 1).unsqueeze(1), inside

    def exclude_(self, scores: Tensor, rows: slice, cols: slice) -> None:
        """Write -inf over the pairs of this tile that do not count."""
        if self.query_ids is not None and self.key_ids is not None:
            same = self.query_ids[rows].unsqueeze(1) == self.key_ids[cols]
            if self.labels is not None:
                column, inside = self.positives(rows, cols)
                same.scatter_(1, column, same.gather(1, column) & ~inside.unsqueeze(1))
            scores.masked_fill_(same, -torch.inf)
        if self.exclude_self and rows.start < cols.stop and cols.start < rows.stop:
            scores.diagonal(rows.start - cols.start).fill_(-torch.inf)

"""The pair rule: which (query, key) pairs count, and which one is a query's positive.

A tile evaluates the rule from O(N) vectors and its own position; no N x M mask exists. Forward and backward ask
the same rule about the same tile, so both see exactly the same pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.plan import Tile
from contratile.engine.spec import SameId
from contratile.engine.stats import part, take


@dataclass(kw_only=True, eq=False, slots=True)
class PairRule:
    """Positives and exclusions over a block of N queries and M keys."""

    labels: Tensor | None = None
    """[N] int64: key index of each query's positive."""

    paired: bool = False
    """Label i is i."""

    exclude_self: bool = False
    """Query i is not compared with key i (queries and keys are the same set)."""

    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    """[N] and [M]: pairs of equal id are excluded, except a query's own positive."""

    same_id: SameId = "exclude"
    """"positive": pairs of equal id are positives too."""

    keys: int = -1
    """M, if known: a tile with M columns holds every positive of its rows."""

    _known: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert (self.query_ids is None) == (self.key_ids is None), "ids come for both sides or for none"

    def exclude_(self, scores: Tensor, tile: Tile) -> None:
        """Write -inf over the pairs of this tile that do not count."""
        rows, cols = tile.rows, tile.cols
        if self.same_id == "exclude":
            same = self._same(tile)
            if same is not None:
                scores.masked_fill_(same, -torch.inf)
        if self.exclude_self and rows.start < cols.stop and cols.start < rows.stop:
            scores.diagonal(rows.start - cols.start).fill_(-torch.inf)

    def within(self, by_RC: Tensor, limit: Tensor, dim: int, tile: Tile, *, out: Tensor) -> Tensor:
        """1 where the pair counts: the guide's product is at most the limit of its row (`dim=1`) or column (`dim=0`),
        or the pair is positive. 0 elsewhere."""
        torch.le(by_RC, limit.unsqueeze(dim), out=out)
        for at in self.places(out, tile):
            at.put_(torch.ones_like(at.get()))
        return out

    def more_positives(self, tile: Tile) -> Tensor | None:
        """The pairs of this tile that are positive by their ids [R, C], without the labelled ones.

        None: there are none. That is not asked on a GPU, which would synchronise it.
        """
        same = self._same(tile) if self.same_id == "positive" else None
        return None if same is not None and same.is_cpu and not same.any() else same

    def _same(self, tile: Tile) -> Tensor | None:
        """The pairs of equal id, without the labelled ones."""
        if self.query_ids is None or self.key_ids is None:
            return None
        same = self.query_ids[tile.rows].unsqueeze(1) == self.key_ids[tile.cols]
        place = None if self.labels is None else self._positives(tile.rows, tile.cols)
        if place is not None:
            column, inside = place
            spared = torch.zeros_like(column, dtype=torch.bool)
            same.scatter_(1, column, spared if inside is None else same.gather(1, column) & ~inside.unsqueeze(1))
        return same

    def of_positives(self, of_key: Tensor) -> Tensor:
        """For each query the value of its positive key."""
        assert self.labels is not None
        return part(of_key, slice(0, self.labels.shape[0])) if self.paired else take(of_key, self.labels)

    def places(self, x_RC: Tensor, tile: Tile) -> Iterator["Places | Diagonal"]:
        """The positives of the tile's rows, and of its columns if the tile is mirrored."""
        if self.labels is None:
            return
        views = [(x_RC, tile.rows, tile.cols)]
        if tile.mirrored:
            views.append((x_RC.t(), tile.cols, tile.rows))
        for x, rows, cols in views:
            if self.paired:
                both = slice(max(rows.start, cols.start), min(rows.stop, cols.stop))
                if both.start < both.stop:
                    yield Diagonal(x.diagonal(rows.start - cols.start), both)
                continue
            place = self._positives(rows, cols)
            if place is not None:
                yield Places(x, rows, *place)

    def _positives(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor | None] | None:
        """For each row of the tile: its positive's column in the tile [R, 1], and whether it lies there at all [R].

        None if the tile holds no positive; no mask if it holds all of them. Finding out would synchronise a GPU, so
        GPUs always get a mask, and clamped columns where the positive is elsewhere.
        """
        assert self.labels is not None
        column = part(self.labels, rows)
        if cols.stop - cols.start == self.keys:
            return column.unsqueeze(1), None
        column = column - cols.start
        if self.labels.is_cpu:
            low, high = self._bounds(rows)
            if high < cols.start or low >= cols.stop:
                return None
            if cols.start <= low and high < cols.stop:
                return column.unsqueeze(1), None
        inside = (column >= 0) & (column < cols.stop - cols.start)
        return column.clamp_(0, cols.stop - cols.start - 1).unsqueeze(1), inside

    def _bounds(self, rows: slice) -> tuple[int, int]:
        """The lowest and the highest label of a row block, looked up once."""
        assert self.labels is not None
        at = rows.start, rows.stop
        if at not in self._known:
            low, high = self.labels[rows].aminmax()
            self._known[at] = int(low), int(high)
        return self._known[at]


class Diagonal(NamedTuple):
    """The positives on the diagonal of a tile: a view of them, and the queries they belong to."""

    values: Tensor
    rows: slice

    def get(self, otherwise: Tensor | None = None) -> Tensor:
        """One value per query: a view of the tile."""
        return self.values

    def put_(self, values: Tensor) -> None:
        """Write one value per query."""
        self.values.copy_(values)


class Places(NamedTuple):
    """The places of positives in a tile, seen from one side."""

    tile: Tensor  # the tile, or its transpose, with queries as rows
    rows: slice
    column: Tensor  # [rows, 1]
    inside: Tensor | None  # [rows]; None means all

    def get(self, otherwise: Tensor | None = None) -> Tensor:
        """One value per query: from the tile, or `otherwise` if its positive is in another tile."""
        found = self.tile.gather(1, self.column).squeeze(1)
        return found if self.inside is None or otherwise is None else torch.where(self.inside, found, otherwise)

    def put_(self, values: Tensor) -> None:
        """Write one value per query."""
        if self.inside is not None:
            values = torch.where(self.inside, values, self.tile.gather(1, self.column).squeeze(1))
        self.tile.scatter_(1, self.column, values.unsqueeze(1))

"""Embedded files as a corpus to search, exactly and in memory that does not grow with their rows.

    corpus, towers, title = open_corpus(Path("features.npy"))
    find_hits(corpus, ["battery charging"], encode_queries(towers.right, ["battery charging"]), k=8, among="left")

The files may come from anyone. They name rows of data that are pictures, never files: pictures are read by
position from data that this user embedded or names now.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from contratile.data.sample import Broken, Indexed, left_name
from contratile.embed.record import Record
from contratile.embed.stored import Stored
from contratile.metrics import nearest_of_tiles
from contratile.report.corpus import Hit, Side, Split
from contratile.report.gallery import thumbnail

if TYPE_CHECKING:
    from contratile.embed.units import EmbeddedRow

SIDES: tuple[Side, ...] = ("left", "right")
MOST = 4096
"""Maximum number of rows that a query examines to find k different items."""

KEPT = 256
"""Number of most recently used rows and pictures that are kept in memory."""


class EmbeddedCorpus:
    """Embedded rows to search. Rows with the same picture or text are one item.

    Args:
        record: What the features are.
        stored: The features and keys.
        pictures: The data that the rows were made of, by position; None if there is none to read pictures from.
        remark: Why there is none.
    """

    has_splits = False

    def __init__(self, record: Record, stored: Stored, pictures: Indexed | None = None, remark: str = "") -> None:
        self.record, self.kinds, self.sides = record, record.kinds, record.names
        self.searchable: tuple[Side, ...] = tuple(side for side in SIDES if side in record.sides)
        self.remark = remark
        self._stored, self._pictures = stored, pictures
        self._row = lru_cache(KEPT)(stored.row)
        self._picture = lru_cache(KEPT)(self._read_picture)
        self._lock = threading.Lock()

    def counts(self) -> str:
        names = [self.sides[0 if side == "left" else 1] for side in self.searchable]
        return f"{self.record.rows:,} rows of {' and '.join(names)} features"

    def nearest(self, features: Tensor, side: Side, k: int, split: Split) -> list[list[tuple[float, int]]]:
        if split == "training":  # unknown
            return [[] for _ in features]
        looked, most = min(k, self.record.rows), min(max(k, MOST), self.record.rows)
        while True:
            scores, rows = nearest_of_tiles(features, self._stored.tiles(side), looked)
            pairs = [list(zip(*each, strict=True)) for each in zip(scores.tolist(), rows.tolist(), strict=True)]
            found = [list(self._different(each, side, k)) for each in pairs]
            if looked == most or all(len(each) == k for each in found):
                return found
            looked = min(4 * looked, most)

    def _different(self, found: list[tuple[float, int]], side: Side, k: int) -> Iterator[tuple[float, int]]:
        """The first k rows whose picture or text was not there before."""
        seen: set[str] = set()
        for score, number in found:
            row = self._row(number)
            word = row.name if side == "left" else row.text
            if word not in seen and len(seen) < k:
                seen.add(word)
                yield score, number

    def hit(self, side: Side, item: int, score: float, query: str) -> Hit:
        row = self._row(item)
        if side == "right":
            return Hit(item, score, row.text, "", row.name == query, "")
        if self.kinds[0] == "image":
            return Hit(item, score, row.text, row.name, row.text == query, "")
        return Hit(item, score, row.name, "", row.text == query, "")

    def has_picture(self, item: int) -> bool:
        return self._pictures is not None and self._row(item).index is not None

    def picture(self, item: int) -> bytes:
        if self._pictures is None or not 0 <= item < self.record.rows:
            return b""
        with self._lock:  # one at a time: a large picture takes 270 MB
            return self._picture(item)

    def _read_picture(self, item: int) -> bytes:
        row: EmbeddedRow = self._row(item)
        if self._pictures is None or row.index is None or not 0 <= row.index < len(self._pictures):
            return b""
        try:
            sample = self._pictures[row.index]
        except Broken:
            return b""
        # The data may have changed: a picture of another sample would be wrong. A key alone can be just a line number.
        same = (sample.key, left_name(sample), sample.right) == (row.key, row.name, row.text)
        return thumbnail(sample.left) if same and not isinstance(sample.left, str) else b""

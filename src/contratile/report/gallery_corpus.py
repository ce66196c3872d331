"""The gallery of a run as a corpus to search.

(row,) = found_rows(gallery, ["arrow left"], features, k=8)          # the images nearest to a text
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contratile.metrics import nearest
from contratile.report.corpus import Hit, Side, Split, sheet_rows
from contratile.report.gallery import Gallery
from contratile.report.sheets import SheetRow


class GalleryCorpus:
    """A gallery, with what a search needs about its pairs computed once.

    Args:
        gallery: What is searched.
        items: Search only these items of either side, without marking training data; None means all.
    """

    searchable: tuple[Side, ...] = ("left", "right")

    def __init__(self, gallery: Gallery, items: Sequence[int] | None = None) -> None:
        self.gallery, self.kinds, self.sides = gallery, gallery.kinds, gallery.sides
        self.has_splits = items is None and bool(gallery.trained.any())
        # A pass over all pairs for each result would take longer than the search.
        first: dict[int, int] = {}
        self._pairs: dict[Side, dict[int, set[int]]] = {"left": {}, "right": {}}
        for left, right in gallery.pairs.tolist():
            first.setdefault(left, right)
            self._pairs["left"].setdefault(left, set()).add(right)
            self._pairs["right"].setdefault(right, set()).add(left)
        self._captions = [gallery.texts[first[item]] for item in range(len(gallery.names))]
        self._places: dict[Side, dict[str, int]] = {"left": {}, "right": {}}
        self._marks: dict[Side, list[bool]] = {}
        self._rows: dict[tuple[Side, Split], Tensor | None] = {}
        sides: tuple[tuple[Side, list[str]], ...] = (("left", gallery.names), ("right", gallery.texts))
        for side, words in sides:
            for place, text in enumerate(words):
                self._places[side].setdefault(text, place)
            self._marks[side] = gallery.trained_items(side)
            trained = torch.tensor(self._marks[side])
            self._rows[side, "all"] = None if items is None else torch.tensor(list(items))
            self._rows[side, "training"] = trained.nonzero()[:, 0]
            self._rows[side, "held out"] = (~trained).nonzero()[:, 0]

    @property
    def remark(self) -> str:
        there, names = sum(map(bool, self.gallery.pictures)), len(self.gallery.names)
        absent = self.kinds[0] == "image" and there < names
        return f"the gallery holds {there:,} of {names:,} pictures" if absent else ""

    def counts(self) -> str:
        return self.gallery.counts()

    def nearest(self, features: Tensor, side: Side, k: int, split: Split) -> list[list[tuple[float, int]]]:
        searched = self.gallery.left if side == "left" else self.gallery.right
        rows = self._rows[side, split]
        if rows is not None and len(rows) == 0:
            return [[] for _ in features]
        scores, places = nearest(features, searched if rows is None else searched[rows], k)
        found = places if rows is None else rows[places]
        return [list(zip(*each, strict=True)) for each in zip(scores.tolist(), found.tolist(), strict=True)]

    def hit(self, side: Side, item: int, score: float, query: str) -> Hit:
        own: Side = "right" if side == "left" else "left"  # the side that queries come from
        place = self._places[own].get(query)
        match = place is not None and item in self._pairs[own][place]
        split: Split = "training" if self._marks[side][item] else "held out"
        told = split if self.has_splits else ""
        if side == "left" and self.kinds[0] == "image":
            return Hit(item, score, query if match else self._captions[item], self.gallery.names[item], match, told)
        text = self.gallery.names[item] if side == "left" else self.gallery.texts[item]
        return Hit(item, score, text, "", match, told)

    def has_picture(self, item: int) -> bool:
        return bool(self.picture(item))

    def picture(self, item: int) -> bytes:
        pictures = self.gallery.pictures
        return pictures[item] if 0 <= item < len(pictures) else b""


def found_rows(
    gallery: Gallery,
    queries: Sequence[str],
    features: Tensor,
    *,
    k: int,
    among: Side = "left",
    items: Sequence[int] | None = None,
) -> list[SheetRow]:
    """Find the k nearest items of one side for each query.

    Args:
        gallery: Where to search.
        queries: The queries as text.
        features: Their features [queries, D], from the tower of the other side.
        k: Items per query.
        among: The side that is searched.
        items: Search only these items of that side; None means all.

    Returns:
        For each query the pictures and texts found, best first, and whether they belong to the query.
    """
    return sheet_rows(GalleryCorpus(gallery, items), queries, features, k=k, among=among)

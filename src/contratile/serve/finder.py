"""Answers the queries of the page: encodes a text or a picture and finds the nearest items of a gallery.

finder = load_finder(Path("runs/icons"))
(group,) = finder.by_text("battery charging", k=8)
group.title, group.items[0].text, group.items[0].score
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from contratile.data.images import decode
from contratile.data.sample import Broken
from contratile.errors import bad_value, check_choice
from contratile.metrics import nearest
from contratile.models.encoding import best_device
from contratile.printable import printable
from contratile.report.gallery import Gallery, Side, load_gallery
from contratile.train.checkpoint import step_name
from contratile.train.gallery_search import encode_queries, searched_side
from contratile.train.load import load_run

if TYPE_CHECKING:
    from contratile.models.towers import Tower, Towers

Split = Literal["all", "held out", "training"]
SPLITS: tuple[Split, ...] = ("all", "held out", "training")


class Item(NamedTuple):
    """One result."""

    score: float | None
    """Cosine with the query; None if it is not finite."""

    text: str
    name: str
    """Path or key of a picture; "" for a text."""

    thumbnail: int | None
    """Number of the picture for `Finder.thumbnail`; None if there is none."""

    match: bool
    """Whether it belongs to the query in the data."""

    split: str
    """"training", "held out", or "" if the gallery holds held-out data only."""


class Group(NamedTuple):
    """What was found on one side, best first."""

    title: str
    kind: str
    """"image" or "text"."""

    items: list[Item]


class Finder:
    """Searches a gallery. Safe to call from several threads; one query is encoded at a time.

    Args:
        gallery: Where to search.
        towers: The encoders whose features the gallery holds.
        title: What the gallery is called on the page.

    Attributes:
        takes_text: Whether texts can be searched for.
        takes_pictures: Whether pictures can be searched for.
        has_splits: Whether some items are training data, so that they can be left out.
    """

    def __init__(self, gallery: Gallery, towers: Towers, title: str) -> None:
        self.gallery, self.towers, self.title = gallery, towers, title
        self.takes_text = towers.right.kind == "text"
        self.takes_pictures = towers.left.kind == "image"
        self.has_splits = bool(gallery.trained.any())
        self._lock = threading.Lock()
        # Computed once: a pass over all pairs for each result would take longer than the search.
        first: dict[int, int] = {}
        self._pairs: dict[Side, dict[int, set[int]]] = {"left": {}, "right": {}}
        for left, right in gallery.pairs.tolist():
            first.setdefault(left, right)
            self._pairs["left"].setdefault(left, set()).add(right)
            self._pairs["right"].setdefault(right, set()).add(left)
        self._captions = [gallery.texts[first[item]] for item in range(len(gallery.names))]
        self._places: dict[Side, dict[str, int]] = {"left": {}, "right": {}}
        self._marks: dict[Side, list[bool]] = {}
        self._rows: dict[tuple[Side, Split], Tensor] = {}
        sides: tuple[tuple[Side, list[str]], ...] = (("left", gallery.names), ("right", gallery.texts))
        for side, words in sides:
            for place, text in enumerate(words):
                self._places[side].setdefault(text, place)
            self._marks[side] = gallery.trained_items(side)
            trained = torch.tensor(self._marks[side])
            self._rows[side, "training"] = trained.nonzero()[:, 0]
            self._rows[side, "held out"] = (~trained).nonzero()[:, 0]

    def by_text(self, text: str, *, k: int = 24, among: Side | None = None, split: Split = "all") -> list[Group]:
        """Find the items nearest to a text.

        Args:
            text: The query.
            k: Number of results.
            among: The side to search; by default the pictures, or the right side of text pairs.
            split: Search all items, held-out ones or training data.

        Raises:
            ValueError: The text is empty, or the run has no text encoder for that side.
        """
        among = among or searched_side(self.gallery)
        query = printable(text).strip()
        if not query:
            bad_value("query", expected="a text", got="nothing", remedy="Type what to search for.")
        tower = self.towers.right if among == "left" else self.towers.left
        if tower.kind != "text":
            remedy = "Search with a picture." if self.takes_pictures else "Search the other side."
            bad_value("query", expected="a picture", got="a text", remedy=remedy)
        features = self._encoded(tower, query)
        own: Side = "right" if among == "left" else "left"
        place = self._places[own].get(query)
        matches = set() if place is None else self._pairs[own][place]
        return [self._group(features, among, k, split, matches)]

    def by_picture(self, data: bytes, *, k: int = 24, split: Split = "all") -> list[Group]:
        """Find the texts and the pictures nearest to a picture.

        Args:
            data: The contents of an image file.
            k: Number of results of each kind.
            split: Search all items, held-out ones or training data.

        Raises:
            ValueError: It is not a picture, it is too large, or the run has no image encoder.
        """
        if not self.takes_pictures:
            bad_value("query", expected="a text", got="a picture", remedy="This run has no image encoder.")
        with self._lock:  # one at a time: a large picture takes 270 MB
            try:
                picture = decode(data, "picture")
            except Broken as error:
                bad_value("query", expected="a picture", got=error.reason, remedy="Choose another file.")
            features = encode_queries(self.towers.left, [picture])
        sides: tuple[Side, ...] = ("right", "left") if self.takes_text else ("left",)
        return [self._group(features, side, k, split, set()) for side in sides]

    def thumbnail(self, item: int) -> bytes:
        """The thumbnail of a picture as an image file; b"" if there is none."""
        pictures = self.gallery.pictures
        return pictures[item] if 0 <= item < len(pictures) else b""

    def _encoded(self, tower: Tower, query: Any) -> Tensor:
        with self._lock:
            return encode_queries(tower, [query])

    def _group(self, features: Tensor, side: Side, k: int, split: Split, matches: set[int]) -> Group:
        check_choice("split", split, SPLITS)
        searched = self.gallery.left if side == "left" else self.gallery.right
        rows = None if split == "all" else self._rows[side, split]
        title, kind = self._title(side), "image" if side == "left" and self.takes_pictures else "text"
        if rows is not None and len(rows) == 0:
            return Group(title, kind, [])
        scores, places = nearest(features, searched if rows is None else searched[rows], k)
        found = places[0] if rows is None else rows[places[0]]
        items = zip(scores[0].tolist(), found.tolist(), strict=True)
        return Group(title, kind, [self._item(item, score, side, item in matches) for score, item in items])

    def _title(self, side: Side) -> str:
        if side == "left" and self.takes_pictures:
            return "Pictures"
        if self.takes_pictures:
            return "Texts"
        return self.gallery.sides[0 if side == "left" else 1]

    def _item(self, item: int, score: float, side: Side, match: bool) -> Item:
        mark = ("training" if self._marks[side][item] else "held out") if self.has_splits else ""
        rounded = round(score, 4) if math.isfinite(score) else None
        if side == "left" and self.takes_pictures:
            thumbnail = item if self.thumbnail(item) else None
            return Item(rounded, self._captions[item], self.gallery.names[item], thumbnail, match, mark)
        text = self.gallery.names[item] if side == "left" else self.gallery.texts[item]
        return Item(rounded, text, "", None, match, mark)


def load_finder(run: Path) -> Finder:
    """Load the gallery of a finished run and the encoders that produced it. The training data is not needed.

    Raises:
        ValueError: There is no such run, it is not finished, or it is damaged.
    """
    gallery = load_gallery(run)
    towers = load_run(run, step_name(gallery.step)).towers
    return Finder(gallery, towers.to(best_device()), printable(run.resolve().name) or "run")

"""Answers the queries of the page: encodes a text or a picture and finds the nearest items of a corpus.

finder = load_finder(Path("runs/icons"))
(group,) = finder.by_text("battery charging", k=8)
group.title, group.items[0].text, group.items[0].score
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from contratile.data.images import decode
from contratile.data.sample import Broken
from contratile.embed.open_corpus import open_corpus
from contratile.errors import bad_value
from contratile.printable import printable
from contratile.report.corpus import Corpus, Hit, Side, Split, find_hits, searched_side
from contratile.train.gallery_search import encode_queries

if TYPE_CHECKING:
    from contratile.models.towers import Tower, Towers


class Result(NamedTuple):
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

    items: list[Result]


class Finder:
    """Searches a corpus. Safe to call from several threads; one query is encoded at a time.

    Args:
        corpus: Where to search.
        towers: The encoders whose features the corpus holds.
        title: What it is called on the page.

    Attributes:
        takes_text: Whether texts can be searched for.
        takes_pictures: Whether pictures can be searched for.
    """

    def __init__(self, corpus: Corpus, towers: Towers, title: str) -> None:
        self.corpus, self.towers, self.title = corpus, towers, title
        self.takes_text = any(self._tower_for(side).kind == "text" for side in corpus.searchable)
        self.takes_pictures = towers.left.kind == "image"
        self._lock = threading.Lock()

    def _tower_for(self, among: Side) -> Tower:
        """The encoder of queries that search a side: that of the other side."""
        return self.towers.right if among == "left" else self.towers.left

    def example(self) -> str:
        """A text of the corpus to search for; "" if there is none."""
        if not self.takes_text:
            return ""
        asked: Side = "left" if searched_side(self.corpus.kinds, self.corpus.searchable) == "right" else "right"
        try:
            return self.corpus.hit(asked, 0, 0.0, "").text
        except (OSError, ValueError):  # damaged embedded files: the first search raises
            return ""

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
        among = among or searched_side(self.corpus.kinds, self.corpus.searchable)
        query = printable(text).strip()
        if not query:
            bad_value("query", expected="a text", got="nothing", remedy="Type what to search for.")
        tower = self._tower_for(among)
        if tower.kind != "text":
            remedy = "Search with a picture." if self.takes_pictures else "Search the other side."
            bad_value("query", expected="a picture", got="a text", remedy=remedy)
        return [self._group(self._encoded(tower, query), query, among, k, split)]

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
        views = self.towers.right.kind == "image"  # whose texts have no encoder
        sides: tuple[Side, ...] = ("left",) if views else ("right", "left")
        return [self._group(features, "", side, k, split) for side in sides if side in self.corpus.searchable]

    def thumbnail(self, item: int) -> bytes:
        """The thumbnail of a picture as an image file; b"" if there is none."""
        return self.corpus.picture(item)

    def _encoded(self, tower: Tower, query: Any) -> Tensor:
        with self._lock:
            return encode_queries(tower, [query])

    def _group(self, features: Tensor, query: str, side: Side, k: int, split: Split) -> Group:
        (hits,) = find_hits(self.corpus, [query], features, k=k, among=side, split=split)
        pictures = side == "left" and self.takes_pictures
        return Group(self._title(side), "image" if pictures else "text", [self._item(hit, pictures) for hit in hits])

    def _title(self, side: Side) -> str:
        if self.takes_pictures:
            return "Pictures" if side == "left" else "Texts"
        return self.corpus.sides[0 if side == "left" else 1]

    def _item(self, hit: Hit, picture: bool) -> Result:
        rounded = round(hit.score, 4) if math.isfinite(hit.score) else None
        thumbnail = hit.item if picture and self.corpus.has_picture(hit.item) else None
        return Result(rounded, hit.text, hit.name, thumbnail, hit.match, hit.split)


def load_finder(path: Path, *, run: Path | None = None, pictures: str | None = None) -> Finder:
    """Load a corpus and the encoders that produced it. The arguments are those of `open_corpus`.

    Raises:
        ValueError: There is no such run or file, it is not finished, or it is damaged.
    """
    corpus, towers, title, _ = open_corpus(path, run=run, pictures=pictures)
    return Finder(corpus, towers, title)

"""What can be searched: the interface that galleries and embedded files share, and the search itself.

    (hits,) = find_hits(corpus, ["battery charging"], features, k=8, among="left")
    hits[0].text, hits[0].score, corpus.picture(hits[0].item)

`contratile search` and `contratile serve` use nothing else of what they search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from contratile.data.sample import Broken
from contratile.errors import bad_value, check_choice
from contratile.report.sheets import SheetRow

if TYPE_CHECKING:
    from PIL.Image import Image

Side: TypeAlias = Literal["left", "right"]
Split: TypeAlias = Literal["all", "held out", "training"]
SPLITS: tuple[Split, ...] = ("all", "held out", "training")


class Hit(NamedTuple):
    """One result."""

    item: int
    score: float
    text: str
    """The text that was found, or the caption of the picture."""

    name: str
    """Path or key of a picture; "" for a text."""

    match: bool
    """Whether it belongs to the query in the data."""

    split: Split | Literal[""]
    """"training", "held out", or "" if that is not known or all items are held out."""


class Corpus(Protocol):
    """Items of one or two sides with their features, names and pictures."""

    @property
    def kinds(self) -> tuple[str, str]:
        """What the left and the right side hold: "image" or "text"."""

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the sides: image and text, or the columns of a text pair."""

    @property
    def searchable(self) -> tuple[Side, ...]:
        """The sides that have features."""

    @property
    def has_splits(self) -> bool:
        """Whether some items are training data, so that they can be left out."""

    @property
    def remark(self) -> str:
        """Why pictures are missing; "" if none should be."""

    def counts(self) -> str:
        """How many items there are, in words."""

    def nearest(self, features: Tensor, side: Side, k: int, split: Split) -> list[list[tuple[float, int]]]:
        """Scores and numbers of the k nearest items of a side for each query [Q, D], best first, none twice."""

    def hit(self, side: Side, item: int, score: float, query: str) -> Hit:
        """The facts about an item that was found for a query."""

    def has_picture(self, item: int) -> bool:
        """Whether `picture` is worth asking for. It may still be empty."""

    def picture(self, item: int) -> bytes:
        """A small picture of a left item as a PNG or JPEG file; b"" if there is none. Safe to call from threads."""


def searched_side(kinds: tuple[str, str], searchable: tuple[Side, ...] = ("left", "right")) -> Side:
    """The side that is searched by default: the images; for text pairs the right side, with a text of the left."""
    side: Side = "left" if kinds[0] == "image" else "right"
    return side if side in searchable else searchable[0]


def find_hits(
    corpus: Corpus, queries: Sequence[str], features: Tensor, *, k: int, among: Side, split: Split = "all"
) -> list[list[Hit]]:
    """Find the k nearest items of one side for each query.

    Args:
        corpus: Where to search.
        queries: The queries as text; "" for a picture that has no name.
        features: Their features [queries, D].
        k: Items per query.
        among: The side that is searched.
        split: Search all items, held-out ones or training data.

    Returns:
        For each query its results, best first.

    Raises:
        ValueError: The corpus has no features of that side.
    """
    check_choice("split", split, SPLITS)
    if among not in corpus.searchable:
        there = " and ".join(corpus.searchable)
        remedy = "Embed that side too: contratile embed ... --side both."
        bad_value("among", expected=f"{there}, the side that was embedded", got=among, remedy=remedy)
    found = corpus.nearest(features, among, k, split)
    return [
        [corpus.hit(among, item, score, query) for score, item in row]
        for query, row in zip(queries, found, strict=True)
    ]


def sheet_rows(
    corpus: Corpus, queries: Sequence[str], features: Tensor, *, k: int, among: Side = "left"
) -> list[SheetRow]:
    """What `find_hits` finds, as rows of a contact sheet: with pictures, if pictures are searched."""
    pictures = among == "left" and corpus.kinds[0] == "image"
    rows = []
    for query, hits in zip(queries, find_hits(corpus, queries, features, k=k, among=among), strict=True):
        rows.append(
            SheetRow(
                query,
                [_decoded(corpus, hit) for hit in hits] if pictures else [],
                [hit.text for hit in hits],
                [hit.match for hit in hits],
                [hit.score for hit in hits],
                [hit.name for hit in hits] if pictures else (),
                [hit.split == "training" for hit in hits] if corpus.has_splits else [],
            )
        )
    return rows


def _decoded(corpus: Corpus, hit: Hit) -> Image | None:
    """The picture of a result; None if there is none or it cannot be decoded."""
    from contratile.data.images import decode

    try:
        data = corpus.picture(hit.item)
        return decode(data, hit.name) if data else None
    except Broken:
        return None

"""Which rows go into which chunk: a plan of integers, made before anything is encoded.

    plan = by_length(torch.tensor([5, 2, 9, 2]), size=2)
    [(piece.rows.tolist(), piece.length) for piece in plan]        # [([2, 0], 9), ([1, 3], 2)]

Longest rows come first: what does not fit into memory fails at once, and the last chunks, whose graphs can be kept, are
the smallest. Rows of equal length keep their order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """The rows of one chunk."""

    rows: Tensor
    """Their numbers, int64 on the CPU."""

    length: int
    """Columns that are kept of tensors with a column per token; 0: tensors are not cut."""

    @property
    def cost(self) -> int:
        """Tokens to encode, padding included; rows if tensors are not cut."""
        return len(self.rows) * max(1, self.length)

    @property
    def span(self) -> slice | None:
        """The rows as a slice, if they follow each other."""
        first, count = int(self.rows[0]), len(self.rows)
        if int(self.rows[-1]) - first != count - 1:
            return None
        in_order = count < 3 or bool((self.rows[1:] - self.rows[:-1] == 1).all())
        return slice(first, first + count) if in_order else None


def by_rows(total: int, size: int) -> list[Piece]:
    """Chunks of `size` rows, in order."""
    return [Piece(torch.arange(at, min(at + size, total)), 0) for at in range(0, total, size)]


def by_length(lengths: Tensor, *, size: int, tokens: int | None = None, buckets: Sequence[int] = ()) -> list[Piece]:
    """Chunks of rows of similar length.

    Args:
        lengths: Tokens of each row, int64 on the CPU.
        size: Rows of a chunk, at most.
        tokens: Tokens of a chunk, padding included, at most. A row with more gets a chunk of its own.
        buckets: Lengths that chunks may have, ascending; none: any. Longer rows than the last keep their length.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    pieces, start = [], 0
    while start < len(order):
        length = _bucket(max(1, int(lengths[order[start]])), buckets)
        count = size if tokens is None else min(size, max(1, tokens // length))
        pieces.append(Piece(order[start : start + count], length))
        start += count
    return pieces


def in_pieces(plan: Sequence[Piece], count: int) -> list[Piece]:
    """The plan with at least `count` chunks: the most expensive ones are halved, each half right after the other."""
    pieces = list(plan)
    while len(pieces) < count:
        at = max(range(len(pieces)), key=lambda x: pieces[x].cost if len(pieces[x].rows) > 1 else 0)
        rows, length = pieces[at]
        half = (len(rows) + 1) // 2
        if half == len(rows):
            break  # every chunk has one row
        pieces[at : at + 1] = [Piece(rows[:half], length), Piece(rows[half:], length)]
    return pieces


def _bucket(length: int, buckets: Sequence[int]) -> int:
    place = bisect_left(buckets, length)
    return buckets[place] if place < len(buckets) else length


class Padding(NamedTuple):
    """Tokens of a step: what sorting by length saved. Sides that are not cut do not count."""

    real: int = 0
    """Tokens without padding."""

    encoded: int = 0
    """Tokens that were encoded, padding included."""

    given: int = 0
    """Tokens as they came: rows times columns."""

    @property
    def saved(self) -> float:
        """Share of the tokens as they came that were not encoded."""
        return 1 - self.encoded / self.given if self.given else 0.0

    def plus(self, other: Padding) -> Padding:
        return Padding(*(a + b for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        if not self.real:
            return "not cut by length"
        return f"{self.encoded / self.real:.2f} tokens per real token (as given: {self.given / self.real:.2f})"

"""Plans which rows go into which chunk, in integers, before anything is encoded.

    plan = by_length(torch.tensor([5, 2, 9, 2]), size=2)
    [(piece.rows.tolist(), piece.length) for piece in plan]        # [([2, 0], 9), ([1, 3], 2)]

The longest rows come first: a chunk that does not fit into memory fails at once, and the last chunks, whose graphs can
be kept, are the smallest. Rows of equal length keep their order.
"""

from __future__ import annotations

import math
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
    """Columns to keep of tensors with a column per token; 0: tensors are not cut."""

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


def by_length(
    lengths: Tensor,
    *,
    size: int,
    tokens: int | None = None,
    buckets: Sequence[int] = (),
    overhead: int | None = None,
) -> list[Piece]:
    """Chunks of rows of similar length.

    Args:
        lengths: Tokens of each row, int64 on the CPU.
        size: Rows of a chunk, at most.
        tokens: Tokens of a chunk, padding included, at most. A row with more gets a chunk of its own.
        buckets: Lengths that chunks may have, ascending; none: any. Longer rows than the last keep their length.
        overhead: Fixed cost of a chunk, in tokens. The plan minimises tokens plus overhead. None: every chunk except
            the last is as large as allowed.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    widths = [_bucket(max(1, x), buckets) for x in lengths[order].tolist()]
    ends = [at + (size if tokens is None else min(size, max(1, tokens // width))) for at, width in enumerate(widths)]
    if overhead is not None and widths[0] != widths[-1]:
        ends = _cheapest_ends(widths, ends, overhead)
    pieces, start = [], 0
    while start < len(order):
        pieces.append(Piece(order[start : ends[start]], widths[start]))
        start = ends[start]
    return pieces


def _cheapest_ends(widths: Sequence[int], last: Sequence[int], overhead: int) -> list[int]:
    """For each row: where a chunk that starts there ends, so that it and all later chunks cost least.

    A chunk costs its rows times its width (that of its first row) plus the overhead. If it ends between rows of equal
    width, moving its last rows to the next chunk costs nothing and saves padding, until the next chunk is full. So the
    only starts worth trying are rows where the width changes, and rows from which a chunk is full.

    Args:
        widths: Width of each row, descending.
        last: For each row: the latest end of a chunk that starts there.
        overhead: Tokens for each chunk.
    """
    count = len(widths)
    changes = [row for row in range(count) if row == 0 or widths[row] != widths[row - 1]]
    costs: list[float] = [math.inf] * count + [0.0]
    ends = list(last)
    for end in range(count, 0, -1):
        if costs[end] == math.inf:
            continue
        full = bisect_left(last, end)
        for start in (full, *changes[bisect_left(changes, full) : bisect_left(changes, end)]):
            cost = costs[end] + (end - start) * widths[start] + overhead
            if cost < costs[start]:
                costs[start], ends[start] = cost, end
    return ends


def in_pieces(plan: Sequence[Piece], count: int) -> list[Piece]:
    """The plan with at least `count` chunks: the most expensive chunks are halved in place."""
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
    """Tokens of a step, to see what sorting by length saved. Sides that are not cut are left out."""

    real: int = 0
    """Tokens without padding."""

    encoded: int = 0
    """Tokens that were encoded, padding included."""

    given: int = 0
    """Tokens of the inputs as given: rows times columns."""

    @property
    def saved(self) -> float:
        """Share of the given tokens that did not have to be encoded."""
        return 1 - self.encoded / self.given if self.given else 0.0

    def plus(self, other: Padding) -> Padding:
        return Padding(*(a + b for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        if not self.real:
            return "not cut by length"
        return f"{self.encoded / self.real:.2f} tokens per real token (as given: {self.given / self.real:.2f})"

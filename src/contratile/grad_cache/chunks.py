"""Inputs of encoders, cut into chunks.

    for chunk in cut({"input_ids": ids, "attention_mask": mask}, 64, "input 0"):
        call(encoder, chunk)                       # encoder(**chunk)

A nest is a tensor, or a tuple (positional arguments) or mapping (keyword arguments) of nests. Its tensors have one row
per example. 0-d tensors and values that are not tensors are passed with every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from contratile.errors import bad_type, bad_value

Nest: TypeAlias = Any
Encoder: TypeAlias = Callable[..., Any]


def map_tensors(function: Callable[[Any], Any], nest: Nest, leaf: type = Tensor) -> Nest:
    """Apply `function` to every tensor (or other `leaf` type) of a nest."""
    if isinstance(nest, leaf):
        return function(nest)
    if isinstance(nest, Mapping):
        return {name: map_tensors(function, x, leaf) for name, x in nest.items()}
    if isinstance(nest, tuple | list):
        parts = [map_tensors(function, x, leaf) for x in nest]
        return type(nest)(*parts) if hasattr(nest, "_fields") else type(nest)(parts)
    return nest


def tensors_of(nest: Nest) -> list[Tensor]:
    """The tensors of a nest, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, nest)
    return found


def count_rows(nest: Nest, name: str) -> int:
    """Number of rows of a nest; `name` is for error messages."""
    lengths = {len(x) for x in tensors_of(nest) if x.dim()}
    if not lengths:
        remedy = "Pass a tensor, a tuple or a dict of tensors, or an iterator of such chunks."
        bad_type(name, expected="tensors with a row per example", got=type(nest).__name__, remedy=remedy)
    if len(lengths) > 1:
        got = " and ".join(map(str, sorted(lengths)))
        if isinstance(nest, Mapping):
            got += f" ({', '.join(f'{x} {len(y)}' for x, y in nest.items() if isinstance(y, Tensor) and y.dim())})"
        remedy = "Each needs one row per example; for patches, packed sequences and several images pass split_fn=."
        bad_value(name, expected="tensors of one batch length", got=got, remedy=remedy)
    return lengths.pop()


def slice_rows(nest: Nest, start: int, stop: int) -> Nest:
    """Rows `start` to `stop`, as views."""
    return map_tensors(lambda x: x[start:stop] if x.dim() else x, nest)


def repeat_rows(nest: Nest, count: int) -> Nest:
    """The first `count` rows as views; if there are fewer, a copy in which they repeat."""
    if count <= count_rows(nest, "rows"):
        return slice_rows(nest, 0, count)
    return map_tensors(lambda x: x[torch.arange(count, device=x.device) % len(x)] if x.dim() else x, nest)


def cut(nest: Nest, size: int, name: str) -> Iterator[Nest]:
    """Cut a nest into chunks of up to `size` rows."""
    rows = count_rows(nest, name)
    if rows == 0:
        remedy = "Skip empty batches, or use drop_last=True in the loader."
        bad_value(name, expected="at least one row", got=0, remedy=remedy)
    for start in range(0, rows, size):
        yield slice_rows(nest, start, start + size)


def is_whole(given: Any) -> bool:
    """Whether an input is a batch, rather than an iterable of chunks."""
    return isinstance(given, Tensor | tuple | Mapping)


def blocks(given: Any, name: str) -> Iterator[Nest]:
    """Yield the batch itself, or the chunks of an iterable."""
    if is_whole(given):
        yield given
        return
    if isinstance(given, list | str) or not isinstance(given, Iterable):
        remedy = "For a list x pass tuple(x) if it holds the encoder's arguments, iter(x) if it holds chunks."
        expected = "a tensor, a tuple, a mapping, or an iterator of such chunks"
        bad_type(name, expected=expected, got=type(given).__name__, remedy=remedy)
    count = 0
    for count, block in enumerate(given, start=1):  # noqa: B007 (it is read after the loop)
        yield block
    if not count:
        remedy = "Iterators can be read once: create a new one for every step."
        bad_value(name, expected="at least one chunk", got="an empty iterator", remedy=remedy)


def joint_blocks(given: Any, number: int) -> Iterator[tuple[Nest, ...]]:
    """Yield from one iterable for several encoders: tuples with a chunk for each."""
    for item in blocks(given, "input"):
        if not isinstance(item, tuple | list) or len(item) != number:
            got = f"{type(item).__name__}{f' of {len(item)}' if isinstance(item, tuple | list) else ''}"
            remedy = "One iterator for several encoders must yield (chunk of the first, chunk of the second, ...)."
            bad_type("input", expected=f"tuples of {number}, a chunk for each encoder", got=got, remedy=remedy)
        yield tuple(item)


def call(encoder: Encoder, chunk: Nest) -> Any:
    """Call an encoder. A tuple holds positional arguments, a mapping keyword arguments."""
    if isinstance(chunk, Mapping):
        return encoder(**chunk)
    return encoder(*chunk) if isinstance(chunk, tuple) else encoder(chunk)


class RowBuffer:
    """Collects rows that arrive in chunks into one tensor, without a second copy if the total is known beforehand."""

    def __init__(self, total: int | None) -> None:
        self.total, self.count = total, 0
        self.room = torch.empty(0)

    def place(self, rows: slice | Tensor, chunk: Tensor) -> None:
        """Write rows to their places."""
        stop = rows.stop if isinstance(rows, slice) else int(rows.max()) + 1
        if self.room.dim() != chunk.dim() or stop > len(self.room):
            room = chunk.new_empty((max(stop, self.total or 2 * stop), *chunk.shape[1:]))
            if self.count:
                room[: self.count] = self.room[: self.count]
            self.room = room
        self.room[rows if isinstance(rows, slice) else rows.to(chunk.device)] = chunk
        self.count = max(self.count, stop)

    def gathered(self) -> Tensor:
        return self.room[: self.count]

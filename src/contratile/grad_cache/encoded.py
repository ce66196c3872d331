"""The result of the first phase: features for the loss, and what is needed to encode every chunk again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contratile.errors import bad_value
from contratile.grad_cache.chunks import Encoder, Nest, RowBuffer, call, map_tensors, tensors_of
from contratile.grad_cache.offload import ChunkStore, Slot
from contratile.grad_cache.replay import Autocast, Buffer, RandomState

RowIndex = slice | Tensor
"""Which rows of a side a chunk has."""
OutputGrads = list["Tensor | None"]
"""Gradients of the tensors of an encoder's output; None for those that the loss did not use."""


@dataclass
class EncoderSide:
    """An encoder with one of the inputs, and the features computed so far."""

    index: int
    encoder: Encoder
    select: Callable[[Any], Any] | None
    """Selects the features from the encoder's output."""

    owner: nn.Module
    """The encoder's module, or the module that it is a method of."""

    wrappers: list[nn.Module]
    total: int | None
    """Number of rows, if known beforehand."""

    columns: tuple[int, ...] = ()
    """Rows of each input, if the side serves several inputs; their features are returned input by input."""

    trainable: bool | None = None
    """Whether the features require gradients; known after the first chunk."""

    rows: int = 0
    form: Nest = None
    """The encoder's output with empty tensors: its structure."""

    outputs: list[RowBuffer] = field(default_factory=list)
    offloaded: list[tuple[RowIndex, Slot]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Device of the encoder's parameters."""
        return next((p.device for p in self.owner.parameters()), torch.device("cpu"))

    def encode(self, chunk: Nest) -> Nest:
        output = call(self.encoder, chunk)
        return output if self.select is None else self.select(output)

    def add(self, output: Nest, rows: RowIndex, store: ChunkStore | None) -> None:
        """Add the features of some rows, offloaded if there is a store."""
        tensors = [x.detach() for x in tensors_of(output)]
        if self.form is None:
            self.form = map_tensors(lambda x: x.new_empty(0), output)
        if store is None:
            self._place(rows, tensors)
        else:
            self.offloaded.append((rows, store.put(tensors)))
        self.rows += len(tensors[0])

    def _place(self, rows: RowIndex, tensors: list[Tensor]) -> None:
        if not self.outputs:
            self.outputs = [RowBuffer(self.total) for _ in tensors]
        for gathered, x in zip(self.outputs, tensors, strict=True):
            gathered.place(rows, x)

    def gather(self, store: ChunkStore) -> list[Tensor]:
        """Return the features of all chunks."""
        self.total = self.rows
        places = [rows for rows, _ in self.offloaded]
        loaded = store.fetch([slot for _, slot in self.offloaded], store.get)
        for rows, tensors in zip(places, loaded, strict=True):
            self._place(rows, tensors)
        found = [gathered.gathered() for gathered in self.outputs]
        self.outputs, self.offloaded = [], []
        return found


@dataclass
class ChunkRecord:
    """A chunk that will be encoded again, unless its graph is kept."""

    side: EncoderSide
    rows: RowIndex
    count: int
    chunk: Slot
    state: RandomState
    """The random state before its first pass."""

    kept: list[Tensor] | None = None
    """The encoder's output with its graph, if that is kept."""


class Encoded:
    """Features of all encoders, as returned by `GradCache.encode`.

    `features` holds the output of each encoder for all rows. They are leaves, and require gradients if the encoder is
    trainable. Compute any loss from them and call its `backward()`; `GradCache.backward` then reads their `.grad`.
    A context manager: on exit, chunks and features are released.
    """

    def __init__(
        self, sides: list[EncoderSide], store: ChunkStore, autocast: Autocast, *, offload_features: bool
    ) -> None:
        self.sides, self.store, self.autocast = sides, store, autocast
        self.feature_store = store if offload_features else None
        self.records: list[ChunkRecord] = []
        self.buffers: list[Buffer] = []
        self._leaves: list[list[Tensor]] | None = None
        self._open = True

    @property
    def total(self) -> int | None:
        """Number of rows of all sides, if known beforehand."""
        totals = [side.total for side in self.sides]
        return None if None in totals else sum(total or 0 for total in totals)

    @property
    def leaves(self) -> list[list[Tensor]]:
        """The tensors of `features`: a list per side, in the order of its inputs."""
        if not self._open:
            remedy = "Encode again: the chunks of a batch are kept for one backward pass."
            bad_value("encoded", expected="features that are still there", got="used ones", remedy=remedy)
        if self._leaves is None:
            self._leaves = [_columns(side.gather(self.store), side.columns) for side in self.sides]
            for side, leaves in zip(self.sides, self._leaves, strict=True):
                for x in leaves:
                    x.requires_grad_(bool(side.trainable) and x.is_floating_point())
        return self._leaves

    @property
    def features(self) -> list[Nest]:
        """The arguments of the loss: the output of each encoder, for all rows."""
        built = []
        for side, leaves in zip(self.sides, self.leaves, strict=True):
            left = iter(leaves)
            for _ in side.columns or (side.rows,):
                built.append(map_tensors(partial(_next_of, left), side.form))
        return built

    def work(self) -> list[tuple[ChunkRecord, Slot]]:
        """Chunks whose features have gradients, with these gradients, the last chunk of the first pass first.

        Releases the features: only their gradients are needed from here on.
        """
        grads = [[x.grad for x in leaves] for leaves in self.leaves]
        self._leaves, self._open = None, False
        found = {id(side): _joined(mine, side.columns) for side, mine in zip(self.sides, grads, strict=True)}
        del grads
        paired = []
        for record in reversed(self.records):
            mine = [None if g is None else _taken(g, record.rows) for g in found[id(record.side)]]
            if any(g is not None for g in mine):
                paired.append((record, self.feature_store.put(mine) if self.feature_store else mine))
        return paired

    def fetch(self, work: list[tuple[ChunkRecord, Slot]]) -> Iterator[tuple[ChunkRecord, Nest, OutputGrads]]:
        """Load chunks and gradients, one ahead of their use."""

        def load(item: tuple[ChunkRecord, Slot]) -> tuple[ChunkRecord, Nest, OutputGrads]:
            record, mine = item
            gradients: OutputGrads = self.feature_store.get(mine) if self.feature_store else mine
            chunk = self.store.get(record.chunk) if record.kept is None else None
            return record, chunk, gradients

        return iter(self.store.fetch(work, load))

    def close(self) -> None:
        """Release chunks and features, also those on disk."""
        self.records, self._leaves, self._open = [], None, False
        self.store.close()

    def __enter__(self) -> Encoded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _next_of(tensors: Iterator[Tensor], _: Tensor) -> Tensor:
    """Replace a tensor of the structure by the next one."""
    return next(tensors)


def _columns(tensors: list[Tensor], columns: tuple[int, ...]) -> list[Tensor]:
    """Split the features of a side that serves several inputs: all tensors of the first input, then of the second."""
    if not columns:
        return tensors
    pieces = [torch.split(x, list(columns)) for x in tensors]
    return [piece[k] for k in range(len(columns)) for piece in pieces]


def _joined(grads: OutputGrads, columns: tuple[int, ...]) -> OutputGrads:
    """The reverse of `_columns`. Where the loss used only some columns, the others have gradient 0."""
    if not columns:
        return grads
    number = len(grads) // len(columns)
    found: OutputGrads = []
    for at in range(number):
        mine = grads[at::number]
        like = next((g for g in mine if g is not None), None)
        if like is None:
            found.append(None)
            continue
        pairs = zip(mine, columns, strict=True)
        found.append(torch.cat([like.new_zeros(n, *like.shape[1:]) if g is None else g for g, n in pairs]))
    return found


def _taken(x: Tensor, rows: RowIndex) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows.to(x.device))

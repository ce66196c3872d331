"""What the first phase leaves: features for the loss, and for every chunk what it takes to encode it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contratile.errors import bad_value
from contratile.grad_cache.chunks import Encoder, Nest, Rows, call, map_tensors, tensors_of
from contratile.grad_cache.offload import Shelf, Slot
from contratile.grad_cache.replay import Autocast, Buffer, RandomState

Gradients = list["Tensor | None"]
"""Of the tensors of an output, None for those that the loss did not use."""


@dataclass
class Side:
    """One encoder, and the features that it has made so far."""

    index: int
    encoder: Encoder
    select: Callable[[Any], Any] | None
    """What to take of the encoder's output."""

    owner: nn.Module
    """The module that the encoder is, or is a method of."""

    wrappers: list[nn.Module]
    total: int | None
    """Rows, where they are known beforehand."""

    trainable: bool | None = None
    """Whether the features depend on something that wants a gradient; known after the first chunk."""

    rows: int = 0
    form: Nest = None
    """An output of the encoder, for its form."""

    outputs: list[Rows] = field(default_factory=list)
    offloaded: list[Slot] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the encoder's parameters are."""
        return next((p.device for p in self.owner.parameters()), torch.device("cpu"))

    def encode(self, chunk: Nest) -> Nest:
        output = call(self.encoder, chunk)
        return output if self.select is None else self.select(output)

    def add(self, output: Nest, shelf: Shelf | None) -> slice:
        """The features of one chunk more, to be put on the shelf if there is one. Returns their place among all."""
        tensors = [x.detach() for x in tensors_of(output)]
        if self.form is None:
            self.form = map_tensors(lambda x: x.new_empty(0), output)
        if shelf is None:
            self._append(tensors)
        else:
            self.offloaded.append(shelf.put(tensors))
        place = slice(self.rows, self.rows + len(tensors[0]))
        self.rows = place.stop
        return place

    def _append(self, tensors: list[Tensor]) -> None:
        if not self.outputs:
            self.outputs = [Rows(self.total) for _ in tensors]
        for gathered, x in zip(self.outputs, tensors, strict=True):
            gathered.append(x)

    def gather(self, shelf: Shelf) -> list[Tensor]:
        """The features of all chunks."""
        self.total = self.rows
        for tensors in shelf.fetch(self.offloaded, shelf.get):
            self._append(tensors)
        found = [gathered.gathered() for gathered in self.outputs]
        self.outputs, self.offloaded = [], []
        return found


@dataclass(frozen=True)
class Record:
    """A chunk that will be encoded again."""

    side: Side
    rows: slice
    chunk: Slot
    state: RandomState


class Encoded:
    """Features of all sides, as `GradCache.encode` made them.

    `features` has the output of each encoder for all rows: leaves, which want a gradient where something is learned.
    Any loss may be computed from them; after its backward `GradCache.backward` takes it from their `.grad`.
    """

    def __init__(self, sides: list[Side], shelf: Shelf, autocast: Autocast, *, offload_features: bool) -> None:
        self.sides, self.shelf, self.autocast = sides, shelf, autocast
        self.feature_shelf = shelf if offload_features else None
        self.records: list[Record] = []
        self.buffers: list[Buffer] = []
        self._leaves: list[list[Tensor]] | None = None
        self._open = True

    @property
    def total(self) -> int | None:
        """Rows of all sides, if they are known before all are encoded."""
        totals = [side.total for side in self.sides]
        return None if None in totals else sum(total or 0 for total in totals)

    @property
    def leaves(self) -> list[list[Tensor]]:
        """The tensors of `features`, side by side."""
        if not self._open:
            remedy = "Encode again: the chunks of a batch are kept for one backward."
            bad_value("encoded", expected="features that are still there", got="used ones", remedy=remedy)
        if self._leaves is None:
            self._leaves = [side.gather(self.shelf) for side in self.sides]
            for side, leaves in zip(self.sides, self._leaves, strict=True):
                for x in leaves:
                    x.requires_grad_(bool(side.trainable) and x.is_floating_point())
        return self._leaves

    @property
    def features(self) -> list[Nest]:
        """What the loss is called with."""
        built = []
        for side, leaves in zip(self.sides, self.leaves, strict=True):
            left = iter(leaves)
            built.append(map_tensors(partial(_next_of, left), side.form))
        return built

    def work(self) -> list[tuple[Record, Slot]]:
        """Chunks whose features have a gradient, with that gradient, in the order of the first pass.

        Features are let go of: only their gradients are needed from here on.
        """
        found = {id(side): [x.grad for x in leaves] for side, leaves in zip(self.sides, self.leaves, strict=True)}
        self._leaves, self._open = None, False
        paired = []
        for record in self.records:
            mine = [None if g is None else g[record.rows] for g in found[id(record.side)]]
            if any(g is not None for g in mine):
                paired.append((record, self.feature_shelf.put(mine) if self.feature_shelf else mine))
        return paired

    def fetch(self, work: list[tuple[Record, Slot]]) -> Iterator[tuple[Record, Nest, Gradients]]:
        """Chunks and gradients, brought back one ahead of their use."""

        def load(item: tuple[Record, Slot]) -> tuple[Record, Nest, Gradients]:
            record, mine = item
            gradients: Gradients = self.feature_shelf.get(mine) if self.feature_shelf else mine
            return record, self.shelf.get(record.chunk), gradients

        return iter(self.shelf.fetch(work, load))

    def close(self) -> None:
        """Let go of chunks and features, on disk too."""
        self.records, self._leaves, self._open = [], None, False
        self.shelf.close()

    def __enter__(self) -> Encoded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _next_of(tensors: Iterator[Tensor], _: Tensor) -> Tensor:
    """For a tensor of the form, that which takes its place."""
    return next(tensors)

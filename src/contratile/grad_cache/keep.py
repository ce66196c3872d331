"""Keeps graphs of the first pass, which then need no second: the last ones, as many as there is room for.

    shelf = keeper.shelf(agenda)
    for index, item in enumerate(agenda.items):
        if shelf.wants(index, item):               # may release graphs that were kept before
            record.kept = encode with gradients
            shelf.add(record, item)

The backward pass goes from the last chunk to the first, so kept graphs are freed before a chunk is encoded again.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from contratile.errors import bad_value, check_choice, check_count
from contratile.grad_cache.auto import Trial
from contratile.grad_cache.chunks import Encoder, Nest
from contratile.grad_cache.encoded import ChunkRecord, EncoderSide
from contratile.grad_cache.feed import Agenda, Item
from contratile.grad_cache.wrappers import is_collective
from contratile.host_memory import available_bytes, status_bytes, trim

KeepGraphs: TypeAlias = "int | Literal['auto']"

USED = 0.9
"""Share of the limit that graphs may fill: allocators leave gaps."""
FREE = 0.8
"""Default limit on an accelerator, as a share of its free memory."""
LONGER = 1.25
"""A chunk is measured too if it is longer by this factor (attention may need more per token) or has as many more tokens
than those that were."""


class GraphCost(NamedTuple):
    """Memory of a chunk with gradients: the maximum over the chunks measured for an encoder."""

    graph: float
    """Bytes that stay until the backward pass, per token (per row for inputs that are not cut)."""

    passing: float
    """Bytes that a forward and backward pass needs beyond that."""

    length: int
    """Columns of the longest chunk that was measured."""

    tokens: int
    """Tokens of the largest one."""


class GraphTrial(Trial):
    """A trial that also counts what the graph holds."""

    held = 0

    def rows(self, size: int) -> Nest:
        return self.block  # the chunk as it is

    def encode(self, chunk: Nest) -> Nest:
        known = {x.untyped_storage().data_ptr() for x in (*self.side.owner.parameters(), *self.side.owner.buffers())}
        self.held = 0

        def count(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                self.held += storage.nbytes()
            return x.detach()

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            return super().encode(chunk)


class Keeper:
    """The option `keep_graphs` of `GradCache`, and what was measured for it."""

    def __init__(self, keep_graphs: KeepGraphs, memory_limit: int | None) -> None:
        if isinstance(keep_graphs, str):
            check_choice("keep_graphs", keep_graphs, ("auto",))
        else:
            check_count("keep_graphs", keep_graphs, least=0)
        self.wanted, self.memory_limit = keep_graphs, memory_limit
        self.share = 1.0
        """Halved after every out-of-memory."""
        self.stretch = 1.0
        """Resident bytes for a byte of graphs: allocators leave gaps between them."""
        self.costs: dict[Encoder, GraphCost] = {}

    def shelf(self, agenda: Agenda) -> Shelf:
        """Room for the graphs of a step; none without grad mode."""
        if self.wanted == 0 or not torch.is_grad_enabled():
            return Shelf(0.0)
        if any(is_collective(wrapper) for side in agenda.sides for wrapper in side.wrappers):
            remedy = "Their parameters are freed after every forward pass. Leave it out, or use DDP."
            bad_value("keep_graphs", expected="0 for encoders under FSDP or ZeRO 3", got=self.wanted, remedy=remedy)
        if self.wanted != "auto":
            return Shelf(int(self.wanted * self.share), known=agenda.known)
        limit = self._limit(agenda.sides[0].device) * self.share
        # The largest first, then longer ones: they are measured only if they are much longer.
        for item in sorted(agenda.known or (), key=lambda x: x.piece.cost, reverse=True):
            self.cost(item)
        return MeasuredShelf(USED * limit, known=agenda.known, keeper=self)

    def back_off(self) -> None:
        """Keep half as many graphs from now on."""
        self.share /= 2

    def cost(self, item: Item) -> GraphCost:
        """What a chunk of this encoder costs; measured for the first and for much longer or larger chunks."""
        piece = item.piece
        known = self.costs.get(item.side.encoder, GraphCost(0.0, 0.0, 0, 0))
        if piece.length > LONGER * known.length or piece.cost > LONGER * known.tokens:
            trial, rows = GraphTrial(item.side, item.chunk()), len(piece.rows)
            trial.cost(rows)  # what is allocated once only, by the first call, does not count
            peak = trial.cost(rows)
            known = self.costs[item.side.encoder] = GraphCost(
                graph=max(known.graph, trial.held / piece.cost),
                passing=max(known.passing, peak - trial.held),
                length=max(known.length, piece.length),
                tokens=max(known.tokens, piece.cost),
            )
            trim()
        return known

    def _limit(self, device: torch.device) -> float:
        if self.memory_limit is not None:
            return self.memory_limit
        if device.type == "cpu":
            return available_bytes() / 2
        memory = torch.get_device_module(device)
        if not hasattr(memory, "mem_get_info"):
            remedy = "Pass the bytes that a chunk and the graphs may take."
            bad_value("memory_limit", expected=f"a number: {device.type} does not tell", got=None, remedy=remedy)
        unused = memory.memory_reserved(device) - memory.memory_allocated(device)
        return FREE * float(memory.mem_get_info(device)[0] + unused)


class Shelf:
    """The graphs that are kept in a step: the last ones that have room, each of weight 1."""

    def __init__(self, room: float, *, known: list[Item] | None = None) -> None:
        self.room, self.used = room, 0.0
        self.kept: deque[tuple[ChunkRecord, float]] = deque()
        self.synchronised: set[int] = set()
        self.trained: dict[int, bool] = {}
        self.known = known
        self.first: int | None = None
        """Index of the first item to keep, if all items are known."""

    @property
    def stretch(self) -> float:
        """Room that a graph of weight 1 takes."""
        return 1.0

    def weight(self, item: Item) -> float:
        """Part of the room that a graph takes; nothing for encoders that are frozen."""
        key = id(item.side)
        if key not in self.trained:
            self.trained[key] = any(p.requires_grad for p in item.side.owner.parameters())
        return float(self.trained[key])

    def wants(self, index: int, item: Item) -> bool:
        """Whether the graph of an item shall be kept; makes room for it."""
        if self.room <= 0 or item.side.trainable is False or self._synchronises(item.side):
            return False
        if self.known is not None and self.first is None:
            self.first = self._first(self.known)
        weight = self.weight(item)
        if weight * self.stretch > self.room or (self.first is not None and index < self.first):
            return False
        while self.kept and (self.used + weight) * self.stretch > self.room:
            self.release(1)
        return True

    def add(self, record: ChunkRecord, item: Item) -> None:
        weight = self.weight(item)
        self.kept.append((record, weight))
        self.used += weight

    def release(self, count: int | None = None) -> None:
        """Drop the oldest graphs, or all; their chunks are encoded again."""
        for _ in range(len(self.kept) if count is None else min(count, len(self.kept))):
            record, weight = self.kept.popleft()
            record.kept = None
            self.used -= weight

    def _first(self, known: list[Item]) -> int:
        total, index = 0.0, len(known)
        while index and (total + self.weight(known[index - 1])) * self.stretch <= self.room:
            total += self.weight(known[index - 1])
            index -= 1
        return index

    def _synchronises(self, side: EncoderSide) -> bool:
        """Whether this is a wrapper's first chunk, the last of the backward pass, which synchronises.

        DDP decides about that in the forward pass, so this chunk is encoded again.
        """
        new = {id(wrapper) for wrapper in side.wrappers} - self.synchronised
        self.synchronised |= new
        return bool(new)


class MeasuredShelf(Shelf):
    """Graphs by their bytes, with the chunk that is being encoded, within a limit."""

    def __init__(self, room: float, *, known: list[Item] | None, keeper: Keeper) -> None:
        super().__init__(room, known=known)
        self.keeper, self.limit = keeper, room
        self.start = _resident()
        self.passing = 0.0

    @property
    def stretch(self) -> float:
        return self.keeper.stretch

    def weight(self, item: Item) -> float:
        return self.keeper.cost(item).graph * item.piece.cost

    def wants(self, index: int, item: Item) -> bool:
        if item.side.trainable is False or self.limit <= 0:
            return super().wants(index, item)
        passing = self.keeper.cost(item).passing
        if passing > self.passing:
            self.passing, self.room, self.first = passing, self.limit - passing, None
        wanted = super().wants(index, item)
        if not wanted or not self.start or item.side.device.type != "cpu":
            return wanted
        growth, weight = (_resident() or self.start) - self.start, self.weight(item)
        if self.used > self.limit / 4:
            self.keeper.stretch = max(1.0, (growth - self.passing) / self.used)
        return growth + weight * self.stretch + self.passing <= self.limit or self._replace(weight)

    def _replace(self, weight: float) -> bool:
        """Release graphs of a weight, whose memory is then used again; False if there are not enough."""
        before = self.used
        while self.kept and before - self.used < weight:
            self.release(1)
        return before - self.used >= weight


def _resident() -> int | None:
    try:
        return status_bytes("VmRSS")
    except OSError:
        return None


@dataclass
class Attempt:
    """Whether memory ran out."""

    failed: bool = False


@contextmanager
def out_of_memory(*, tolerated: bool) -> Iterator[Attempt]:
    """Context that swallows an out-of-memory error, if it is tolerated, and says so."""
    attempt = Attempt()
    try:
        yield attempt
    except (RuntimeError, MemoryError) as error:
        if not tolerated or not is_out_of_memory(error):
            raise
        attempt.failed = True
    if attempt.failed:
        gc.collect()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out on an accelerator or the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def empty_cache(device: torch.device) -> None:
    """Return what the allocator of an accelerator holds unused."""
    if device.type != "cpu":
        memory: Any = torch.get_device_module(device)
        memory.empty_cache()

"""Which samples make up which batch, decided before anything is read.

    order = BatchOrder(batch=65536, chunk=256, seed=0, rank=rank, world=world)
    for task in order.tasks(source, {"epoch": 0, "step": 0}):
        task.items                            # of one chunk

Indexed source: epoch e is one random permutation (see `mixture` for several sources and epochs of another length),
global batch b a slice of it, and rank r takes rows r, r + world, ... of the slice. So the global batch does not depend
on the number of ranks, chunks or workers. Stream: every rank reads its own part and takes its share of each batch from
there. At the end of its part it starts its next epoch, so that ranks with fewer records never make the others wait.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import torch

from contratile.data.mixture import MixedStream, epoch_order, steps_per_epoch
from contratile.data.sample import Cursor, Indexed, Stream
from contratile.errors import bad_value


class ChunkTask(NamedTuple):
    """A chunk to be read."""

    items: list[Any]
    """Indices into an indexed source, or records of a stream."""

    epoch: int
    step: int
    last: bool
    """Whether it is the last chunk of its batch."""

    after: dict[str, Any]
    """The loader's position after it."""

    rounds: list[int]
    """How often each item was read before: its own epoch, which random changes depend on."""


class _StreamItem(NamedTuple):
    record: Any
    epoch: int
    round: int
    cursor: Cursor
    """The position after the record."""


@dataclass(frozen=True, kw_only=True)
class BatchOrder:
    """The order of samples for one of `world` ranks. The fields are arguments of `Loader`."""

    batch: int
    chunk: int
    seed: int = 0
    rank: int = 0
    world: int = 1
    drop_last: bool = True
    shuffle: bool = True
    epochs: int | None = None
    samples: int = 0
    """Samples in an epoch; 0: all of the source."""

    def steps_per_epoch(self, source: Indexed | Stream) -> int | None:
        """Batches in an epoch; None for a stream whose epochs were given no length."""
        if isinstance(source, Indexed):
            return steps_per_epoch(source, samples=self.samples, batch=self.batch, drop_last=self.drop_last)
        return self.samples // self.batch if self.samples else None

    def tasks(self, source: Indexed | Stream, position: Mapping[str, Any]) -> Iterator[ChunkTask]:
        """Yield the chunks of this rank from a position on: {"epoch", "step"}, for a stream also {"cursor"}."""
        if isinstance(source, Stream):
            return self._of_stream(source, position)
        return self._of_indexed(source, position)

    def _of_indexed(self, source: Indexed, position: Mapping[str, Any]) -> Iterator[ChunkTask]:
        first, steps = int(position["step"]), self.steps_per_epoch(source)
        assert steps is not None
        for epoch in self._epochs(position):
            order, rounds = torch.arange(len(source)), torch.full((len(source),), epoch)
            if self.shuffle:
                options = {"seed": self.seed, "epoch": epoch, "samples": self.samples, "batch": self.batch}
                order, rounds = epoch_order(source, **options)
            for step in range(first, steps):
                mine = slice(step * self.batch, (step + 1) * self.batch)
                rows, turns = (x[mine][self.rank :: self.world].tolist() for x in (order, rounds))
                after = {"epoch": epoch, "step": step + 1} if step + 1 < steps else {"epoch": epoch + 1, "step": 0}
                sizes = _chunk_sizes(len(rows), self.chunk)
                for i, size in enumerate(sizes):
                    part = slice(i * self.chunk, i * self.chunk + size)
                    yield ChunkTask(rows[part], epoch, step, i + 1 == len(sizes), after, turns[part])
            first = 0

    def _of_stream(self, source: Stream, position: Mapping[str, Any]) -> Iterator[ChunkTask]:
        """A batch may extend into the next epoch; it belongs to the epoch of its first record."""
        sizes = _chunk_sizes(len(range(self.rank, self.batch, self.world)), self.chunk)
        items, now = self._stream_items(source, position), dict(position)
        while first := list(islice(items, sizes[0])):
            epoch = first[0].epoch
            step = now["step"] if now["epoch"] == epoch else 0
            for i, size in enumerate(sizes, 1):
                taken = first if i == 1 else list(islice(items, size))
                if taken:
                    end = taken[-1]
                    now = {"epoch": end.epoch, "step": step + 1 if end.epoch == epoch else 0, "cursor": end.cursor}
                last = i == len(sizes) or len(taken) < size
                records, rounds = [item.record for item in taken], [item.round for item in taken]
                yield ChunkTask(records, epoch, step, last, now, rounds)
                if last:
                    break

    def _stream_items(self, source: Stream, position: Mapping[str, Any]) -> Iterator[_StreamItem]:
        start, seed = position.get("cursor"), self.seed if self.shuffle else None
        if isinstance(source, MixedStream) and seed is not None:
            share = len(range(self.rank, self.batch, self.world))
            for record, cursor in source.endless(seed=seed, part=self.rank, parts=self.world, share=share, start=start):
                yield _StreamItem(record, min(cursor[1]), cursor[1][record[0]], cursor)
        for epoch in self._epochs(position):
            found = start is not None
            records = source.records(seed=seed, epoch=epoch, part=self.rank, parts=self.world, start=start)
            for record, cursor in records:
                yield _StreamItem(record, epoch, epoch, cursor)
                found = True
            if not found:
                remedy = "Check the name of the data, and that there are at least as many samples as ranks."
                bad_value(source.name, expected="at least one sample for each rank", got="none", remedy=remedy)
            start = None

    def _epochs(self, position: Mapping[str, Any]) -> Iterator[int]:
        first = int(position["epoch"])
        return iter(count(first) if self.epochs is None else range(first, self.epochs))


def first_items(tasks: Iterator[ChunkTask], limit: int) -> Iterator[ChunkTask]:
    """The tasks of the first `limit` items."""
    for task in tasks:
        yield task._replace(items=task.items[:limit], rounds=task.rounds[:limit])
        limit -= len(task.items)
        if limit <= 0:
            return


def _chunk_sizes(rows: int, chunk: int) -> list[int]:
    """Sizes of the chunks of some rows. No rows are one empty chunk, so that every batch has a task."""
    return [min(chunk, rows - start) for start in range(0, rows, chunk)] or [0]

"""Which samples belong to which unit, and who reads them.

    for task in unit_tasks(source, share, done): ...       # chunks of this process's units that are not done

Samples keep the source's own order. Of an indexed source a process reads its own units only. Of a stream every process
reads all records, which is cheap, and decodes and encodes those of its own units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice, takewhile
from typing import Any

from contratile.data.chunk_maker import Chunk
from contratile.data.loader import Loader
from contratile.data.order import ChunkTask
from contratile.data.sample import Broken, Indexed, Stream
from contratile.embed.units import Unit


@dataclass(frozen=True, kw_only=True)
class Share:
    """How samples are cut into units, and who makes them: process `rank` every `world`-th one that is not done."""

    chunk: int
    chunks: int
    """Chunks in a unit."""

    limit: int = 0
    rank: int = 0
    world: int = 1

    @property
    def size(self) -> int:
        """Samples in a unit."""
        return self.chunk * self.chunks

    def numbers(self, done: Mapping[int, Unit]) -> Iterator[int]:
        """The numbers of this process's units, without end."""
        return islice((number for number in count() if number not in done), self.rank, None, self.world)


def unit_tasks(source: Indexed | Stream, share: Share, done: Mapping[int, Unit]) -> Iterator[ChunkTask]:
    """Yield the chunks of this process's units that are not done. `step` is the number of the unit.

    Args:
        source: The samples.
        share: The units of this process.
        done: Units that any process has done.
    """
    return _of_stream(source, share, done) if isinstance(source, Stream) else _of_indexed(source, share, done)


def _of_indexed(source: Indexed, share: Share, done: Mapping[int, Unit]) -> Iterator[ChunkTask]:
    n = min(len(source), share.limit or len(source))
    units = -(-n // share.size)
    for number in takewhile(lambda number: number < units, share.numbers(done)):
        end = min(n, (number + 1) * share.size)
        for start in range(number * share.size, end, share.chunk):
            stop = min(end, start + share.chunk)
            yield ChunkTask(list(range(start, stop)), 0, number, stop == end, {"cursor": None}, [0] * (stop - start))


def _of_stream(source: Stream, share: Share, done: Mapping[int, Unit]) -> Iterator[ChunkTask]:
    mine = share.numbers(done)
    wanted = next(mine)
    before = max((number for number in done if number < wanted), default=-1)
    cursor = done[before].cursor if before >= 0 else None
    if before >= 0 and done[before].seen < share.size:
        return  # the stream ended in this unit
    records = source.records(seed=None, epoch=0, part=0, parts=1, start=cursor)
    if share.limit:
        records = islice(records, share.limit - (before + 1) * share.size)
    for number in count(before + 1):
        for place in range(share.chunks):
            taken = list(islice(records, share.chunk))
            if not taken and place == 0:
                return
            cursor = taken[-1][1] if taken else cursor
            last = len(taken) < share.chunk or place + 1 == share.chunks
            if number == wanted:
                found = [record for record, _ in taken]
                yield ChunkTask(found, 0, number, last, {"cursor": cursor}, [0] * len(taken))
            if len(taken) < share.chunk:
                return
        if number == wanted:
            wanted = next(mine)


class ChunkReader(Loader):
    """A loader of given chunks that also reports which samples were broken."""

    def read(self, tasks: Iterator[ChunkTask]) -> Iterator[tuple[ChunkTask, Chunk | None, list[Broken]]]:
        """Yield tasks with their chunks, None if all samples of a chunk are broken, and the broken samples."""
        for task, chunk in self._made(tasks):
            yield task, chunk, self._recent

    def _count(self, broken: list[Broken], seen: int) -> None:
        self._recent = broken
        super()._count(broken, seen)


class Skip:
    """Prepares a side that is not encoded: pictures are decoded to one pixel, and nothing is kept."""

    edge = 1

    def __call__(self, items: list[Any]) -> None:
        return None

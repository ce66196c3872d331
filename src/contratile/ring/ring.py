"""The ring pass: blocks of keys visit every rank, and what was gathered for them follows one hop behind.

    trip = RingPass(ring, KeyBlock(k, ids))
    for block in trip:                        # this rank's own block first
        block.gathered = work(block.carried)  # while the next block is already on its way
    trip.home                                 # what all ranks gathered for this rank's block

A step reads: post the next block, compute, wait for what other ranks gathered so far, merge, pass it on, swap. With one
process there is one step and nothing is posted; the caller is the same.

Sent per rank and pass: `world - 1` carried blocks and `world` gathered ones. Held at any time: the block in use and the
next one, and of the gathered ones the one being filled, one leaving, one arriving. Buffers that were passed on are
reused, so nothing is allocated after the first steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from contratile.ring.schedule import FlatSchedule, Schedule
from contratile.ring.team import Team

Record = tuple[Tensor | None, ...]
"""A NamedTuple of tensors with one row per key; a field that is None does not travel."""


_recorders: list[list[float]] = []


@contextmanager
def record_waits() -> Iterator[list[float]]:
    """Collect the seconds that this process waits at each hop of a ring, in order, while the block runs."""
    waits: list[float] = []
    _recorders.append(waits)
    try:
        yield waits
    finally:
        _recorders[:] = [other for other in _recorders if other is not waits]


class Gathered(Protocol):
    """A `Record` that adds another of its kind to itself."""

    def merge_(self, other: Any) -> None: ...


R = TypeVar("R", bound=Record)
C = TypeVar("C", bound=Record)
G = TypeVar("G", bound=Gathered)


class Ring(NamedTuple):
    """Who takes part in a pass, how many keys each rank holds, how many queries there are in all, and the order."""

    team: Team
    sizes: tuple[int, ...]
    total: int
    schedule: Schedule

    @classmethod
    def flat(cls, team: Team, sizes: tuple[int, ...], *, total: int) -> Ring:
        return cls(team, sizes, total, FlatSchedule(team.size))

    def origin(self, step: int) -> int:
        """The rank that sends this rank its next block when a step ends."""
        rank, source, target = self.team.rank, self.schedule.source, self.schedule.target
        wanted = rank if step == self.team.size - 1 else source(rank, step + 1)
        return next(r for r in range(self.team.size) if source(r, step) == wanted and target(r, step) == rank)

    def pass_on(self, record: R, step: int, *, tag: int, buffers: Buffers) -> Mail[R]:
        """Send the record of this step on its way and start to receive the one of the next step."""
        rank, last = self.team.rank, step == self.team.size - 1
        size = self.sizes[rank if last else self.schedule.source(rank, step + 1)]
        leaving = tuple(x.contiguous() for x in _present(record))
        arriving = tuple(buffers.take(x, size) for x in leaving)
        to, origin = self.schedule.target(rank, step), self.origin(step)
        posts = [(dist.isend, x, to) for x in leaving] + [(dist.irecv, x, origin) for x in arriving]
        ops = [
            dist.P2POp(kind, x, self.team.peer(peer), self.team.group, tag=tag + index % len(leaving))
            for index, (kind, x, peer) in enumerate(posts)
            if x.numel()
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Mail(self, works, leaving, _filled(record, arriving), origin)


def _present(record: Record) -> tuple[Tensor, ...]:
    return tuple(x for x in record if x is not None)


def _filled(record: R, tensors: tuple[Tensor, ...]) -> R:
    """A record of the same kind with these tensors instead of its own."""
    each = iter(tensors)
    make: Any = type(record)  # a NamedTuple, not a plain tuple
    return cast(R, make(*(None if x is None else next(each) for x in record)))


class Buffers:
    """Tensors that are no longer needed, to be written over."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[Tensor]] = {}

    def take(self, like: Tensor, size: int) -> Tensor:
        """A tensor of `size` rows with arbitrary content."""
        shape = (size, *like.shape[1:])
        free = self.reuse(shape, like.dtype)
        return like.new_empty(shape) if free is None else free

    def reuse(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """A free tensor, if there is one like that."""
        free = self._free.get((shape, dtype))
        return free.pop() if free else None

    def give(self, tensors: tuple[Tensor, ...]) -> None:
        for x in tensors:
            self._free.setdefault((tuple(x.shape), x.dtype), []).append(x)


@dataclass
class Mail(Generic[R]):
    """A record in flight. What leaves stays referenced until it has been waited for, so no buffer is reused early."""

    ring: Ring
    works: list[dist.Work]
    leaving: tuple[Tensor, ...]
    arriving: R
    origin: int

    def wait(self) -> R:
        start = time.perf_counter()
        try:
            while self.works:
                self.works[-1].wait()
                self.works.pop()
        except RuntimeError as error:
            self.works.clear()
            raise self.ring.team.lost(error, f"to pass a block on (from rank {self.origin})") from error
        self.leaving = ()
        for waits in _recorders:
            waits.append(time.perf_counter() - start)
        return self.arriving


@dataclass
class Block(Generic[C, G]):
    """A visiting block of keys, and what this rank gathers for it."""

    source: int
    home: bool
    carried: C
    size: int
    """Rows of the carried tensors."""

    buffers: Buffers
    gathered: G | None = None
    """Set by the caller, if there is anything to gather."""

    def zeros(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A zeroed tensor with one row per key, in memory that an earlier block no longer needs."""
        shape, dtype = (self.size, *like.shape[1:]), dtype or like.dtype
        free = self.buffers.reuse(shape, dtype)
        return like.new_zeros(shape, dtype=dtype) if free is None else free.zero_()


class RingPass(Generic[C, G]):
    """One trip of all blocks round the ring; iterate over it once."""

    def __init__(self, ring: Ring, carried: C) -> None:
        self.ring, self.carried = ring, carried
        self.home: G | None = None

    def __iter__(self) -> Iterator[Block[C, G]]:
        ring, here = self.ring, self.carried
        rank, world = ring.team.rank, ring.team.size
        if world == 1:  # nothing is posted
            own: Block[C, G] = Block(rank, True, here, ring.sizes[rank], Buffers())
            yield own
            self.home = own.gathered
            return
        ahead: Mail[C] | None = None
        behind: Mail[Any] | None = None
        tag, buffers = 0, Buffers()
        try:
            for step in range(world):
                source = ring.schedule.source(rank, step)
                if step < world - 1:
                    ahead = ring.pass_on(here, step, tag=tag, buffers=buffers)
                    tag += len(here)
                block: Block[C, G] = Block(source, source == rank, here, ring.sizes[source], buffers)
                yield block
                gathered = block.gathered
                if behind is not None:
                    sent, arrived = behind.leaving, behind.wait()
                    assert gathered is not None, "a pass gathers for every block, or for none"
                    gathered.merge_(arrived)
                    buffers.give(sent + _present(arrived))
                    del sent, arrived
                if gathered is not None:
                    behind = ring.pass_on(cast(Any, gathered), step, tag=tag, buffers=buffers)
                    tag += len(cast(Any, gathered))
                del block, gathered
                if step < world - 1:
                    assert ahead is not None
                    before, here = here, ahead.wait()
                    if step:  # the first block is the caller's
                        buffers.give(_present(before))
                    del before
            if behind is not None:
                self.home = behind.wait()
        finally:
            _drain(ahead, behind)


def _drain(*mails: Mail[Any] | None) -> None:
    """Complete what was posted, so that an exception leaves no transfer behind. The peers have posted their part."""
    for mail in mails:
        for work in mail.works if mail is not None else ():
            try:
                work.wait()
            except RuntimeError:  # the peer is gone; the exception in flight says more
                continue

"""The ring pass: blocks of keys visit every rank, and what was gathered for them follows one hop behind.

    trip = RingPass(ring, carried=(k, ids), gathers=(empty_gradient,), merge=add)
    for block in trip:                       # own block first
        work(block.carried, block.gathered)  # while the next block is already on its way
    trip.home                                # what all ranks gathered for this rank's block

A step reads: post the next block, compute, wait for what other ranks gathered so far, add, pass it on, swap. With one
process there is one step and nothing is posted; the caller is the same.

Sent per rank and pass: `world - 1` carried blocks and `world` gathered ones. Held at any time: the block in use and the
next one, and of the gathered ones the one being filled, one leaving, one arriving. Blocks that were passed on make room
for later ones, so nothing is allocated after the first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from contratile.ring.team import Team

Tensors = tuple[Tensor, ...]


class Schedule(Protocol):
    """The order in which blocks visit. Every rank sees each block once, its own first."""

    def source(self, rank: int, step: int) -> int:
        """The rank whose block is at `rank` in this step."""

    def target(self, rank: int, step: int) -> int:
        """The rank that has it in the next step; after the last step, its owner."""


@dataclass(frozen=True)
class FlatRing:
    """Every block moves on to the next rank."""

    world: int

    def source(self, rank: int, step: int) -> int:
        return (rank - step) % self.world

    def target(self, rank: int, step: int) -> int:
        return (rank + 1) % self.world


@dataclass(frozen=True)
class Ring:
    """A team, the number of keys that each rank holds, that of all queries together, and the order of visits."""

    team: Team
    sizes: tuple[int, ...]
    total: int
    schedule: Schedule

    @classmethod
    def flat(cls, team: Team, sizes: tuple[int, ...], *, total: int) -> Ring:
        return cls(team, sizes, total, FlatRing(team.size))

    def origin(self, step: int) -> int:
        """The rank that this rank's next block comes from when a step ends."""
        rank, source, target = self.team.rank, self.schedule.source, self.schedule.target
        wanted = rank if step == self.team.size - 1 else source(rank, step + 1)
        return next(r for r in range(self.team.size) if source(r, step) == wanted and target(r, step) == rank)

    def pass_on(self, blocks: Tensors, step: int, *, tag: int, room: Room) -> Mail:
        """Send the block of this step on its way and start to receive the one of the next step."""
        rank, last = self.team.rank, step == self.team.size - 1
        if self.team.size == 1:
            return Mail(self, [], blocks, blocks, rank)
        size = self.sizes[rank if last else self.schedule.source(rank, step + 1)]
        arriving = tuple(room.take(x, size) for x in blocks)
        to, origin = self.schedule.target(rank, step), self.origin(step)
        posts = [(dist.isend, x.contiguous(), to) for x in blocks] + [(dist.irecv, x, origin) for x in arriving]
        ops = [
            dist.P2POp(kind, x, self.team.peer(peer), self.team.group, tag=tag + index % len(blocks))
            for index, (kind, x, peer) in enumerate(posts)
            if x.numel()
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        return Mail(self, works, tuple(x for _, x, _ in posts), arriving, origin)


class Room:
    """Blocks that are no longer needed, to be written over."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[Tensor]] = {}

    def take(self, like: Tensor, size: int) -> Tensor:
        """A block of `size` rows with any content."""
        shape = (size, *like.shape[1:])
        free = self._free.get((shape, like.dtype))
        return free.pop() if free else like.new_empty(shape)

    def give(self, blocks: Tensors) -> None:
        for x in blocks:
            self._free.setdefault((tuple(x.shape), x.dtype), []).append(x)


@dataclass
class Mail:
    """Blocks in flight. The tensors stay referenced until they have been waited for, so no buffer is reused early."""

    ring: Ring
    works: list[dist.Work]
    held: Tensors
    arriving: Tensors
    origin: int

    def wait(self) -> Tensors:
        try:
            while self.works:
                self.works[-1].wait()
                self.works.pop()
        except RuntimeError as error:
            self.works.clear()
            raise self.ring.team.lost(error, f"to pass a block on (from rank {self.origin})") from error
        self.held = ()
        return self.arriving


@dataclass
class Block:
    """A rank's keys on their visit, and what this rank gathers for them."""

    source: int
    home: bool
    carried: Tensors
    gathered: Tensors


def _keep(gathered: Tensors, arrived: Tensors) -> None:
    return None


class RingPass:
    """One trip of all blocks round the ring; iterate over it once.

    `carried` is this rank's block: tensors with one row per key. `gathers` are tensors like the accumulators that every
    block shall find, filled with 0; without it the caller puts there what it gathered, if anything.
    `merge(into, other)` adds one set of accumulators to another.
    """

    def __init__(
        self,
        ring: Ring,
        carried: Tensors,
        *,
        gathers: Tensors = (),
        merge: Callable[[Tensors, Tensors], None] = _keep,
    ) -> None:
        self.ring, self.carried, self.gathers, self.merge = ring, carried, gathers, merge
        self.home: Tensors = ()

    def __iter__(self) -> Iterator[Block]:
        ring, here = self.ring, self.carried
        rank, world = ring.team.rank, ring.team.size
        ahead: Mail | None = None
        behind: Mail | None = None
        tag, room = 0, Room()
        try:
            for step in range(world):
                source = ring.schedule.source(rank, step)
                if step < world - 1:
                    ahead = ring.pass_on(here, step, tag=tag, room=room)
                    tag += len(here)
                fresh = tuple(room.take(like, ring.sizes[source]).zero_() for like in self.gathers)
                block = Block(source, source == rank, here, fresh)
                yield block
                gathered = block.gathered
                if behind is not None:
                    sent, arrived = behind.held, behind.wait()
                    self.merge(gathered, arrived)
                    if self.gathers:
                        room.give(sent[: len(arrived)] + arrived)
                    del sent, arrived
                if gathered:
                    behind = ring.pass_on(gathered, step, tag=tag, room=room)
                    tag += len(gathered)
                del block, fresh, gathered
                if step < world - 1:
                    assert ahead is not None
                    before, here = here, ahead.wait()
                    if step:  # the first block is the caller's
                        room.give(before)
                    del before
            if behind is not None:
                self.home = behind.wait()
        finally:
            _drain(ahead, behind)


def _drain(*mails: Mail | None) -> None:
    """Complete what was posted, so that an exception leaves no transfer behind. The peers have posted their part."""
    for mail in mails:
        for work in mail.works if mail is not None else ():
            try:
                work.wait()
            except RuntimeError:  # the peer is gone; the exception under way tells more
                continue

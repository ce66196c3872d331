"""The ring pass: blocks of keys visit every rank, and what was gathered for them follows one hop behind.

    trip = RingPass(ring, KeyBlock(k, ids))
    for block in trip:                        # this rank's own block first
        block.gathered = work(block.carried)  # while the next block is already on its way
    trip.home                                 # what all ranks gathered for this rank's block

A step reads: post the next block, compute, wait for what other ranks gathered so far, merge, pass it on, swap. With one
process there is one step and nothing is posted; the caller is the same.

Over nodes (`schedule.py`) the pass has a round per node. The block that a rank starts a round with also goes to the
next node, and has the round to get there. What a node gathered for a block is complete one hop after the round, where
the block entered the node; it is added to what the nodes before gathered and goes on, again with a round to get there.

Sent per rank and pass, with K nodes of L ranks: inside the node K (L - 1) carried blocks and K L gathered ones, across
nodes K - 1 and K. On one node, nothing goes across: `world - 1` and `world`.

Held at any time: the block in use and the next one; of the gathered ones the one being filled, one leaving, one
arriving; and across nodes one leaving and one arriving of both. Buffers that were passed on are reused, so nothing is
allocated after the first steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from contratile.ring.mail import Buffers, Mail, Payload, PostOffice, present, record_waits
from contratile.ring.schedule import Route, Schedule
from contratile.ring.team import Team

__all__ = ["Block", "Ring", "RingPass", "record_waits"]


class Gathered(Protocol):
    """A `Payload` that adds another of its kind to itself."""

    def merge_(self, other: Any) -> None: ...


C = TypeVar("C", bound=Payload)
G = TypeVar("G", bound=Gathered)


class Ring(NamedTuple):
    """Who takes part in a pass, how many keys each rank holds, how many queries there are in all, and the order."""

    team: Team
    sizes: tuple[int, ...]
    total: int
    schedule: Schedule

    @classmethod
    def flat(cls, team: Team, sizes: tuple[int, ...], *, total: int) -> Ring:
        return cls(team, sizes, total, Schedule.flat(team.size))

    @property
    def route(self) -> Route:
        return self.schedule.route(self.team.rank)


@dataclass
class Block(Generic[C, G]):
    """A visiting block of keys, and what this rank gathers for it."""

    source: int
    home: bool
    carried: C
    size: int
    """Rows of the carried tensors."""

    buffers: Buffers | None
    """None on one process, where no block leaves memory behind."""

    gathered: G | None = None
    """Set by the caller, if there is anything to gather."""

    def zeros(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A zeroed tensor with one row per key, in memory that an earlier block no longer needs."""
        shape, dtype = (self.size, *like.shape[1:]), dtype or like.dtype
        free = None if self.buffers is None else self.buffers.reuse(shape, dtype)
        return like.new_zeros(shape, dtype=dtype) if free is None else free.zero_()


class RingPass(Generic[C, G]):
    """One trip of all blocks round the ring; iterate over it once."""

    def __init__(self, ring: Ring, carried: C) -> None:
        self.ring, self.carried = ring, carried
        self.home: G | None = None

    def __iter__(self) -> Iterator[Block[C, G]]:
        ring, rank = self.ring, self.ring.team.rank
        if ring.team.size == 1:  # nothing is posted
            own: Block[C, G] = Block(rank, True, self.carried, ring.sizes[rank], None)
            yield own
            self.home = own.gathered
            return
        office = PostOffice(ring.team)
        try:
            yield from self._rounds(office, ring.route)
        finally:
            office.drain()

    def _rounds(self, office: PostOffice, route: Route) -> Iterator[Block[C, G]]:
        sizes, buffers, inside = self.ring.sizes, office.buffers, route.inside()
        entered = self.carried  # the block that this rank starts a round with
        onward: Mail[C] | None = None  # to the next node: that block, and what this node and those before gathered
        sums: Mail[Any] | None = None
        ahead: Mail[C] | None = None  # inside the node: the block in use, and what was gathered for the one before
        behind: Mail[Any] | None = None
        for round_ in range(route.rounds):
            if round_ < route.rounds - 1:
                onward = office.post(entered, route.across(), sizes[route.source(round_ + 1, 0)], across=True)
            here = entered
            for step in range(route.steps):
                source, coming = route.source(round_, step), sizes[route.source(round_, step + 1)]
                if step < route.steps - 1:
                    ahead = office.post(here, inside, coming)
                block: Block[C, G] = Block(source, source == self.ring.team.rank, here, sizes[source], buffers)
                yield block
                gathered = block.gathered
                if behind is not None:
                    assert gathered is not None, "a pass gathers for every block, or for none"
                    sent, arrived = behind.leaving, behind.wait()
                    buffers.give(sent)
                    if step:
                        gathered.merge_(arrived)
                        buffers.give(present(arrived))
                    else:  # the sum of the last round
                        sums = self._add_up(office, route, sums, arrived, round_)
                    del sent, arrived
                if gathered is not None:
                    behind = office.post(cast(Any, gathered), inside, coming)
                del block, gathered
                before, here = here, ahead.wait() if ahead is not None and step < route.steps - 1 else entered
                if before is not entered:
                    buffers.give(present(before))
                del before
            if onward is not None and round_ < route.rounds - 1:
                before, entered = entered, onward.wait()
                if round_:  # the first block belongs to the caller
                    buffers.give(present(before))
                del before, here
        if behind is not None:
            self.home = behind.wait()
            if route.rounds > 1:
                self.home = self._add_up(office, route, sums, self.home, route.rounds).wait()

    def _add_up(self, office: PostOffice, route: Route, sums: Mail[Any] | None, total: Any, rounds: int) -> Mail[Any]:
        """Add what this node gathered for a block to what the nodes before did, and send it on: at the end, home."""
        if sums is not None:
            sent, arrived = sums.leaving, sums.wait()
            total.merge_(arrived)
            office.buffers.give(sent + present(arrived))
        return office.post(total, route.across(), self.ring.sizes[route.source(rounds, 0)], across=True)

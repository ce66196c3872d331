"""The order in which blocks of keys visit the ranks, in plain integers.

Ranks are arranged as nodes of equal size. In a round, a node works on the blocks of one node (its own in round 0, those
of the node before it in round 1, and so on); these go round the node, a step at a time:

    at (round, step) the rank at place y of node x has the block of place y - step of node x - round

The block that a rank has when a round starts also goes to the same place of the next node. It has the whole round to
get there, as many steps as a node has ranks, and every rank uses its own link.

A flat ring is the case of one node with all ranks: one round, and nothing goes to another node.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


class Hop(NamedTuple):
    """The ranks that a rank sends to and receives from."""

    target: int
    origin: int


class Schedule(NamedTuple):
    """Every rank sees each block once, its own first."""

    nodes: tuple[tuple[int, ...], ...]
    """The ranks of each node, equally many."""

    @classmethod
    def flat(cls, world: int) -> Schedule:
        return cls((tuple(range(world)),))

    def route(self, rank: int) -> Route:
        return _route(self.nodes, rank)


ONE_RANK = Schedule.flat(1)


@lru_cache(maxsize=64)
def _route(nodes: tuple[tuple[int, ...], ...], rank: int) -> Route:
    node = next(x for x, ranks in enumerate(nodes) if rank in ranks)
    return Route(nodes, node, nodes[node].index(rank))


class Route(NamedTuple):
    """The schedule as one rank sees it."""

    nodes: tuple[tuple[int, ...], ...]
    node: int
    place: int

    @property
    def rounds(self) -> int:
        return len(self.nodes)

    @property
    def steps(self) -> int:
        """Steps per round."""
        return len(self.nodes[0])

    def source(self, round_: int, step: int) -> int:
        """The owner of the block that is here. After the last step of a round it is that of its first step again."""
        return self.nodes[(self.node - round_) % self.rounds][(self.place - step) % self.steps]

    def visits(self) -> Iterator[int]:
        """The owners of all blocks in the order of their visits."""
        return (self.source(round_, step) for round_ in range(self.rounds) for step in range(self.steps))

    def inside(self) -> Hop:
        """The neighbours in the node."""
        ranks = self.nodes[self.node]
        return Hop(ranks[(self.place + 1) % self.steps], ranks[self.place - 1])

    def across(self) -> Hop:
        """The ranks at the same place of the next node and of the previous one."""
        return Hop(self.nodes[(self.node + 1) % self.rounds][self.place], self.nodes[self.node - 1][self.place])

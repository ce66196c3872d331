"""One rank of many in one process: the real passes, with a transport that delivers blocks from memory.

    team = SimulatedRank.among(128, nodes=16, inside=Link(200e9), across=Link(25e9))
    clip_loss(image, text, scale, group=team).backward()
    team.log.sent                      # bytes by link
    team.log.seconds                   # predicted time of the step: measured compute, and transfers that did not hide

All ranks hold the same block, so they are in the same state at every step and receive what they send: values and
gradients are exactly those of P ranks with equal pairs. Memory and compute are real (the tiles of every visiting block
are computed, buffers are allocated and filled). Transfers take no time; the log predicts theirs from the links.

The rank is the last one of the first node, so that a flat ring sends over the link between nodes, which sets its pace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from contratile.errors import bad_value, check_count
from contratile.ring.schedule import Hop
from contratile.ring.team import Facts, Team, Transfer


class Link(NamedTuple):
    """A link of one rank, in each direction."""

    bytes_per_second: float = float("inf")
    latency: float = 0.0
    """Seconds."""


FREE = Link()
"""Transfers take no time."""


@dataclass
class TransferLog:
    """What a simulated rank sent, and how long its step would take.

    Time is compute as it passes here, plus what remains of a transfer when it is waited for. Transfers over the same
    link follow each other.
    """

    inside: Link
    across: Link
    sent: dict[str, int] = field(default_factory=lambda: {"inside": 0, "across": 0})
    """Bytes by link."""

    posts: dict[str, int] = field(default_factory=lambda: {"inside": 0, "across": 0})
    computed: float = 0.0
    """Seconds of compute."""

    waited: float = 0.0
    """Predicted seconds of transfers that compute did not hide."""

    _free: dict[str, float] = field(default_factory=lambda: {"inside": 0.0, "across": 0.0})
    _mark: float | None = None

    @property
    def seconds(self) -> float:
        return self.computed + self.waited

    def restart(self) -> None:
        """Forget everything, and count from now on."""
        self.__init__(self.inside, self.across)  # type: ignore[misc]  # reset the fields to their defaults
        self._mark = time.perf_counter()

    def stop(self) -> None:
        """End the step here."""
        self._compute()
        self._mark = None

    def _compute(self) -> None:
        now = time.perf_counter()
        self.computed += 0.0 if self._mark is None else now - self._mark
        self._mark = now

    def post(self, way: str, size: int) -> float:
        """Note a transfer and return when it ends."""
        self._compute()
        link: Link = getattr(self, way)
        self.sent[way] += size
        self.posts[way] += 1
        start = max(self.seconds, self._free[way])
        self._free[way] = start + link.latency + size / link.bytes_per_second
        return self._free[way]

    def resume(self) -> None:
        """Continue counting; the time since the last note is not compute."""
        self._mark = time.perf_counter()

    def wait(self, end: float) -> None:
        """Wait until then."""
        self._compute()
        self.waited += max(0.0, end - self.seconds)


class _Sent(NamedTuple):
    log: TransferLog
    end: float

    def wait(self) -> None:
        self.log.wait(self.end)


@dataclass(frozen=True)
class SimulatedRank(Team):
    """A rank of `size` ranks on `nodes` nodes that all hold the same block."""

    nodes: int = 1
    log: TransferLog = field(default_factory=lambda: TransferLog(FREE, FREE))

    @classmethod
    def among(cls, ranks: int, *, nodes: int = 1, inside: Link = FREE, across: Link = FREE) -> SimulatedRank:
        """The last rank of the first node.

        Args:
            ranks: Number of ranks P, at least 2.
            nodes: Number of nodes; it divides P.
            inside: The link of a rank to others on its node.
            across: The link of a rank to other nodes.
        """
        check_count("ranks", ranks, least=2)
        check_count("nodes", nodes, least=1)
        if ranks % nodes:
            remedy = "All nodes have the same number of ranks."
            bad_value("nodes", expected=f"a divisor of {ranks}", got=nodes, remedy=remedy)
        return cls(None, ranks // nodes - 1, ranks, None, nodes, TransferLog(inside, across))

    def node(self, rank: int) -> int:
        return rank * self.nodes // self.size

    def with_lane(self) -> Team:
        return self

    def handshake(self, mine: Facts) -> list[Facts]:
        """The other ranks report the same facts, on their nodes."""
        return [replace(mine, node=f"node {self.node(rank)}", local=0) for rank in range(self.size)]

    def sum(self, values: Tensor) -> Tensor:
        return values * self.size

    def post(
        self, leaving: Sequence[Tensor], arriving: Sequence[Tensor], hop: Hop, *, tag: int, across: bool
    ) -> list[Transfer]:
        """Deliver what this rank sends: the origin sends the same."""
        way = "inside" if self.node(hop.target) == self.node(self.rank) else "across"
        end = self.log.post(way, sum(x.numel() * x.itemsize for x in leaving))
        for x, into in zip(leaving, arriving, strict=True):
            into.copy_(x)
        self.log.resume()
        return [_Sent(self.log, end)]

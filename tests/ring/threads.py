"""Ranks as threads of one process, with mail boxes instead of a network: the ring without `torch.distributed`.

results = run_ranks(6, function)         # function(team) in a thread per rank, results in rank order
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from contratile.ring.schedule import Hop
from contratile.ring.team import Facts, Team, Transfer

T = TypeVar("T")
SECONDS = 60.0


class Network:
    """Boxes by (origin, target, tag, across), what was sent, and a place to meet."""

    def __init__(self, world: int) -> None:
        self.boxes: dict[tuple[int, int, int, bool], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self.lock = threading.Lock()
        self.meeting = threading.Barrier(world, timeout=SECONDS)
        self.shared: dict[int, Any] = {}

    def box(self, *key: Any) -> queue.SimpleQueue[Tensor]:
        with self.lock:
            return self.boxes[key]

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.shared[rank] = value
        self.meeting.wait()
        found = [self.shared[other] for other in sorted(self.shared)]
        self.meeting.wait()
        return found


@dataclass
class Letter:
    box: queue.SimpleQueue[Tensor]
    into: Tensor

    def wait(self) -> None:
        self.into.copy_(self.box.get(timeout=SECONDS))


@dataclass(frozen=True)
class ThreadTeam(Team):
    """A rank that is a thread. `node` is what it says in the handshake."""

    network: Any = None
    node: str = ""
    sent: dict[tuple[int, bool], int] = field(default_factory=lambda: defaultdict(int))
    """Numbers sent by this rank, by target and whether across nodes."""

    def with_lane(self) -> Team:
        return self

    def handshake(self, mine: Facts) -> list[Facts]:
        return [*self.network.gather(self.rank, replace(mine, node=self.node, local=0))]

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.network.gather(self.rank, values.clone())).sum(0)

    def post(
        self, leaving: Sequence[Tensor], arriving: Sequence[Tensor], hop: Hop, *, tag: int, across: bool
    ) -> list[Transfer]:
        for index, x in enumerate(leaving):
            if x.numel():
                self.network.box(self.rank, hop.target, tag + index, across).put(x.clone())
                self.sent[hop.target, across] += x.numel()
        return [
            Letter(self.network.box(hop.origin, self.rank, tag + index, across), x)
            for index, x in enumerate(arriving)
            if x.numel()
        ]


def run_ranks(world: int, function: Callable[[ThreadTeam], T], nodes: Sequence[str] = ()) -> list[T]:
    """What the function returns on each rank; raises the first error."""
    network = Network(world)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadTeam(None, rank, world, None, network, nodes[rank] if nodes else ""))
        except BaseException as error:
            errors.append(error)
            network.meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]

"""Who takes part in a loss: the ranks of a process group, and the handshake that opens every call.

    team = Team.of("auto")                   # the default group if there is one, else this process alone
    facts = team.handshake(Facts(...))       # the sizes of all ranks, or the same error on every rank

The handshake tells each rank how many rows the others hold and checks that all of them make the same call, before any
block moves. It uses CPU memory, so it never synchronises a GPU.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from contratile.errors import bad_type, bad_value
from contratile.ring.schedule import Hop

# A string: PyTorch builds without torch.distributed have no ProcessGroup.
Group: TypeAlias = "dist.ProcessGroup | Team | Literal['auto'] | None"

_HEADER_BYTES = 640
_LOOK = 2.0
"""Seconds to wait for other ranks to report a failure too."""

T = TypeVar("T")


class RankLost(RuntimeError):
    """Raised when another rank died, stalled, or did not take part."""


class NoAnswer(RuntimeError):
    """Raised when a call takes too long."""


class Transfer(Protocol):
    """Something posted, such as `dist.Work`."""

    def wait(self) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rank reports in the handshake. Only the sizes and the nodes may differ between ranks."""

    queries: int
    keys: int
    extra: int = 0
    features: int
    dtype: str
    device: str
    call: str
    """The loss and the options that decide what is computed."""

    gradient: str
    """The inputs that need a gradient: the backward pass is collective like the forward."""

    node: str = ""
    local: int = 0
    """Where the rank runs: see `nodes.Home`."""

    refused: str = ""
    """Set by a rank whose own arguments are bad, so that the other ranks do not hang."""


@dataclass(frozen=True)
class Team:
    """The ranks that share a loss. `group=None` is this process alone: a team of one."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    lane: dist.ProcessGroup | None = None
    """A second group of the same ranks, for transfers between nodes; None if those use the same group."""

    @classmethod
    def of(cls, group: Group) -> Team:
        """The team of a group. A team is returned unchanged, such as the simulated ranks of `simulated.py`."""
        if group is None:
            return ALONE
        if isinstance(group, Team):
            return group
        if isinstance(group, str) and group != "auto":
            remedy = "Pass None for this process alone."
            bad_value("group", expected='"auto", None or a process group', got=repr(group), remedy=remedy)
        if not dist.is_available() or not dist.is_initialized():
            if group == "auto":
                return ALONE
            remedy = "Call torch.distributed.init_process_group first, or pass group=None."
            bad_type("group", expected="an initialised process group", got="none", remedy=remedy)
        if group == "auto":
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            remedy = 'Pass "auto", None, or a group that this rank belongs to.'
            bad_type("group", expected="a process group", got=repr(group), remedy=remedy)
        size = dist.get_world_size(group)
        return ALONE if size == 1 else cls(group, dist.get_rank(group), size)

    def peer(self, rank: int) -> int:
        """The global rank of a rank of this team, which point-to-point calls need."""
        assert self.group is not None
        return dist.get_global_rank(self.group, rank)

    def with_lane(self) -> Team:
        """The team with a second group for transfers between nodes; collective the first time.

        NCCL runs the transfers of a group one after the other: on the same group those inside a node would wait for
        the slow ones. A new group needs all processes, so a group of some of them uses itself for both.
        """
        if self.group is None or self.size < dist.get_world_size():
            return self
        if self.group not in _lanes:
            _lanes[self.group] = dist.new_group(timeout=_store(self.group).timeout)
        return replace(self, lane=_lanes[self.group])

    def post(
        self, leaving: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor], hop: Hop, *, tag: int, across: bool
    ) -> list[Transfer]:
        """Start to send some tensors and to receive others. Tensors without elements do not travel.

        Args:
            leaving: What the target receives.
            arriving: Where to put what the origin sends, in the same order.
            hop: Target and origin.
            tag: Tag of the first tensor; the others get the following numbers.
            across: Use the lane between nodes.
        """
        group = self.lane if across and self.lane is not None else self.group
        posts = (dist.isend, leaving, hop.target), (dist.irecv, arriving, hop.origin)
        ops = [
            dist.P2POp(kind, x, self.peer(rank), group, tag=tag + index)
            for kind, tensors, rank in posts
            for index, x in enumerate(tensors)
            if x.numel()
        ]
        return [*dist.batch_isend_irecv(ops)] if ops else []

    def handshake(self, mine: Facts) -> list[Facts]:
        """The facts of all ranks, in rank order. Raises the same ValueError on every rank if they do not agree."""
        if self.size == 1:
            return [mine]
        header = json.dumps(asdict(mine)).encode()[:_HEADER_BYTES].ljust(_HEADER_BYTES)
        try:
            facts = [Facts(**json.loads(raw)) for raw in self._gather(header)]
        except RuntimeError as error:
            raise self.lost(error, "to start the loss") from error
        _compare(facts)
        return facts

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks in the handshake that this rank's arguments are bad, so that they do not hang."""
        if self.size == 1:
            return
        text = str(error).encode("ascii", "replace").decode()[:200]
        with suppress(ValueError):
            self.handshake(
                Facts(queries=0, keys=0, features=0, dtype="", device="", call="", gradient="", refused=text)
            )

    def _gather(self, header: bytes) -> list[bytes]:
        """All ranks' headers, through CPU memory: a CPU backend of the group if it has one, else its store."""
        assert self.group is not None
        if torch.device("cpu") in self.group._device_types:
            sent = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            received = [torch.empty_like(sent) for _ in range(self.size)]
            dist.all_gather(received, sent, group=self.group)
            return [bytes(row.tolist()) for row in received]
        store, turn = _store(self.group), _next_turn(self.group)
        keys = [f"contratile/{turn}/{rank}" for rank in range(self.size)]

        def exchange() -> list[bytes]:
            store.set(keys[self.rank], header.decode())
            store.wait(keys)
            headers: list[bytes] = store.multi_get(keys)
            if turn > 1:  # every rank has read the headers of turn - 2
                store.delete_key(f"contratile/{turn - 2}/{self.rank}")
            return headers

        return bounded(exchange, store.timeout.total_seconds() + _LOOK)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a small tensor without gradient."""
        if self.size > 1:
            values = values.clone()
            try:
                dist.all_reduce(values, group=self.group)
            except RuntimeError as error:
                raise self.lost(error, "to add up a statistic") from error
        return values

    def lost(self, error: BaseException, purpose: str) -> RankLost:
        """The error for a lost rank; names the ranks that did not report a failure, if possible."""
        return RankLost(
            f"rank {self.rank} of {self.size} gave up waiting for {self._absentees()} {purpose}: it died, stalled, or "
            f"did not call the loss (or its backward), which every rank of the group must. Look for that rank's own "
            f"error, or pass group=None for a loss over one rank's own pairs. "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'})"
        )

    def _absentees(self) -> str:
        """Ranks that did not report the failure. Those that do leave a note in the store."""
        assert self.group is not None
        store, me, size = _store(self.group), self.rank, self.size

        def look() -> list[int]:
            store.set(f"contratile/lost/{me}", "1")
            deadline = time.monotonic() + _LOOK
            absent = list(range(size))
            while absent and time.monotonic() < deadline:
                absent = [rank for rank in absent if not store.check([f"contratile/lost/{rank}"])]
                time.sleep(0.05)
            return absent

        try:
            absent = bounded(look, 2 * _LOOK)
        except NoAnswer:  # the process that holds the store stalls: rank 0, unless torchrun holds it
            return "another rank, probably rank 0 (the group's store does not answer)"
        except RuntimeError:
            return "another rank"  # the process that held the store has ended
        return f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}" if absent else "another rank"


ALONE = Team(None, 0, 1)


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Run a call that has no time-out of its own, such as a query to a store whose process may stall.

    Raises:
        NoAnswer: It took longer. Its thread keeps running until the process ends.
    """
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((work(), None))
        except BaseException as error:  # re-raised in the waiting thread
            answer.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        found, error = answer.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(f"no answer within {seconds:g} seconds") from None
    if error is not None:
        raise error
    return cast(T, found)


@contextmanager
def watched(purpose: str) -> Iterator[None]:
    """Turn errors of other packages' collectives that mean a lost rank into `RankLost`."""
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        team = Team.of("auto")
        if team.size == 1 or not (isinstance(error, dist.DistError) or _CONNECTION.search(str(error))):
            raise
        raise team.lost(error, purpose) from error


_CONNECTION = re.compile(r"gloo|connection (closed|reset)|timed out waiting|store\b.*timeout", re.IGNORECASE)
"""Texts of errors about lost ranks; gloo raises plain RuntimeErrors."""


def _compare(facts: list[Facts]) -> None:
    refused = {rank: fact.refused for rank, fact in enumerate(facts) if fact.refused}
    if refused:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in refused.items())
        raise ValueError(f"not every rank could make this call. {told}")
    for name in ("call", "features", "dtype", "device", "gradient"):
        holders: dict[Any, list[int]] = defaultdict(list)
        for rank, fact in enumerate(facts):
            holders[getattr(fact, name)].append(rank)
        if len(holders) > 1:
            told = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in holders.items())
            raise ValueError(f"{name}: expected the same on every rank, got {told}. {_REMEDIES[name]}")


_REMEDIES = {
    "call": "Every rank must make the same calls in the same order, with the same options.",
    "features": "Every rank must use the same embedding size D.",
    "dtype": "Convert the features of the ranks that differ.",
    "device": "Move the features of the ranks that differ.",
    "gradient": "The backward pass is collective: the same inputs must need a gradient on every rank.",
}


_lanes: WeakKeyDictionary[Any, dist.ProcessGroup] = WeakKeyDictionary()


def _store(group: dist.ProcessGroup) -> Any:
    return dist.distributed_c10d._world.pg_map[group][1]


_turns: dict[str, int] = defaultdict(int)


def _next_turn(group: dist.ProcessGroup) -> int:
    _turns[group.group_name] += 1
    return _turns[group.group_name]

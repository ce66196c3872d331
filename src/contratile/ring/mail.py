"""Records of tensors in flight between ranks, and the buffers that they arrive in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from contratile.ring.schedule import Hop
from contratile.ring.team import Team, Transfer

Payload = tuple[Tensor | None, ...]
"""A NamedTuple of tensors with one row per key; a field that is None does not travel."""

R = TypeVar("R", bound=Payload)

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


def present(record: Payload) -> tuple[Tensor, ...]:
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
        """A free tensor of the same kind, if there is one."""
        free = self._free.get((shape, dtype))
        return free.pop() if free else None

    def give(self, tensors: tuple[Tensor, ...]) -> None:
        for x in tensors:
            self._free.setdefault((tuple(x.shape), x.dtype), []).append(x)


@dataclass
class Mail(Generic[R]):
    """A record in flight. What leaves stays referenced until it has been waited for, so no buffer is reused early."""

    team: Team
    transfers: list[Transfer]
    leaving: tuple[Tensor, ...]
    arriving: R
    origin: int

    def wait(self) -> R:
        start = time.perf_counter()
        try:
            while self.transfers:
                self.transfers[-1].wait()
                self.transfers.pop()
        except RuntimeError as error:
            self.transfers.clear()
            raise self.team.lost(error, f"to pass a block on (from rank {self.origin})") from error
        self.leaving = ()
        for waits in _recorders:
            waits.append(time.perf_counter() - start)
        return self.arriving

    def drain(self) -> None:
        """Complete what was posted. The peers have posted their part."""
        for transfer in self.transfers:
            try:
                transfer.wait()
            except RuntimeError:  # the peer is lost; the exception being raised says more
                continue


class PostOffice:
    """Posts the records of a pass. All ranks post in the same order, so equal tags belong together."""

    def __init__(self, team: Team) -> None:
        self.team, self.buffers = team, Buffers()
        self._tag = 0
        self._sent: list[Mail[Any]] = []

    def post(self, record: R, hop: Hop, size: int, *, across: bool = False) -> Mail[R]:
        """Send a record on its way and start to receive one of the same kind with `size` rows.

        Args:
            record: What leaves.
            hop: Where to, and where from.
            size: Rows of the record that arrives.
            across: It goes to another node, in addition to what travels inside.
        """
        leaving = tuple(x.contiguous() for x in present(record))
        arriving = tuple(self.buffers.take(x, size) for x in leaving)
        try:
            transfers = self.team.post(leaving, arriving, hop, tag=self._tag, across=across)
        except RuntimeError as error:  # the peer is already known to be lost
            raise self.team.lost(error, f"to pass a block on (from rank {hop.origin})") from error
        self._tag += len(leaving)
        mail = Mail(self.team, transfers, leaving, _filled(record, arriving), hop.origin)
        self._sent = [other for other in self._sent if other.transfers] + [mail]
        return mail

    def drain(self) -> None:
        """Complete all transfers, so that an exception leaves none behind."""
        for mail in self._sent:
            mail.drain()

"""The order in which blocks of keys visit the ranks."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Schedule(Protocol):
    """Every rank sees each block once, its own first."""

    def source(self, rank: int, step: int) -> int:
        """The owner of the block that is at `rank` in this step."""

    def target(self, rank: int, step: int) -> int:
        """The rank that has this block in the next step; after the last step, its owner."""


class FlatSchedule(NamedTuple):
    """Every block moves on to the next rank."""

    world: int

    def source(self, rank: int, step: int) -> int:
        return (rank - step) % self.world

    def target(self, rank: int, step: int) -> int:
        return (rank + 1) % self.world

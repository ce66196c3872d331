"""Which ranks share a node, and whether a ring goes round the nodes.

    facts = team.handshake(Facts(..., **here()._asdict()))
    schedule = schedule_for("auto", [Home(fact.node, fact.local) for fact in facts])

A node is known by the name of its host. The environment variable CONTRATILE_NODE overrides the name, for hosts that
share one and for tests. LOCAL_WORLD_SIZE, which torchrun and accelerate set, shows names that do not identify nodes:
if more ranks have a name than the launcher started there, two hosts share it (or a host runs two launchers).
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from contratile.errors import bad_value
from contratile.ring.schedule import Schedule

RingKind = Literal["auto", "flat", "nodes"]
RINGS: tuple[str, ...] = get_args(RingKind)
_LONGEST = 32
"""Characters of a name in the handshake."""


class Home(NamedTuple):
    """The node that a rank runs on."""

    node: str
    """Its name; empty if unknown."""

    local: int
    """How many ranks the launcher started there; 0 if unknown."""


def here() -> Home:
    """The node of this process."""
    name = os.environ.get("CONTRATILE_NODE")
    if name:
        return Home(_short(name), 0)  # a name given by the user overrides the launcher
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Home(_short(socket.gethostname()), int(local) if local.isdecimal() else 0)


def _short(name: str) -> str:
    plain = name.encode("ascii", "replace").decode()
    return plain if len(plain) <= _LONGEST else hashlib.sha256(name.encode()).hexdigest()[:_LONGEST]


def schedule_for(ring: RingKind, homes: Sequence[Home]) -> Schedule:
    """The schedule of a group, from the nodes of its ranks in rank order.

    Args:
        ring: "flat", "nodes", or "auto": over nodes if there are several, known and of equal size.
        homes: The node of each rank.

    Raises:
        ValueError: `ring` is "nodes", and the nodes are unknown or differ in size.
    """
    flat = Schedule.flat(len(homes))
    if ring == "flat":
        return flat
    members: dict[str, list[int]] = {}
    for rank, home in enumerate(homes):
        members.setdefault(home.node, []).append(rank)
    obstacle = _obstacle(members, homes)
    if obstacle is not None:
        if ring == "nodes":
            remedy = (
                'Use ring="auto" or "flat", or a group with equally many ranks of each node. CONTRATILE_NODE names the '
                "node of a process if its host name does not."
            )
            bad_value("ring='nodes'", expected="known nodes with equally many ranks", got=obstacle, remedy=remedy)
        return flat
    if len(members) == 1 or len(members) == len(homes):  # one node, or one rank on each: a flat ring
        return flat
    return Schedule(tuple(map(tuple, members.values())))


def _obstacle(members: dict[str, list[int]], homes: Sequence[Home]) -> str | None:
    """Why these nodes cannot be arranged, or None."""
    if "" in members:
        return f"no name of a node on rank {', '.join(map(str, members[''][:8]))}"
    for name, ranks in members.items():
        least = min(homes[rank].local or len(ranks) for rank in ranks)
        if len(ranks) > least:
            return f"{len(ranks)} ranks on {name!r}, where the launcher started {least}"
    counts = {name: len(ranks) for name, ranks in members.items()}
    if len(set(counts.values())) > 1:
        few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        return f"{counts[few]} on {few!r} and {counts[many]} on {many!r}"
    return None

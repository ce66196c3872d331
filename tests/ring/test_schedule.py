"""The schedule in integers, and the pass of all ranks as threads: every pair meets once, sums come home complete."""

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contratile.ring.mail import Buffers
from contratile.ring.nodes import Home, RingKind, here, schedule_for
from contratile.ring.ring import Ring, RingPass
from contratile.ring.schedule import Hop, Schedule
from tests.ring.threads import ThreadTeam, run_ranks


@st.composite
def schedules(draw: st.DrawFn, most: int = 6) -> Schedule:
    """Nodes of equal size with any placement of the ranks; a node has several ranks, as `schedule_for` sees to."""
    count, size = draw(st.integers(1, most)), draw(st.integers(2, most))
    ranks = draw(st.permutations(range(count * size)))
    return Schedule(tuple(tuple(ranks[start : start + size]) for start in range(0, count * size, size)))


def world(schedule: Schedule) -> int:
    return len(schedule.nodes) * len(schedule.nodes[0])


@given(schedules())
def test_every_rank_sees_each_block_once_its_own_first(schedule: Schedule) -> None:
    for rank in range(world(schedule)):
        visits = list(schedule.route(rank).visits())
        assert visits[0] == rank
        assert sorted(visits) == list(range(world(schedule)))


@given(schedules())
def test_what_arrives_is_what_the_origin_had(schedule: Schedule) -> None:
    for rank in range(world(schedule)):
        route = schedule.route(rank)
        inside, across = (schedule.route(hop.origin) for hop in (route.inside(), route.across()))
        assert inside.inside().target == across.across().target == rank
        for round_ in range(route.rounds):
            assert across.source(round_, 0) == route.source(round_ + 1, 0)
            for step in range(route.steps):
                assert inside.source(round_, step) == route.source(round_, step + 1)
        assert route.source(route.rounds, 0) == rank, "what goes across after the last round comes home"


@given(schedules())
def test_links_across_nodes_join_equal_places(schedule: Schedule) -> None:
    """Every rank sends to one rank of another node: all links are used alike."""
    targets = [schedule.route(rank).across().target for rank in range(world(schedule))]
    assert sorted(targets) == list(range(world(schedule)))


def test_a_flat_ring() -> None:
    route = Schedule.flat(4).route(1)
    assert list(route.visits()) == [1, 0, 3, 2]
    assert route.inside() == Hop(target=2, origin=0)
    assert (route.rounds, route.steps) == (1, 4)


class Keys(NamedTuple):
    owner: Tensor


class Votes(NamedTuple):
    """One row per key, one column per rank that saw it."""

    seen: Tensor

    def merge_(self, other: Any) -> None:
        self.seen.add_(other.seen)


def trip(team: ThreadTeam, schedule: Schedule, sizes: tuple[int, ...]) -> tuple[list[int], Tensor, int, int]:
    ring = Ring(team, sizes, sum(sizes), schedule)
    visitors = []
    whole: RingPass[Keys, Votes] = RingPass(ring, Keys(torch.full((sizes[team.rank], 1), team.rank)))
    for block in whole:
        assert block.carried.owner.tolist() == [[block.source]] * sizes[block.source]
        assert block.home == (block.source == team.rank)
        visitors.append(block.source)
        seen = block.zeros(torch.empty(0, team.size), torch.int64)
        seen[:, team.rank] += 1 + torch.arange(block.size)
        block.gathered = Votes(seen)
    assert whole.home is not None
    counts = [sum(n for (_, over), n in team.sent.items() if over == across) for across in (False, True)]
    return visitors, whole.home.seen, counts[0], counts[1]


@settings(max_examples=25)
@given(schedules(most=4), st.data())
def test_what_all_ranks_gather_comes_home(schedule: Schedule, data: st.DataObject) -> None:
    ranks = world(schedule)
    sizes = tuple(data.draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)))
    for rank, (visitors, seen, _, _) in enumerate(run_ranks(ranks, lambda team: trip(team, schedule, sizes))):
        assert visitors == list(schedule.route(rank).visits())
        assert seen.tolist() == [[1 + row] * ranks for row in range(sizes[rank])]


@pytest.mark.parametrize(("count", "size"), [(1, 5), (2, 2), (3, 2), (2, 4), (4, 3)])
def test_what_is_sent(count: int, size: int) -> None:
    """As the docstring of `ring.py` counts it; a row is carried as one number and gathered as one per rank."""
    ranks, n = count * size, 3
    schedule = Schedule(tuple(tuple(range(start, start + size)) for start in range(0, ranks, size)))
    for *_, inside, across in run_ranks(ranks, lambda team: trip(team, schedule, (n,) * ranks)):
        assert inside == n * (count * (size - 1) + count * size * ranks)
        assert across == (n * (count - 1 + count * ranks) if count > 1 else 0)


@pytest.mark.parametrize(("count", "size", "most"), [(1, 8, 5), (4, 4, 9), (3, 2, 8)])
def test_buffers_are_reused(count: int, size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 carried and 3 gathered blocks on one node, at most 4 and 5 over nodes."""
    made: Counter[Buffers] = Counter()
    reuse = Buffers.reuse

    def counting(self: Buffers, *like: Any) -> Tensor | None:
        found = reuse(self, *like)
        made[self] += found is None
        return found

    monkeypatch.setattr(Buffers, "reuse", counting)
    ranks = count * size
    schedule = Schedule(tuple(tuple(range(start, start + size)) for start in range(0, ranks, size)))
    run_ranks(ranks, lambda team: trip(team, schedule, (3,) * ranks))
    assert len(made) == ranks and set(made.values()) == {most}


# --- the choice -------------------------------------------------------------------------------------------------


def nodes(names: str, ring: RingKind = "auto") -> tuple[tuple[int, ...], ...]:
    return schedule_for(ring, [Home(name, 0) for name in names.split()]).nodes


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("a a b b", ((0, 1), (2, 3))),
        ("a b a b", ((0, 2), (1, 3))),
        ("b b a a c c", ((0, 1), (2, 3), (4, 5))),
        ("a a a a", ((0, 1, 2, 3),)),
        ("a b c d", ((0, 1, 2, 3),)),
    ],
)
def test_nodes_of_equal_size(names: str, found: tuple[tuple[int, ...], ...]) -> None:
    assert nodes(names) == nodes(names, "nodes") == found
    assert nodes(names, "flat") == (tuple(range(len(found) * len(found[0]))),)


@pytest.mark.parametrize(
    ("homes", "got"),
    [
        ([Home("a", 0), Home("a", 0), Home("b", 0)], "got 1 on 'b' and 2 on 'a'"),
        ([Home("a", 0), Home("", 0)], "no name of a node on rank 1"),
        ([Home("a", 2)] * 4, "4 ranks on 'a', where the launcher started 2"),
    ],
)
def test_nodes_that_cannot_be_arranged(homes: list[Home], got: str) -> None:
    assert schedule_for("auto", homes) == Schedule.flat(len(homes))
    with pytest.raises(ValueError, match=r"ring='nodes': expected known nodes with equally many ranks") as raised:
        schedule_for("nodes", homes)
    assert got in str(raised.value) and "CONTRATILE_NODE" in str(raised.value)


def test_the_node_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTRATILE_NODE", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "host-7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert here() == Home("host-7", 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert here() == Home("host-7", 0)
    monkeypatch.setenv("CONTRATILE_NODE", "rack")
    assert here() == Home("rack", 0)
    monkeypatch.setenv("CONTRATILE_NODE", "long" * 20)
    assert len(here().node) == 32
    other = here()
    monkeypatch.setenv("CONTRATILE_NODE", "long" * 20 + "er")
    assert here() != other

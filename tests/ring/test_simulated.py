"""One simulated rank against real groups in which every rank holds the same pairs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contratile as ct
from contratile import reference
from contratile.ring.nodes import RingKind
from contratile.ring.schedule import Hop
from contratile.ring.simulated import Link, SimulatedRank, TransferLog
from contratile.ring.team import Team, Transfer
from tests.ranks import pool
from tests.ring.test_ring import batch

N = 12


def step(group: Any, ring: RingKind) -> tuple[Tensor, ...]:
    q, k = (x.requires_grad_() for x in batch(N, torch.float64))
    s = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    loss = ct.clip_loss(q, k, s, group=group, ring=ring, tile=5)
    loss.backward()
    assert q.grad is not None and k.grad is not None and s.grad is not None
    return loss.detach(), q.grad, k.grad, s.grad


def real_step(nodes: int, ring: RingKind) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """On a rank of a real group: results, and the bytes it posted inside its node and across."""
    sent: Counter[str] = Counter()
    post, world = Team.post, dist.get_world_size()
    node = [rank * nodes // world for rank in range(world)]

    def counting(
        self: Team, leaving: Sequence[Tensor], arriving: Sequence[Tensor], hop: Hop, *, tag: int, across: bool
    ) -> list[Transfer]:
        way = "inside" if node[hop.target] == node[self.rank] else "across"
        sent[way] += sum(x.numel() * x.itemsize for x in leaving)
        return post(self, leaving, arriving, hop, tag=tag, across=across)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTRATILE_NODE", str(node[dist.get_rank()]))
        patch.setattr(Team, "post", counting)
        return step("auto", ring), dict(sent)


@pytest.mark.parametrize(
    ("world", "nodes", "ring"),
    [
        (2, 1, "flat"),
        (4, 1, "flat"),
        (4, 2, "nodes"),
        pytest.param(8, 1, "flat", marks=pytest.mark.slow),
        pytest.param(8, 4, "nodes", marks=pytest.mark.slow),
        pytest.param(8, 2, "flat", marks=pytest.mark.slow),
    ],
)
def test_a_simulated_rank_equals_a_real_one(world: int, nodes: int, ring: RingKind) -> None:
    rank = SimulatedRank.among(world, nodes=nodes)
    simulated = step(rank, ring)
    results, sent = pool(world).run(real_step, nodes, ring)[rank.rank]
    for got, want in zip(simulated, results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    assert {way: size for way, size in rank.log.sent.items() if size} == sent


@pytest.mark.parametrize(("world", "nodes"), [(3, 1), (6, 3), (128, 16), (1024, 1)])
def test_a_simulated_rank_equals_the_oracle(world: int, nodes: int) -> None:
    n = 4
    q, k = (x.requires_grad_() for x in batch(n, torch.float64))
    loss = ct.clip_loss(q, k, 9.0, group=SimulatedRank.among(world, nodes=nodes))
    loss.backward()
    a, b = (x.detach().requires_grad_() for x in (q, k))
    # A row's log-sum-exp over P copies of the keys is that over one copy, plus log P.
    value = reference.clip_loss(a, b, 9.0) + torch.tensor(float(world), dtype=torch.float64).log()
    value.backward()
    assert q.grad is not None and a.grad is not None
    torch.testing.assert_close(loss, value, rtol=1e-11, atol=0)
    torch.testing.assert_close(q.grad, a.grad, rtol=1e-9, atol=1e-12)


def test_bytes_over_nodes() -> None:
    """3K - 2 blocks across nodes and 3KL - 2K inside, as docs/distributed.md counts them, and vectors."""
    rank = SimulatedRank.among(12, nodes=3)
    step(rank, "nodes")
    block = N * 13 * 8
    assert rank.log.sent["across"] // block == 3 * 3 - 2
    assert rank.log.sent["inside"] // block == 3 * 12 - 2 * 3 + 3  # 33 blocks, and vectors worth three


def test_symmetric_scores_and_class_sums() -> None:
    z = batch(N, torch.float64)[0]
    got = ct.sup_con(z, torch.arange(N) % 3, 0.5, group=SimulatedRank.among(4, nodes=2), reduction="none")
    whole = reference.sup_con(z.repeat(4, 1), torch.arange(N).repeat(4) % 3, 0.5, reduction="none")
    # A copy of a row on another rank is another row: a positive of it, not the row itself.
    torch.testing.assert_close(got, whole[:N], rtol=1e-11, atol=1e-12)


def test_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers hide behind compute; those over one link follow each other."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    log = TransferLog(Link(100.0), Link(10.0, latency=0.5))
    log.restart()
    first = log.post("across", 20)
    second = log.post("across", 10)
    inside = log.post("inside", 100)
    assert (first, second, inside) == (2.5, 4.0, 1.0)
    now[0] += 1.5
    log.wait(inside)
    assert (log.computed, log.waited) == (1.5, 0.0)
    log.wait(first)
    assert log.waited == 1.0
    now[0] += 1.0
    log.wait(second)
    log.stop()
    assert (log.computed, log.waited, log.seconds) == (2.5, 1.5, 4.0)
    assert log.sent == {"inside": 100, "across": 30}


def test_bad_numbers() -> None:
    with pytest.raises(ValueError, match=r"nodes: expected a divisor of 8, got 3"):
        SimulatedRank.among(8, nodes=3)
    with pytest.raises(ValueError, match=r"ranks: expected"):
        SimulatedRank.among(1)

"""Rings over nodes: every loss equals the flat ring and the oracle, on 2 x 2, 2 x 3 and 3 x 2 ranks."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contratile as ct
from contratile import reference
from contratile.ring.nodes import RingKind
from contratile.ring.schedule import Hop
from contratile.ring.team import Team, Transfer
from tests.ranks import fresh_group, pool
from tests.ring.test_ring import LIMITS, Ending, batch, clip_errors, endings_of, share, trouble
from tests.ring.threads import ThreadTeam, run_ranks

NODES = {"2x2": "aabb", "2x3": "aaabbb", "3x2": "aabbcc", "3x2, in turn": "abcabc"}


def on_nodes(nodes: str, function: Callable[..., Any], *args: Any) -> tuple[Any, Counter[bool]]:
    """Call a function on a rank of these nodes; also how many posts stayed inside and went across."""
    posts: Counter[bool] = Counter()
    post = Team.post

    def counting(
        self: Team, leaving: Sequence[Tensor], arriving: Sequence[Tensor], hop: Hop, *, tag: int, across: bool
    ) -> list[Transfer]:
        assert across == (nodes[dist.get_rank()] != nodes[self.peer(hop.target)])
        posts[across] += 1
        return post(self, leaving, arriving, hop, tag=tag, across=across)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTRATILE_NODE", nodes[dist.get_rank()])
        patch.setattr(Team, "post", counting)
        return function(*args), posts


@pytest.mark.parametrize("ring", ["auto", "nodes"])
@pytest.mark.parametrize("nodes", NODES)
def test_clip_loss_equals_one_process(nodes: str, ring: str) -> None:
    ranks = len(NODES[nodes])
    for sizes in ((5,) * ranks, (3, 11, 0, 2, 7, 1)[:ranks]):
        for dtype in (torch.float64, torch.bfloat16):
            options = {"ring": ring, "tile": 4, "cache_bytes": 600}
            for errors, posts in pool(ranks).run(on_nodes, NODES[nodes], clip_errors, sizes, dtype, options):
                assert max(errors) <= LIMITS[dtype], (sizes, errors)
                assert posts[True] > 0


def test_flat_stays_flat() -> None:
    """Whatever the nodes: most hops of a flat ring are inside a node here, but none has a lane of its own."""
    for errors in pool(4).run(flat_errors):
        assert max(errors) <= LIMITS[torch.float64]


def flat_errors() -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTRATILE_NODE", "aabb"[dist.get_rank()])
        patch.setattr(Team, "with_lane", None)
        return clip_errors((4, 1, 0, 6), torch.float64, {"ring": "flat"})


# --- all losses, with ranks as threads --------------------------------------------------------------------------


def every_loss(q: Tensor, k: Tensor, group: Any, ring: RingKind) -> dict[str, tuple[Tensor, ...]]:
    """Values and gradients of all losses on one rank."""
    n = len(q)
    how: dict[str, Any] = {"group": group, "ring": ring, "tile": 3, "reduction": "sum"}
    ids = torch.arange(n) % 3
    calls: dict[str, Callable[..., Any]] = {
        "clip": lambda a, b, s: ct.clip_loss(a, b, s, **how),
        "options": lambda a, b, s: ct.clip_loss(
            a, b, s, ids=ids, extra_keys=b[:2] * 0.9, margin=0.1, return_stats=True, **how
        )[0],
        "smoothing": lambda a, b, s: ct.info_nce(a, b, s, label_smoothing=0.1, **how),
        "hard": lambda a, b, s: ct.info_nce(a, b, s, hard_negatives=torch.stack([b.flip(0), -b], 1), **how),
        "nt_xent": lambda a, b, s: ct.nt_xent(a, b, 1 / s, return_stats=True, **how)[0],
        "sup_con": lambda a, b, s: ct.sup_con(torch.cat([a, b]), torch.cat([ids, ids]), 1 / s, **how),
        "siglip": lambda a, b, s: ct.siglip_loss(a, b, s, -s, **how),
        "pair_lse": lambda a, b, s: torch.cat(ct.pair_lse(a, b, s, group=group, ring=ring, tile=3)).square().sum(),
        "symmetric": lambda a, b, s: ct.pair_lse(a + b, None, s, group=group, ring=ring, tile=3)[0].sum(),
    }
    found: dict[str, tuple[Tensor, ...]] = {}
    for name, call in calls.items():
        a, b = (x.clone().requires_grad_() for x in (q, k))
        s = torch.tensor(5.0, dtype=q.dtype, requires_grad=True)
        loss = call(a, b, s)
        loss.backward()
        assert a.grad is not None and b.grad is not None and s.grad is not None
        found[name] = loss.detach(), a.grad, b.grad, s.grad
    return found


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4, 4, 4), (3, 6, 0, 2, 5, 1)])
def test_every_loss_equals_the_flat_ring(nodes: str, sizes: tuple[int, ...]) -> None:
    names = NODES[nodes]
    sizes = sizes[: len(names)]
    q, k = (x.split(list(sizes)) for x in batch(sum(sizes), torch.float64))

    def losses(ring: RingKind) -> list[dict[str, tuple[Tensor, ...]]]:
        def on_rank(team: ThreadTeam) -> dict[str, tuple[Tensor, ...]]:
            return every_loss(q[team.rank], k[team.rank], team, ring)

        return run_ranks(len(names), on_rank, list(names))

    for got, want in zip(losses("nodes"), losses("flat"), strict=True):
        for name in want:
            for x, y in zip(got[name], want[name], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11, msg=name)


# --- groups and errors ------------------------------------------------------------------------------------------


def subgroup_losses() -> tuple[float, float]:
    """Ranks 1 to 4 of 2 x 3: nodes of two each. Ranks 0, 1 and 3: unequal nodes, so flat."""
    rank = dist.get_rank()
    middle, uneven = dist.new_group([1, 2, 3, 4]), dist.new_group([0, 1, 3])
    q, k = (share(x, (3, 4, 5, 6, 1, 2)).detach() for x in batch(21, torch.float64))
    a = ct.clip_loss(q, k, 9.0, reduction="sum", group=middle, ring="nodes") if rank in (1, 2, 3, 4) else 0.0
    b = ct.clip_loss(q, k, 9.0, reduction="sum", group=uneven) if rank in (0, 1, 3) else 0.0
    return float(a), float(b)


def test_subgroups() -> None:
    results = [result for result, _ in pool(6).run(on_nodes_quietly, "aaabbb", subgroup_losses)]
    q, k = (x.split([3, 4, 5, 6, 1, 2]) for x in batch(21, torch.float64))
    for column, ranks in ((0, (1, 2, 3, 4)), (1, (0, 1, 3))):
        a, b = (torch.cat([x[r] for r in ranks]) for x in (q, k))
        want = float(reference.clip_loss(a, b, 9.0, reduction="sum"))
        assert sum(result[column] for result in results) == pytest.approx(want, rel=1e-12)


def on_nodes_quietly(nodes: str, function: Callable[..., Any], *args: Any) -> tuple[Any, None]:
    """Without looking at what is posted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTRATILE_NODE", nodes[dist.get_rank()])
        return function(*args), None


def error_of(options: dict[str, Any]) -> str:
    q, k = (torch.randn(4, 8) for _ in range(2))
    try:
        ct.clip_loss(q, k, **{name: x[dist.get_rank()] for name, x in options.items()})
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("rings", "told"),
    [
        (["nodes"] * 4, "ring='nodes': expected known nodes with equally many ranks, got 1 on 'b' and 3 on 'a'"),
        (["flat", "flat", "auto", "flat"], "call: expected the same on every rank"),
    ],
)
def test_the_same_error_on_every_rank(rings: list[str], told: str) -> None:
    texts = [text for text, _ in pool(4).run(on_nodes_quietly, "aaab", error_of, {"ring": rings})]
    assert len(set(texts)) == 1
    assert texts[0].startswith(told)


def test_an_unknown_ring() -> None:
    with pytest.raises(ValueError, match=r"ring: expected"):
        ct.clip_loss(torch.randn(4, 8), torch.randn(4, 8), ring="star")  # type: ignore[call-overload]


def rank_trouble(kind: str) -> str:
    os.environ["CONTRATILE_NODE"] = "aabb"[dist.get_rank()]
    return trouble(kind)


TROUBLES = ("forward raises", "backward killed")


@pytest.fixture(scope="module")
def endings() -> dict[str, Ending]:
    return endings_of(4, dict.fromkeys(TROUBLES, (rank_trouble, (0, 2, 3))))


@pytest.mark.parametrize("kind", TROUBLES)
def test_the_others_end_with_a_message(kind: str, endings: dict[str, Ending]) -> None:
    _, outcomes = endings[kind]
    for rank in (0, 2, 3):
        assert outcomes[rank].ok, outcomes[rank].result
        assert f"rank {rank} of 4 gave up waiting" in outcomes[rank].result


def lanes() -> tuple[bool, bool]:
    """Whether a group keeps its lane from call to call, and has another one after it was made anew."""
    os.environ["CONTRATILE_NODE"] = "aabb"[dist.get_rank()]
    first, again = (Team.of("auto").with_lane().lane for _ in range(2))
    assert first is not None and dist.get_process_group_ranks(first) == [0, 1, 2, 3]
    loss = ct.clip_loss(*batch(4, torch.float32), 9.0)
    return first is again, bool(loss.isfinite())


def test_a_group_has_one_lane() -> None:
    with fresh_group(4, timeout=60) as group:
        assert group.run(lanes) == [(True, True)] * 4

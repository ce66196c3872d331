"""The loss over many ranks: values and gradients against the oracle on the whole batch, DDP, and failures."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import contratile as ct
from contratile import reference
from contratile.engine import reserve
from contratile.engine.backends import torch_tiles
from contratile.ring.mail import PostOffice
from contratile.ring.schedule import Hop
from contratile.ring.team import NoAnswer, RankLost, Team, bounded, watched
from tests.ranks import Outcome, fresh_group, pool
from tests.torchvision_repair import repair_torchvision

SIZES: list[tuple[int, ...]] = [(9,), (8, 9), (1, 6), (5, 0, 17), (7, 7, 7), (3, 11, 0, 2)]
D = 13


def batch(n: int, dtype: torch.dtype, m: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(n, D, generator=generator, dtype=torch.float64)
    k = torch.randn(m or n, D, generator=generator, dtype=torch.float64)
    k[:n] += q
    return F.normalize(q, dim=1).to(dtype), F.normalize(k, dim=1).to(dtype)


def share(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.split(x, list(sizes))[dist.get_rank()].clone().requires_grad_()


def relative(got: Tensor, want: Tensor, scale: Tensor | None = None) -> float:
    """Largest error over the largest entry of the whole gradient."""
    if not got.numel():
        return 0.0
    return float((got.double() - want).abs().max() / (want if scale is None else scale).abs().max())


def total(x: Tensor) -> Tensor:
    x = x.detach().double().clone()
    dist.all_reduce(x)
    return x


def clip_errors(sizes: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]) -> list[float]:
    """Errors of value, query, key and scale gradients against fp64 on the concatenated batch."""
    world, rank = len(sizes), dist.get_rank()
    whole_q, whole_k = batch(sum(sizes), dtype)
    q, k = share(whole_q, sizes), share(whole_k, sizes)
    s = torch.tensor(9.0, dtype=torch.float64 if dtype == torch.float64 else torch.float32, requires_grad=True)
    loss = ct.clip_loss(q, k, s, **options)
    loss.backward()
    a, b = (x.double().clone().requires_grad_() for x in (whole_q, whole_k))
    t = torch.tensor(9.0, dtype=torch.float64, requires_grad=True)
    want = reference.clip_loss(a, b, t)
    (want * world).backward()
    assert q.grad is not None and k.grad is not None and s.grad is not None
    assert a.grad is not None and b.grad is not None and t.grad is not None
    assert q.grad.dtype == dtype
    return [
        float((total(loss) / world - want).abs() / want),
        relative(q.grad, a.grad.split(list(sizes))[rank], a.grad),
        relative(k.grad, b.grad.split(list(sizes))[rank], b.grad),
        # The scale's gradient is a difference of mean cosines, so 1 is its measure, not what the difference leaves.
        float((total(s.grad) - t.grad).abs()) / world,
    ]


# What fp32 can promise of scores up to 5: each is off by a few roundings of its size, at most 8 * 1.2e-7 * (1 + 5).
LIMITS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_clip_loss_equals_one_process(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    options: list[dict[str, Any]] = [{}, {"tile": 4}, {"tile": 4, "cache_bytes": 600}, {"cache_bytes": 1 << 20}]
    for option in options:
        for errors in pool(len(sizes)).run(clip_errors, sizes, dtype, option):
            assert max(errors) <= LIMITS[dtype], (option, errors)


@pytest.mark.slow
def test_eight_ranks() -> None:
    for errors in pool(8).run(clip_errors, (5, 5, 5, 5, 0, 5, 9, 5), torch.float32, {}):
        assert max(errors) <= LIMITS[torch.float32]


def info_nce_errors(queries: tuple[int, ...], keys: tuple[int, ...]) -> list[float]:
    rank, world = dist.get_rank(), len(keys)
    whole_q, whole_k = batch(sum(queries), torch.float64, sum(keys))
    q, k = share(whole_q, queries), share(whole_k, keys)
    own = [torch.arange(n) * 7 % m if n else torch.arange(0) for n, m in zip(queries, keys, strict=True)]
    offset = [sum(keys[:r]) for r in range(world)]
    s = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    values = ct.info_nce(q, k, s, labels=own[rank], reduction="none", tile=3)
    weight = torch.linspace(0.5, 2, sum(queries), dtype=torch.float64)
    (values * weight.split(list(queries))[rank]).sum().backward()
    a, b, t = (x.detach().clone().requires_grad_() for x in (whole_q, whole_k, s))
    labels = torch.cat([x + o for x, o in zip(own, offset, strict=True)])
    want = reference.info_nce(a, b, t, labels=labels, reduction="none")
    (want * weight).sum().backward()
    assert q.grad is not None and k.grad is not None and s.grad is not None
    assert a.grad is not None and b.grad is not None and t.grad is not None
    return [
        relative(values, want.split(list(queries))[rank], want),
        relative(q.grad, a.grad.split(list(queries))[rank], a.grad),
        relative(k.grad, b.grad.split(list(keys))[rank], b.grad),
        relative(total(s.grad), t.grad),
    ]


@pytest.mark.parametrize(("queries", "keys"), [((4, 6), (9, 7)), ((3, 0, 5), (4, 2, 5)), ((3, 2, 5), (1, 1, 30))])
def test_info_nce_with_labels_and_rectangular_keys(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    for errors in pool(len(keys)).run(info_nce_errors, queries, keys):
        assert max(errors) <= 1e-13, errors


def symmetric_errors(sizes: tuple[int, ...]) -> list[float]:
    rank = dist.get_rank()
    whole, _ = batch(sum(sizes), torch.float64)
    z = share(whole, sizes)
    s = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    rows, cols = ct.pair_lse(z, None, s, tile=4)
    weight = torch.linspace(-1, 2, sum(sizes), dtype=torch.float64)
    ((rows + 0.5 * cols) * weight.split(list(sizes))[rank]).sum().backward()
    a, t = (x.detach().clone().requires_grad_() for x in (whole, s))
    want_rows, want_cols = reference.pair_lse(a, None, t)
    ((want_rows + 0.5 * want_cols) * weight).sum().backward()
    assert z.grad is not None and s.grad is not None and a.grad is not None and t.grad is not None
    return [
        relative(rows, want_rows.split(list(sizes))[rank], want_rows),
        relative(z.grad, a.grad.split(list(sizes))[rank], a.grad),
        relative(total(s.grad), t.grad),
    ]


@pytest.mark.parametrize("sizes", [(8, 9), (5, 0, 17)])
def test_symmetric_scores(sizes: tuple[int, ...]) -> None:
    for errors in pool(len(sizes)).run(symmetric_errors, sizes):
        assert max(errors) <= 1e-13, errors


def reductions(sizes: tuple[int, ...]) -> dict[str, Tensor]:
    q, k = (share(x, sizes).detach() for x in batch(sum(sizes), torch.float32))
    return {name: ct.clip_loss(q, k, 9.0, reduction=name) for name in ("none", "sum", "mean")}


def test_reductions_over_ranks() -> None:
    sizes = (5, 0, 17)
    q, k = batch(22, torch.float32)
    per_row = reference.clip_loss(q.double(), k.double(), 9.0, reduction="none")
    results = pool(3).run(reductions, sizes)
    torch.testing.assert_close(torch.cat([r["none"] for r in results]).double(), per_row, rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(sum(r["sum"].double() for r in results), per_row.sum(), rtol=5e-6, atol=0)
    torch.testing.assert_close(sum(r["mean"].double() for r in results) / 3, per_row.mean(), rtol=5e-6, atol=0)


# --- groups -----------------------------------------------------------------------------------------------------


def subgroup_losses() -> tuple[float, float, float]:
    """Two halves at the same time, then a group without rank 0, while the default group exists."""
    rank = dist.get_rank()
    q, k = (share(x, (3, 4, 5, 6)).detach() for x in batch(18, torch.float64))
    low, high, odd = dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([1, 3])
    half = ct.clip_loss(q, k, 9.0, reduction="sum", group=low if rank < 2 else high)
    pair = ct.clip_loss(q, k, 9.0, reduction="sum", group=odd) if rank in (1, 3) else torch.zeros(())
    alone = ct.clip_loss(q, k, 9.0, reduction="sum", group=None)
    return float(half), float(pair), float(alone)


def test_subgroups() -> None:
    half, pair, alone = zip(*pool(4).run(subgroup_losses), strict=True)
    q, k = (x.split([3, 4, 5, 6]) for x in batch(18, torch.float64))

    def want(*ranks: int) -> float:
        a, b = (torch.cat([x[r] for r in ranks]) for x in (q, k))
        return float(reference.clip_loss(a, b, 9.0, reduction="sum"))

    assert half[0] + half[1] == pytest.approx(want(0, 1), rel=1e-12)
    assert half[2] + half[3] == pytest.approx(want(2, 3), rel=1e-12)
    assert pair[1] + pair[3] == pytest.approx(want(1, 3), rel=1e-12)
    assert list(alone) == pytest.approx([want(r) for r in range(4)], rel=1e-12)


# --- what travels -----------------------------------------------------------------------------------------------


def traffic(n: int, d: int, dtype: torch.dtype) -> dict[str, int]:
    """Elements sent by this rank in one symmetric step, by dtype, counted where they are posted."""
    sent: dict[str, int] = {}
    post = dist.batch_isend_irecv

    def counting(ops: list[dist.P2POp]) -> list[dist.Work]:
        for op in ops:
            if op.op is dist.isend:
                sent[str(op.tensor.dtype)] = sent.get(str(op.tensor.dtype), 0) + op.tensor.numel()
        return post(ops)

    dist.batch_isend_irecv = counting  # type: ignore[assignment]
    try:
        q, k = (torch.randn(n, d).to(dtype).requires_grad_() for _ in range(2))
        ct.clip_loss(q, k, 1.0).backward()
    finally:
        dist.batch_isend_irecv = post
    return sent


@pytest.mark.parametrize("world", [2, 3])
def test_elements_sent(world: int) -> None:
    n, d = 6, 100
    for sent in pool(world).run(traffic, n, d, torch.float32):
        blocks = (3 * world - 2) * n * d
        statistics = 2 * world * n + 2 * (world - 1) * n
        assert sent == {"torch.float32": blocks + statistics}
    for sent in pool(world).run(traffic, n, d, torch.bfloat16):
        assert sent["torch.bfloat16"] == 2 * (world - 1) * n * d, "features travel as they are"
        assert sent["torch.float32"] == world * n * d + statistics, "gradients travel in full precision"


def leak_check(steps: int) -> tuple[int, int]:
    """Growth of open files and of resident pages over many steps."""

    def pages() -> int:
        with open("/proc/self/statm") as file:  # noqa: PTH123 - a kernel interface
            return int(file.read().split()[1])

    q, k = (torch.randn(64, 32, requires_grad=True) for _ in range(2))
    for _ in range(30):
        ct.clip_loss(q, k, 1.0).backward()
    files, before = len(os.listdir("/proc/self/fd")), pages()  # noqa: PTH208
    for _ in range(steps):
        ct.clip_loss(q, k, 1.0).backward()
    return len(os.listdir("/proc/self/fd")) - files, pages() - before  # noqa: PTH208


def test_repeated_steps_leak_nothing() -> None:
    for files, pages in pool(2).run(leak_check, 200):
        assert files == 0
        assert pages * 4096 < 4 << 20


# --- under DDP and its relatives --------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two linear towers and a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(D, 7), nn.Linear(D, 7)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Views of a joint tensor: features that are neither leaves nor contiguous.
        both = torch.stack([F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)], dim=1)
        return both[:, 0], both[:, 1], self.log_scale.exp()


def single_process_gradients(n: int, parts: int = 1) -> list[Tensor]:
    model = Towers().double()
    for image, text in zip(*(x.chunk(parts) for x in batch(n, torch.float64)), strict=True):
        reference.clip_loss(*model(image, text)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def ddp_gradients(sizes: tuple[int, ...], mode: str) -> list[Tensor]:
    model = Towers()
    wrapped = DistributedDataParallel(model, static_graph=mode == "static_graph")
    image, text = (share(x, sizes).detach() for x in batch(sum(sizes), torch.float32))
    if mode == "no_sync":
        # Two micro-batches: all ranks' first halves are one batch, the second halves another.
        parts = [x.chunk(2) for x in (image, text)]
        with wrapped.no_sync():
            ct.clip_loss(*wrapped(parts[0][0], parts[1][0])).backward()
        ct.clip_loss(*wrapped(parts[0][1], parts[1][1])).backward()
    elif mode == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, s = wrapped(image, text)
            loss = ct.clip_loss(q.bfloat16(), k.bfloat16(), s)
        loss.backward()
    else:
        for _ in range(2 if mode == "static_graph" else 1):
            model.zero_grad()
            ct.clip_loss(*wrapped(image, text)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("mode", "sizes", "limit"),
    [
        ("plain", (8, 8), 2e-6),
        ("plain", (3, 10, 6), 2e-6),
        ("static_graph", (5, 9), 2e-6),
        ("autocast", (8, 8), 3e-2),
    ],
)
def test_a_ddp_step_equals_a_step_on_the_whole_batch(mode: str, sizes: tuple[int, ...], limit: float) -> None:
    want = single_process_gradients(sum(sizes))
    for got in pool(len(sizes)).run(ddp_gradients, sizes, mode):
        assert len(got) == len(want) == 5  # the learned scale among them
        for x, y in zip(got, want, strict=True):
            assert relative(x, y) <= limit


def test_gradient_accumulation_without_synchronisation() -> None:
    model = Towers().double()
    image, text = (x.split([8, 8]) for x in batch(16, torch.float64))
    for half in range(2):
        a, b = (torch.cat([part.chunk(2)[half] for part in x]) for x in (image, text))
        reference.clip_loss(*model(a, b)).backward()
    for got in pool(2).run(ddp_gradients, (8, 8), "no_sync"):
        for x, parameter in zip(got, model.parameters(), strict=True):
            assert parameter.grad is not None
            assert relative(x, parameter.grad) <= LIMITS[torch.float32]


def open_clip_gradients(sizes: tuple[int, ...], local_loss: bool, gather_with_grad: bool) -> list[Tensor]:
    from contratile.bench.harness import quiet

    repair_torchvision()
    with quiet():
        from open_clip.loss import ClipLoss

        model = Towers()
        image, text = (share(x, sizes).detach() for x in batch(sum(sizes), torch.float32))
        keywords = {"local_loss": local_loss, "gather_with_grad": gather_with_grad}
        loss = ClipLoss(**keywords, rank=dist.get_rank(), world_size=len(sizes))
        wrapped = DistributedDataParallel(model)
        loss(*wrapped(image, text)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.peers
@pytest.mark.parametrize(
    ("local_loss", "gather_with_grad", "towers"), [(False, False, 0.5), (False, True, 1.0), (True, True, 1.0)]
)
def test_open_clips_modes_as_documented(local_loss: bool, gather_with_grad: bool, towers: float) -> None:
    """docs/distributed.md: by default open_clip's gradients are 1 / P of those of the global mean loss."""
    scale, *rest = single_process_gradients(16)
    for got in pool(2).run(open_clip_gradients, (8, 8), local_loss, gather_with_grad):
        assert relative(got[0], scale) <= 1e-5
        for x, y in zip(got[1:], rest, strict=True):
            assert relative(x, towers * y) <= 1e-5


def fsdp_gradients(sizes: tuple[int, ...]) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Towers()
    model.log_scale = nn.Parameter(model.log_scale.detach().reshape(1))  # FSDP2 shards along a dimension
    fully_shard(model, mesh=init_device_mesh("cpu", (len(sizes),)))
    image, text = (share(x, sizes).detach() for x in batch(sum(sizes), torch.float32))
    ct.clip_loss(*model(image, text)).backward()
    grads = (p.grad for p in model.parameters())
    return [g.full_tensor().reshape(g.shape) for g in grads]  # type: ignore[union-attr]


def test_fsdp2() -> None:
    want = single_process_gradients(16)
    for got in pool(2).run(fsdp_gradients, (8, 8)):
        assert len(got) == 5
        for g in got:  # in whatever order FSDP2 keeps the parameters
            assert min(relative(g, w.reshape(g.shape)) for w in want if w.numel() == g.numel()) <= LIMITS[torch.float32]


# --- failures ---------------------------------------------------------------------------------------------------


def mismatch(what: str) -> str:
    n = 5
    q, k = (torch.randn(n, 8, requires_grad=True) for _ in range(2))
    options: dict[str, Any] = {}
    if dist.get_rank() == 1:
        if what == "features":
            q, k = q[:, :4], k[:, :4]
        elif what == "dtype":
            q, k = q.double(), k.double()
        elif what == "gradient":
            q, k = q.detach(), k.detach()
        elif what == "call":
            options["reduction"] = "sum"
        elif what == "rows":
            k = k[:3]
        elif what == "tile":
            options["tile"] = -1
    if what == "empty":
        q, k = q[:0], k[:0]
    try:
        ct.clip_loss(q, k, 1.0, **options)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["features", "dtype", "gradient", "call"])
def test_mismatched_arguments_raise_the_same_error_everywhere(what: str) -> None:
    texts = pool(3).run(mismatch, what)
    assert len(set(texts)) == 1
    assert texts[0].startswith(f"{what}: expected the same on every rank")
    assert "on rank 0, 2" in texts[0] and "on rank 1" in texts[0]


@pytest.mark.parametrize("what", ["rows", "tile"])
def test_bad_arguments_of_one_rank_reach_the_others(what: str) -> None:
    texts = pool(3).run(mismatch, what)
    assert "rank 1" not in texts[1], "the culprit gets its own error"
    assert texts[0] == texts[2]
    assert "rank 1: " + texts[1][:100] in texts[0]


def cache_taken(cache_bytes: int) -> int:
    """The bytes of the scores that a rank keeps of 40 queries with 3 x 40 keys."""
    taken = []

    def take(items: int, like: Tensor) -> Tensor:
        taken.append(items * like.itemsize)
        return like.new_empty(items)

    q, k = (torch.randn(40, 8, requires_grad=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reserve, "take", take)
        ct.clip_loss(q, k, tile=10, cache_bytes=cache_bytes).backward()
    return sum(taken)


@pytest.mark.parametrize(("room", "most"), [(10**6, 40 * 120 * 4), (40 * 60 * 4, 40 * 60 * 4), (0, 0)])
def test_the_blocks_of_all_ranks_share_the_cache(room: int, most: int) -> None:
    for taken in pool(3).run(cache_taken, room):
        assert 0.8 * most <= taken <= most


def test_an_empty_global_batch() -> None:
    assert all(text.startswith("global batch: expected at least one row") for text in pool(2).run(mismatch, "empty"))


def test_the_pool_is_usable_after_errors() -> None:
    for errors in pool(3).run(clip_errors, (5, 0, 17), torch.float32, {}):
        assert max(errors) <= LIMITS[torch.float32]


def trouble(kind: str) -> str:
    """Rank 1 of 3 misbehaves in the middle of a step, or rank 0 stalls; the others report what they see."""
    q, k = (torch.randn(40, 8, requires_grad=True) for _ in range(2))
    if kind == "store stalls" and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)  # and with it the store, which it hosts
    if dist.get_rank() == 1:
        if kind == "absent":
            time.sleep(3600)
        visits = 0
        work = torch_tiles.backward if kind.startswith("backward") else torch_tiles.forward

        def misbehave(*args: Any, **options: Any) -> Any:
            nonlocal visits
            visits += 1
            if visits == 2 and kind.endswith("raises"):
                raise MemoryError("no room for the tile")
            if visits == 2 and kind.endswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if visits == 2 and kind.endswith("stalls"):
                time.sleep(3600)
            return work(*args, **options)

        setattr(torch_tiles, work.__name__, misbehave)
    try:
        ct.clip_loss(q, k, 1.0).backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_peer_that_is_gone_before_a_block_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo may know it already: it then raises at the post, not at the wait."""

    def gone(*args: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Team, "post", gone)
    monkeypatch.setattr(Team, "_absentees", lambda self: "rank 1")
    office = PostOffice(Team(None, 0, 2))
    with pytest.raises(RankLost, match=r"rank 0 of 2 gave up waiting for rank 1 to pass a block on \(from rank 1\)"):
        office.post((torch.ones(2, 3),), Hop(target=1, origin=1), 2)


Ending = tuple[list[int | None], list[Outcome]]
"""The processes of a group, and how its ranks ended."""


def endings_of(world: int, cases: dict[str, tuple[Callable[..., str], tuple[int, ...]]]) -> dict[str, Ending]:
    """Groups with a rank in trouble, all at once, as they do little but wait. A case has the ranks that answer."""

    def ending(kind: str) -> Ending:
        function, answer = cases[kind]
        with fresh_group(world, timeout=4) as group:
            pids = [process.pid for process in group.processes]
            return pids, group.outcomes(function, kind, limit=600, ranks=answer)

    with ThreadPoolExecutor(len(cases)) as threads:
        return dict(zip(cases, threads.map(ending, cases), strict=True))


def stalled_host(over: str) -> str:
    if over == "store":
        setattr(type(dist.group.WORLD), "_device_types", property(lambda group: [torch.device("cuda")]))  # noqa: B010
    return trouble("store stalls")


TROUBLES = ("forward raises", "forward killed", "forward stalls", "backward killed", "absent")
HOSTS = ("gloo", "store")


@pytest.fixture(scope="module")
def endings() -> dict[str, Ending]:
    troubles = {kind: (trouble, (0, 1, 2) if kind.endswith("raises") else (0, 2)) for kind in TROUBLES}
    return endings_of(3, troubles | dict.fromkeys(HOSTS, (stalled_host, (1, 2))))


@pytest.mark.parametrize("kind", TROUBLES)
def test_the_others_end_with_a_message(kind: str, endings: dict[str, Ending]) -> None:
    pids, outcomes = endings[kind]
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].result
        assert f"rank {rank} of 3 gave up waiting" in outcomes[rank].result
        if kind == "absent":
            assert "for rank 1 to start the loss" in outcomes[rank].result
    if kind.endswith("raises"):
        assert "no room for the tile" in outcomes[1].result
    for pid in pids:
        assert pid is not None and not os.path.exists(f"/proc/{pid}"), "an orphan"  # noqa: PTH110


@pytest.mark.parametrize("over", HOSTS)
def test_a_stalled_host_of_the_store_ends_the_others(over: str, endings: dict[str, Ending]) -> None:
    """Also where the handshake goes through the store, as it does in groups without a CPU backend."""
    _, outcomes = endings[over]
    for rank in (1, 2):
        assert outcomes[rank].ok, outcomes[rank].result
        told = "gave up waiting for another rank, probably rank 0 (the group's store does not answer) to start the loss"
        assert f"rank {rank} of 3 {told}" in outcomes[rank].result, outcomes[rank].result


def test_bounded_calls() -> None:
    assert bounded(lambda: 3, 60.0) == 3
    with pytest.raises(KeyError, match="x"):
        bounded(lambda: os.environ["no such x"], 60.0)
    with pytest.raises(NoAnswer, match=r"no answer within 0.01 seconds"):
        bounded(threading.Event().wait, 0.01)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_errors_of_other_packages_that_mean_a_lost_rank(
    error: RuntimeError, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Team, "of", classmethod(lambda cls, group: Team(None, 1, 2)))
    monkeypatch.setattr(Team, "_absentees", lambda self: "rank 0")
    with pytest.raises(RuntimeError) as raised, watched("to go on"):
        raise error
    assert isinstance(raised.value, RankLost) == lost
    if lost:
        assert "rank 1 of 2 gave up waiting for rank 0 to go on" in str(raised.value)

"""Gradient caching over ranks: the ring, DDP, FSDP2 and accelerate."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contratile as ct
from tests.grad_cache.towers import ROUNDING, TOKENS, Normed, Tower, gap, gradients, ids_of, oracle, padded, twins
from tests.ranks import pool

EXACT = ROUNDING


def mine(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """This rank's rows of both sides."""
    first, second = (ids_of(sum(sizes), seed).split(sizes)[dist.get_rank()] for seed in (1, 2))
    return first, second


def mean_over_ranks(tensors: list[Tensor | None]) -> list[Tensor | None]:
    found: list[Tensor | None] = []
    for x in tensors:
        y = None if x is None else x.clone()
        if y is not None:
            dist.all_reduce(y)
            y /= dist.get_world_size()
        found.append(y)
    return found


def counted(ddp: DistributedDataParallel) -> list[int]:
    """Grows by one with every bucket that DDP reduces."""
    seen: list[int] = []

    def average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        seen.append(bucket.index())
        x = bucket.buffer().div_(dist.get_world_size())
        future: torch.futures.Future[Any] = dist.all_reduce(x, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, average)
    return seen


def ddp_step(sizes: tuple[int, ...], chunk_size: int, *, shared: bool, normed: bool = False, steps: int = 1) -> Any:
    """Gap to the oracle (plain modules, gradients averaged by hand), that of the scale, and reductions per wrapper."""
    make = Normed if normed else Tower
    encoders = (make(1),) if shared else (make(1), make(2))
    ours, theirs = twins(*encoders)
    our_scale, their_scale = (torch.tensor(2.0, requires_grad=True) for _ in range(2))
    wrapped = [DistributedDataParallel(module) for module in ours]
    counters = [counted(ddp) for ddp in wrapped]
    inputs = mine(sizes)
    torch.manual_seed(dist.get_rank())
    cache = ct.GradCache(wrapped[0] if shared else wrapped, ct.ClipLoss(), chunk_size)
    for _ in range(steps):
        loss = cache.step(*inputs, logit_scale=our_scale.exp())
    state = torch.get_rng_state()
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        want = oracle(
            theirs * 2 if shared else theirs,
            lambda a, b: ct.clip_loss(a, b, their_scale.exp()),
            inputs,
            (chunk_size, chunk_size),
        )
    assert torch.equal(torch.get_rng_state(), state) and loss.item() == pytest.approx(want.item(), rel=ROUNDING)
    got = [*gradients(*ours), our_scale.grad]
    same = gap(got, mean_over_ranks([*gradients(*theirs), their_scale.grad]))
    batches = [int(module.norm.num_batches_tracked) for module in ours] if normed else []  # type: ignore[union-attr, arg-type]
    return same, [len(counter) for counter in counters], batches


@pytest.mark.parametrize("shared", [False, True], ids=["two encoders", "one encoder"])
@pytest.mark.parametrize(
    ("sizes", "chunk_size"), [((12, 12), 4), ((13, 6), 4), ((9, 2), 100)], ids=["even", "uneven", "one chunk"]
)
def test_ddp(sizes: tuple[int, ...], chunk_size: int, shared: bool) -> None:
    """One reduction per wrapper and step, after the last of its chunks, though ranks have different numbers of them."""
    for same, reductions, _ in pool(2).run(ddp_uneven, sizes, chunk_size, shared):
        assert same <= EXACT and reductions == [1] * len(reductions)


def ddp_uneven(sizes: tuple[int, ...], chunk_size: int, shared: bool) -> Any:
    return ddp_step(sizes, chunk_size, shared=shared)


def ddp_normed(sizes: tuple[int, ...]) -> Any:
    return ddp_step(sizes, 4, shared=True, normed=True)


def test_ddp_with_buffers() -> None:
    """DDP broadcasts buffers in forward passes: once per step, so uneven numbers of chunks do not hang."""
    (same, _, batches), (other, _, fewer) = pool(2).run(ddp_normed, (14, 6))
    assert max(same, other) <= EXACT and batches == [8] and fewer == [4]


def ddp_steps(sizes: tuple[int, ...]) -> Any:
    return ddp_step(sizes, 4, shared=False, steps=3)


def test_ddp_over_steps() -> None:
    """Gradients add up over steps; the reducer is ready again each time."""
    for same, reductions, _ in pool(2).run(ddp_steps, (13, 6)):
        assert same <= 3 * EXACT and reductions == [3, 3]


def accumulate() -> Any:
    """Two steps, the first without synchronisation."""
    ours, theirs = twins(Tower(1))
    ddp = DistributedDataParallel(ours[0])
    counter = counted(ddp)
    cache = ct.GradCache(ddp, ct.ClipLoss(), 4)
    torch.manual_seed(dist.get_rank())
    with ddp.no_sync():
        cache.step(*mine((8, 8)), logit_scale=7.0)
    assert not counter
    cache.step(*mine((5, 9)), logit_scale=7.0)
    torch.manual_seed(dist.get_rank())
    for sizes in ((8, 8), (5, 9)):
        oracle(theirs * 2, lambda a, b: ct.clip_loss(a, b, 7.0), mine(sizes), (4, 4))
    return gap(gradients(*ours), mean_over_ranks(gradients(*theirs))), len(counter)


def test_accumulation_without_synchronisation() -> None:
    for same, count in pool(2).run(accumulate):
        assert same <= EXACT and count == 1


class Branches(nn.Module):
    """One wrapped model with a branch for each side: the last chunk uses only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tower(1), Tower(2)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, *, kind: str) -> Tensor:
        features: Tensor = getattr(self, kind)(x)
        return features


def branches() -> float:
    from functools import partial

    ours, theirs = Branches(), Branches()
    ddp = DistributedDataParallel(ours, find_unused_parameters=True)
    inputs = mine((9, 5))
    cache = ct.GradCache((partial(ddp, kind="image"), partial(ddp, kind="text")), ct.ClipLoss(), 4)
    torch.manual_seed(dist.get_rank())
    cache.step(*inputs, logit_scale=ours.log_scale.exp())
    torch.manual_seed(dist.get_rank())
    loss = lambda a, b: ct.clip_loss(a, b, theirs.log_scale.exp())  # noqa: E731
    oracle([theirs.image, theirs.text], loss, inputs, (4, 4))
    return gap(gradients(ours), mean_over_ranks(gradients(theirs)))


def test_ddp_with_branches_and_a_scale_inside() -> None:
    assert max(pool(2).run(branches)) <= EXACT


class LearnedScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return ct.clip_loss(a, b, self.log_scale.exp())


def loss_parameters() -> tuple[float, Tensor]:
    ours, theirs = twins(Tower(1), LearnedScale())
    inputs = mine((9, 5))
    torch.manual_seed(dist.get_rank())
    ct.GradCache(DistributedDataParallel(ours[0]), ours[1], 4).step(*inputs)
    torch.manual_seed(dist.get_rank())
    oracle([theirs[0]] * 2, theirs[1], inputs, (4, 4))
    want = mean_over_ranks([theirs[1].log_scale.grad])[0]  # type: ignore[list-item]
    assert want is not None
    return float((ours[1].log_scale.grad - want).abs() / want.abs()), ours[1].unused.grad  # type: ignore[operator, return-value]


def test_loss_parameters_are_averaged() -> None:
    for same, unused in pool(2).run(loss_parameters):
        assert same <= 1e-5 and unused == 0


def fsdp_gap(sizes: tuple[int, ...], chunk_size: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ours, theirs = twins(Tower(1), Tower(2))
    mesh = init_device_mesh("cpu", (len(sizes),))
    for module in ours:
        fully_shard(module.layer, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(module, mesh=mesh)
    inputs = mine(sizes)
    cache = ct.GradCache(ours, ct.ClipLoss(), chunk_size)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        cache.step(*inputs, logit_scale=7.0)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        oracle(theirs, lambda a, b: ct.clip_loss(a, b, 7.0), inputs, (chunk_size, chunk_size))
    got = {name: p.grad.full_tensor() for x in ours for name, p in named(x, ours.index(x))}
    want = {name: p.grad for x in theirs for name, p in named(x, theirs.index(x))}
    return gap([got[name] for name in want], mean_over_ranks(list(want.values())))


def named(module: nn.Module, index: int) -> list[tuple[str, Any]]:
    return [(f"{index}.{name}", p) for name, p in module.named_parameters()]


def test_fsdp2() -> None:
    assert max(pool(2).run(fsdp_gap, (10, 9), 4)) <= 2 * EXACT


def fsdp_refused(sizes: tuple[int, ...]) -> str:
    try:
        fsdp_gap(sizes, 4)
    except ValueError as error:
        return str(error)
    return ""


def test_fsdp2_wants_equally_many_chunks() -> None:
    for text in pool(2).run(fsdp_refused, (12, 5)):
        assert text.startswith("chunks of an encoder under FSDP or ZeRO 3: expected equally many on every rank")


@pytest.mark.peers
class Heedless(Tower):
    """Ignores its mask, so that padding changes the features."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


def fsdp_padding(heedless: bool) -> tuple[list[bool], list[str], int, float]:
    """Only rank 0 has padding: what each rank decided, its warnings, tokens it encoded, and the gap to plain steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    make = Heedless if heedless else Tower
    (ours,), (theirs,) = twins(make(1, dropout=0.0))
    fully_shard(ours, mesh=init_device_mesh("cpu", (2,)))
    rank = dist.get_rank()
    batch = padded(9, 3) if rank == 0 else {"input_ids": ids_of(9, 4), "attention_mask": torch.ones(9, TOKENS).long()}
    cache = ct.GradCache(ours, ct.ClipLoss(), 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            cache.step(batch, batch, logit_scale=7.0)
    for _ in range(2):
        ct.clip_loss(theirs(**batch), theirs(**batch), 7.0).backward()
    got, want = ([p.grad for p in x.parameters()] for x in (ours, theirs))
    found = gap([g.full_tensor() for g in got], mean_over_ranks(want))  # type: ignore[union-attr]
    told = [str(x.message) for x in caught if "without padding" in str(x.message)]
    return [*cache.feed.sorting.agreed.values()], told, cache.padding.encoded, found


@pytest.mark.parametrize("heedless", [False, True])
def test_fsdp2_ranks_decide_about_padding_together(heedless: bool) -> None:
    """Forward passes are collective: a rank without padding takes part in the comparison, and does what all do."""
    (first, told, encoded, gap_0), (second, also_told, all_tokens, gap_1) = pool(2).run(fsdp_padding, heedless)
    assert first == second == [not heedless]
    assert max(gap_0, gap_1) <= 2 * EXACT
    assert len(told) == len(also_told) == heedless
    if heedless:
        assert "another rank" in also_told[0] and encoded == all_tokens == 0
    else:
        assert encoded < all_tokens == 2 * 9 * TOKENS


def test_accelerate(request: pytest.FixtureRequest) -> None:
    """`accelerator.backward`, which divides by the number of accumulated steps."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    request.addfinalizer(accelerate.state.GradientState._reset_state)
    request.addfinalizer(lambda: accelerate.state.AcceleratorState._reset_state(True))
    ours, theirs = twins(Tower(1))
    optimiser = torch.optim.SGD(ours[0].parameters(), lr=0.0)
    model, optimiser = accelerator.prepare(ours[0], optimiser)
    batches = [(ids_of(9, seed), ids_of(9, seed + 1)) for seed in (1, 5)]
    cache = ct.GradCache(model, ct.ClipLoss(group=None), 4)
    torch.manual_seed(5)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(cache(*batch, logit_scale=7.0))
            optimiser.step()
    torch.manual_seed(5)
    for batch in batches:
        oracle(theirs * 2, lambda a, b: ct.clip_loss(a, b, 7.0) / 2, batch, (4, 4))
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT


def accelerated() -> tuple[float, str]:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    ours, theirs = twins(Tower(1))
    model = accelerator.prepare(ours[0])
    inputs = mine((9, 5))
    torch.manual_seed(dist.get_rank())
    accelerator.backward(ct.GradCache(model, ct.ClipLoss(), 4)(*inputs, logit_scale=7.0))
    torch.manual_seed(dist.get_rank())
    oracle(theirs * 2, lambda a, b: ct.clip_loss(a, b, 7.0), inputs, (4, 4))
    return gap(gradients(*ours), mean_over_ranks(gradients(*theirs))), type(model).__name__


@pytest.mark.peers
def test_accelerate_over_ranks() -> None:
    for same, wrapper in pool(2).run(accelerated):
        assert same <= EXACT and wrapper == "DistributedDataParallel"

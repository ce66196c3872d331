"""The loss family over ranks equals the family on the whole batch; the queue that ranks share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contratile as ct
from contratile import reference
from tests.helpers import randn
from tests.ranks import pool

SIZES: list[tuple[int, ...]] = [(9,), (8, 9), (5, 0, 17)]
D, H = 6, 2


def part(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.split(x, list(sizes))[dist.get_rank()]


def compare(
    ours: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    shared: list[Tensor],
    split: list[tuple[Tensor, tuple[int, ...]]],
) -> list[float]:
    """Relative errors of the mean value and of all gradients, in fp64. `split` tensors are dealt to the ranks,
    `shared` ones (scale, bias) are everybody's."""
    world = dist.get_world_size()
    local = [part(x, sizes).clone().requires_grad_() for x, sizes in split]
    numbers = [x.clone().requires_grad_() for x in shared]
    loss = ours(*local, *numbers)
    loss.backward()
    whole = [x.clone().requires_grad_() for x, _ in split]
    exact = [x.clone().requires_grad_() for x in shared]
    want = oracle(*whole, *exact)
    (want * world).backward()
    value = loss.detach().clone()
    dist.all_reduce(value)
    errors = [float((value / world - want).abs() / want.abs())]
    for x, (_, sizes), y in zip(local, split, whole, strict=True):
        assert x.grad is not None and y.grad is not None
        errors.append(float((x.grad - part(y.grad, sizes)).abs().sum() / y.grad.abs().max()))
    for x, y in zip(numbers, exact, strict=True):
        assert x.grad is not None and y.grad is not None
        total = x.grad.clone()
        dist.all_reduce(total)
        errors.append(float((total - y.grad).abs() / y.grad.abs()))
    return errors


def features(n: int, seed: int) -> Tensor:
    return randn(n, D, seed=seed, dtype=torch.float64)


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def integers(n: int, kinds: int, seed: int) -> Tensor:
    return torch.randint(kinds, (n,), generator=torch.Generator().manual_seed(seed))


def nt_xent_errors(sizes: tuple[int, ...], tile: int) -> list[float]:
    n = sum(sizes)
    pairs = [(features(n, 1), sizes), (features(n, 2), sizes)]
    return compare(lambda a, b, t: ct.nt_xent(a, b, t, tile=tile), reference.nt_xent, [scalar(0.7)], pairs)


def sup_con_errors(sizes: tuple[int, ...], tile: int) -> list[float]:
    n = sum(sizes)
    labels = integers(n, 4, 3)
    labels[0] = 99  # alone in its class
    return compare(
        lambda z, t: ct.sup_con(z, part(labels, sizes), t, tile=tile),
        lambda z, t: reference.sup_con(z, labels, t),
        [scalar(0.7)],
        [(features(n, 1), sizes)],
    )


def siglip_errors(sizes: tuple[int, ...], tile: int) -> list[float]:
    n = sum(sizes)
    pairs = [(features(n, 1), sizes), (features(n, 2), sizes)]
    ours = lambda a, b, s, c: ct.siglip_loss(a, b, s, c, tile=tile)  # noqa: E731
    return compare(ours, reference.siglip_loss, [scalar(1.3), scalar(-2.0)], pairs)


def siglip_ids_errors(sizes: tuple[int, ...], tile: int) -> list[float]:
    n = sum(sizes)
    pairs = [(features(n, 1), sizes), (features(n, 2), sizes)]
    ids, errors = integers(n, 5, 3), []
    for same_id in ("exclude", "positive"):
        ours = lambda a, b, s, c, how=same_id: ct.siglip_loss(  # noqa: E731
            a, b, s, c, ids=part(ids, sizes), same_id=how, tile=tile
        )
        oracle = lambda a, b, s, c, how=same_id: reference.siglip_loss(a, b, s, c, ids=ids, same_id=how)  # noqa: E731
        errors += compare(ours, oracle, [scalar(1.3), scalar(-2.0)], pairs)
    return errors


OPTIONS: dict[str, dict[str, Any]] = {
    "ids": {},
    "margin": {"margin": 0.2},
    "label_smoothing": {"label_smoothing": 0.2},
    "positives": {"same_id": "positive"},
    "elsewhere": {"in_batch_negatives": False},
    "biases": {},
}


def option_errors(name: str, which: str, sizes: tuple[int, ...], tile: int) -> list[float]:
    """Ids over ranks, extra keys of different numbers, hard negatives, weights, and the option."""
    n, extras = sum(sizes), tuple(range(1, len(sizes) + 1))
    ids, extra_ids = integers(n, 5, 1), integers(sum(extras), 5, 2)
    weights = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = integers(n * H, 2, 4).view(n, H).bool()
    split = [(features(n, 1), sizes), (features(n, 2), sizes), (features(sum(extras), 3), extras)]
    hard = randn(n, H, D, seed=4, dtype=torch.float64)

    def loss(function: Callable[..., Tensor], deal: Callable[[Tensor, tuple[int, ...]], Tensor], **more: Any) -> Any:
        options = {"ids": deal(ids, sizes), "weights": deal(weights, sizes), "hard_mask": deal(mask, sizes)}
        options["extra_ids"] = deal(extra_ids, extras)
        if which == "biases":
            options["key_bias"], options["extra_bias"] = (
                deal(features(n, 5)[:, 0], sizes),
                deal(weights[: sum(extras)], extras),
            )
        return lambda q, k, e, h, s: function(
            q, k, s, extra_keys=e, hard_negatives=h, **options, **OPTIONS[which], **more
        )

    ours = loss(getattr(ct, name), part, tile=tile)
    oracle = loss(getattr(reference, name), lambda x, _: x)
    return compare(ours, oracle, [scalar(1.1)], [*split, (hard, sizes)])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("function", [nt_xent_errors, sup_con_errors, siglip_errors, siglip_ids_errors])
def test_losses_over_ranks(function: Callable[..., list[float]], sizes: tuple[int, ...]) -> None:
    for tile in (4, 100):
        for errors in pool(len(sizes)).run(function, sizes, tile):
            assert max(errors) < 1e-11, errors


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    ("name", "which"),
    [
        (name, which)
        for name in ("clip_loss", "info_nce")
        for which in OPTIONS
        if (name, which) != ("clip_loss", "elsewhere")
    ],
)
def test_options_over_ranks(name: str, which: str, sizes: tuple[int, ...]) -> None:
    for errors in pool(len(sizes)).run(option_errors, name, which, sizes, 4):
        assert max(errors) < 1e-11, errors


def statistics(name: str, same_id: str | None, sizes: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Over the ranks, and of one process on the whole batch."""
    n = sum(sizes)
    q, k = features(n, 1), features(n, 2)
    more = {"clip_loss": (1.3,), "siglip_loss": (1.3, -1.0), "nt_xent": (0.7,)}[name]
    mine: dict[str, Any] = {"tile": 4}
    whole: dict[str, Any] = {"group": None}
    if same_id is not None:
        ids = integers(n, 5, 3)
        mine |= {"ids": part(ids, sizes), "same_id": same_id}
        whole |= {"ids": ids, "same_id": same_id}
    _, got = getattr(ct, name)(part(q, sizes), part(k, sizes), *more, return_stats=True, **mine)
    _, want = getattr(ct, name)(q, k, *more, return_stats=True, **whole)
    return [float(x) for x in got if x is not None], [float(x) for x in want if x is not None]


BY_ID = [(name, how) for name in ("clip_loss", "siglip_loss") for how in (None, "exclude", "positive")]


@pytest.mark.parametrize(("name", "same_id"), [*BY_ID, ("nt_xent", None)])
def test_statistics_are_of_the_global_batch(name: str, same_id: str | None) -> None:
    for got, want in pool(3).run(statistics, name, same_id, (5, 0, 17)):
        assert got == pytest.approx(want, rel=1e-12)


def traffic(name: str, n: int) -> int:
    """Numbers that this rank sends in a step."""
    sent, post = 0, dist.batch_isend_irecv

    def counting(ops: list[dist.P2POp]) -> list[dist.Work]:
        nonlocal sent
        sent += sum(op.tensor.numel() for op in ops if op.op is dist.isend)
        return post(ops)

    dist.batch_isend_irecv = counting  # type: ignore[assignment]
    try:
        q, k = (torch.randn(n, D, requires_grad=True) for _ in range(2))
        arguments = (1.0, -1.0) if name == "siglip_loss" else (1.0,)
        getattr(ct, name)(q, k, *arguments).backward()
    finally:
        dist.batch_isend_irecv = post
    return sent


def test_what_travels() -> None:
    """SigLIP: keys twice and their gradient. NT-Xent: views twice with their statistics, and no gradient."""
    n, world = 5, 3
    assert pool(world).run(traffic, "siglip_loss", n) == [(3 * world - 2) * n * D] * world
    views = 2 * n
    assert pool(world).run(traffic, "nt_xent", n) == [2 * (world - 1) * views * D + (world - 1) * 2 * views] * world


def different_options() -> str:
    q = torch.randn(4, D)
    margin = 0.1 if dist.get_rank() == 0 else 0.2
    with pytest.raises(ValueError, match="call: expected the same on every rank") as error:
        ct.clip_loss(q, q, margin=margin)
    return str(error.value)


def test_options_that_differ_between_ranks_are_told() -> None:
    first, second = pool(2).run(different_options)
    assert first == second and "0.1" in first and "0.2" in first


def option_of_one_rank(which: str) -> str:
    q, k, extra = (randn(4, D, seed=seed) for seed in range(3))
    options: dict[str, Any] = {"extra_keys": extra}
    if dist.get_rank():
        if which == "weights":
            options["weights"] = torch.ones(4)
        else:
            extra.requires_grad_()
    with pytest.raises(ValueError, match="expected the same on every rank") as error:
        ct.info_nce(q.requires_grad_(), k, **options)
    return str(error.value)


@pytest.mark.parametrize(("which", "told"), [("weights", "extra_keys weights"), ("gradient", "query extra_keys on")])
def test_options_of_one_rank_are_told(which: str, told: str) -> None:
    first, second = pool(2).run(option_of_one_rank, which)
    assert first == second and told in first


def gradient_of_one_rank(name: str) -> str:
    q, k, hard = randn(4, D, seed=0), randn(4, D, seed=1), randn(4, 2, D, seed=2)
    of_hard: dict[str, Any] = {"hard_negatives": hard, "hard_bias": torch.zeros(4, 2)}
    of_hard[name].requires_grad_(dist.get_rank() == 1)
    ct.info_nce(q.requires_grad_(), k, **of_hard).backward()  # each rank's own: nothing of them travels
    with pytest.raises(ValueError, match="expected the same on every rank") as error:
        ct.info_nce(q, k, **of_hard, share_hard_negatives=True)
    return str(error.value)


@pytest.mark.parametrize("name", ["hard_negatives", "hard_bias"])
def test_gradients_of_shared_hard_negatives_that_one_rank_wants_are_told(name: str) -> None:
    first, second = pool(2).run(gradient_of_one_rank, name)
    assert first == second and f"got query on rank 0; query {name} on rank 1" in first


def directions_in_any_order() -> float:
    q, k = randn(4, D, seed=1), randn(4, D, seed=2)
    names: tuple[Any, ...] = ("query_to_doc", "query_to_query", "doc_to_doc")
    return ct.info_nce(q, k, directions=tuple(reversed(names)) if dist.get_rank() else names).item()


def test_directions_may_be_in_any_order() -> None:
    """A set of names has another order in every process."""
    first, second = pool(2).run(directions_in_any_order)
    assert first == second


def weights_of_two_dtypes() -> float:
    rank = dist.get_rank()
    q, k = randn(4, D, seed=1), randn(4, D, seed=2)
    return ct.info_nce(q, k, weights=torch.ones(4, dtype=torch.float64 if rank else torch.float32)).item()


def test_weights_of_two_dtypes() -> None:
    first, second = pool(2).run(weights_of_two_dtypes)
    assert first == second


def one_side_each() -> list[float]:
    """Rank 0 uses the rows, rank 1 the columns: what travels back is still the same."""
    rank = dist.get_rank()
    q, k = (features(7, seed) for seed in (1, 2))
    mine = [part(x, (3, 4)).clone().requires_grad_() for x in (q, k)]
    row, col = ct.pair_lse(mine[0], mine[1], 2.0)
    (col if rank else row).sum().backward()
    whole = [x.clone().requires_grad_() for x in (q, k)]
    scores = 2.0 * whole[0] @ whole[1].T
    (scores.logsumexp(1)[:3].sum() + scores.logsumexp(0)[3:].sum()).backward()
    return [
        float((x.grad - part(y.grad, (3, 4))).abs().max())  # type: ignore[operator, arg-type]
        for x, y in zip(mine, whole, strict=True)
    ]


def test_ranks_that_use_different_sides() -> None:
    for errors in pool(2).run(one_side_each):
        assert max(errors) < 1e-12


# --- the queue ----------------------------------------------------------------------------------------------------


def queue_run(sizes: tuple[int, ...], capacity: int, steps: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The queue's content, its ids, and all shares joined, after some steps."""
    queue = ct.MemoryQueue(capacity, 2, with_ids=True, dtype=torch.float64)
    for step in range(steps):
        n = sum(sizes)
        keys = torch.arange(2 * n, dtype=torch.float64).view(n, 2) + 1000 * step
        queue.enqueue(part(keys, sizes), part(torch.arange(n) + 1000 * step, sizes))
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (queue.keys(), queue.ids()))
    return queue.buffer[: len(queue)], queue.ids_buffer[: len(queue)], [keys for keys, _ in shares]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("capacity", "steps"), [(100, 2), (30, 4), (7, 3)])
def test_queue_over_ranks(sizes: tuple[int, ...], capacity: int, steps: int) -> None:
    n = sum(sizes)
    newest = [key + 1000 * step for step in range(steps) for key in range(n)][-capacity:]
    for content, ids, shares in pool(len(sizes)).run(queue_run, sizes, capacity, steps):
        assert sorted(ids.tolist()) == sorted(newest)
        assert sorted(torch.cat(shares)[:, 0].tolist()) == sorted(content[:, 0].tolist())
        assert torch.equal(content[:, 0] % 1000, ids.double() % 1000 * 2)


def queue_loss() -> list[float]:
    """A loss against the queue equals one against all of its keys."""
    rank, world = dist.get_rank(), dist.get_world_size()
    queue = ct.MemoryQueue(20, D, dtype=torch.float64)
    queue.enqueue(features(13, 9)[rank::world])
    q, k = features(6, 1), features(6, 2)
    sizes = (2,) * world
    loss = ct.info_nce(part(q, sizes), part(k, sizes), 2.0, extra_keys=queue.keys())
    dist.all_reduce(loss)
    want = reference.info_nce(q, k, 2.0, extra_keys=queue.buffer[: len(queue)])
    return [float(loss / world), float(want)]


def test_a_loss_against_the_queue() -> None:
    for got, want in pool(3).run(queue_loss):
        assert got == pytest.approx(want, rel=1e-12)


def test_queue_wraps_around_and_resumes() -> None:
    queue = ct.MemoryQueue(5, 1)
    assert len(queue) == 0 and queue.keys().shape == (0, 1)
    for first in (0, 3, 6):
        queue.enqueue(torch.arange(first, first + 3.0).unsqueeze(1))
    assert sorted(queue.keys().flatten().tolist()) == [4, 5, 6, 7, 8]
    resumed = ct.MemoryQueue(5, 1)
    resumed.load_state_dict(queue.state_dict())
    for q in (queue, resumed):
        q.enqueue(torch.tensor([[9.0]]))
    assert torch.equal(queue.keys(), resumed.keys()) and sorted(queue.keys().flatten().tolist()) == [5, 6, 7, 8, 9]
    queue.enqueue(torch.arange(100.0, 112).unsqueeze(1))  # more than it holds
    assert sorted(queue.keys().flatten().tolist()) == [107, 108, 109, 110, 111]


def test_queue_keys_survive_the_next_enqueue() -> None:
    queue = ct.MemoryQueue(4, D, dtype=torch.float64)
    queue.enqueue(features(4, 1))
    q, k = features(3, 2).requires_grad_(), features(3, 3)
    loss = ct.info_nce(q, k, extra_keys=queue.keys())
    want = torch.autograd.grad(reference.info_nce(q, k, extra_keys=features(4, 1)), q)
    queue.enqueue(k)
    torch.testing.assert_close(torch.autograd.grad(loss, q), want)


@pytest.mark.parametrize("moved", [True, False])
def test_queue_on_another_device(moved: bool) -> None:
    """The memory of "meta" cannot be read: `enqueue` waits for no device, and mixes none."""
    queue = ct.MemoryQueue(8, 2, with_ids=True, device=None if moved else "meta").to("meta")
    assert {buffer.device.type for buffer in queue.buffers()} == {"meta"}
    queue.enqueue(torch.zeros(3, 2, device="meta"), torch.zeros(3, dtype=torch.long, device="meta"))


def test_queue_refusals() -> None:
    with pytest.raises(ValueError, match="size: expected at least 1"):
        ct.MemoryQueue(0, 4)
    queue = ct.MemoryQueue(4, 2)
    with pytest.raises(ValueError, match="one number of features"):
        queue.enqueue(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="with_ids=True"):
        queue.enqueue(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="with_ids=True"):
        queue.ids()


def queue_of_one_wrong_rank(what: str) -> str:
    rank, queue = dist.get_rank(), ct.MemoryQueue(4, 2, dtype=torch.float16 if what == "dtype" else torch.float32)
    if what == "dtype" and rank:
        queue.float()
    keys = torch.zeros(3, 5 if what == "features" and rank else 2)
    with pytest.raises(ValueError) as caught:
        queue.enqueue(keys)
    assert len(queue) == 0
    dist.barrier()  # nobody is left behind
    return str(caught.value)


@pytest.mark.parametrize(("what", "told"), [("features", "one number of features"), ("dtype", "float16 on rank 0")])
def test_a_queue_that_is_wrong_on_one_rank_is_said_on_all(what: str, told: str) -> None:
    for said in pool(2).run(queue_of_one_wrong_rank, what):
        assert told in said


def empty_keys() -> int:
    queue = ct.MemoryQueue(4, 2)
    queue.enqueue(torch.zeros(0, 2))
    return len(queue)


def test_a_queue_takes_no_keys_too() -> None:
    assert pool(2).run(empty_keys) == [0, 0]


# --- refusals -----------------------------------------------------------------------------------------------------


def mask_of_lists_on_one_rank() -> str:
    x, hard, mask = randn(3, D, seed=1), randn(3, H, D, seed=2), torch.ones(3, H, dtype=torch.bool)
    given: Any = mask.tolist() if dist.get_rank() else mask
    with pytest.raises((ValueError, RuntimeError)) as caught:
        ct.info_nce(x, x, hard_negatives=hard, hard_mask=given)
    return str(caught.value)


def test_a_bad_option_on_one_rank_is_said_on_all() -> None:
    for said in pool(2).run(mask_of_lists_on_one_rank):
        assert "hard_mask: expected bool of shape [3, 2], got list" in said


class Odd(int):
    def __lt__(self, other: int) -> bool:
        raise ArithmeticError("ungültig " * 100)


def odd_on_one_rank() -> str:
    x = randn(3, D, seed=1)
    with pytest.raises((ArithmeticError, ValueError)) as caught:
        ct.info_nce(x, x, tile=Odd(4) if dist.get_rank() else 4)
    return str(caught.value)


def test_any_error_on_one_rank_is_said_on_all() -> None:
    """Also a long one in other letters."""
    told, own = pool(2).run(odd_on_one_rank)
    assert "rank 1: ung?ltig" in told and own.startswith("ungültig")


def test_queue_refuses_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="keys: expected a tensor"):
        ct.MemoryQueue(4, D).enqueue([1])  # type: ignore[arg-type]

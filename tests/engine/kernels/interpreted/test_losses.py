"""The public losses with `backend="triton"`: the same as fp64 and as the torch backend, on one rank and on two."""

from tests.engine.kernels.interpreted.battery import half, numbers, to_tf32  # isort: skip  # first: it sets the mode of Triton

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contratile as ct
from contratile.engine.backends import triton_configs
from tests.engine.kernels.interpreter import launches
from tests.helpers import randn, run
from tests.ranks import pool

N, D = 34, 19
IDS = torch.arange(N) // 2
EXTRA, HARD = numbers(21, D, seed=5, kind="ieee"), numbers(N * 2, D, seed=6, kind="ieee").view(N, 2, D)

BIAS = torch.linspace(-4, 3, N)

LOSSES: dict[str, Callable[..., Tensor]] = {
    "clip": lambda q, k, s, **how: ct.clip_loss(q, k, s, **how),
    "clip with options": lambda q, k, s, **how: ct.clip_loss(
        q, k, s, ids=IDS, extra_keys=EXTRA.to(q), hard_negatives=HARD.to(q), label_smoothing=0.1, **how
    ),
    "clip with a margin": lambda q, k, s, **how: ct.clip_loss(
        q, k, s, ids=IDS, margin=0.1, weights=torch.linspace(0.5, 2, N), cache_bytes=4 * N * N // 2, **how
    ),
    "clip, smoothed and kept": lambda q, k, s, **how: ct.clip_loss(
        q, k, s, ids=IDS, label_smoothing=0.2, cache_bytes=4 * N * N, **how
    ),
    "clip, several positives": lambda q, k, s, **how: ct.clip_loss(
        *(q, k, s), ids=IDS, same_id="positive", extra_keys=EXTRA.bfloat16().to(q), extra_ids=torch.arange(21), **how
    ),
    "clip with biases": lambda q, k, s, **how: ct.clip_loss(
        *(q, k, s),
        key_bias=BIAS + (k.to(s.dtype) ** 2).sum(1),
        ids=IDS,
        extra_keys=EXTRA.bfloat16().to(q),
        extra_bias=BIAS[:21],
        **how,
    ),
    "info_nce with biases and a margin": lambda q, k, s, **how: ct.info_nce(
        *(q, k, s), labels=(torch.arange(N) * 5) % N, key_bias=(k.to(s.dtype) ** 2).sum(1), margin=0.1, **how
    ),
    "info_nce with hardness": lambda q, k, s, **how: ct.info_nce(
        *(q, k, s),
        key_bias=BIAS,
        ids=IDS,
        hard_negatives=HARD.bfloat16().to(q),
        share_hard_negatives=True,
        hardness_mode="in_batch_negatives",
        hardness_strength=5.0,
        cache_bytes=2 * N * N,
        **how,
    ),
    "info_nce with hardness, two directions": lambda q, k, s, **how: ct.info_nce(
        *(q, k, s),
        extra_keys=EXTRA.bfloat16().to(q),
        directions=("query_to_doc", "doc_to_query"),
        hardness_mode="all_negatives",
        hardness_strength=5.0,
        **how,
    ),
    "info_nce, four directions": lambda q, k, s, **how: ct.info_nce(
        *(q, k, s),
        ids=IDS,
        hard_negatives=HARD.bfloat16().to(q),
        share_hard_negatives=True,
        directions=("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"),
        **how,
    ),
    "info_nce, negatives from elsewhere": lambda q, k, s, **how: ct.info_nce(
        *(q, k, s),
        ids=IDS,
        extra_keys=EXTRA.bfloat16().to(q),
        extra_ids=torch.arange(21),
        in_batch_negatives=False,
        **how,
    ),
    "info_nce": lambda q, k, s, **how: ct.info_nce(q, k, s, labels=(torch.arange(N) * 5) % N, **how),
    "info_nce, several positives": lambda q, k, s, **how: ct.info_nce(
        *(q, k, s), labels=(torch.arange(N) * 5) % N, ids=(IDS, IDS), same_id="positive", **how
    ),
    "nt_xent": lambda q, k, s, **how: ct.nt_xent(q, k, 1 / s, **how),
    "sup_con": lambda q, k, s, **how: ct.sup_con(torch.cat([q, k]), torch.cat([IDS, IDS]) % 5, 1 / s, **how),
    "siglip": lambda q, k, s, **how: ct.siglip_loss(q, k, s, 0.3 * s - 5, **how),
    "siglip with ids": lambda q, k, s, **how: ct.siglip_loss(q, k, s, 0.3 * s - 5, ids=IDS, **how),
    "siglip, several positives": lambda q, k, s, **how: ct.siglip_loss(
        q, k, s, 0.3 * s - 5, ids=IDS, same_id="positive", **how
    ),
    "pair_lse": lambda q, k, s, **how: torch.cat(ct.pair_lse(q, k, s, **how)).mean(),
}
HOW: dict[str, Any] = {"backend": "triton", "tile": 16, "group": None}
# 8 roundings of a score of up to 6, and one of 16-bit gradients.
TOLERANCE = {"ieee": 8 * 2**-23 * 7, "bf16": 8e-3, "fp16": 1e-3}
SCALE = torch.tensor(6.0)


@pytest.fixture(autouse=True)
def several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_configs, "WORKSPACE_BYTES", 4096)


def close(got: Tensor, true: Tensor, tolerance: float) -> None:
    error = float((got.double() - true).abs().max())
    assert error <= tolerance * max(1e-3, float(true.abs().max())), (error, float(true.abs().max()))


# Each loss in one kind of number, the most used one in all; all losses in all kinds in the slow tests.
KINDS_OF_LOSSES = [
    *half(["ieee", "bf16"], list(LOSSES)[1:]),
    *(pytest.param("fp16", name, marks=pytest.mark.slow) for name in list(LOSSES)[1:]),
    *(pytest.param(kind, "clip") for kind in TOLERANCE),
]


@pytest.mark.parametrize(("kind", "name"), KINDS_OF_LOSSES)
def test_every_loss(kind: str, name: str) -> None:
    q, k = numbers(N, D, seed=1, kind=kind), numbers(N, D, seed=2, kind=kind)
    exact = run(lambda *x: LOSSES[name](*x, backend="dense", group=None), q, k, SCALE, dtype=torch.float64)
    with launches(order=1) as seen:
        got = run(lambda *x: LOSSES[name](*x, **HOW), q, k, SCALE)
    assert seen.programs["forward_tiles"] and seen.programs["gradient_tiles"]
    close(got.values[0], exact.values[0], 2e-6)
    for grad, true in zip(got.grads, exact.grads, strict=True):
        close(grad, true, TOLERANCE[kind])


@pytest.mark.slow  # both are held to fp64 in fast tests
@pytest.mark.parametrize("name", LOSSES)
def test_the_same_as_the_torch_backend(name: str) -> None:
    q, k = numbers(N, D, seed=3, kind="ieee"), numbers(N, D, seed=4, kind="ieee")
    ours = run(lambda *x: LOSSES[name](*x, **HOW), q, k, SCALE)
    torchs = run(lambda *x: LOSSES[name](*x, backend="torch", group=None), q, k, SCALE)
    for a, b in zip(ours.values + ours.grads, torchs.values + torchs.grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_compiled_by_pytorch() -> None:
    """Kernels stand behind the operator that `torch.compile` traces."""
    q, k = numbers(N, D, seed=3, kind="ieee"), numbers(N, D, seed=4, kind="ieee")
    eager = run(lambda *x: ct.clip_loss(*x, **HOW), q, k, SCALE)
    compiled = torch.compile(lambda *x: ct.clip_loss(*x, **HOW), fullgraph=True, backend="aot_eager")
    with launches() as seen:
        traced = run(compiled, q, k, SCALE)
    assert seen.programs["forward_tiles"] and seen.programs["gradient_tiles"]
    for a, b in zip(eager.values + eager.grads, traced.values + traced.grads, strict=True):
        torch.testing.assert_close(a, b)


# --- statistics ---------------------------------------------------------------------------------------------------

STATISTICS: dict[str, Callable[..., tuple[Tensor, Any]]] = {
    "clip": lambda q, k, s, **how: ct.clip_loss(q, k, s, return_stats=True, **how),
    "clip with ids and a margin": lambda q, k, s, **how: ct.clip_loss(
        q, k, s, ids=IDS, margin=0.1, return_stats=True, **how
    ),
    "clip, several positives": lambda q, k, s, **how: ct.clip_loss(
        q, k, s, ids=IDS, same_id="positive", return_stats=True, **how
    ),
    "info_nce": lambda q, k, s, **how: ct.info_nce(q, k, s, labels=torch.arange(N) // 2, return_stats=True, **how),
    "nt_xent": lambda q, k, s, **how: ct.nt_xent(q, k, 1 / s, return_stats=True, **how),
    "siglip": lambda q, k, s, **how: ct.siglip_loss(q, k, s, 0.3 * s - 5, return_stats=True, **how),
    "siglip, several positives": lambda q, k, s, **how: ct.siglip_loss(
        q, k, s, 0.3 * s - 5, ids=IDS, same_id="positive", return_stats=True, **how
    ),
}


def same_statistics(ours: Any, theirs: Any) -> None:
    """Accuracies and ranks exactly, mean scores but for rounding."""
    for name, a, b in zip(ours._fields, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            tolerance = 1e-5 if name.endswith("logit") else 1e-7
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


POSITIVE = ("nt_xent", "clip with ids and a margin")
"""Losses whose scale is positive."""


SIGNS = [(name, sign) for name in STATISTICS for sign in (1, -1) if sign > 0 or name not in POSITIVE]


@pytest.mark.parametrize(("named", "kind"), half(SIGNS, ["ieee", "bf16"]))
def test_statistics(named: tuple[str, int], kind: str) -> None:
    name, sign = named
    q, k = numbers(N, D, seed=3, kind=kind), numbers(N, D, seed=4, kind=kind)
    scale = sign * SCALE
    with launches(order=1) as seen:
        loss, ours = STATISTICS[name](q, k, scale, **HOW)
    assert seen.programs["forward_tiles"]
    plain, theirs = STATISTICS[name](q.float(), k.float(), scale, backend="torch", group=None)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
    same_statistics(ours, theirs)


@pytest.mark.parametrize("ties", ["first", "mean"])
def test_metrics(ties: Any) -> None:
    """Of features with many exact ties, to the last digit."""

    def whole(n: int, seed: int) -> Tensor:
        return torch.randint(-1, 2, (n, 5), generator=torch.Generator().manual_seed(seed)).float()

    image, text, classes = whole(37, 1), whole(50, 2), whole(9, 3)
    owner, targets = torch.arange(50) % 37, torch.arange(37) % 9
    found = []
    for backend in ("triton", "torch"):
        how: Any = {"backend": backend, "tile": 16, "ties": ties}
        found.append(
            [
                ct.retrieval_metrics(image, text[:37], **how),
                ct.retrieval_metrics(image, text, image_of_text=owner, **how),
                ct.zero_shot_metrics(image, classes, targets, **how),
            ]
        )
    assert found[0] == found[1] and all(found[0])


# --- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32"])
@pytest.mark.parametrize("scale", [14.3, 40.0, 100.0])
def test_a_loss_is_not_biased_and_never_negative(precision: Any, scale: float) -> None:
    """Cut operands make every score smaller by 2^-11 of it: the paper's loss of 8e-4 came out as -8e-3."""
    q = torch.linalg.qr(randn(64, 64, seed=1))[0]
    k = torch.nn.functional.normalize(q + 0.02 * randn(64, 64, seed=2))
    with launches():
        each = ct.clip_loss(q, k, scale, reduction="none", precision=precision, **HOW)
    true = ct.clip_loss(q.double(), k.double(), scale, reduction="none", backend="dense", group=None)
    assert (each >= 0).all()
    # fp32 holds a score of 14.3 to 1e-6, and makes it from 64 products.
    spread = {"ieee": 5e-6, "tf32x3": 1e-5, "tf32": 3e-4}[precision]
    assert float((each - true).abs().max()) <= spread * scale / 14.3
    assert abs(float(each.mean() - true.mean())) <= spread / 5 * scale / 14.3


def test_scores_of_tf32_are_those_of_rounded_operands() -> None:
    """To the last bit those of features that were rounded before; cut ones would differ."""
    q, k = numbers(N, D, seed=1, kind="ieee"), numbers(N, D, seed=2, kind="ieee")
    got = ct.pair_lse(q, k, 9.0, precision="tf32", **HOW)
    rounded = ct.pair_lse(to_tf32(q), to_tf32(k), 9.0, precision="tf32", **HOW)
    q_cut, k_cut = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (q, k))
    cut = ct.pair_lse(q_cut, k_cut, 9.0, precision="tf32", **HOW)
    assert all(torch.equal(a, b) for a, b in zip(got, rounded, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(got, cut, strict=True))


@pytest.mark.parametrize("kind", ["ieee", "tf32", "bf16", "fp16"])
def test_a_converged_row_has_no_gradient(kind: str) -> None:
    """Its positive has all the weight, and its two gradients cancel exactly."""
    q = torch.eye(20, 24).to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32))
    left, right = q.clone().requires_grad_(), q.clone().requires_grad_()
    precision: Any = kind if kind in ("ieee", "tf32") else None
    loss = ct.clip_loss(left, right, 400.0, precision=precision, **HOW)
    loss.backward()
    assert loss == 0 and all(x.grad is not None and not x.grad.any() for x in (left, right))


@pytest.mark.parametrize("upstream", [1e-9, 1.0, 65536.0])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_small_and_large_upstream_gradients(kind: str, upstream: float) -> None:
    """fp16 ends at 6e-8: 1 / N of a large batch, and what a GradScaler makes of it, must not matter to g."""
    q, k = numbers(N, D, seed=1, kind=kind), numbers(N, D, seed=2, kind=kind)
    grads = []
    for x, y, how in ((q, k, HOW), (q.double(), k.double(), {"backend": "dense", "group": None})):
        scale = torch.tensor(20.0, dtype=torch.promote_types(x.dtype, torch.float32), requires_grad=True)
        leaves = x.clone().requires_grad_(), y.clone().requires_grad_(), scale
        (ct.clip_loss(*leaves, **how) * upstream).backward()
        grads.append([leaf.grad for leaf in leaves])
    for got, true in zip(*grads, strict=True):
        assert got is not None and true is not None
        representable = torch.finfo(got.dtype).smallest_normal * torch.finfo(got.dtype).eps
        assert float((got.double() - true).abs().max()) <= TOLERANCE[kind] * float(true.abs().max()) + representable


def test_many_small_weights_in_fp16() -> None:
    """Weights of 1 / 600 of a row that counts 1e-3: without room below, fp16 would round them coarsely."""
    n = 600
    q, k = torch.zeros(8, 16, dtype=torch.float16), numbers(n, 16, seed=2, kind="fp16")
    leaf = q.clone().requires_grad_()
    weights = torch.tensor([1.0] + [1e-3] * 7)
    row, _ = ct.pair_lse(leaf, k, 1.0, cols=False, **HOW | {"tile": 128})
    (grad,) = torch.autograd.grad(row, leaf, weights)
    true = weights.double().unsqueeze(1) * k.double().mean(0)
    torch.testing.assert_close(grad.double(), true, rtol=2e-3, atol=1e-7)


# --- ranks --------------------------------------------------------------------------------------------------------

SIZES = 19, 28


def on_a_rank(name: str, kind: str) -> list[Tensor]:
    """Loss and gradients of this rank's share."""
    triton_configs.WORKSPACE_BYTES = 4096
    total = sum(SIZES)
    q, k = (
        torch.split(numbers(total, D, seed=seed, kind=kind), list(SIZES))[dist.get_rank()].clone() for seed in (1, 2)
    )
    leaves = [q.requires_grad_(), k.requires_grad_(), torch.tensor(6.0, requires_grad=True)]
    with launches(order=2) as seen:
        loss = RING[name](*leaves, backend="triton", tile=16, rank=dist.get_rank())
        loss.backward()
    assert seen.programs["gradient_tiles"]
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def ids_of(rank: int | None) -> Tensor:
    every = torch.arange(sum(SIZES)) // 2
    return every if rank is None else torch.split(every, list(SIZES))[rank]


RING: dict[str, Callable[..., Tensor]] = {
    "clip": lambda q, k, s, rank, **how: ct.clip_loss(q, k, s, ids=ids_of(rank), **how),
    "clip with a margin": lambda q, k, s, rank, **how: ct.clip_loss(q, k, s, ids=ids_of(rank), margin=0.1, **how),
    "nt_xent": lambda q, k, s, rank, **how: ct.nt_xent(q, k, 1 / s, **how),
    "sup_con": lambda q, k, s, rank, **how: ct.sup_con(q, ids_of(rank) % 5, 1 / s, **how) + 0 * k.sum(),
    "siglip": lambda q, k, s, rank, **how: ct.siglip_loss(q, k, s, 0.3 * s - 5, **how),
}


@pytest.mark.parametrize("name", RING)
@pytest.mark.parametrize("kind", ["ieee", "bf16"])
def test_two_ranks(kind: str, name: str) -> None:
    ranks = pool(2).run(on_a_rank, name, kind)
    q, k = (numbers(sum(SIZES), D, seed=seed, kind=kind).double().requires_grad_() for seed in (1, 2))
    scale = torch.tensor(6.0, dtype=torch.float64, requires_grad=True)
    loss = RING[name](q, k, scale, rank=None, backend="dense", group=None)
    loss.backward()
    tolerance = TOLERANCE[kind]
    close(torch.stack([rank[0] for rank in ranks]).mean(), loss.detach(), 4e-6)
    for place, leaf in ((1, q), (2, k)):
        assert leaf.grad is not None
        close(torch.cat([rank[place] for rank in ranks]), 2 * leaf.grad, tolerance)
    assert scale.grad is not None
    close(torch.stack([rank[3] for rank in ranks]).mean(), scale.grad, 1e-4)


def statistics_on_a_rank(sign: int, margin: float | None) -> list[Tensor | None]:
    triton_configs.WORKSPACE_BYTES = 4096
    rank = dist.get_rank()
    q, k = (torch.split(numbers(sum(SIZES), D, seed=seed, kind="ieee"), list(SIZES))[rank] for seed in (1, 2))
    how: dict[str, Any] = {"backend": "triton", "tile": 16, "ids": ids_of(rank), "margin": margin}
    with launches(order=2):
        loss, stats = ct.clip_loss(q, k, 6.0 * sign, return_stats=True, **how)
        views = ct.nt_xent(q, k, 0.2, return_stats=True, backend="triton", tile=16)
    return [loss, *stats, views[0], *views[1]]


@pytest.mark.parametrize(("margin", "sign"), [(None, 1), (None, -1), (0.1, 1)])
def test_statistics_of_two_ranks(margin: float | None, sign: int) -> None:
    """Ranks are counted over the keys of both; ids exclude across ranks."""
    ranks = pool(2).run(statistics_on_a_rank, sign, margin)
    q, k = (numbers(sum(SIZES), D, seed=seed, kind="ieee") for seed in (1, 2))
    options: dict[str, Any] = {"ids": ids_of(None), "margin": margin, "backend": "torch", "group": None}
    loss, stats = ct.clip_loss(q, k, 6.0 * sign, return_stats=True, **options)
    views = ct.nt_xent(q, k, 0.2, return_stats=True, backend="torch", group=None)
    for place, true in enumerate([loss, *stats, views[0], *views[1]]):
        for rank in ranks:
            assert (rank[place] is None) == (true is None)
        if true is not None:
            got = torch.stack([rank[place] for rank in ranks]).mean()
            torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-6, check_dtype=False)

"""Losses summed over truncated features: one product for all dimensions equals a loop over them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import contratile as ct
from contratile import reference
from contratile.engine.backends import registry
from contratile.engine.plan import WORKSPACE_LIMIT, MiB, plan_tiles
from contratile.engine.prefixes import STEP
from contratile.engine.spec import Inputs, Spec
from tests.helpers import assert_error, features, randn, run
from tests.losses.test_family_ring import compare, part
from tests.ranks import pool

N, D, EXTRA, H = 37, 24, 11, 2
DIMS = (8, 24, 3)
CLIP_LOSS: Any = ct.clip_loss  # called with keywords from a dictionary
SIGLIP_LOSS: Any = ct.siglip_loss
WEIGHTS = (1.0, 0.5, 2.0)
IDS = torch.arange(N) // 3
WEIGHT = torch.rand(N, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
MASK = torch.rand(N, H, generator=torch.Generator().manual_seed(8)) < 0.7


def rows(n: int, seed: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of different norms, and so far from normalised."""
    return (randn(n, D, seed=seed).double() * torch.linspace(0.3, 2.0, n).double().unsqueeze(1)).to(dtype)


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


Case = tuple[str, list[Tensor], Callable[..., dict[str, Tensor]], dict[str, Any]]
PAIRS = [rows(N, 1), rows(N, 2)]
MORE = [rows(EXTRA, 3), randn(N, H, D, seed=4, dtype=torch.float64)]
BIASES = [randn(n, seed=n, dtype=torch.float64) for n in (N, EXTRA)]
KEYS_OF_MORE = "extra_keys", "hard_negatives"


def named(*names: str) -> Callable[..., dict[str, Tensor]]:
    return lambda *tensors: dict(zip(names, tensors, strict=True))


CASES: dict[str, Case] = {
    "plain": ("clip_loss", [*PAIRS, number(7.0)], named(), {}),
    "sum": ("clip_loss", [*PAIRS, number(-3.0)], named(), {"ids": IDS, "weights": WEIGHT, "reduction": "sum"}),
    "labels": ("info_nce", [rows(N, 1), rows(20, 2), number(7.0)], named(), {"labels": torch.arange(N) % 20}),
    "keys": (
        "clip_loss",
        [*PAIRS, number(2.0), *MORE, *BIASES],
        named(*KEYS_OF_MORE, "key_bias", "extra_bias"),
        {"ids": (IDS, IDS), "hard_mask": MASK, "reduction": "none"},
    ),
    "elsewhere": (
        "info_nce",
        [*PAIRS, number(2.0), *MORE, BIASES[0]],
        named(*KEYS_OF_MORE, "key_bias"),
        {"in_batch_negatives": False, "hard_mask": MASK},
    ),
    "both ways": (
        "info_nce",
        [*PAIRS, number(2.0), MORE[1]],
        named("hard_negatives"),
        {"directions": ("query_to_doc", "doc_to_query"), "share_hard_negatives": True},
    ),
    "sigmoid": ("siglip_loss", [*PAIRS, number(5.0), number(-2.0)], named(), {}),
    "sigmoid ids": ("siglip_loss", [*PAIRS, number(5.0), number(-2.0)], named(), {"ids": IDS, "same_id": "positive"}),
}


def losses(case: str, how: dict[str, Any], **ours: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """This library's and the reference's, of the same tensors."""
    name, _, names, options = CASES[case]
    first = 4 if name == "siglip_loss" else 3
    mine, oracle = (
        lambda *x, of=function, more=more: of(*x[:first], **names(*x[first:]), **options, **how, **more)
        for function, more in ((getattr(ct, name), ours), (getattr(reference, name), {}))
    )
    return mine, oracle


@pytest.mark.parametrize("backend", ["torch", "dense"])
@pytest.mark.parametrize("case", CASES)
def test_one_product_equals_a_loop_over_dimensions(case: str, backend: str) -> None:
    tolerance = 1e-11 if backend == "torch" else 1e-8  # dense softplus is cut at 20
    for how in (
        {"matryoshka_dims": DIMS, "matryoshka_weights": WEIGHTS},
        {"matryoshka_dims": [17, 4], "matryoshka_normalize": False},  # some features belong to no dimension
        {"matryoshka_dims": (D,)},
    ):
        mine, oracle = losses(case, how, backend=backend, tile=16)
        got, want = (run(function, *CASES[case][1]) for function in (mine, oracle))
        for x, y in zip(got.values + got.grads, want.values + want.grads, strict=True):
            assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-3), (case, how)


@pytest.mark.parametrize("scale", [20.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precise_near_convergence(dtype: torch.dtype, scale: float) -> None:
    """Positives have cosines near 1, and features are views with strides."""
    n, d, dims = 150, 64, (8, 24, 64)
    image = features(n, d, seed=1)
    text = image + 0.02 * randn(n, d, seed=2) / d**0.5
    for noise in (text, features(n, d, seed=3)):
        query, key = (torch.cat([x, x], 1).to(dtype)[:, :d] for x in (3 * image, noise))
        ours = lambda q, k, s: CLIP_LOSS(q, k, s, matryoshka_dims=dims, tile=48)  # noqa: E731
        oracle = lambda q, k, s: reference.clip_loss(q, k, s, matryoshka_dims=dims)  # noqa: E731
        leaves = query, key, torch.tensor(scale)
        got = run(ours, *leaves)
        dense, true = (run(oracle, *leaves, dtype=kind) for kind in (torch.float32, torch.float64))
        noise_of_one = 8 * torch.finfo(torch.float32).eps
        triples = zip(got.values + got.grads, dense.values + dense.grads, true.values + true.grads, strict=True)
        for x, y, z in triples:
            rounding = 0.0 if x.dtype == torch.float32 else torch.finfo(dtype).eps
            assert_error(x, y, z, floor=(noise_of_one + rounding) * float(z.abs().max()))
        assert got.grads[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_hard_negatives_are_rounded_once(dtype: torch.dtype) -> None:
    """Those of their products and of their norms almost cancel, and are large where a truncated row is short."""
    image = F.normalize(features(N, D, seed=1) * torch.where(torch.arange(D) < 3, 0.05, 1.0))
    hard = image.unsqueeze(1) * (1 + 0.02 * randn(N, H, D, seed=2))
    leaves = [x.to(dtype) for x in (image, features(N, D, seed=3), hard)]
    for mask in (None, MASK):
        got, naive, true = (
            run(
                lambda q, k, h, of=of, mask=mask: of(
                    q, k, 20.0, hard_negatives=h, hard_mask=mask, matryoshka_dims=DIMS
                ),
                *leaves,
                dtype=kind,
            ).grads[2]
            for of, kind in (
                (CLIP_LOSS, None),
                (reference.clip_loss, torch.float32),
                (reference.clip_loss, torch.float64),
            )
        )
        assert (got.double() - true).abs().max() <= 1.5 * (naive.to(dtype).double() - true).abs().max()


def test_scores_out_of_range_of_a_shared_exponential() -> None:
    """Plain products of very different size, for which a tile needs an exponential per direction."""
    query, key = randn(40, D, seed=1) * torch.logspace(-2, 1, 40).unsqueeze(1), randn(40, D, seed=2) * 5
    how = {"matryoshka_dims": DIMS, "matryoshka_normalize": False}
    got = run(lambda q, k: CLIP_LOSS(q, k, 3.0, tile=16, **how), query, key)
    true = run(lambda q, k: reference.clip_loss(q, k, 3.0, **how), query.double(), key.double())
    for x, y in zip(got.values + got.grads, true.values + true.grads, strict=True):
        assert x.isfinite().all() and (x - y).abs().max() < 1e-5 * y.abs().max()


def assert_like_the_reference(query: Tensor, key: Tensor, atol: float = 1e-8) -> None:
    got, want = (
        run(lambda q, k, of=of: of(q, k, 2.0, matryoshka_dims=DIMS), query, key)
        for of in (CLIP_LOSS, reference.clip_loss)
    )
    for x, y in zip(got.values + got.grads, want.values + want.grads, strict=True):
        assert torch.allclose(x, y, rtol=1e-9, atol=atol)


def test_rows_of_zeros() -> None:
    """Such rows, and rows whose first features are 0, are divided by a tiny number, as in F.normalize."""
    query, key = rows(6, 1), rows(6, 2)
    query[1], query[2, :8] = 0, 0
    assert_like_the_reference(query, key)


def test_rows_shorter_than_the_smallest_norm() -> None:
    """They are divided by a constant, which has no gradient."""
    query, key = rows(6, 1), rows(6, 2)
    query[1] *= 3e-13 / query[1].norm()
    assert_like_the_reference(query, key)


def test_more_rows_than_a_chunk() -> None:
    assert_like_the_reference(rows(STEP + 5, 1), rows(STEP + 5, 2), atol=1e-12)


def test_padding_of_hard_negatives_may_hold_anything() -> None:
    hard = MORE[1].clone()
    hard[~MASK] = torch.nan
    hard.requires_grad_()
    loss = CLIP_LOSS(*PAIRS, 3.0, hard_negatives=hard, hard_mask=MASK, matryoshka_dims=DIMS)
    loss.backward()
    assert loss.isfinite() and hard.grad is not None and not hard.grad[~MASK].any() and hard.grad.isfinite().all()


def test_only_the_scale_needs_a_gradient() -> None:
    want = run(lambda s: reference.clip_loss(*PAIRS, s, matryoshka_dims=DIMS), number(5.0))
    got = run(lambda s: CLIP_LOSS(*PAIRS, s, matryoshka_dims=DIMS, tile=16), number(5.0))
    assert torch.allclose(got.grads[0], want.grads[0], rtol=1e-12)


# --- over ranks, compiled, with a cache -----------------------------------------------------------------------------


def errors_over_ranks(case: str, normalize: bool, sizes: tuple[int, ...]) -> list[float]:
    name, tensors, *_ = CASES[case]
    n, extras = sum(sizes), tuple(range(1, len(sizes) + 1))
    how = {"matryoshka_dims": DIMS, "matryoshka_weights": WEIGHTS, "matryoshka_normalize": normalize}
    numbers = [x for x in tensors if x.dim() == 0]
    split = [(rows(n, 1), sizes), (rows(n, 2), sizes)]
    if name == "siglip_loss":
        ours = lambda q, k, *x: SIGLIP_LOSS(q, k, *x, ids=part(IDS[:n], sizes), tile=4, **how)  # noqa: E731
        oracle = lambda q, k, *x: reference.siglip_loss(q, k, *x, ids=IDS[:n], **how)  # noqa: E731
        return compare(ours, oracle, numbers, split)
    split += [(rows(sum(extras), 3), extras), (MORE[1][:n], sizes)]
    weigh = {"ids": IDS[:n], "weights": WEIGHT[:n], "hard_mask": MASK[:n]}
    ours, oracle = (
        lambda q, k, e, h, s, of=of, deal=deal, more=more: of(
            q, k, s, extra_keys=e, hard_negatives=h, **{key: deal(x) for key, x in weigh.items()}, **how, **more
        )
        for of, deal, more in (
            (getattr(ct, name), lambda x: part(x, sizes), {"tile": 4}),
            (getattr(reference, name), lambda x: x, {}),
        )
    )
    return compare(ours, oracle, numbers, split)


@pytest.mark.parametrize("sizes", [(9,), (8, 9), (5, 0, 17)], ids=str)
def test_over_ranks(sizes: tuple[int, ...]) -> None:
    for case in ("keys", "labels", "sigmoid"):
        for normalize in (True, False):
            for errors in pool(len(sizes)).run(errors_over_ranks, case, normalize, sizes):
                assert max(errors) < 1e-11, (case, errors)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["keys", "sigmoid"])
def test_compiled(case: str) -> None:
    mine, oracle = losses(case, {"matryoshka_dims": DIMS}, tile=16)
    torch._dynamo.reset()
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    got, want = (run(function, *CASES[case][1]) for function in (compiled, oracle))
    for x, y in zip(got.values + got.grads, want.values + want.grads, strict=True):
        assert torch.allclose(x, y, rtol=1e-9, atol=1e-12)


def test_modules_and_gradient_cache() -> None:
    torch.manual_seed(0)
    encoder = nn.Linear(5, D)
    left, right = randn(12, 5, seed=1), randn(12, 5, seed=2)
    for module in (ct.ClipLoss(matryoshka_dims=DIMS), ct.InfoNCE(matryoshka_dims=DIMS, matryoshka_normalize=False)):
        want = module(encoder(left), encoder(right), 3.0)
        wanted = torch.autograd.grad(want, list(encoder.parameters()))
        cache = ct.GradCache(encoder, lambda q, k, of=module: of(q, k, 3.0), chunk_size=5)
        encoder.zero_grad()
        assert torch.allclose(cache.step(left, right), want)
        for x, y in zip(encoder.parameters(), wanted, strict=True):
            assert x.grad is not None and torch.allclose(x.grad, y, rtol=1e-4, atol=1e-6)


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [256, 768])
def test_workspace_holds_the_tiles_of_all_dimensions(d: int) -> None:
    plan = plan_tiles(32768, 32768, d, prefixes=5)
    assert plan.workspace_bytes <= WORKSPACE_LIMIT and plan.rows * plan.cols * 8 * 4 < 32 * MiB
    assert plan.workspace_bytes > plan_tiles(32768, 32768, d, tile=plan.cols).workspace_bytes


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"matryoshka_dims": ()}, ValueError, "distinct numbers from 1 to the 24 features"),
        ({"matryoshka_dims": (8, 8)}, ValueError, "distinct"),
        ({"matryoshka_dims": (8, 25)}, ValueError, "from 1 to the 24 features"),
        ({"matryoshka_dims": (8, 0)}, ValueError, "from 1"),
        ({"matryoshka_dims": 8}, TypeError, "tuple of integers"),
        ({"matryoshka_dims": (8.0,)}, TypeError, "tuple of integers"),
        ({"matryoshka_dims": DIMS, "matryoshka_weights": (1.0,)}, ValueError, "expected 3 numbers, got 1"),
        ({"matryoshka_dims": (8,), "matryoshka_weights": (-1.0,)}, ValueError, "from 0 up"),
        ({"matryoshka_dims": (8,), "matryoshka_weights": ("1",)}, TypeError, "tuple of numbers"),
        ({"matryoshka_weights": (1.0,)}, ValueError, "expected matryoshka_dims= with it"),
        ({"matryoshka_normalize": False}, ValueError, "expected matryoshka_dims= with it"),
        ({"matryoshka_dims": (8,), "matryoshka_normalize": 1}, TypeError, "True or False"),
        ({"matryoshka_dims": (8,), "return_stats": True}, ValueError, "Drop return_stats="),
        ({"matryoshka_dims": (8,), "margin": 0.0}, ValueError, "Drop margin="),
        ({"matryoshka_dims": (8,), "label_smoothing": 0.1}, ValueError, "Drop label_smoothing="),
        ({"matryoshka_dims": (8,), "cache_bytes": 1}, ValueError, "Drop cache_bytes="),
        ({"matryoshka_dims": (8,), "ids": IDS, "same_id": "positive"}, ValueError, "Drop same_id="),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CLIP_LOSS(*PAIRS, 1.0, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"directions": ("query_to_doc", "query_to_query")},
        {"directions": ("query_to_doc", "doc_to_doc")},
        {"hardness_mode": "all_negatives", "hardness_strength": 1.0},
    ],
)
def test_directions_and_hardness_are_refused(options: dict[str, Any]) -> None:
    info_nce: Any = ct.info_nce
    with pytest.raises(ValueError, match="matryoshka_dims and"):
        info_nce(*PAIRS, 1.0, matryoshka_dims=DIMS, **options)


def test_kernels_do_not_cover_it() -> None:
    x = Inputs(randn(4, 8, seed=1), randn(4, 8, seed=2), torch.tensor(1.0))
    with pytest.raises(ValueError, match="got matryoshka_dims"):
        registry.choose(x, Spec(backend="triton", dims=(4, 8)))


def test_raw_features_do_not_warn_and_equal_normalised_ones() -> None:
    raw = [rows(N, seed, dtype=torch.float32) for seed in (1, 2)]
    unit = [F.normalize(x) for x in raw]
    for dims in ((D,), (4, D)):
        a, b = (CLIP_LOSS(*pair, 20.0, matryoshka_dims=dims) for pair in (raw, unit))
        assert torch.allclose(a, b)
    assert torch.allclose(CLIP_LOSS(*raw, 20.0, matryoshka_dims=(D,)), CLIP_LOSS(*unit, 20.0))

"""Losses against the dense fp64 oracle: values and every gradient, over dtypes, ragged shapes, tiles and layouts."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

from collections.abc import Callable
from math import inf, log, nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import contratile as ct
from contratile import reference
from contratile.reference import Reduction
from tests.helpers import (
    DTYPES,
    Function,
    assert_precise,
    assert_same,
    features,
    labels_of,
    levers,
    randn,
    reach,
    run,
)

SHAPES = [(1, 1), (2, 1), (3, 5), (17, 7), (31, 64), (37, 300)]  # (N, D)
TILES = [1, 2, 7, 16, 1000, None]
SCALE = torch.tensor(14.3)


def clip(**keywords: Any) -> Function:
    return lambda q, k, s: ct.clip_loss(q, k, s, **keywords)


def clip_dense(reduction: Reduction = "mean") -> Function:
    return lambda q, k, s: reference.clip_loss(q, k, s, reduction=reduction)


def nce(labels: Tensor | None = None, **keywords: Any) -> Function:
    return lambda q, k, s: ct.info_nce(q, k, s, labels=labels, **keywords)


def nce_dense(labels: Tensor | None = None, reduction: Reduction = "mean") -> Function:
    return lambda q, k, s: reference.info_nce(q, k, s, labels=labels, reduction=reduction)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_loss(dtype: torch.dtype, n: int, d: int, tile: int | None) -> None:
    image, text = features(n, d, seed=1, dtype=dtype), features(n, d, seed=2, dtype=dtype)
    assert_precise(clip(tile=tile), clip_dense(), image, text, SCALE, share=1 / n)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 1), (1, 9, 3), (13, 40, 5), (40, 13, 5), (29, 53, 33)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_info_nce_with_labels(dtype: torch.dtype, n: int, m: int, d: int, tile: int | None) -> None:
    query, key = features(n, d, seed=1, dtype=dtype), features(m, d, seed=2, dtype=dtype)
    labels = labels_of(n, m, seed=3)
    assert_precise(nce(labels, tile=tile), nce_dense(labels), query, key, SCALE, share=1 / n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_info_nce_without_labels_pairs_row_by_row(dtype: torch.dtype) -> None:
    query, key = features(19, 6, seed=1, dtype=dtype), features(31, 6, seed=2, dtype=dtype)
    assert_precise(nce(tile=8), nce_dense(torch.arange(19)), query, key, SCALE, share=1 / 19)


@pytest.mark.parametrize("labels_dtype", [torch.int32, torch.int16, torch.uint8])
def test_labels_may_be_any_integers(labels_dtype: torch.dtype) -> None:
    query, key, labels = features(9, 4, seed=1), features(12, 4, seed=2), labels_of(9, 12, seed=3)
    assert_same(run(nce(labels.to(labels_dtype)), query, key, SCALE), run(nce(labels), query, key, SCALE))


@pytest.mark.parametrize(("rows", "cols"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("tile", [1, 7, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pair_lse(dtype: torch.dtype, tile: int | None, rows: bool, cols: bool) -> None:
    query, key = features(23, 9, seed=1, dtype=dtype), features(38, 9, seed=2, dtype=dtype)

    def ours(q: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return ct.pair_lse(q, k, s, rows=rows, cols=cols, tile=tile)

    def oracle(q: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return reference.pair_lse(q, k, s, rows=rows, cols=cols)

    assert_precise(ours, oracle, query, key, SCALE, share=4.0)
    row_lse, col_lse = ct.pair_lse(query, key, SCALE, rows=rows, cols=cols, tile=tile)
    assert row_lse.shape == (23 if rows else 0,) and col_lse.shape == (38 if cols else 0,)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "d"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_pair_lse_of_queries_with_themselves(dtype: torch.dtype, n: int, d: int, tile: int | None) -> None:
    query = features(n, d, seed=1, dtype=dtype)
    assert_precise(
        lambda q, unused, s: ct.pair_lse(q, None, s + 0 * unused.sum(), tile=tile),
        lambda q, unused, s: reference.pair_lse(q, None, s + 0 * unused.sum()),
        query,
        query.clone(),
        SCALE,
        share=8.0,
    )


@pytest.mark.parametrize(("rows", "cols"), [(True, False), (False, True)])
def test_queries_with_themselves_give_only_the_side_asked_for(rows: bool, cols: bool) -> None:
    row_lse, col_lse = ct.pair_lse(features(11, 4, seed=1), None, 3.0, rows=rows, cols=cols, tile=4)
    assert row_lse.shape == (11 if rows else 0,) and col_lse.shape == (11 if cols else 0,)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(dtype: torch.dtype, reduction: Reduction) -> None:
    n = 29
    image, text, labels = (
        features(n, 8, seed=1, dtype=dtype),
        features(n, 8, seed=2, dtype=dtype),
        labels_of(n, n, seed=3),
    )
    share = 1 / n if reduction == "mean" else 4.0
    got = assert_precise(clip(reduction=reduction, tile=8), clip_dense(reduction), image, text, SCALE, share=share)
    assert got.values[0].shape == ((n,) if reduction == "none" else ())
    ours, oracle = nce(labels, reduction=reduction, tile=8), nce_dense(labels, reduction)
    assert_precise(ours, oracle, image, text, SCALE, share=share)


# --- the cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [5, 16, None])
def test_cache_changes_no_bit(dtype: torch.dtype, tile: int | None) -> None:
    image, text = features(43, 12, seed=1, dtype=dtype), features(43, 12, seed=2, dtype=dtype)
    labels = labels_of(43, 43, seed=3)
    for build in (clip, lambda **keywords: nce(labels, **keywords), _lse_of_itself):
        without = run(build(tile=tile), image, text, SCALE)
        for cache_bytes in (1, 3000, 7000, 1 << 20):
            assert_same(run(build(tile=tile, cache_bytes=cache_bytes), image, text, SCALE), without)


def _lse_of_itself(**keywords: Any) -> Function:
    return lambda q, k, s: ct.pair_lse(q, None, s + 0 * k.sum(), **keywords)


# --- layouts ------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "sliced columns": lambda x: torch.cat([x + 1, x, x - 1], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "strided columns": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "strided rows": lambda x: x.repeat_interleave(3, 0)[::3],
    "expanded rows": lambda x: x[:1].expand_as(x),
    "expanded columns": lambda x: x[:, :1].expand_as(x),
    "offset": lambda x: torch.cat([x[:1], x])[1:],
}


@pytest.mark.parametrize("tile", [7, None])
@pytest.mark.parametrize("side", ["image", "text", "both"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_do_not_matter(dtype: torch.dtype, layout: str, side: str, tile: int | None) -> None:
    image, text = features(21, 10, seed=1, dtype=dtype), features(21, 10, seed=2, dtype=dtype)
    image = LAYOUTS[layout](image) if side != "text" else image
    text = LAYOUTS[layout](text) if side != "image" else text
    plain = run(clip(tile=tile), image.contiguous(), text.contiguous(), SCALE)
    for got, expected in zip(
        [*(odd := run(clip(tile=tile), image, text, SCALE)).values, *odd.grads], plain.values + plain.grads, strict=True
    ):
        assert torch.allclose(got, expected, rtol=4 * torch.finfo(got.dtype).eps, atol=1e-6)
    assert_precise(clip(tile=tile), clip_dense(), image, text, SCALE, share=1 / 21)


# --- the scale ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-3.5, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scale_tensor(dtype: torch.dtype, shape: tuple[int, ...], value: float) -> None:
    image, text = features(15, 6, seed=1, dtype=dtype), features(15, 6, seed=2, dtype=dtype)
    scale = torch.full(shape, value)
    for tile in (4, None):
        assert_precise(clip(tile=tile), clip_dense(), image, text, scale, share=1 / 15)
        assert_precise(nce(tile=tile), nce_dense(), image, text, scale, share=1 / 15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scale_may_have_its_own_dtype(dtype: torch.dtype) -> None:
    image, text = features(15, 6, seed=1), features(15, 6, seed=2)
    assert_precise(clip(), clip_dense(), image, text, torch.tensor(14.25, dtype=dtype), share=1 / 15)


@pytest.mark.parametrize("norm", [1e-4, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("tile", [4, None])
def test_scale_zero(tile: int | None, norm: float) -> None:
    """All scores are 0: the loss is log N, features have no gradient, and the scale has the one of the formula."""
    image, text = features(15, 6, seed=1, norm=norm), features(15, 6, seed=2, norm=norm)
    for ours, oracle in ((clip(tile=tile), clip_dense()), (nce(tile=tile), nce_dense())):
        got = run(ours, image, text, torch.tensor(0.0))
        exact = run(oracle, image, text, torch.tensor(0.0), dtype=torch.float64)
        assert got.values[0].item() == pytest.approx(log(15), abs=1e-6)
        assert got.grads[2].item() == pytest.approx(exact.grads[2].item(), rel=1e-5)
        assert max(grad.abs().max() for grad in got.grads[:2]) <= 1e-12 * norm


def test_scale_number() -> None:
    image, text = features(15, 6, seed=1), features(15, 6, seed=2)
    for number in (2, 2.0, -1, 0, 0.0):
        with_number, with_tensor = (
            ct.clip_loss(image, text, number),
            ct.clip_loss(image, text, torch.tensor(float(number))),
        )
        assert torch.equal(with_number, with_tensor)
    assert torch.equal(ct.clip_loss(image, text), ct.clip_loss(image, text, 1.0))
    assert torch.equal(ct.info_nce(image, text), ct.info_nce(image, text, 1.0))


def test_learned_scale_takes_its_gradient_through_exp() -> None:
    image, text = features(15, 6, seed=1, dtype=torch.float64), features(15, 6, seed=2, dtype=torch.float64)
    grads = []
    for loss in (ct.clip_loss, reference.clip_loss):
        logit_scale = torch.nn.Parameter(torch.tensor(2.6593, dtype=torch.float64))
        loss(image, text, logit_scale.exp()).backward()
        assert logit_scale.grad is not None and logit_scale.grad.shape == ()
        grads.append(logit_scale.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-13, atol=0.0)


# --- extremes -----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 24),
    extra=st.integers(0, 12),
    d=st.integers(1, 40),
    tile=st.sampled_from([3, 7, 16, None]),
    log_scale=st.floats(-3, 2),
    log_norms=st.lists(st.floats(-4, 4), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    stride=st.integers(1, 3),
    alike=st.booleans(),
    seed=st.integers(0, 1 << 20),
)
def test_finite_and_accurate_wherever_dense_fp64_is(
    n: int,
    extra: int,
    d: int,
    tile: int | None,
    log_scale: float,
    log_norms: list[float],
    dtype: torch.dtype,
    stride: int,
    alike: bool,
    seed: int,
) -> None:
    def rows_of(count: int, low: float, high: float, seed: int) -> Tensor:
        norms = torch.logspace(low, high, count, dtype=torch.float64).unsqueeze(1)
        unit = features(count, d, seed=seed, dtype=torch.float64)
        wide = (unit * norms).to(dtype).repeat_interleave(stride, 1)
        return wide[:, ::stride]

    query = rows_of(n, log_norms[0], log_norms[1], seed)
    key = rows_of(n + extra, log_norms[2], log_norms[3], seed if alike else seed + 1)
    scale, labels = torch.tensor(10.0**log_scale), labels_of(n, n + extra, seed=seed)

    losses = [(nce(labels, tile=tile, reduction="sum"), nce_dense(labels, "sum"))]
    if not extra:
        losses.append((clip(tile=tile, reduction="sum"), clip_dense("sum")))
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    noise = 16 * eps * (1 + reach(query, key, scale) * d**0.5)  # relative to the logits' magnitude
    for ours, oracle in losses:
        got, exact = run(ours, query, key, scale), run(oracle, query, key, scale, dtype=torch.float64)
        assert torch.isfinite(exact.values[0]) and torch.isfinite(got.values[0])
        assert abs(float(got.values[0]) - float(exact.values[0])) <= n * noise
        weights = [2.0, 2.0 * n, 2.0 * n]
        for grad, true, lever, weight in zip(got.grads, exact.grads, levers(query, key, scale), weights, strict=True):
            assert torch.isfinite(grad).all()
            error = float((grad.double() - true).abs().max())
            rounding = torch.finfo(grad.dtype).eps * float(true.abs().max())
            # A softmax is off by at most 1 however large the logits' rounding error.
            assert error <= min(noise, 2.0) * lever * weight + rounding


@pytest.mark.parametrize("tile", [1, 4, 16, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_and_tiny_rows_share_a_tile(dtype: torch.dtype, tile: int | None) -> None:
    norms = torch.ones(16, 1, dtype=torch.float64)
    norms[3], norms[4] = 1e4, 1e-4
    for side in ("query", "key", "both"):
        query = features(16, 8, seed=1, dtype=torch.float64) * (norms if side != "key" else 1)
        key = features(16, 8, seed=2, dtype=torch.float64) * (norms if side != "query" else 1)
        # A gradient of 16-bit floats must itself be in range: at scale 1 it is.
        scale = torch.tensor(1.0 if dtype == torch.float16 else 100.0)
        for ours, oracle in [
            (clip(tile=tile, reduction="none"), clip_dense("none")),
            (nce(tile=tile, reduction="none"), nce_dense(reduction="none")),
        ]:
            got = assert_precise(ours, oracle, query.to(dtype), key.to(dtype), scale, share=4.0)
            assert all(torch.isfinite(x).all() for x in got.values + got.grads)


@pytest.mark.parametrize("level", [-200.0, -82.0, 0.0, 41.0, 76.0, 82.0, 83.0, 88.0, 200.0, 1e4])
@pytest.mark.parametrize(("m", "tile"), [(700, 2), (1000, 3), (150, 64), (150, None)])
def test_equal_features_lose_log_n(m: int, tile: int | None, level: float) -> None:
    """All scores are `level`: whatever it is, the loss among M indistinguishable keys is log M."""
    query, key = torch.full((2, 1), level).requires_grad_(), torch.ones(m, 1, requires_grad=True)
    tolerance = 4e-7 * (abs(level) + 10)
    loss = ct.info_nce(query, key, tile=tile)
    assert loss.item() == pytest.approx(log(m), abs=tolerance)
    query_grad, key_grad = torch.autograd.grad(loss, (query, key))
    assert query_grad.abs().max() <= tolerance
    expected = torch.full((m, 1), level / m)
    expected[:2] -= level / 2
    assert torch.allclose(key_grad, expected, rtol=0, atol=tolerance * max(1.0, abs(level)))
    row_lse, col_lse = ct.pair_lse(key.detach(), query.detach(), tile=tile)
    assert torch.allclose(row_lse, torch.tensor(level + log(2)), rtol=1e-6, atol=1e-6)
    assert torch.allclose(col_lse, torch.tensor(level + log(m)), rtol=1e-6, atol=1e-6)


def test_many_tiles_of_large_scores_do_not_overflow() -> None:
    """Each tile's sum may be in range where the sum over all tiles is not."""
    m = 400_000
    key = torch.ones(m, 1)
    for level in range(60, 92):
        loss = ct.info_nce(torch.full((2, 1), float(level)), key)
        assert loss.item() == pytest.approx(log(m), abs=1e-4), level


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_features_lose_log_n_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(45, 16, dtype=dtype)
    for tile in TILES:
        for scale in (1.0, 100.0, -7.0):
            tolerance = 4 * torch.finfo(torch.float32).eps * 16 * abs(scale)
            assert ct.clip_loss(x, x.clone(), scale, tile=tile).item() == pytest.approx(log(45), abs=tolerance)


@pytest.mark.parametrize(("norm", "scale"), [(1.0, 14.3), (1.0, 100.0), (30.0, 1.0), (1000.0, 100.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_is_never_negative(dtype: torch.dtype, norm: float, scale: float) -> None:
    for seed in range(4):
        image = features(60, 16, seed=seed, norm=norm, dtype=dtype)
        text = (image.double() * (1 + 0.01 * randn(60, 1, seed=seed + 50).double())).to(dtype)
        for tile in (7, 16, None):
            for loss in (
                ct.clip_loss(image, text, scale, tile=tile, reduction="none"),
                ct.info_nce(image, text, scale, tile=tile, reduction="none"),
                ct.info_nce(image, text, scale, labels=labels_of(60, 60, seed=seed), tile=tile, reduction="none"),
            ):
                assert loss.min() >= 0 and torch.isfinite(loss).all()


@pytest.mark.parametrize("scale", [100.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_separable_pairs_lose_nothing(dtype: torch.dtype, scale: float) -> None:
    x = torch.eye(33, dtype=dtype)
    for tile in TILES:
        loss = ct.clip_loss(x, x.clone(), scale, tile=tile, reduction="none")
        assert loss.min() >= 0 and loss.max() <= 4e-7 * scale


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("tile", [1, 4, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_features_are_not_hidden(dtype: torch.dtype, tile: int | None, bad: float) -> None:
    for side in (0, 1):
        pair = [randn(9, 5, seed=1, dtype=dtype).abs() + 0.5, randn(9, 5, seed=2, dtype=dtype).abs() + 0.5]
        pair[side][6, 2] = bad
        assert ct.clip_loss(pair[0], pair[1], tile=tile).isnan()
        assert reference.clip_loss(pair[0].double(), pair[1].double()).isnan()
        got = run(clip(tile=tile), pair[0], pair[1], torch.tensor(1.0))
        assert any(grad.isnan().any() for grad in got.grads)


def test_nan_stays_in_its_own_row() -> None:
    query, key = features(9, 5, seed=1), features(9, 5, seed=2)
    query[6, 2] = nan
    loss = ct.info_nce(query, key, tile=4, reduction="none")
    assert loss.isnan().tolist() == [row == 6 for row in range(9)]


# --- side effects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_agree_bitwise(dtype: torch.dtype) -> None:
    image, text = features(130, 24, seed=1, dtype=dtype), features(130, 24, seed=2, dtype=dtype)
    for tile in (16, None):
        assert_same(run(clip(tile=tile), image, text, SCALE), run(clip(tile=tile), image, text, SCALE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_left_alone(dtype: torch.dtype) -> None:
    labels = labels_of(20, 20, seed=3)
    inputs = [features(20, 6, seed=1, dtype=dtype), features(20, 6, seed=2, dtype=dtype), SCALE.clone(), labels]
    for x in inputs[:3]:
        x.requires_grad_()
    image, text, scale, _ = inputs
    before = [(x.detach().clone(), x._version) for x in inputs]
    (ct.clip_loss(image, text, scale, tile=6) + ct.info_nce(image, text, scale, labels=labels, tile=6)).backward()
    for x, (value, version) in zip(inputs, before, strict=True):
        assert torch.equal(x, value) and x._version == version


@pytest.mark.parametrize("backend", ["auto", "torch", "dense"])
def test_every_backend_computes_the_same_loss(backend: Any) -> None:
    image, text = features(20, 6, seed=1), features(20, 6, seed=2)
    labels = labels_of(20, 20, seed=3)
    assert_precise(clip(backend=backend), clip_dense(), image, text, SCALE, share=1 / 20)
    assert_precise(nce(labels, backend=backend), nce_dense(labels), image, text, SCALE, share=1 / 20)

"""The loss family against its dense definitions: every loss, every option, their combinations, and what they refuse."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import inspect
import math
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import contratile as ct
from contratile import reference
from contratile.engine.autograd import pair_stats
from contratile.engine.spec import Inputs, Spec
from contratile.losses.batch_stats import BatchStats
from contratile.losses.hard_negatives import CHUNK, own_products
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE
from tests.helpers import DTYPES, assert_precise, assert_same, features, randn, run

N, D, E, H = 37, 7, 11, 3
Loss = Callable[..., Tensor]


def ids_of(n: int, kinds: int, seed: int) -> Tensor:
    return torch.randint(kinds, (n,), generator=torch.Generator().manual_seed(seed))


# --- losses of their own ------------------------------------------------------------------------------------------

LABELS = {
    "some": ids_of(N, 9, 1),
    "pairs": torch.arange(N) // 2,
    "all equal": torch.full((N,), -5),
    "all different": torch.arange(N) * 1000003,
    "one pair": torch.arange(N).clamp(max=N - 2),
}


@pytest.mark.parametrize("tile", [1, 8, 13, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nt_xent(dtype: torch.dtype, tile: int) -> None:
    z1, z2 = features(N, D, seed=1, dtype=dtype), features(N, D, seed=2, dtype=dtype)
    scale = torch.tensor(5.0, dtype=torch.promote_types(dtype, torch.float32))
    # In terms of 1 / temperature, as the rule's noise is that of scores.
    assert_precise(
        lambda a, b, s: ct.nt_xent(a, b, 1 / s, tile=tile),
        lambda a, b, s: reference.nt_xent(a, b, 1 / s),
        *(z1, z2, scale),
        share=1 / N,
        roundings=2,
    )


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.parametrize("tile", [1, 8, 64])
def test_sup_con(name: str, tile: int) -> None:
    labels = LABELS[name]
    z, t = randn(N, D, seed=3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    ours = run(lambda z, t: ct.sup_con(z, labels, t, tile=tile), z, t)
    assert_close(ours, run(lambda z, t: reference.sup_con(z, labels, t), z, t))
    if name == "all different":
        assert ours.values[0] == 0 and not ours.grads[0].any()
    for reduction in ("sum", "none"):
        rows = ct.sup_con(z, labels, t, tile=tile, reduction=reduction)
        torch.testing.assert_close(rows, reference.sup_con(z, labels, t, reduction=reduction))


def sup_contrast(features: Tensor, labels: Tensor, temperature: float, base: float, *, one: bool) -> Tensor:
    """SupContrast's loss of views [B, V, D] as its paper and code define it."""
    views = torch.cat(features.unbind(1))
    anchors = features[:, 0] if one else views
    scores = anchors @ views.T / temperature
    others = ~torch.eye(len(anchors), len(views), dtype=torch.bool)
    positive = (labels.repeat(len(anchors) // len(labels))[:, None] == labels.repeat(features.shape[1])) & others
    log_prob = scores - scores.masked_fill(~others, -math.inf).logsumexp(1, keepdim=True)
    mean = (log_prob * positive).sum(1) / positive.sum(1).clamp(min=1)
    return -(temperature / base * mean).mean()


@pytest.mark.parametrize("views", [1, 2, 3])
def test_sup_con_and_sup_contrast(views: int) -> None:
    """The relations that the documentation tells."""
    x, labels = features(12 * views, D, seed=4, dtype=torch.float64).view(12, views, D), ids_of(12, 9, 5)
    temperature, base = 0.1, 0.07
    z, factor = torch.cat(x.unbind(1)), temperature / base
    rows = ct.sup_con(z, labels.repeat(views), temperature, reduction="none")
    total = ct.sup_con(z, labels.repeat(views), temperature, reduction="sum")
    torch.testing.assert_close(factor * total / len(z), sup_contrast(x, labels, temperature, base, one=False))
    torch.testing.assert_close(factor * rows[:12].mean(), sup_contrast(x, labels, temperature, base, one=True))
    mean = factor * ct.sup_con(z, labels.repeat(views), temperature)
    same = torch.isclose(mean, sup_contrast(x, labels, temperature, base, one=False))
    assert same == (views > 1)  # some label is alone: without a second view its anchor has no positive


@pytest.mark.parametrize("dtype", DTYPES)
def test_sup_con_precision(dtype: torch.dtype) -> None:
    labels = LABELS["some"]
    z = features(N, D, seed=1, dtype=dtype)
    scale = torch.tensor(10.0, dtype=torch.promote_types(dtype, torch.float32))
    assert_precise(
        lambda a, b, s: ct.sup_con(a, labels, 1 / s, tile=8) + 0 * b.float().sum(),
        lambda a, b, s: reference.sup_con(a, labels, 1 / s) + 0 * b.sum(),
        *(z, features(N, D, seed=2, dtype=dtype), scale),
        share=1 / N,
        roundings=2,
    )


@pytest.mark.parametrize("tile", [1, 8, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_siglip(dtype: torch.dtype, tile: int) -> None:
    image, text = features(N, D, seed=1, dtype=dtype), features(N, D, seed=2, dtype=dtype)
    scale = torch.tensor(10.0, dtype=torch.promote_types(dtype, torch.float32))
    assert_precise(
        lambda a, b, s: ct.siglip_loss(a, b, s, -10.0, tile=tile),
        lambda a, b, s: reference.siglip_loss(a, b, s, -10.0),
        *(image, text, scale),
        share=1.0,
    )


@pytest.mark.parametrize("bias", [-60.0, -10.0, 0.0, 40.0])
def test_siglip_far_from_zero(bias: float) -> None:
    """Where softplus is linear or vanishes; positives are not lost in a difference."""
    image, text = features(N, D, seed=1, norm=4.0), features(N, D, seed=1, norm=4.0)
    inputs = image.double(), text.double(), torch.tensor(5.0).double(), torch.tensor(bias).double()
    exact = run(reference.siglip_loss, *inputs)
    ours = run(lambda *x: ct.siglip_loss(*x, tile=8), *(x.float() for x in inputs))
    for got, want in zip(ours.values + ours.grads, exact.values + exact.grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6 * float(want.abs().max()))
    precise = run(lambda *x: ct.siglip_loss(*x, tile=8), *inputs)
    assert_close(precise, exact)


@pytest.mark.parametrize("tile", [8, 64])
def test_sums_of_softplus_on_both_sides(tile: int) -> None:
    """The primitive has gradients of the columns' sums too."""
    leaves = [randn(n, D, seed=n, dtype=torch.float64) for n in (N, N + 5)]
    labels, numbers = ids_of(N, N + 5, 7), [torch.tensor(x, dtype=torch.float64) for x in (2.0, -1.0)]
    ring, spec = Ring.flat(ALONE, (N + 5,), total=N), Spec(reduce="softplus", tile=tile)

    def ours(q: Tensor, k: Tensor, s: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        stats = pair_stats(ring, Inputs(q, k, s, b, labels=labels), spec)
        assert stats.row.total is not None and stats.col.total is not None
        return stats.row.total, stats.col.total

    def dense(q: Tensor, k: Tensor, s: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        results = reference.pair_stats(q, k, s, b, labels, reduce="softplus")
        return results["row"], results["col"]

    assert_close(run(ours, *leaves, *numbers), run(dense, *leaves, *numbers))


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.01, 3.0])
def test_siglip_scale_of_frozen_features(scale: float, cache_bytes: int) -> None:
    """Without a gradient of the features the scale's is made from scores, in which a bias must not drown them."""
    image, text = features(N, D, seed=1), features(N, D, seed=2)

    def grad(x: Tensor, y: Tensor, s: Tensor, loss: Loss, **how: Any) -> Tensor:
        s.requires_grad_()
        return torch.autograd.grad(loss(x, y, s, -10.0, **how), s)[0]

    got = grad(image, text, torch.tensor(scale), ct.siglip_loss, tile=8, cache_bytes=cache_bytes)
    want = grad(image.double(), text.double(), torch.tensor(scale).double(), reference.siglip_loss)
    # A sum over all pairs, of both signs. Drowned in the bias, a score of 1e-4 would keep two digits.
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-7)


# --- options ------------------------------------------------------------------------------------------------------

IDS, KEY_IDS = ids_of(N, 9, 1), ids_of(N, 9, 2)
EXTRA_IDS = ids_of(E, 9, 3)
MASK = torch.rand(N, H, generator=torch.Generator().manual_seed(4)) > 0.4
WEIGHTS = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
LABELS_OF_QUERIES = ids_of(N, N, 6)
HARD_BIAS = randn(N, H, seed=8, dtype=torch.float64)


def assert_close(ours: Any, oracle: Any, rtol: float = 1e-11) -> None:
    for got, want in zip(ours.values + ours.grads, oracle.values + oracle.grads, strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * max(1.0, float(want.abs().max())))


def inputs() -> list[Tensor]:
    """Query, key, scale, extra keys, hard negatives in fp64."""
    kinds = ((N, D), (N, D), (), (E, D), (N, H, D))
    x = [randn(*shape, seed=seed, dtype=torch.float64) for seed, shape in enumerate(kinds)]
    x[2] = torch.tensor(1.7, dtype=torch.float64)
    return x


options = st.fixed_dictionaries(
    {},
    optional={
        "ids": st.sampled_from([IDS, (IDS, KEY_IDS), torch.zeros(N, dtype=torch.long)]),
        "extra_ids": st.just(EXTRA_IDS),
        "hard_mask": st.sampled_from([MASK, torch.zeros(N, H, dtype=torch.bool)]),
        "same_id": st.just("positive"),
        "margin": st.sampled_from([-0.5, 0.0, 0.4, 100.0]),
        "label_smoothing": st.sampled_from([0.1, 0.9]),
        "weights": st.just(WEIGHTS),
        "labels": st.just(LABELS_OF_QUERIES),
        "hard_bias": st.just(HARD_BIAS),
        "in_batch_negatives": st.just(False),
        "reduction": st.sampled_from(["mean", "sum"]),
    },
)


@given(
    options,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 8, 64]),
    st.sampled_from(["clip_loss", "info_nce"]),
)
@settings(deadline=None, max_examples=150)
def test_options_and_their_combinations(
    chosen: dict[str, Any], extra: bool, hard: bool, bias: bool, tile: int, name: str
) -> None:
    if "margin" in chosen:
        chosen.pop("label_smoothing", None)
    if not extra or "ids" not in chosen:
        chosen.pop("extra_ids", None)
    if "ids" not in chosen or "margin" in chosen or "label_smoothing" in chosen:
        chosen.pop("same_id", None)
    if not hard:
        chosen.pop("hard_mask", None)
        chosen.pop("hard_bias", None)
    if "hard_bias" in chosen or bias:
        chosen.pop("label_smoothing", None)
        chosen.pop("same_id", None)
    if name == "clip_loss":
        chosen.pop("labels", None)
    if name == "clip_loss" or not (extra or hard):
        chosen.pop("in_batch_negatives", None)
    x = inputs()
    names = ["extra_keys"] * extra + ["hard_negatives"] * hard + ["key_bias"] * bias + ["extra_bias"] * (bias and extra)
    biases = [randn(N, seed=9, dtype=torch.float64), randn(E, seed=10, dtype=torch.float64)][: 1 + extra]
    leaves = x[:3] + [x[3]] * extra + [x[4]] * hard + biases * bias

    def loss(function: Loss, **more: Any) -> Callable[..., Tensor]:
        return lambda q, k, s, *others: function(q, k, s, **chosen, **dict(zip(names, others, strict=True)), **more)

    exact = run(loss(getattr(reference, name)), *leaves)
    assert all(bool(y.isfinite().all()) for y in exact.values)
    for more in ({"tile": tile}, {"backend": "dense"}):
        assert_close(run(loss(getattr(ct, name), **more), *leaves), exact)


def test_every_negative_excluded() -> None:
    """Then the positive is alone: loss 0, no gradient, no NaN, learned scale included."""
    q, k = features(N, D, seed=1), features(N, D, seed=2)
    everything: list[dict[str, Any]] = [
        {"ids": torch.zeros(N, dtype=torch.long)},
        {"margin": 1e6},
        {"margin": 1e6, "hard_negatives": features(N * H, D, seed=3).view(N, H, D)},
        {"ids": torch.zeros(N, dtype=torch.long), "label_smoothing": 0.3},
        {
            "ids": torch.zeros(N, dtype=torch.long),
            "hard_negatives": features(N * H, D, seed=3).view(N, H, D),
            "hard_mask": torch.zeros(N, H, dtype=torch.bool),
        },
    ]
    for chosen in everything:
        for loss in (ct.clip_loss, ct.info_nce):
            outcome = run(lambda q, k, s, f=loss, o=chosen: f(q, k, s, tile=8, **o), q, k, torch.tensor(20.0))
            for value in outcome.values + outcome.grads:
                assert value.abs().max() < 1e-5, chosen


@pytest.mark.parametrize("tile", [8, 17, None])
def test_a_margin_drops_the_same_pairs_forward_and_backward(tile: int | None) -> None:
    """Duplicates of the positive and margin 0: rounding decides which of them count, but once and for all.

    A row of G sums to 0 if and only if the weights are those of the log-sum-exp; a key feature of 1 shows the sum.
    """
    q = features(N, D, seed=1)
    k = features(1, D, seed=2).expand(N, D).clone()
    k[:, 0] = 1
    outcome = run(lambda q, k, s: ct.info_nce(q, k, s, margin=0.0, tile=tile), q, k, torch.tensor(10.0))
    assert 0 < outcome.values[0] < math.log(N) + 1e-5
    assert outcome.grads[0][:, 0].abs().max() < 1e-5 * 10 / N


def test_weights_of_zero_drop_a_query_but_not_its_key() -> None:
    q, k, s = inputs()[:3]
    weights = torch.ones(N).double()
    weights[5] = 0
    rows = ct.info_nce(q, k, s, reduction="none")
    kept = torch.arange(N) != 5
    torch.testing.assert_close(ct.info_nce(q, k, s, weights=weights), rows[kept].mean())


# --- negatives from elsewhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["extra_keys", "hard_negatives"])
def test_no_negatives_from_elsewhere_yet(what: str) -> None:
    """The queue of MoCo is empty in its first step: the loss is 0, and so are gradients, which exist."""
    q, k, s = inputs()[:3]
    negatives: dict[str, Any] = {"extra_keys": q[:0]} if what == "extra_keys" else {"hard_negatives": q[:, None][:, :0]}
    for dims in (None, (2, D)):
        leaves = [x.detach().requires_grad_() for x in (q, k, s)]
        loss = ct.info_nce(*leaves, in_batch_negatives=False, matryoshka_dims=dims, **negatives)
        loss.backward()
        assert loss == 0 and all(x.grad is not None and not x.grad.any() for x in leaves)


def test_negatives_only_from_elsewhere() -> None:
    """MoCo's loss, and no score of a query with the positive of another."""
    q, k, s, extra, _ = inputs()
    k[5] = torch.nan
    rows = ct.info_nce(q, k, s, extra_keys=extra, in_batch_negatives=False, reduction="none")
    assert rows[5].isnan() and rows[torch.arange(N) != 5].isfinite().all()
    logits = s * torch.cat([(q * k).sum(1, keepdim=True), q @ extra.T], 1)
    want = F.cross_entropy(logits, torch.zeros(N, dtype=torch.long), reduction="none")
    torch.testing.assert_close(rows, want, equal_nan=True)
    assert ct.info_nce(q, q, s, extra_keys=extra[:0], in_batch_negatives=False) == 0, "a queue that is still empty"


@pytest.mark.parametrize("same_id", ["exclude", "positive"])
def test_statistics_of_negatives_from_elsewhere(same_id: str) -> None:
    q, k, s, extra, hard = inputs()
    more: dict[str, Any] = {"extra_keys": extra, "extra_ids": EXTRA_IDS, "hard_negatives": hard, "hard_mask": MASK}
    more |= {"ids": IDS, "same_id": same_id, "in_batch_negatives": False}
    _, stats = ct.info_nce(q, k, s, **more, return_stats=True, tile=8)
    pos = s * (q * k).sum(1)
    scores = torch.cat([pos.unsqueeze(1), s * q @ extra.T, s * torch.einsum("nd,nhd->nh", q, hard)], 1)
    count = torch.cat([torch.ones(N, 1, dtype=torch.bool), IDS.unsqueeze(1) != EXTRA_IDS, MASK], 1)
    top1, rank, negative = naive_stats(scores, pos, count)
    found = stats.row_top1, stats.row_rank, stats.negative_logit, stats.positive_logit
    torch.testing.assert_close(found, (top1, rank, negative, pos.mean()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"in_batch_negatives": False}, "in_batch_negatives=False: expected extra_keys= or hard_negatives= with it"),
        ({"in_batch_negatives": 0}, "in_batch_negatives: expected True or False, got int"),
    ],
)
def test_no_negatives_at_all(options: dict[str, Any], says: str) -> None:
    x = features(N, D, seed=1)
    with pytest.raises((ValueError, TypeError), match=says):
        ct.info_nce(x, x, **options)


# --- several positives --------------------------------------------------------------------------------------------

SAME = {"pairs": torch.arange(N) // 2, "some": IDS, "one": torch.zeros(N, dtype=torch.long)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("which", SAME)
@pytest.mark.parametrize("name", ["clip_loss", "info_nce"])
def test_several_positives(name: str, which: str, scale: float, dtype: torch.dtype) -> None:
    image, ids = features(N, D, seed=1, dtype=dtype), SAME[which]
    near = features(N, D, seed=2, norm=0.1)[ids] + image.float()  # positives score high, as late in training
    text = (near / near.norm(dim=1, keepdim=True)).to(dtype)
    number = torch.tensor(scale, dtype=torch.promote_types(dtype, torch.float32))
    ours, oracle = getattr(ct, name), getattr(reference, name)
    assert_precise(
        lambda a, b, s: ours(a, b, s, ids=ids, same_id="positive", tile=8),
        lambda a, b, s: oracle(a, b, s, ids=ids, same_id="positive"),
        *(image, text, number),
        share=1 / N,
        roundings=2,
    )


@pytest.mark.parametrize("tile", [1, 8, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["clip_loss", "info_nce", "siglip_loss"])
def test_unique_ids_change_nothing(name: str, dtype: torch.dtype, tile: int) -> None:
    """To the last bit (but for fp64, which has no wider sums): with one positive its mean is itself."""
    x, y = features(N, D, seed=1, dtype=dtype), features(N, D, seed=2, dtype=dtype)
    numbers = [torch.tensor(20.0), torch.tensor(-3.0)][: 1 + (name == "siglip_loss")]
    loss: Loss = getattr(ct, name)
    ids = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    plain = run(lambda *z: loss(*z, tile=tile), x, y, *numbers)
    for same_id in ("exclude", "positive"):
        outcome = run(lambda *z, how=same_id: loss(*z, ids=ids, same_id=how, tile=tile), x, y, *numbers)
        if dtype == torch.float64:
            assert_close(outcome, plain, rtol=1e-15)
        else:
            assert_same(outcome, plain)


def test_several_positives_are_those_of_sup_con() -> None:
    """An anchor's own row is then labelled, so SupCon over [N] equals the rows of a set against itself."""
    z, labels = features(N, D, seed=1, dtype=torch.float64), torch.arange(N) % 7
    scores = 5 * z @ z.T
    positive = (labels.unsqueeze(1) == labels).double()
    want = (scores.logsumexp(1) - (scores * positive).sum(1) / positive.sum(1)).mean()
    torch.testing.assert_close(ct.info_nce(z, z.clone(), 5.0, ids=labels, same_id="positive"), want)


@pytest.mark.parametrize("which", SAME)
@pytest.mark.parametrize("same_id", ["exclude", "positive"])
@pytest.mark.parametrize("tile", [8, 64])
def test_siglip_with_ids(tile: int, same_id: str, which: str) -> None:
    ids = SAME[which]
    kinds: dict[str, Any] = {"same_id": same_id}
    loss: Loss = ct.siglip_loss
    leaves = [randn(N, D, seed=n, dtype=torch.float64) for n in (1, 2)]
    numbers = [torch.tensor(x, dtype=torch.float64) for x in (1.3, -2.0)]
    for chosen in (ids, (ids, IDS)):
        exact = run(lambda *x, i=chosen: reference.siglip_loss(*x, ids=i, **kinds), *leaves, *numbers)
        several: list[dict[str, Any]] = [{"tile": tile}, {"backend": "dense"}, {"tile": tile, "cache_bytes": 1 << 20}]
        for more in several:
            ours = run(lambda *x, i=chosen, m=more: loss(*x, ids=i, **kinds, **m), *leaves, *numbers)
            assert_close(ours, exact)


def test_siglip_of_many_positives_keeps_its_digits() -> None:
    """Late in training a positive's term is exp(-s): as softplus(s) - s it would drown in s."""
    ids = torch.arange(N) // 4
    image = features(10, D, seed=1, norm=1.0)[ids]
    numbers = torch.tensor(40.0), torch.tensor(-10.0)

    def loss(function: Loss, **how: Any) -> Callable[..., Tensor]:
        return lambda x, y, s, b: function(x, y, s, b, ids=ids, same_id="positive", **how)

    ours = run(loss(ct.siglip_loss, tile=8), image, image.clone(), *numbers)
    exact = run(loss(reference.siglip_loss), image, image.clone(), *numbers, dtype=torch.float64)
    for got, want in zip(ours.values + ours.grads, exact.values + exact.grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["clip_loss", "info_nce", "siglip_loss"])
@pytest.mark.parametrize("same_id", ["exclude", "positive"])
def test_statistics_with_ids(same_id: str, name: str) -> None:
    """Ranks and negatives are those of other ids, whatever pairs of equal id are."""
    q, k, s, extra, hard = inputs()
    options: dict[str, Any] = {"ids": (IDS, KEY_IDS), "same_id": same_id}
    numbers, bias = [s], 0.0
    if name == "siglip_loss":
        numbers, bias = [s, torch.tensor(-2.0, dtype=torch.float64)], -2.0
        blocks, counts = [q @ k.T], [IDS.unsqueeze(1) != KEY_IDS]
    else:
        options |= {"extra_keys": extra, "extra_ids": EXTRA_IDS, "hard_negatives": hard, "hard_mask": MASK}
        blocks = [q @ k.T, q @ extra.T, torch.einsum("nd,nhd->nh", q, hard)]
        counts = [IDS.unsqueeze(1) != KEY_IDS, IDS.unsqueeze(1) != EXTRA_IDS, MASK]
    scores, count = s * torch.cat(blocks, 1) + bias, torch.cat(counts, 1)
    pos = scores.diagonal()
    count = count | torch.eye(*count.shape, dtype=torch.bool)
    for tile in (8, 64):
        _, stats = getattr(ct, name)(q, k, *numbers, **options, return_stats=True, tile=tile)
        top1, rank, negative = naive_stats(scores, pos, count)
        found = stats.row_top1, stats.row_rank, stats.negative_logit, stats.positive_logit
        torch.testing.assert_close(found, (top1, rank, negative, pos.mean()))
        if stats.col_rank is not None:
            top1, rank, _ = naive_stats(scores[:, :N].T, pos, count[:, :N].T)
            torch.testing.assert_close((stats.col_top1, stats.col_rank), (top1, rank))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"same_id": "positive"}, r"same_id='positive': expected ids= with it"),
        ({"same_id": "drop", "ids": IDS}, r"same_id: expected one of 'exclude', 'positive'"),
        ({"same_id": "positive", "ids": IDS, "margin": 0.1}, "same_id and margin"),
        ({"same_id": "positive", "ids": IDS, "label_smoothing": 0.1}, "same_id and label_smoothing"),
    ],
)
def test_several_positives_that_mean_nothing(options: dict[str, Any], says: str) -> None:
    x = features(N, D, seed=1)
    with pytest.raises(ValueError, match=says):
        ct.clip_loss(x, x, **options)


# --- statistics ---------------------------------------------------------------------------------------------------


def naive_stats(scores: Tensor, pos: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Top-1, mean rank, mean negative score, of rows whose positive is among the columns that count."""
    rank = 1 + ((scores > pos.unsqueeze(1)) & counts).sum(1)
    negative = (scores * counts).sum() - pos.sum()
    return (rank == 1).double().mean(), rank.double().mean(), negative / (counts.sum() - len(pos))


@pytest.mark.parametrize("tile", [1, 8, 64])
@pytest.mark.parametrize("margin", [None, 0.3])
def test_statistics_of_clip_loss(tile: int, margin: float | None) -> None:
    q, k, s, extra, hard = inputs()
    chosen: dict[str, Any] = {"ids": IDS, "extra_keys": extra, "extra_ids": EXTRA_IDS, "hard_negatives": hard}
    loss, stats = ct.clip_loss(q, k, s, **chosen, hard_mask=MASK, margin=margin, return_stats=True, tile=tile)
    # Statistics compare products, before the scale, which is then rounded at another place.
    plain = ct.clip_loss(q, k, s, **chosen, hard_mask=MASK, margin=margin, tile=tile)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-12)
    own = s * q @ k.T
    counts = (IDS.unsqueeze(1) != IDS) | torch.eye(N, dtype=torch.bool)
    scores = torch.cat([own, s * q @ extra.T, s * torch.einsum("nd,nhd->nh", q, hard)], 1)
    whole = torch.cat([counts, IDS.unsqueeze(1) != EXTRA_IDS, MASK], 1)
    top1, rank, negative = naive_stats(scores, own.diagonal(), whole)
    col_top1, col_rank, _ = naive_stats(own.T, own.diagonal(), counts.T)
    expected = BatchStats(top1, rank, col_top1, col_rank, own.diagonal().mean(), negative)
    torch.testing.assert_close(tuple(stats), tuple(expected))


def test_statistics_are_detached() -> None:
    q, k, s, *_ = (x.requires_grad_() for x in inputs())
    for call in (ct.clip_loss, ct.info_nce, ct.nt_xent):
        loss, stats = call(q, k, s, return_stats=True)
        assert loss.requires_grad and not any(x is not None and x.requires_grad for x in stats)
    loss, stats = ct.siglip_loss(q, k, s, -2.0, return_stats=True)
    assert loss.requires_grad and not any(x is not None and x.requires_grad for x in stats)


def test_statistics_of_the_others() -> None:
    q, k, s = inputs()[:3]
    scores = s * q @ k.T
    every = torch.ones_like(scores, dtype=torch.bool)
    top1, rank, negative = naive_stats(scores, scores.diagonal(), every)
    loss, stats = ct.info_nce(q, k, s, return_stats=True, tile=8)
    torch.testing.assert_close(stats[:2], (top1, rank))
    assert stats.col_top1 is None and stats.col_rank is None
    loss, stats = ct.siglip_loss(q, k, s, -2.0, return_stats=True, tile=8)
    assert loss.item() == pytest.approx(ct.siglip_loss(q, k, s, -2.0, tile=8).item(), rel=1e-12)
    col_top1, col_rank, _ = naive_stats(scores.T, scores.diagonal(), every)
    expected = (top1, rank, col_top1, col_rank, scores.diagonal().mean() - 2, negative - 2)
    torch.testing.assert_close(tuple(stats), expected)
    loss, stats = ct.nt_xent(q, k, 1 / s, return_stats=True, tile=8)
    assert loss == ct.nt_xent(q, k, 1 / s, tile=8)
    z = torch.cat([q, k])
    views, others = s * z @ z.T, ~torch.eye(2 * N, dtype=torch.bool)
    pos = views[torch.arange(2 * N), torch.arange(2 * N).roll(N)]
    top1, rank, negative = naive_stats(views, pos, others)
    torch.testing.assert_close((stats[0], stats[1], *stats[4:]), (top1, rank, pos.mean(), negative))


@pytest.mark.parametrize("tile", [64, 17, None])
def test_a_positive_does_not_outrank_itself(tile: int | None) -> None:
    """What it is compared with is its own score, to the last bit."""
    q = features(300, 33, seed=1)
    for _, stats in (
        ct.clip_loss(q, q.clone(), 20.0, return_stats=True, tile=tile),
        ct.info_nce(q, q.flip(0), 20.0, labels=torch.arange(299, -1, -1), return_stats=True, tile=tile),
        ct.siglip_loss(q, q.clone(), 20.0, -5.0, return_stats=True, tile=tile),
    ):
        assert stats.row_top1 == 1 and stats.row_rank == 1
        assert stats.col_rank is None or stats.col_rank == 1


def test_no_negative_has_no_logit() -> None:
    q, k, s, *_ = inputs()
    for loss in (ct.nt_xent, ct.clip_loss, ct.info_nce):
        _, stats = loss(q[:1], k[:1], s, return_stats=True)
        assert stats.negative_logit.isnan() and stats.row_rank == 1


# --- precision of small numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_are_summed_in_full(dtype: torch.dtype) -> None:
    q, k = features(300, D, seed=1), features(300, D, seed=2)
    weights = torch.full((300,), 1000.0, dtype=dtype)
    weights[0] = 2000
    got, want = (ct.info_nce(q, k, 5.0, weights=w) for w in (weights, weights.float()))
    torch.testing.assert_close(got, want)


def test_weights_of_nothing() -> None:
    q, k = features(N, D, seed=1).requires_grad_(), features(N, D, seed=2)
    loss = ct.info_nce(q, k, 5.0, weights=torch.zeros(N))
    (grad,) = torch.autograd.grad(loss, q)
    assert loss == 0 and not grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_half_precision_are_used_in_full(dtype: torch.dtype) -> None:
    q, k, hard = features(N, D, seed=1), features(N, D, seed=2), randn(N, H, D, seed=3)
    number = torch.tensor(0.07, dtype=dtype, requires_grad=True)
    calls: list[Loss] = [
        lambda t: ct.nt_xent(q, k, t),
        lambda t: ct.sup_con(q, IDS, t),
        lambda t: ct.info_nce(q, k, 1000 * t, hard_negatives=hard, margin=0.1),
        lambda t: ct.siglip_loss(q, k, 100 * t, -100 * t, return_stats=True)[0],
    ]
    for call in calls:
        # The scale that reaches the loss is rounded in the caller's dtype; what follows is not.
        got, want = call(number), call(number.detach().float())
        if call in calls[:2]:
            torch.testing.assert_close(got, want)
        (grad,) = torch.autograd.grad(got, number)
        assert grad.dtype == dtype and grad != 0
    s = torch.tensor(99.0, dtype=dtype)
    rows = (ct.info_nce(q, k, x, hard_negatives=hard, reduction="none") for x in (s, s.float()))
    torch.testing.assert_close(*rows)


def test_sup_con_is_never_negative() -> None:
    """Late in training: pairs are almost equal, and the loss is smaller than the rounding of a score."""
    n = 256
    z = features(n // 2, 32, seed=1).repeat_interleave(2, 0)
    z = torch.nn.functional.normalize(z + 1e-3 * randn(n, 32, seed=2), dim=1).requires_grad_()
    labels = torch.arange(n) // 2
    for temperature in (0.05, 0.03, 0.01):
        rows = ct.sup_con(z, labels, temperature, reduction="none")
        assert rows.min() >= 0
        exact = reference.sup_con(z.detach().double(), labels, temperature, reduction="none")
        assert (rows - exact).abs().max() <= 8 * torch.finfo(torch.float32).eps / temperature
        (grad,) = torch.autograd.grad(rows.sum(), z)
        assert grad.isfinite().all()


def row_errors(loss: Loss, naive: Loss, *inputs: Tensor) -> tuple[float, float]:
    """The largest errors of the rows against fp64: ours, and the naive code's in the same dtype."""
    exact = naive(*(x.double() for x in inputs), reduction="none")
    got, same_dtype = (function(*inputs, reduction="none").double() for function in (loss, naive))
    return float((got - exact).abs().max()), float((same_dtype - exact).abs().max())


def test_smoothing_over_the_few_keys_of_another_id() -> None:
    """Almost all keys have one id: what counts is a small part of the sum over all of them."""
    n = 2048
    q, k = (torch.nn.functional.normalize(features(n, 16, seed=seed) + 0.5, dim=1) for seed in (1, 2))
    ids = torch.zeros(n, dtype=torch.long)
    ids[:2] = 1
    chosen: dict[str, Any] = {"ids": ids, "label_smoothing": 0.1}
    ours, naive = row_errors(
        lambda q, k, **how: ct.info_nce(q, k, 100.0, **chosen, **how),
        lambda q, k, **how: reference.info_nce(q, k, 100.0, **chosen, **how),
        *(q, k),
    )
    assert ours <= 2 * naive + 1e-5


@pytest.mark.parametrize("norm", [1.0, 100.0, 1000.0])
def test_sup_con_of_rows_of_different_length(norm: float) -> None:
    """The short partner of a long row does not drown in it."""
    z, labels = features(64, 16, seed=1), torch.arange(64) // 2
    z[0] *= norm
    ours, naive = row_errors(
        lambda z, **how: ct.sup_con(z, labels, 0.1, **how),
        lambda z, **how: reference.sup_con(z, labels, 0.1, **how),
        z,
    )
    assert ours <= 2 * naive + 2e-6


def test_smoothed_losses_are_never_negative() -> None:
    z = features(64, 16, seed=1)
    ids = torch.zeros(64, dtype=torch.long)
    for scale in (1.0, 30.0, 100.0):
        assert ct.info_nce(z, z, scale, ids=ids, label_smoothing=0.3, reduction="none").min() >= 0


# --- dtypes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_autocast_changes_nothing(backend: Any) -> None:
    """Not even a backward pass inside of it, but for dense scores, whose backward pass is PyTorch's."""
    q, k, s, extra, hard = (x.float().requires_grad_() for x in inputs())

    def gradients() -> list[Tensor]:
        loss = ct.clip_loss(q, k, s, extra_keys=extra, hard_negatives=hard, backend=backend)
        return [loss.detach(), *torch.autograd.grad(loss, (q, k, s, extra, hard))]

    want = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients()
    same = [torch.equal(x, y) for x, y in zip(got, want, strict=True)]
    assert same[0] if backend == "dense" else all(same)


@pytest.mark.parametrize("backend", ["auto", "dense"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_of_full_precision(dtype: torch.dtype, backend: Any) -> None:
    """Whatever the dtype of the features, and of the weights."""
    q, k = features(N, D, seed=1, dtype=dtype).requires_grad_(), features(N, D, seed=2, dtype=dtype)
    for weights in (None, torch.ones(N, dtype=torch.float64), torch.ones(N, dtype=torch.float16)):
        loss = ct.clip_loss(q, k, 3.0, weights=weights, backend=backend)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.autograd.grad(loss, q)[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8])
def test_labels_of_any_integers(dtype: torch.dtype) -> None:
    q, k = features(N, D, seed=1), features(N, D, seed=2)
    labels = torch.arange(N).flip(0)
    assert ct.info_nce(q, k, labels=labels.to(dtype)) == ct.info_nce(q, k, labels=labels)
    assert ct.clip_loss(q, k, ids=IDS.to(dtype)) == ct.clip_loss(q, k, ids=IDS)
    hard, of_hard = features(N * 2, D, seed=3).view(N, 2, D), torch.stack([IDS, labels], 1)
    of_any, of_int64 = (
        ct.info_nce(q, k, ids=IDS.to(x), hard_negatives=hard, hard_ids=of_hard.to(x)) for x in (dtype, torch.int64)
    )
    assert of_any == of_int64


def test_padding_may_be_anything() -> None:
    q, k, s, _, hard = (x.requires_grad_() for x in inputs())
    want = torch.autograd.grad(ct.info_nce(q, k, s, hard_negatives=hard, hard_mask=MASK), (q, k, s))
    hollow = hard.masked_fill(~MASK.unsqueeze(2), torch.nan)
    got = torch.autograd.grad(ct.info_nce(q, k, s, hard_negatives=hollow, hard_mask=MASK), (q, k, s))
    torch.testing.assert_close(got, want)


# --- documentation ------------------------------------------------------------------------------------------------


def test_losses_replace_the_code_that_they_name() -> None:
    """The code in the docstrings gives the same value."""
    q, k, s, *_ = inputs()
    calls: dict[str, dict[str, Any]] = {
        "pair_lse": {"query": q, "key": k, "scale": s},
        "clip_loss": {"image": q, "text": k, "scale": s},
        "info_nce": {"query": q, "key": k, "scale": s, "labels": torch.arange(N).roll(3)},
        "nt_xent": {"z1": q, "z2": k, "temperature": 0.3},
        "sup_con": {"z": q, "labels": IDS, "temperature": 0.3},
        "siglip_loss": {"image": q, "text": k, "scale": s, "bias": -3.0},
    }
    for name, arguments in calls.items():
        function = getattr(ct, name)
        doc = inspect.getdoc(function)
        assert doc is not None
        code = textwrap.indent(textwrap.dedent(doc.split("Replaces\n\n")[1].split("\n\n")[0]), "    ")
        known = {"torch": torch, "F": torch.nn.functional, "inf": math.inf, "n": N, **arguments}
        exec(f"def naive():\n{code}\nresult = naive()", known)
        torch.testing.assert_close(function(**arguments), known["result"])


# --- modules ------------------------------------------------------------------------------------------------------


def test_modules_call_their_functions() -> None:
    q, k, s, extra, hard = inputs()
    assert ct.NTXent(0.3, tile=8)(q, k) == ct.nt_xent(q, k, 0.3, tile=8)
    assert ct.NTXent(0.3)(q, k, 0.9, output_dict=True) == {"contrastive_loss": ct.nt_xent(q, k, 0.9)}
    assert ct.SupCon(0.3)(q, IDS) == ct.sup_con(q, IDS, 0.3)
    assert ct.SigLipLoss(reduction="sum")(q, k, s, -1.0) == ct.siglip_loss(q, k, s, -1.0, reduction="sum")
    expected = ct.clip_loss(q, k, s, ids=IDS, extra_keys=extra, margin=0.2)
    assert ct.ClipLoss(margin=0.2)(q, k, s, ids=IDS, extra_keys=extra) == expected
    answer = ct.InfoNCE(3.0, return_stats=True)(q, k, hard_negatives=hard, output_dict=True)
    plain = ct.info_nce(q, k, 3.0, hard_negatives=hard)
    assert answer["contrastive_loss"].item() == pytest.approx(plain.item(), rel=1e-12)
    assert set(answer) == {"contrastive_loss", "row_top1", "row_rank", "positive_logit", "negative_logit"}
    with pytest.raises(TypeError):
        ct.ClipLoss()(q, k, s, torch.tensor(-10.0))  # open_clip's bias: only the integration takes it
    with pytest.raises(TypeError, match=r"InfoNCE: expected keywords .*, got labels=\. The call of the module has it"):
        ct.InfoNCE(labels=IDS)  # type: ignore[call-arg]
    assert "temperature=0.3" in repr(ct.NTXent(0.3)) and "margin=0.2" in repr(ct.ClipLoss(margin=0.2))


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"margin": 0.1, "label_smoothing": 0.1}, "Drop one"),
        ({"label_smoothing": 1.0}, "from 0 to below 1"),
        ({"margin": "much"}, "margin: expected a number"),
        ({"ids": torch.zeros(3, dtype=torch.long)}, r"ids: expected shape \[37\]"),
        ({"ids": torch.zeros(N)}, "integer"),
        ({"ids": (IDS,)}, "or a pair of them, got tuple of Tensor, 1 entries"),
        ({"extra_ids": EXTRA_IDS}, "drop extra_ids"),
        ({"extra_keys": torch.zeros(E, D + 1)}, "one number of features"),
        ({"extra_keys": torch.zeros(E, D), "extra_ids": EXTRA_IDS}, "Pass ids= too"),
        ({"hard_mask": MASK}, "drop hard_mask"),
        ({"hard_negatives": torch.zeros(N, D)}, r"shape \[37, H, 7\]"),
        ({"hard_negatives": torch.zeros(N, H, D, dtype=torch.float64)}, "hard_negatives.to"),
        ({"hard_negatives": torch.zeros(N, H, D), "hard_mask": MASK.T}, r"bool of shape \[37, 3\]"),
        ({"weights": torch.ones(N - 1)}, r"floats of shape \[37\]"),
        ({"weights": torch.ones(N, requires_grad=True)}, "detach"),
        ({"weights": -torch.ones(N)}, "weights: expected numbers from 0 up, got -1.0"),
        ({"margin": math.inf}, "margin: expected a finite number, got inf. Leave it out"),
        ({"margin": math.nan}, "margin: expected a finite number"),
        ({"label_smoothing": "a"}, "label_smoothing: expected a number, got str"),
        ({"hard_negatives": torch.zeros(N, H, D), "hard_mask": MASK.tolist()}, r"hard_mask: .*\[37, 3\], got list"),
        ({"hard_negatives": torch.zeros(N, H, D), "hard_mask": MASK.to("meta")}, "hard_mask: expected device cpu"),
    ],
)
def test_bad_options(chosen: dict[str, Any], said: str) -> None:
    for loss in (ct.clip_loss, ct.info_nce):
        with pytest.raises((ValueError, TypeError), match=said):
            loss(features(N, D, seed=1), features(N, D, seed=2), 1.0, **chosen)


@pytest.mark.parametrize("scale", [0.0, -2.0, torch.tensor(-2.0)])
def test_a_margin_needs_a_positive_scale(scale: Any) -> None:
    q, k = features(N, D, seed=1), features(N, D, seed=2)
    for loss in (ct.clip_loss, ct.info_nce):
        with pytest.raises(ValueError, match=r"scale: expected a positive number with margin=, .* drop margin="):
            loss(q, k, scale, margin=0.1)


def test_bad_arguments_of_the_family() -> None:
    z = features(N, D, seed=1)
    with pytest.raises(ValueError, match="z1 and z2: expected equally many rows, got 37 and 36"):
        ct.nt_xent(z, z[1:])
    with pytest.raises(ValueError, match="temperature: expected a positive number"):
        ct.nt_xent(z, z, 0.0)
    with pytest.raises(ValueError, match="labels: expected shape"):
        ct.sup_con(z, IDS[1:])
    with pytest.raises(ValueError, match="bias: expected a float"):
        ct.siglip_loss(z, z, 1.0, torch.zeros(2))
    with pytest.raises(ValueError, match="ids: expected a pair"):
        ct.info_nce(z, features(N + 1, D, seed=2), ids=IDS)


def test_hard_negatives_of_many_queries() -> None:
    """More queries than are taken at once."""
    n = 2 * CHUNK + 3
    query, hard = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((n, 4), (n, 2, 4)))
    upstream = torch.randn(n, 2, dtype=torch.float64)
    got = own_products(query, hard)
    want = (query.unsqueeze(1) * hard).sum(2)
    torch.testing.assert_close(got, want)
    grads, wanted = (torch.autograd.grad(scores, (query, hard), upstream) for scores in (got, want))
    torch.testing.assert_close(grads, wanted)

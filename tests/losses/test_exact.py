"""Where rounding must not decide: exact ties, scores far above what a number can resolve, sums of one term."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import contratile as ct
from contratile import reference
from tests.ranks import pool

EPS = torch.finfo(torch.float32).eps


def codes(*shape: int, seed: int, values: tuple[int, ...] = (-1, 1)) -> Tensor:
    at = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(values)[at]


# --- ties ---------------------------------------------------------------------------------------------------------


def brute_force(image: Tensor, text: Tensor, ties: str) -> dict[str, float]:
    """Ranks from whole numbers, pair by pair."""
    scores = image @ text.T
    found = {}
    for way, x in (("image_to_text", scores), ("text_to_image", scores.T)):
        ranks = []
        for i, row in enumerate(x.tolist()):
            higher, equal = sum(s > row[i] for s in row), sum(s == row[i] for s in row) - 1
            ranks.append(1 + higher + (equal / 2 if ties == "mean" else 0))
        found[f"{way}_mean_rank"] = sum(ranks) / len(ranks)
        found |= {f"{way}_R@{k}": sum(rank <= k for rank in ranks) / len(ranks) for k in (1, 3)}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("ties", ["first", "mean"])
def test_metrics_of_whole_numbers(ties: Any, dtype: torch.dtype) -> None:
    for seed in range(40):
        n, d, tile = (2, 4, None) if seed == 0 else (3 + seed % 20, 1 + seed % 37, (None, 4, 7)[seed % 3])
        image, text = codes(n, d, seed=seed), codes(n, d, seed=seed + 1000, values=(-1, 0, 2) if seed % 2 else (-1, 1))
        found = ct.retrieval_metrics(image.to(dtype), text.to(dtype), (1, 3), ties=ties, tile=tile)
        expected = brute_force(image, text, ties)
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12), seed


def test_a_margin_that_is_met_exactly_drops_nothing() -> None:
    query, key = torch.tensor([[-1.0, -1, -1, 1]]), torch.tensor([[0.0, -1, -1, 1], [-1, 0, -1, 0]])
    assert ct.info_nce(query, key, 1.0, margin=1.0).item() == pytest.approx(0.31326166, rel=1e-6)  # log(1 + 1 / e)


@pytest.mark.parametrize("scale", [0.7, 14.3, 100.0])
def test_margins_of_whole_numbers(scale: float) -> None:
    for seed in range(20):
        q, k, extra = codes(9, 11, seed=seed), codes(9, 11, seed=seed + 50), codes(4, 11, seed=seed + 90)
        hard = codes(9, 2, 11, seed=seed + 70)
        options: dict[str, Any] = {"margin": float(seed % 4), "reduction": "none"}
        negatives = {"extra_keys": extra, "hard_negatives": hard}
        ours = {name: x.float() for name, x in negatives.items()}
        true = {name: x.double() for name, x in negatives.items()}
        for name in ("info_nce", "clip_loss"):
            got = getattr(ct, name)(q.float(), k.float(), scale, tile=5, **options, **ours)
            want = getattr(reference, name)(q.double(), k.double(), scale, **options, **true)
            # A pair more or less would change a row by far more than rounding does.
            assert torch.allclose(got.double(), want, rtol=0, atol=40 * EPS * scale * 11), (seed, name)


@pytest.mark.parametrize("sign", [1, -1])
def test_statistics_of_whole_numbers(sign: int) -> None:
    """A negative scale turns the order round; ties stay ties."""
    q, k, extra, hard = codes(30, 6, seed=1), codes(30, 6, seed=2), codes(7, 6, seed=3), codes(30, 2, 6, seed=4)
    scores = sign * torch.cat([q @ k.T, q @ extra.T, torch.einsum("nd,nhd->nh", q, hard)], 1)
    ranks = 1 + (scores > scores.diagonal()[:30].unsqueeze(1)).sum(1)
    options: dict[str, Any] = {"extra_keys": extra.float(), "hard_negatives": hard.float(), "tile": 8}
    for backend in ("torch", "dense"):
        _, stats = ct.info_nce(q.float(), k.float(), sign * 14.3, return_stats=True, backend=backend, **options)
        assert stats.row_rank.item() == pytest.approx(ranks.double().mean().item(), rel=1e-6)
        assert stats.row_top1.item() == pytest.approx((ranks == 1).double().mean().item(), rel=1e-6)


def test_statistics_of_one_set_and_of_softplus() -> None:
    q, k = codes(25, 5, seed=1), codes(25, 5, seed=2)
    z = torch.cat([q, k])
    scores = (z @ z.T).fill_diagonal_(-99)
    ranks = 1 + (scores > scores.gather(1, torch.arange(50).roll(25)[:, None])).sum(1)
    _, stats = ct.nt_xent(q.float(), k.float(), 0.07, return_stats=True, tile=16)
    assert stats.row_rank.item() == pytest.approx(ranks.double().mean().item(), rel=1e-6)
    scores = q @ k.T
    _, stats = ct.siglip_loss(q.float(), k.float(), 14.3, -10.0, return_stats=True, tile=8)
    for rank, x in ((stats.row_rank, scores), (stats.col_rank, scores.T)):
        assert rank is not None
        expected = (1 + (x > x.diagonal().unsqueeze(1)).sum(1)).double().mean()
        assert rank.item() == pytest.approx(expected.item(), rel=1e-6)


# --- metrics of several, of equals, of rubbish --------------------------------------------------------------------


def test_features_that_are_not_finite_have_no_metrics() -> None:
    x = F.normalize(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    for bad in (float("nan"), float("inf")):
        spoilt = x.clone()
        spoilt[3, 2] = bad
        for image, text in ((x, spoilt), (spoilt, x), (x, x * bad)):
            found = ct.retrieval_metrics(image, text)
            assert len(found) == 10 and all(value != value for value in found.values())
            found = ct.zero_shot_metrics(image, text, torch.arange(8))
            assert len(found) == 3 and all(value != value for value in found.values())
    huge = x * 1e30  # finite, but not their products
    for options in ({}, {"pairs": torch.tensor([[0, 0], [1, 0], [1, 1]])}):
        assert all(value != value for value in ct.retrieval_metrics(huge, huge, **options).values())  # type: ignore[arg-type]


def test_equal_features_look_perfect_only_to_ties_first() -> None:
    same = torch.ones(101, 4)
    assert ct.retrieval_metrics(same, same)["text_to_image_R@1"] == 1
    found = ct.retrieval_metrics(same, same, ties="mean")
    assert found["image_to_text_R@10"] == found["text_to_image_R@10"] == 0
    assert found["image_to_text_mean_rank"] == found["text_to_image_mean_rank"] == 51
    assert ct.zero_shot_metrics(same, same, torch.arange(101))["zero_shot_top1"] == 1
    assert ct.zero_shot_metrics(same, same, torch.arange(101), ties="mean")["zero_shot_top5"] == 0
    with pytest.raises(ValueError, match="ties: expected one of 'first', 'mean', got 'last'"):
        ct.retrieval_metrics(same, same, ties="last")  # type: ignore[arg-type]


def best_rank(row: list[int], own: set[int], ties: str) -> float:
    best = max(row[j] for j in own)
    higher = sum(s > best for s in row)
    tied, others = sum(row[j] == best for j in own), sum(s == best for j, s in enumerate(row) if j not in own)
    return 1 + higher + (others / (tied + 1) if ties == "mean" else 0)


@pytest.mark.parametrize("ties", ["first", "mean"])
@pytest.mark.parametrize("several", ["texts", "both"])
def test_pairs_of_several(several: str, ties: Any) -> None:
    for seed in range(20):
        image, text = codes(7, 5, seed=seed), codes(12, 5, seed=seed + 100)
        owner = torch.randint(0, 6, (12,), generator=torch.Generator().manual_seed(seed))  # image 6 has no text
        pairs = [(int(i), t) for t, i in enumerate(owner)]
        if several == "both":  # text 0 has a second image, text 11 has none, one pair is told twice
            pairs = [*pairs[:-1], ((int(owner[0]) + 1) % 6, 0), pairs[3]]
        scores = image @ text.T
        to_text = {i: {t for j, t in pairs if j == i} for i, _ in pairs}
        to_image = {t: {i for i, s in pairs if s == t} for _, t in pairs}
        ranks = {
            "image_to_text": [best_rank(scores[i].tolist(), own, ties) for i, own in to_text.items()],
            "text_to_image": [best_rank(scores[:, t].tolist(), own, ties) for t, own in to_image.items()],
        }
        found = ct.retrieval_metrics(image.float(), text.float(), (1, 2), pairs=torch.tensor(pairs), ties=ties, tile=4)
        for way, x in ranks.items():
            assert found[f"{way}_mean_rank"] == pytest.approx(sum(x) / len(x))
            assert found[f"{way}_R@2"] == pytest.approx(sum(rank <= 2 for rank in x) / len(x))
        if several == "texts":
            again = ct.retrieval_metrics(image.float(), text.float(), (1, 2), image_of_text=owner, ties=ties)
            assert again == pytest.approx(found)


def test_pairs_are_checked() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(TypeError, match=r"pairs: expected a tensor of shape \[P, 2\], got \[4\]"):
        ct.retrieval_metrics(x, x, pairs=torch.arange(4))
    with pytest.raises(ValueError, match="expected indices from 0 to 3, got 0 to 4"):
        ct.retrieval_metrics(x, x, pairs=torch.tensor([[0, 4], [1, 0]]))
    with pytest.raises(ValueError, match="got both"):
        ct.retrieval_metrics(x, x, pairs=torch.tensor([[0, 1]]), image_of_text=torch.arange(4))


# --- large scores -------------------------------------------------------------------------------------------------

SCORES = [1e2, 1e4, 1e6, 1e9]
LABELS = torch.randint(0, 9, (70,), generator=torch.Generator().manual_seed(5))
LOSSES: dict[str, Callable[..., Tensor]] = {
    "nt_xent": lambda by, a, b, size, **how: by.nt_xent(a, b, 1 / size, **how),
    "sup_con": lambda by, a, b, size, **how: by.sup_con(a, LABELS, 1 / size, **how) + 0 * b.sum(),
    "clip_loss": lambda by, a, b, size, **how: by.clip_loss(a, b, size, **how),
    "info_nce": lambda by, a, b, size, **how: by.info_nce(a, b, size, **how),
    "siglip_loss": lambda by, a, b, size, **how: by.siglip_loss(a, b, size, -1.0, **how),
}


def views(n: int = 70, d: int = 24) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    a = F.normalize(torch.randn(n, d, generator=random), dim=1)
    return a, F.normalize(a + 0.3 * torch.randn(n, d, generator=random), dim=1)


def differentiate(loss: Callable[..., Tensor], dtype: torch.dtype, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    value = loss(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


def naive_errors(name: str, size: float, exact: tuple[Tensor, ...]) -> list[float]:
    """Of the value and each gradient the largest error of the formula in fp32, with features moved in the last place.

    The error of one run is luck: where two large scores are almost equal, their rounding decides.
    """
    worst = [0.0] * len(exact)
    for seed in range(12):
        random = torch.Generator().manual_seed(seed)
        moved = [x * (1 + torch.randint(-2, 3, x.shape, generator=random) * EPS * (seed > 0)) for x in views()]
        found = differentiate(lambda a, b: LOSSES[name](reference, a, b, size), torch.float32, *moved)
        errors = [(got - true).abs().max().item() for got, true in zip(found, exact, strict=True)]
        worst = [max(pair) for pair in zip(worst, errors, strict=True)]
    return worst


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("size", SCORES)
@pytest.mark.parametrize("name", LOSSES)
def test_large_scores(name: str, size: float, tile: int | None) -> None:
    """Values within the naive error, gradients within 1.5 times the naive error, and a few roundings of a score."""
    loss, pair = LOSSES[name], views()
    exact = differentiate(lambda a, b: loss(reference, a, b, size), torch.float64, *pair)
    value, *gradients = naive_errors(name, size, exact)
    ours = differentiate(lambda a, b: loss(ct, a, b, size, tile=tile), torch.float32, *pair)
    assert (ours[0] - exact[0]).abs() <= value + 4 * EPS * size * (70 if name == "siglip_loss" else 1)
    for got, naive, true in zip(ours[1:], gradients, exact[1:], strict=True):
        assert (got - true).abs().max() <= 1.5 * naive + 8 * EPS * true.abs().max()


def ring_errors(name: str, sizes: tuple[int, ...], size: float, tile: int | None) -> list[tuple[float, float, float]]:
    """Of each gradient: our error, the naive error, the largest gradient."""
    rank, world = dist.get_rank(), dist.get_world_size()
    a, b = (torch.split(x, list(sizes))[rank] for x in views())
    labels = torch.split(LABELS, list(sizes))[rank]

    def ours(a: Tensor, b: Tensor) -> Tensor:
        if name == "sup_con":
            return ct.sup_con(a, labels, 1 / size, tile=tile) + 0 * b.sum()
        return LOSSES[name](ct, a, b, size, tile=tile)

    found = differentiate(ours, torch.float32, a, b)
    exact = differentiate(lambda a, b: LOSSES[name](reference, a, b, size), torch.float64, *views())
    errors = []
    for got, naive, true in zip(found[1:], naive_errors(name, size, exact)[1:], exact[1:], strict=True):
        mine = world * torch.split(true, list(sizes))[rank]
        error = (got - mine).abs().max().item() if len(mine) else 0.0
        errors.append((error, world * naive, world * true.abs().max().item()))
    return errors


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("sizes", [(35, 35), (17, 40, 13)], ids=str)
@pytest.mark.parametrize("name", ["nt_xent", "sup_con", "clip_loss"])
def test_large_scores_over_ranks(name: str, sizes: tuple[int, ...], tile: int | None) -> None:
    """With `key=None` two ranks compute the scores between them, and must come to the same numbers."""
    for size in SCORES:
        for errors in pool(len(sizes)).run(ring_errors, name, sizes, size, tile):
            for error, naive, largest in errors:
                assert error <= 1.5 * naive + 8 * EPS * largest, (size, error, naive, largest)


def test_equal_scores_share_their_weight_at_any_size() -> None:
    """Four keys that are the same, at a score of 1e9, where the next number is 64 away: a quarter each."""
    query, key = torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]]).repeat(4, 1)
    for scale in (1.0, 1e4, 4e7):
        for loss in (ct.info_nce(query, key, scale), ct.clip_loss(query.repeat(4, 1), key, scale)):
            assert loss.item() == pytest.approx(1.3862944, rel=1e-6)  # log 4
        z = torch.tensor([[3.0, 4.0]]).repeat(3, 1)
        assert ct.nt_xent(z, z, 1 / scale).item() == pytest.approx(1.6094379, rel=1e-6)  # log 5


# --- nothing to tell apart ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0, 1e6])
def test_a_single_pair_has_no_loss_and_no_gradient(scale: float) -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        a, b = (F.normalize(torch.randn(1, 24, generator=random), dim=1) for _ in range(2))
        for loss in (ct.clip_loss, ct.info_nce, lambda a, b, s: ct.nt_xent(a, b, 1 / s)):
            for x in differentiate(lambda a, b, f=loss: f(a, b, scale), torch.float32, a, b):
                assert not x.any()


@pytest.mark.parametrize("backend", ["torch", "dense"])
@pytest.mark.parametrize("loss", [ct.clip_loss, ct.info_nce])
def test_negatives_without_rows_stay_in_the_graph(loss: Callable[..., Tensor], backend: str) -> None:
    a, b = views(5, 3)
    empty = {"extra_keys": torch.zeros(0, 3), "hard_negatives": torch.zeros(5, 0, 3)}
    for name, x in empty.items():
        x.requires_grad_()
        value = loss(a, b, 10.0, backend=backend, **{name: x})
        assert value.item() == pytest.approx(loss(a, b, 10.0, backend=backend).item(), rel=1e-6)
        (grad,) = torch.autograd.grad(value, x)
        assert grad.shape == x.shape

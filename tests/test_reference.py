"""The oracle against formulas written down independently, in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from contratile import reference
from contratile.reference import Reduction
from tests.helpers import dense_pair_stats, labels_of, randn

EXACT: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13}


def double(n: int, d: int, *, seed: int) -> Tensor:
    return randn(n, d, seed=seed, dtype=torch.float64)


@pytest.mark.parametrize("scale", [1.0, 14.3, -2.0, 0.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_clip_loss_is_two_cross_entropies(reduction: Reduction, scale: float) -> None:
    image, text = double(13, 5, seed=1), double(13, 5, seed=2)
    logits, labels = scale * image @ text.T, torch.arange(13)
    expected = (
        F.cross_entropy(logits, labels, reduction=reduction) + F.cross_entropy(logits.T, labels, reduction=reduction)
    ) / 2
    torch.testing.assert_close(reference.clip_loss(image, text, scale, reduction=reduction), expected, **EXACT)


@pytest.mark.parametrize("m", [13, 29])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_info_nce_is_cross_entropy(reduction: Reduction, m: int) -> None:
    query, key, labels = double(13, 5, seed=1), double(m, 5, seed=2), labels_of(13, m, seed=3)
    logits = 3.0 * query @ key.T
    expected = F.cross_entropy(logits, labels, reduction=reduction)
    got = reference.info_nce(query, key, 3.0, labels=labels, reduction=reduction)
    torch.testing.assert_close(got, expected, **EXACT)
    expected = F.cross_entropy(logits, torch.arange(13), reduction=reduction)
    torch.testing.assert_close(reference.info_nce(query, key, 3.0, reduction=reduction), expected, **EXACT)


def test_gradients_are_the_closed_form() -> None:
    image, text = double(7, 4, seed=1).requires_grad_(), double(7, 4, seed=2).requires_grad_()
    scale = torch.tensor(2.5, dtype=torch.float64, requires_grad=True)
    grads = torch.autograd.grad(reference.clip_loss(image, text, scale), (image, text, scale))
    with torch.no_grad():
        scores = scale * image @ text.T
        weights = (scores.softmax(1) + scores.softmax(0) - 2 * torch.eye(7)) / 14
        expected = scale * weights @ text, scale * weights.T @ image, (weights * (image @ text.T)).sum()
    torch.testing.assert_close(grads, expected, **EXACT)


def test_pair_lse_is_logsumexp_of_the_scores() -> None:
    query, key = double(6, 4, seed=1), double(9, 4, seed=2)
    scores = 2.0 * query @ key.T
    row_lse, col_lse = reference.pair_lse(query, key, 2.0)
    torch.testing.assert_close(row_lse, scores.exp().sum(1).log(), **EXACT)
    torch.testing.assert_close(col_lse, scores.exp().sum(0).log(), **EXACT)
    assert reference.pair_lse(query, key, rows=False)[0].shape == (0,)
    assert reference.pair_lse(query, key, cols=False)[1].shape == (0,)


def test_no_key_stands_for_the_queries() -> None:
    query = double(6, 4, seed=1)
    torch.testing.assert_close(reference.pair_lse(query, None, 2.0), reference.pair_lse(query, query, 2.0), **EXACT)


def test_exclude_self() -> None:
    query = double(6, 4, seed=1)
    scores = query @ query.T
    expected = torch.stack([torch.cat([scores[i, :i], scores[i, i + 1 :]]).logsumexp(0) for i in range(6)])
    stats = dense_pair_stats(query, None, exclude_self=True)
    torch.testing.assert_close(stats.row_lse, expected, **EXACT)
    torch.testing.assert_close(stats.col_lse, expected, **EXACT)
    assert stats.pos.shape == (0,)


def test_ids_leave_pairs_out_but_never_the_positive() -> None:
    query, key = double(6, 4, seed=1), double(9, 4, seed=2)
    query_ids, key_ids = torch.arange(6) % 3, torch.arange(9) % 3
    labels = torch.tensor([0, 1, 2, 5, 8, 1])
    scores = 1.5 * query @ key.T
    stats = dense_pair_stats(query, key, 1.5, labels=labels, query_ids=query_ids, key_ids=key_ids)
    without = dense_pair_stats(query, key, 1.5, query_ids=query_ids, key_ids=key_ids)
    for i in range(6):
        counted = [j for j in range(9) if query_ids[i] != key_ids[j]]
        torch.testing.assert_close(without.row_lse[i], scores[i, counted].logsumexp(0), **EXACT)
        counted = sorted({*counted, int(labels[i])})
        torch.testing.assert_close(stats.row_lse[i], scores[i, counted].logsumexp(0), **EXACT)
        torch.testing.assert_close(stats.pos[i], scores[i, labels[i]], **EXACT)
    for j in range(9):
        counted = [i for i in range(6) if query_ids[i] != key_ids[j] or labels[i] == j]
        torch.testing.assert_close(stats.col_lse[j], scores[counted, j].logsumexp(0), **EXACT)


def test_a_query_without_pairs_is_minus_infinity() -> None:
    query, key = double(2, 3, seed=1), double(4, 3, seed=2)
    ids = torch.tensor([0, 1]), torch.zeros(4, dtype=torch.long)
    stats = dense_pair_stats(query, key, query_ids=ids[0], key_ids=ids[1])
    assert stats.row_lse[0] == -torch.inf and stats.row_lse[1].isfinite()

"""The primitive with its pair rule: labels, self exclusion and ids, for two sets of features and for one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile.engine.rule import PairRule
from tests.helpers import (
    DTYPES,
    Function,
    PairStats,
    assert_precise,
    assert_same,
    dense_pair_stats,
    features,
    labels_of,
    pair_stats,
    randn,
    run,
)

SCALE = torch.tensor(5.0)


def ids(n: int, *, seed: int, kinds: int = 6) -> Tensor:
    return torch.randint(kinds, (n,), generator=torch.Generator().manual_seed(seed))


def ours(rule: dict[str, Any], *, itself: bool = False, **keywords: Any) -> Function:
    def function(q: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        if itself:
            return pair_stats(q, None, s + 0 * k.sum(), PairRule(**rule), **keywords)
        return pair_stats(q, k, s, PairRule(**rule), **keywords)

    return function


def dense(rule: dict[str, Any], *, itself: bool = False, **keywords: Any) -> Function:
    def function(q: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        if itself:
            return dense_pair_stats(q, None, s + 0 * k.sum(), **rule, **keywords)
        return dense_pair_stats(q, k, s, **rule, **keywords)

    return function


N, M, D = 14, 22, 9
OTHER = (torch.arange(N) + N // 2) % N  # two views of each example: each is the other's positive

RULES_OF_ONE_SET: dict[str, dict[str, Any]] = {
    "nothing": {},
    "self": {"exclude_self": True},
    "labels": {"labels": labels_of(N, N, seed=5)},
    "self and labels": {"exclude_self": True, "labels": OTHER},
    "ids": {"query_ids": torch.arange(N) % 7, "key_ids": torch.arange(N) % 7},
    "self, labels and ids": {
        "exclude_self": True,
        "labels": OTHER,
        "query_ids": torch.arange(N) % 7,
        "key_ids": torch.arange(N) % 7,
    },
}

RULES_OF_TWO_SETS: dict[str, dict[str, Any]] = {
    "labels": {"labels": labels_of(N, M, seed=5)},
    "ids": {"query_ids": ids(N, seed=6), "key_ids": ids(M, seed=7)},
    "labels and ids": {"labels": labels_of(N, M, seed=5), "query_ids": ids(N, seed=6), "key_ids": ids(M, seed=7)},
    "self": {"exclude_self": True},
    "self, labels and ids": {
        "exclude_self": True,
        "labels": torch.arange(N) + 1,
        "query_ids": ids(N, seed=6),
        "key_ids": ids(M, seed=7),
    },
}


@pytest.mark.parametrize("tile", [2, 5, None])
@pytest.mark.parametrize("name", RULES_OF_ONE_SET)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_set(dtype: torch.dtype, name: str, tile: int | None) -> None:
    query, rule = features(N, D, seed=1, dtype=dtype), RULES_OF_ONE_SET[name]
    unused = torch.zeros_like(query)
    unused[0, 0] = 1.0  # nothing is computed with it but the size of the largest score
    # With labels and ids the pairs need not be symmetric: the set is used as queries and as keys, two gradients.
    roundings = 3 if {"labels", "query_ids"} <= rule.keys() else 1
    functions = ours(rule, itself=True, tile=tile), dense(rule, itself=True)
    assert_precise(*functions, query, unused, SCALE, share=16.0, roundings=roundings)


@pytest.mark.parametrize("tile", [2, 5, None])
@pytest.mark.parametrize("name", RULES_OF_TWO_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_sets(dtype: torch.dtype, name: str, tile: int | None) -> None:
    query, key = features(N, D, seed=1, dtype=dtype), features(M, D, seed=2, dtype=dtype)
    rule = RULES_OF_TWO_SETS[name]
    for sides in ({"cols": False}, {"rows": False}, {}):
        assert_precise(ours(rule, tile=tile, **sides), dense(rule, **sides), query, key, SCALE, share=8.0)


@pytest.mark.parametrize("tile", [3, None])
def test_one_set_with_positives_that_are_not_mutual(tile: int | None) -> None:
    """A positive of equal id is spared for its query alone, so that the pairs that count are not symmetric."""
    query, labels = features(N, D, seed=1), (torch.arange(N) + 3) % N
    ids = torch.arange(N) % 3 // 2
    rule: dict[str, Any] = {"exclude_self": True, "labels": labels, "query_ids": ids, "key_ids": ids}
    got = pair_stats(query, None, 5.0, PairRule(**rule), tile=tile)
    expected = dense_pair_stats(query, None, 5.0, **rule)
    for ours_, dense_ in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_, dense_)


@pytest.mark.parametrize("name", RULES_OF_TWO_SETS)
def test_cache_changes_no_bit_under_a_rule(name: str) -> None:
    query, key, rule = features(N, D, seed=1), features(M, D, seed=2), RULES_OF_TWO_SETS[name]
    without = run(ours(rule, tile=7), query, key, SCALE)
    for cache_bytes in (700, 1 << 20):
        assert_same(run(ours(rule, tile=7, cache_bytes=cache_bytes), query, key, SCALE), without)


@pytest.mark.parametrize("name", ["self", "ids", "self, labels and ids"])
def test_scale_alone_takes_its_gradient_under_a_rule(name: str) -> None:
    """Without a feature gradient, the gradient of the scale is a sum over scores, of which some are -inf."""
    query, key = features(N, D, seed=1, dtype=torch.float64), features(M, D, seed=2, dtype=torch.float64)
    grads: list[Tensor] = []
    for stats in (ours(RULES_OF_TWO_SETS[name], tile=6), dense(RULES_OF_TWO_SETS[name])):
        scale = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
        values = [x for x in stats(query, key, scale) if len(x)]
        upstream = [randn(len(x), seed=seed, dtype=torch.float64) for seed, x in enumerate(values)]
        grads += torch.autograd.grad(values, scale, upstream)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=0.0)


def dense_(query: Tensor, scale: Tensor, rule: dict[str, Any]) -> PairStats:
    return dense_pair_stats(query, None, scale, **rule)


def test_positive_is_the_score_even_where_the_pair_is_excluded() -> None:
    query = features(11, 4, seed=1)
    rule: dict[str, Any] = {"exclude_self": True, "labels": torch.arange(11)}
    got = pair_stats(query, None, 2.0, PairRule(**rule), tile=4)
    expected = dense_pair_stats(query, None, 2.0, **rule)
    assert torch.allclose(got.pos, expected.pos) and torch.allclose(got.row_lse, expected.row_lse)
    for wants in (True, False):  # with a feature gradient, and the scale's alone
        grads = []
        for function in (
            lambda q, s: pair_stats(q, None, s, PairRule(**rule), tile=4),
            lambda q, s: dense_(q, s, rule),
        ):
            leaf, scale = query.clone().requires_grad_(wants), torch.tensor(2.0, requires_grad=True)
            stats = function(leaf, scale)
            (stats.row_lse - stats.pos).sum().backward()
            grads.append([scale.grad, leaf.grad] if wants else [scale.grad])
        torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("side", ["row", "column"])
@pytest.mark.parametrize("tile", [1, 4, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_side_without_pairs_harms_no_other(dtype: torch.dtype, tile: int | None, side: str) -> None:
    """Query 3 has the id of every key, or key 5 that of every query: its log-sum-exp is -inf, the rest is as ever."""
    query, key = features(9, 5, seed=1, dtype=dtype), features(12, 5, seed=2, dtype=dtype)
    query_ids, key_ids = torch.zeros(9, dtype=torch.long), torch.ones(12, dtype=torch.long)
    if side == "row":
        query_ids[3] = 1
    else:
        key_ids[5] = 0
    rule = {"query_ids": query_ids, "key_ids": key_ids}

    def finite(stats: Function) -> Function:
        def function(q: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, ...]:
            row_lse, col_lse, _ = stats(q, k, s)
            assert row_lse.isneginf().nonzero().flatten().tolist() == ([3] if side == "row" else [])
            assert col_lse.isneginf().nonzero().flatten().tolist() == ([5] if side == "column" else [])
            return row_lse[row_lse.isfinite()], col_lse[col_lse.isfinite()]

        return function

    assert_precise(finite(ours(rule, tile=tile)), finite(dense(rule)), query, key, SCALE, share=8.0)


def test_zero_upstream_for_a_row_without_pairs() -> None:
    """The whole vector of log-sum-exps may flow on, if -inf is given no weight."""
    query, key = features(9, 5, seed=1).requires_grad_(), features(12, 5, seed=2).requires_grad_()
    query_ids = torch.zeros(9, dtype=torch.long)
    query_ids[3] = 1
    rule = PairRule(query_ids=query_ids, key_ids=torch.ones(12, dtype=torch.long))
    scale = torch.tensor(5.0, requires_grad=True)
    row_lse = pair_stats(query, key, scale, rule, cols=False, tile=4).row_lse
    assert row_lse[3] == -torch.inf
    weight = torch.ones(9)
    weight[3] = 0.0
    grads = torch.autograd.grad(row_lse, (query, key, scale), weight)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0][3].any() and grads[0][:3].any()


def test_every_pair_excluded() -> None:
    query = features(1, 4, seed=1).requires_grad_()
    row_lse = pair_stats(query, None, 1.0, PairRule(exclude_self=True)).row_lse
    assert row_lse.tolist() == [-torch.inf]
    (grad,) = torch.autograd.grad(row_lse, query, torch.zeros(1))
    assert not grad.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_result_depends_on_uninitialised_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = features(N, D, seed=1, dtype=dtype), features(M, D, seed=2, dtype=dtype)
    one_set, two_sets = RULES_OF_ONE_SET["self and labels"], RULES_OF_TWO_SETS["labels and ids"]
    functions = [
        lambda q, k, s: ct.clip_loss(q, k[:N], s, tile=7),
        ours(two_sets, tile=7),
        ours(two_sets, tile=7, cache_bytes=700),
        ours(two_sets, cols=False),
        ours(one_set, itself=True, tile=7),
    ]
    clean = [run(function, query, key, SCALE) for function in functions]

    poisoned: list[int] = []

    def poison(make: Any) -> Any:
        def poisoned_make(*args: Any, **keywords: Any) -> Tensor:
            made: Tensor = make(*args, **keywords)
            poisoned.append(made.numel())
            return made.fill_(torch.nan) if made.is_floating_point() else made

        return poisoned_make

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
    for function, expected in zip(functions, clean, strict=True):
        assert_same(run(function, query, key, SCALE), expected)
    assert max(poisoned) >= 7 * 7  # the tiles were among them

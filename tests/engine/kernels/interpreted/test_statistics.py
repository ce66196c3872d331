"""Ranks, ties, margins, sums and kept scores in kernels: values and gradients by the rule, counts exactly."""

from tests.engine.kernels.interpreted.battery import (  # isort: skip  # first: it sets the mode of Triton
    KINDS,
    close_ids,
    close_positives,
    colliding_ids,
    counting_in_kernels,
    half,
    judge_counts,
    numbers,
    positives,
    watched,
)

from typing import Any

import pytest
import torch
from torch import Tensor

from contratile.engine.backends import triton_configs, triton_launch
from contratile.engine.backends.triton_configs import Config
from tests.helpers import assert_same, run

N, M, D = 57, 61, 21
"""Four tiles of 16 each way, with interior ones."""
SCALE = torch.tensor(7.0)
WORKSPACE = 4096
"""Several launches."""


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_configs, "WORKSPACE_BYTES", WORKSPACE)


def rule_of(n: int, m: int, *, spread: bool = False) -> dict[str, Any]:
    """Labels, ids and classes: near the diagonal, or anywhere."""
    labels = positives(n, m) if spread else close_positives(n, m)
    classes = {"query_classes": torch.arange(n) % 4, "key_classes": torch.arange(m) % 3}
    return {"labels": labels, **close_ids(n, m), **classes}


def without(rule: dict[str, Any], *words: str) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if not any(word in name for word in words)}


OPTIONS: dict[str, dict[str, Any]] = {
    "ranks": {"ranks": True},
    "ties": {"ranks": True, "ties": True},
    "margin": {"margin": 0.15},
    "all": {"sums": "all"},
    "equal": {"sums": "equal"},
    "training": {"ranks": True, "sums": "differ", "col_sums": False},
    "differ, both": {"sums": "differ"},
    "everything": {"ranks": True, "ties": True, "sums": "differ", "margin": 0.15, "cache_bytes": 4 * 40 * M},
    "classes, ranks and margin": {"ranks": True, "sums": "equal", "margin": 0.2},
    "rows": {"ranks": True, "sums": "all", "cols": False},
    "positives": {"ranks": True, "ties": True, "sums": "same", "same_id": "positive"},
}
IDS = ("positives", "training", "differ, both", "everything")
MANY = [pytest.param(kind, marks=() if kind == "ieee" else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", MANY)
def test_two_sets(kind: str, name: str) -> None:
    q, k = numbers(N, D, seed=1, kind=kind), numbers(M, D, seed=2, kind=kind)
    unused = [*(() if name in IDS else ("ids",)), *(() if "sums" in OPTIONS[name] else ("classes",))]
    rule = without(rule_of(N, M), *unused)
    with watched() as paths:
        judge_counts(rule, q, k, SCALE, kind=kind, **OPTIONS[name])
    assert paths.fast >= 2 and paths.gradient_fast >= 2
    assert not paths.marked or "margin" in OPTIONS[name]  # a row of a tile may be dropped as a whole


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_labels_anywhere(kind: str, name: str) -> None:
    q, k = numbers(N, D, seed=1, kind=kind), numbers(M, D, seed=2, kind=kind)
    judge_counts(rule_of(N, M, spread=True), q, k, SCALE, kind=kind, **OPTIONS[name])


@pytest.mark.parametrize("options", [OPTIONS["ranks"], OPTIONS["everything"]], ids=["ranks", "everything"])
def test_labels_anywhere_with_ids(options: dict[str, Any]) -> None:
    q, k = numbers(N, D, seed=1, kind="ieee"), numbers(M, D, seed=2, kind="ieee")
    judge_counts(rule_of(N, M, spread=True), q, k, SCALE, kind="ieee", **options)


ONE_SET: dict[str, dict[str, Any]] = {
    "views": {"ranks": True, "sums": "all"},
    "ties": {"ranks": True, "ties": True},
    "classes": {"sums": "equal"},
    "classes and ranks": {"sums": "equal", "ranks": True},
    "margin": {"margin": 0.1},
}


@pytest.mark.parametrize("name", ONE_SET)
@pytest.mark.parametrize("kind", MANY)
def test_one_set(kind: str, name: str) -> None:
    n = 92
    q, unused = numbers(n, D, seed=1, kind=kind), numbers(n, D, seed=2, kind=kind)
    classes = torch.arange(n) % 4
    rule = {"exclude_self": True, "labels": (torch.arange(n) + n // 2) % n}
    rule |= {"query_classes": classes, "key_classes": classes}
    with watched() as paths:
        judge_counts(rule, q, unused, SCALE, kind=kind, one_set=True, cols=False, **ONE_SET[name])
    assert paths.fast >= 4 and paths.gradient_fast >= 4


@pytest.mark.parametrize(("name", "scale"), half(["ranks", "margin", "ties", "everything"], [-6.0, 0.0]))
def test_scales_that_turn_the_order(name: str, scale: float) -> None:
    q, k = numbers(N, D, seed=1, kind="ieee"), numbers(M, D, seed=2, kind="ieee")
    judge_counts(rule_of(N, M), q, k, torch.tensor(scale), kind="ieee", **OPTIONS[name])


@pytest.mark.parametrize("kind", ["bf16", "fp16", "ieee"])
@pytest.mark.parametrize("bias", [None, -4.0])
def test_softplus(bias: float | None, kind: str) -> None:
    q, k = numbers(N, D, seed=1, kind=kind), numbers(N, D, seed=2, kind=kind)
    rule = {"labels": torch.arange(N), "bias": None if bias is None else torch.tensor(bias)}
    options: dict[str, Any] = {"reduce": "softplus", "ranks": True, "sums": "all", "col_sums": False}
    with watched() as paths:
        judge_counts(rule, q, k, SCALE, kind=kind, **options)
    assert paths.fast and paths.gradient_fast and not paths.programs


SHAPES = [(1, 1), (1, 40), (40, 1), (33, 16), (16, 48), (47, 31)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_shapes(shape: tuple[int, int]) -> None:
    n, m = shape
    q, k = numbers(n, D, seed=1, kind="bf16"), numbers(m, D, seed=2, kind="bf16")
    options = OPTIONS["everything"] | {"cache_bytes": 2 * n * m}
    rule = rule_of(n, m)
    rule["query_ids"] = rule["query_ids"] + (n == 1)  # a column without pairs would have a log-sum-exp of -inf
    judge_counts(rule, q, k, SCALE, kind="bf16", **options)


SHAPED = [Config(64, 32, 16, 4, 2), Config(128, 32, 16, 8, 2), Config(64, 16, 32, 4, 2), Config(32, 64, 16, 4, 2)]


@pytest.mark.parametrize(("name", "config"), half(["training", "everything", "equal"], SHAPED))
@pytest.mark.parametrize(
    "kind", ["fp16", pytest.param("bf16", marks=pytest.mark.slow), pytest.param("tf32", marks=pytest.mark.slow)]
)
def test_tiles_of_other_shapes(name: str, kind: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Careful tiles have 32 rows."""
    monkeypatch.setattr(triton_launch, "config_for", lambda *_, **__: config)
    n, m = 300, 203
    q, k = numbers(n, 16, seed=1, kind=kind), numbers(m, 16, seed=2, kind=kind)
    rule = rule_of(n, m)
    rule["labels"] = torch.arange(n) * m // n
    options = OPTIONS[name] | ({"cache_bytes": 4 * m * 140} if "cache_bytes" in OPTIONS[name] else {})
    with watched() as paths:
        judge_counts(rule, q, k, SCALE, kind=kind, **options)
    assert paths.fast and paths.special and paths.gradient_fast and paths.gradient_special


def test_one_set_of_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "config_for", lambda *_, **__: Config(64, 64, 16, 4, 2))
    n = 280
    q, unused = numbers(n, 16, seed=1, kind="fp16"), numbers(n, 16, seed=2, kind="fp16")
    rule = {"exclude_self": True, "labels": (torch.arange(n) + n // 2) % n}
    judge_counts(rule, q, unused, SCALE, kind="fp16", one_set=True, cols=False, ranks=True, sums="all")


# --- exact counts -------------------------------------------------------------------------------------------------


def whole(n: int, seed: int) -> Tensor:
    """Features whose products are whole numbers, many of them the same."""
    return torch.randint(-1, 3, (n, 6), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize(
    ("kind", "ties", "spread", "scale"), half(["bf16", "ieee"], [False, True], [False, True], [0.5, -0.5])
)
def test_exact_ties(kind: str, ties: bool, spread: bool, scale: float) -> None:
    """The same counts as the oracle and as the torch backend."""
    q, k = (whole(n, seed).to(torch.bfloat16 if kind == "bf16" else torch.float32) for n, seed in ((N, 1), (M, 2)))
    rule, factor = rule_of(N, M, spread=spread), torch.tensor(scale)
    options: dict[str, Any] = {"ranks": True, "ties": ties, "sums": "differ"}
    judge_counts(rule, q, k, factor, kind=kind, **options)
    found: list[dict[str, Tensor]] = [{}, {}]
    for backend, into in zip(("triton", "torch"), found, strict=True):
        counting_in_kernels(rule, into, kind=kind, backend=backend, **options)(q, k, factor)
    assert set(found[0]) == set(found[1]) and len(found[0]) == 4 + 2 * ties
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not ties or float(found[0]["row_equal"].max()) > 3


@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_exact_ties_of_one_set(scale: float) -> None:
    n = 60
    q, unused = whole(n, 1), whole(n, 2)
    rule = {"exclude_self": True, "labels": (torch.arange(n) + n // 2) % n}
    options: dict[str, Any] = {"ranks": True, "ties": True, "cols": False}
    judge_counts(rule, q, unused, torch.tensor(scale), kind="ieee", one_set=True, **options)


# --- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "ieee"])
def test_equal_hashes_of_different_ids(kind: str) -> None:
    """Such tiles are careful, and exclude nothing."""
    q, k = numbers(N, D, seed=1, kind=kind), numbers(M, D, seed=2, kind=kind)
    ids = colliding_ids(N, M)
    assert not torch.isin(ids["query_ids"], ids["key_ids"]).any()
    with watched() as paths:
        judge_counts({"labels": close_positives(N, M), **ids}, q, k, SCALE, kind=kind, ranks=True, sums="differ")
    assert paths.special == 16 and not paths.fast


@pytest.mark.parametrize("place", [(0, 47), (3, 31), (15, 32), (31, 0), (47, 0), (20, 40), (16, 47)], ids=str)
def test_one_excluded_pair_is_found(place: tuple[int, int]) -> None:
    """In one tile of the interior, wherever it is in the sorted hashes; no other tile is careful for it."""
    n = 48
    q, k = numbers(n, D, seed=1, kind="ieee"), numbers(n, D, seed=2, kind="ieee")
    for base in (-(1 << 40), 0, 1 << 35):
        query_ids, key_ids = torch.arange(n) * 2 + base, torch.arange(n) * 2 + 1 + base
        query_ids[place[0]] = key_ids[place[1]]
        rule = {"labels": torch.arange(n), "query_ids": query_ids, "key_ids": key_ids}
        with watched() as paths:
            judge_counts(rule, q, k, SCALE, kind="ieee", ranks=True, sums="differ")
        assert (paths.fast, paths.special) == (5, 4)
        assert (paths.gradient_fast, paths.gradient_special) == (5, 4)


# --- kept scores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "name", "kind"),
    half([16, 40, N], ["plain", "training", "classes, ranks and margin", "everything"], ["bf16", "ieee"]),
)
def test_kept_scores_change_nothing(rows: int, name: str, kind: str) -> None:
    """To the last bit."""
    q, k = numbers(N, D, seed=1, kind=kind), numbers(M, D, seed=2, kind=kind)
    options = OPTIONS.get(name, {}) | {"cache_bytes": 0}
    outcomes = []
    for size in (0, 4 * rows * M):
        with watched() as _:
            how = options | {"cache_bytes": size}
            outcomes.append(run(counting_in_kernels(rule_of(N, M), {}, kind=kind, **how), q, k, SCALE))
    assert_same(*outcomes)


def test_kept_scores_of_tiles_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward tiles of other heights; the last rows are no whole tile of either."""
    configs = {"forward": Config(64, 32, 16, 4, 2), "gradient": Config(16, 32, 16, 4, 2)}
    for height in (16, 128):
        configs["gradient"] = Config(height, 32, 16, 4, 2)
        monkeypatch.setattr(triton_launch, "config_for", lambda *_, kernel, **__: configs[kernel])
        n, m = 150, 90
        q, k = numbers(n, 16, seed=1, kind="ieee"), numbers(m, 16, seed=2, kind="ieee")
        rule = {"labels": torch.arange(n) * m // n}
        judge_counts(rule, q, k, SCALE, kind="ieee", cache_bytes=4 * n * m)
        judge_counts(rule, q, k, SCALE, kind="ieee", cache_bytes=2 * n * m)

"""Several directions in one loss, and hard negatives that queries share: against the dense definition, over ranks,
compiled, in chunks, and what they refuse."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import contratile as ct
from contratile import reference
from tests.helpers import DTYPES, accumulation, assert_same, features, randn, run
from tests.losses.fuzz import judge
from tests.losses.fuzz_cases import Case
from tests.losses.test_family_ring import SIZES, compare, integers, part, scalar
from tests.ranks import pool

ALL: Any = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
BOTH: Any = ("query_to_doc", "doc_to_query")
N, D, E, H = 33, 8, 11, 2


def drawn(seed: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A random call in fp64: its tensors with gradients, and its other keywords."""
    r, generator = Random(seed), torch.Generator().manual_seed(seed)
    n, e, h = r.choice([1, 2, 19, N]), r.choice([1, E]), r.choice([1, H])

    def some(share: float) -> bool:
        return r.random() < share

    def ids(*shape: int) -> Tensor:
        return torch.randint(12, shape, generator=generator)

    def rows(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, D, generator=generator, dtype=torch.float64), dim=-1)

    leaves = {"query": rows(n), "key": rows(n), "scale": torch.tensor(r.choice([1.0, 100.0]), dtype=torch.float64)}
    options: dict[str, Any] = {"reduction": r.choice(["mean", "sum", "none"])}
    if some(0.5):
        leaves["extra_keys"] = rows(e)
    if some(0.6):
        leaves["hard_negatives"] = rows(n, h)
        options["share_hard_negatives"] = some(0.6)
    if some(0.6):
        options["ids"] = (ids(n), ids(n)) if some(0.5) else ids(n)
        options |= {"extra_ids": ids(e)} if "extra_keys" in leaves and some(0.7) else {}
        options |= {"hard_ids": ids(n, h)} if "hard_negatives" in leaves and some(0.7) else {}
    if some(0.3):
        options["weights"] = torch.rand(n, generator=generator, dtype=torch.float64)
    more = [name for name in ALL[1:] if some(0.5)]
    options["directions"] = ("query_to_doc", *more)
    if set(more) <= {"doc_to_query"}:
        options |= {"partition_mode": "per_direction"} if some(0.5) else {}
        options |= {"margin": 0.1} if some(0.2) else {}
    if "margin" not in options and some(0.6):
        mode = r.choice(["in_batch_negatives", "hard_negatives", "all_negatives"])
        options |= {"hardness_mode": mode, "hardness_strength": r.choice([0.5, 9.0])}
    return leaves, options


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 80, 20)], ids=str)
def test_directions_with_every_other_option(seeds: range) -> None:
    for seed in seeds:
        leaves, options = drawn(seed)

        def loss(
            function: Callable[..., Tensor], x: tuple[str, ...] = (*leaves,), **more: Any
        ) -> Callable[..., Tensor]:
            def call(*given: Tensor) -> Tensor:
                return function(**dict(zip(x, given, strict=True)), **more)

            return call

        exact = run(loss(reference.info_nce, **options), *leaves.values())
        for how in ({"tile": 8}, {"cache_bytes": 1 << 16, "tile": 16}, {"backend": "dense"}):
            ours = run(loss(ct.info_nce, **options, **how), *leaves.values())
            for got, want in zip(ours.values + ours.grads, exact.values + exact.grads, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10, msg=f"case {seed}")


@pytest.mark.parametrize("near", [False, True], ids=["random", "near convergence"])
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_precision(dtype: torch.dtype, scale: float, near: bool) -> None:
    """By the rule of the fuzzer, for features with any strides."""
    query = features(N, D, seed=1)
    key = features(N, D, seed=2)
    if near:
        key = F.normalize(query + 0.05 * key)
    hard = features(N * H, D, seed=3).view(N, H, D)
    leaves = {"query": query.t().contiguous().t(), "key": key.repeat_interleave(2, 1)[:, ::2], "hard_negatives": hard}
    leaves = {name: x.to(dtype) for name, x in leaves.items()}
    leaves["scale"] = torch.tensor(scale, dtype=accumulation(dtype))
    hardness = {"hardness_mode": "all_negatives", "hardness_strength": 9.0}
    for constants in ({"directions": ALL, "share_hard_negatives": True}, {"directions": BOTH, **hardness}):
        for found in judge(Case("directions", "info_nce", dtype, "unit", leaves, constants, {"tile": 8})):
            assert found.ratio <= 1, str(found)


def test_biases_do_not_round_scores_that_hardness_multiplies() -> None:
    """At a small scale the strength's share of a score is many times larger than what biases would be added to."""
    leaves = {"query": features(N, D, seed=1), "key": features(N, D, seed=2), "scale": torch.tensor(0.004)}
    constants: dict[str, Any] = {
        "key_bias": 10 * randn(N, seed=3),
        "hardness_mode": "all_negatives",
        "hardness_strength": 9.0,
    }
    how: dict[str, Any]
    for how in ({"tile": 8}, {"cache_bytes": 1 << 20}):
        for found in judge(Case("biases", "info_nce", torch.float32, "unit", leaves, constants, how)):
            assert found.ratio <= 1, str(found)
        alone = run(
            lambda s, how=how: ct.info_nce(leaves["query"], leaves["key"], s, **constants, **how), leaves["scale"]
        )
        whole = run(lambda q, k, s, how=how: ct.info_nce(q, k, s, **constants, **how), *leaves.values())
        torch.testing.assert_close(alone.grads[0], whole.grads[2])


def test_all_directions_are_the_loss_of_twice_as_many_views() -> None:
    """GTE's loss: each view of [queries; documents] against all others, both views of a pair in one softmax."""
    q, k = (features(N, D, seed=seed, dtype=torch.float64) for seed in (1, 2))
    z = torch.cat([q, k])
    row, _ = ct.pair_lse(z, z.clone(), 20.0, cols=False)
    own = 20 * (z * z).sum(1)
    rest = row + torch.log1p(-(own - row).exp())
    want = torch.logaddexp(rest[:N], rest[N:]) - 20 * (q * k).sum(1)
    torch.testing.assert_close(ct.info_nce(q, k, 20.0, directions=ALL, reduction="none"), want)


def test_two_directions_apart_are_the_symmetric_loss() -> None:
    q, k = (features(N, D, seed=seed) for seed in (1, 2))
    s = torch.tensor(20.0)
    options: dict[str, Any] = {"margin": 0.1, "tile": 8}
    one = run(lambda *x: ct.info_nce(*x, directions=BOTH, partition_mode="per_direction", **options), q, k, s)
    assert_same(one, run(lambda *x: ct.clip_loss(*x, **options), q, k, s))
    alone = run(lambda *x: ct.info_nce(*x, partition_mode="per_direction"), q, k, s)
    assert_same(alone, run(lambda *x: ct.info_nce(*x), q, k, s))


def test_statistics_are_those_of_queries_against_documents() -> None:
    q, k, hard = features(N, D, seed=1), features(N, D, seed=2), features(N * H, D, seed=3).view(N, H, D)
    more: dict[str, Any] = {"return_stats": True, "tile": 8}
    options: dict[str, Any] = {"hardness_mode": "in_batch_negatives", "hardness_strength": 3.0, "directions": ALL}
    _, got = ct.info_nce(q, k, 5.0, hard_negatives=hard, share_hard_negatives=True, **options, **more)
    _, want = ct.info_nce(q, k, 5.0, extra_keys=hard.flatten(0, 1), **more)
    _, back = ct.clip_loss(q, k, 5.0, **more)
    torch.testing.assert_close((got.row_top1, got.row_rank), (want.row_top1, want.row_rank))
    torch.testing.assert_close((got.col_top1, got.col_rank), (back.col_top1, back.col_rank))
    torch.testing.assert_close((got.negative_logit, got.positive_logit), (want.negative_logit, want.positive_logit))


# --- over ranks, compiled, in chunks ------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "joint": {"directions": ALL},
    "hardness": {"directions": ALL, "hardness_mode": "in_batch_negatives", "hardness_strength": 2.0},
    "own hardness": {"hardness_mode": "hard_negatives", "hardness_strength": 2.0},
    "apart": {
        "directions": BOTH,
        "partition_mode": "per_direction",
        "hardness_mode": "all_negatives",
        "hardness_strength": 2.0,
    },
}


def direction_errors(which: str, sizes: tuple[int, ...], tile: int) -> list[float]:
    n, extras = sum(sizes), tuple(range(1, len(sizes) + 1))
    ids, extra_ids, hard_ids = integers(n, 9, 1), integers(sum(extras), 9, 2), integers(n * H, 9, 3).view(n, H)
    weights = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    split = [(randn(n, D, seed=seed, dtype=torch.float64), sizes) for seed in (1, 2)]
    split += [(randn(sum(extras), D, seed=3, dtype=torch.float64), extras)]
    split += [(randn(n, H, D, seed=4, dtype=torch.float64), sizes)]

    def loss(function: Callable[..., Tensor], deal: Callable[[Tensor, tuple[int, ...]], Tensor], **more: Any) -> Any:
        options: dict[str, Any] = {
            "ids": deal(ids, sizes),
            "hard_ids": deal(hard_ids, sizes),
            "weights": deal(weights, sizes),
        }
        options |= {"extra_ids": deal(extra_ids, extras), "share_hard_negatives": True, **OPTIONS[which], **more}
        return lambda q, k, e, h, s: function(q, k, s, extra_keys=e, hard_negatives=h, **options)

    return compare(loss(ct.info_nce, part, tile=tile), loss(reference.info_nce, lambda x, _: x), [scalar(1.1)], split)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("which", OPTIONS)
def test_directions_over_ranks(which: str, sizes: tuple[int, ...]) -> None:
    for errors in pool(len(sizes)).run(direction_errors, which, sizes, 4):
        assert max(errors) < 1e-11, errors


@pytest.mark.parametrize("which", ["joint", "apart"])
def test_compiled(which: str) -> None:
    q, k, s = features(N, D, seed=1), features(N, D, seed=2), torch.tensor(20.0)
    hard = features(N * H, D, seed=3).view(N, H, D)

    def loss(q: Tensor, k: Tensor, s: Tensor, hard: Tensor) -> Tensor:
        options = OPTIONS[which] | {"hard_negatives": hard, "share_hard_negatives": True, "tile": 8}
        value: Tensor = ct.info_nce(q, k, s, **options)
        return value

    compiled = run(torch.compile(loss, fullgraph=True, backend="aot_eager"), q, k, s, hard)
    torch.testing.assert_close(compiled, run(loss, q, k, s, hard), rtol=2e-5, atol=1e-6)


def test_in_chunks() -> None:
    """Through GradCache, as a module."""
    encoder = torch.nn.Linear(D, D)
    left, right, hard = (randn(N, D, seed=seed) for seed in (1, 2, 3))
    loss = ct.InfoNCE(5.0, **OPTIONS["hardness"], share_hard_negatives=True)

    def whole(q: Tensor, k: Tensor, h: Tensor) -> Tensor:
        value: Tensor = loss(*(F.normalize(x) for x in (q, k)), hard_negatives=F.normalize(h).unsqueeze(1))
        return value

    want = torch.autograd.grad(whole(encoder(left), encoder(right), encoder(hard)), list(encoder.parameters()))
    cache = ct.GradCache([encoder] * 3, whole, chunk_size=10)
    cache.step(left, right, hard)
    torch.testing.assert_close([x.grad for x in encoder.parameters()], list(want))


# --- refusals -----------------------------------------------------------------------------------------------------

X = features(6, 4, seed=1)
IDS = torch.arange(6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"directions": ()}, "directions: expected a tuple of names"),
        ({"directions": "query_to_doc"}, "directions: expected a tuple of names"),
        ({"directions": 3}, "directions: expected a tuple of names"),
        ({"directions": ("query_to_doc", "doc_to_image")}, "directions: expected one of 'query_to_doc'"),
        ({"directions": ("doc_to_query",)}, "directions: expected 'query_to_doc' among them.*contains the positives"),
        ({"partition_mode": "each"}, "partition_mode: expected one of 'joint', 'per_direction'"),
        ({"directions": ALL, "partition_mode": "per_direction"}, "'query_to_query' never contains it"),
        (
            {"directions": ("query_to_doc", "doc_to_doc"), "partition_mode": "per_direction"},
            "'doc_to_doc' never contains it",
        ),
        ({"directions": ALL, "key_bias": torch.ones(6)}, "directions beyond 'query_to_doc' and key_bias"),
        ({"directions": BOTH, "label_smoothing": 0.1}, "directions beyond 'query_to_doc' and label_smoothing"),
        ({"directions": BOTH, "ids": IDS, "same_id": "positive"}, "and same_id='positive'"),
        ({"directions": BOTH, "extra_keys": X, "in_batch_negatives": False}, "and in_batch_negatives=False"),
        ({"directions": ALL, "margin": 0.1}, "directions beyond 'query_to_doc' and margin"),
        ({"directions": ALL}, "query and key: expected equally many rows"),
        ({"share_hard_negatives": True}, "share_hard_negatives: expected hard_negatives= with it"),
        ({"share_hard_negatives": 1}, "share_hard_negatives: expected True or False, got int"),
        (
            {
                "share_hard_negatives": True,
                "hard_negatives": X.unsqueeze(1),
                "hard_mask": torch.ones(6, 1, dtype=torch.bool),
            },
            r"share_hard_negatives and hard_mask: .*extra_keys= instead: hard_negatives\[hard_mask\]",
        ),
        (
            {"hardness_mode": "all_negatives", "hardness_strength": torch.inf},
            "hardness_strength: expected a number from 0 up, got inf",
        ),
        ({"hard_ids": IDS.unsqueeze(1)}, "hard_ids: expected hard_negatives= with it"),
        ({"hard_ids": IDS.unsqueeze(1), "hard_negatives": X.unsqueeze(1)}, "hard_ids: expected ids= with it"),
        ({"hard_ids": IDS, "ids": IDS, "hard_negatives": X.unsqueeze(1)}, r"hard_ids: expected shape \[6, 1\]"),
    ],
)
def test_directions_that_mean_nothing(options: dict[str, Any], says: str) -> None:
    query = X[:5] if "equally" in says else X
    with pytest.raises((ValueError, TypeError), match=says):
        ct.info_nce(query, X, **options)


def test_documents_need_a_query_each() -> None:
    labels = torch.tensor([3, 1, 0, 2, 5, 4])
    with pytest.raises(ValueError, match=r"labels: expected none with directions="):
        ct.info_nce(X, X, labels=labels, directions=BOTH)


def test_the_symmetric_loss_has_no_directions() -> None:
    clip_loss: Any = ct.clip_loss
    for name in ("directions", "partition_mode", "hardness_mode", "hardness_strength", "share_hard_negatives"):
        with pytest.raises(TypeError, match=f"got {name}=.*info_nce has it"):
            clip_loss(X, X, **{name: "joint"})

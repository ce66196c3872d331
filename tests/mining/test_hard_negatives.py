"""Hard negatives: those of a dense search and of sentence-transformers, for any tile and number of ranks."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import contratile as ct
from tests.helpers import features, randn
from tests.mining.dense import candidates, padded
from tests.ranks import pool
from tests.torchvision_repair import repair_torchvision

RULES: list[dict[str, Any]] = [
    {},
    {"num_negatives": 1},
    {"range_min": 3},
    {"range_min": 2, "range_max": 9},
    {"absolute_margin": 0.0},
    {"absolute_margin": 2.0, "range_min": 1},
    {"relative_margin": 0.25},
    {"relative_margin": 0.25, "absolute_margin": 1.0, "max_score": 3.0, "min_score": -2.0},
    {"max_score": 1.0, "range_max": 30},
    {"min_score": 8.0},
    {"num_negatives": 40, "range_max": 1000},
]


def whole(n: int, d: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Features whose products are exact in any order, with many equal ones."""
    return torch.randint(-2, 3, (n, d), generator=torch.Generator().manual_seed(seed)).to(dtype)


def pairs_of(n: int, m: int, *, seed: int) -> Tensor:
    """One to three positives of most queries, and none of some; a pair may be given twice."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.cat([torch.randint(n, (n,), generator=generator), torch.arange(n // 2)])
    return torch.stack([queries, torch.randint(m, (len(queries),), generator=generator)], 1)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_negatives_of_a_dense_search(rules: dict[str, Any]) -> None:
    query, key, pairs = whole(37, 6, seed=0), whole(83, 6, seed=1), pairs_of(37, 83, seed=2)
    rules = {"num_negatives": 5, **rules}
    want = padded(candidates(query, key, pairs, **rules), rules["num_negatives"])
    scores = torch.where(want >= 0, (query @ key.t()).gather(1, want.clamp(min=0)), torch.nan)
    for tile in (None, 1, 7, 64, 100):
        found = ct.mine_hard_negatives(query, key, positives=pairs, tile=tile, **rules)
        assert torch.equal(found.indices, want), tile
        torch.testing.assert_close(found.scores, scores, rtol=0, atol=0, equal_nan=True)
    if rules.get("min_score") == 8.0:
        assert bool((want == -1).any()), "the test should have queries with too few negatives"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    query, key = whole(20, 6, seed=0, dtype=dtype), whole(30, 6, seed=1, dtype=dtype)
    pairs = pairs_of(20, 30, seed=2)
    found = ct.mine_hard_negatives(query, key, positives=pairs, relative_margin=0.1, tile=8)
    want = candidates(query.float(), key.float(), pairs, num_negatives=5, relative_margin=0.1)
    assert torch.equal(found.indices, padded(want, 5))
    assert found.scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_forms_of_positives() -> None:
    x = features(12, 8, seed=0)
    rows = torch.arange(12)
    found = ct.mine_hard_negatives(x, x)
    assert not bool((found.indices == rows[:, None]).any())
    torch.testing.assert_close(found.positive_scores, torch.ones(12))
    for positives in (rows, torch.stack([rows, rows], 1)):
        assert torch.equal(ct.mine_hard_negatives(x, x, positives=positives).indices, found.indices)
    alone = ct.mine_hard_negatives(x, x, positives=torch.empty(0, 2, dtype=torch.long), absolute_margin=0.5)
    assert torch.equal(alone.indices[:, 0], rows) and bool(alone.positive_scores.isnan().all())


def test_equal_scores_go_to_the_lower_number() -> None:
    key = torch.ones(70, 4)
    found = ct.mine_hard_negatives(key[:3], key, positives=torch.tensor([0, 1, 69]), tile=8)
    assert found.indices.tolist() == [[1, 2, 3, 4, 5], [0, 2, 3, 4, 5], [0, 1, 2, 3, 4]]


def test_random_negatives_are_drawn_from_the_candidates() -> None:
    query, key = features(300, 8, seed=0), features(400, 8, seed=1)
    rules: dict[str, Any] = {"positives": torch.arange(300), "range_min": 2, "range_max": 14, "max_score": 0.9}
    every = ct.mine_hard_negatives(query, key, num_negatives=12, **rules).indices
    some = ct.mine_hard_negatives(query, key, num_negatives=4, sampling="random", seed=1, **rules)
    assert bool((some.indices[:, :, None] == every[:, None]).any(2).all())
    assert bool((some.scores[:, :-1] >= some.scores[:, 1:]).all()), "sorted"
    places = (some.indices[:, :, None] == every[:, None]).nonzero()[:, 2].bincount(minlength=12)
    assert int(places.min()) > 60 and int(places.max()) < 140, "100 of each are expected"
    again = ct.mine_hard_negatives(query, key, num_negatives=4, sampling="random", seed=1, tile=33, **rules)
    other = ct.mine_hard_negatives(query, key, num_negatives=4, sampling="random", seed=2, **rules)
    assert torch.equal(some.indices, again.indices) and not torch.equal(some.indices, other.indices)


# --- sentence-transformers ------------------------------------------------------------------------------------------


class Given:
    """A model of sentence-transformers whose embeddings are given: texts are "q12" and "k7"."""

    device = torch.device("cpu")

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.query, self.key = query, key

    def encode_query(self, texts: list[str], **options: Any) -> Any:
        return self.query[[int(text[1:]) for text in texts]].numpy()

    def encode_document(self, texts: list[str], **options: Any) -> Any:
        return self.key[[int(text[1:]) for text in texts]].numpy()

    def similarity(self, a: Any, b: Any) -> Tensor:
        return torch.as_tensor(a) @ torch.as_tensor(b).t()

    def similarity_pairwise(self, a: Any, b: Any) -> Tensor:
        return (torch.as_tensor(a) * torch.as_tensor(b)).sum(1)


PEER_RULES: list[dict[str, Any]] = [
    {},
    {"range_min": 4},
    {"range_min": 1, "range_max": 12, "num_negatives": 6},
    {"absolute_margin": 0.0},
    {"absolute_margin": 0.1, "range_min": 2},
    {"relative_margin": 0.05},
    {"relative_margin": 0.3, "absolute_margin": 0.05, "max_score": 0.4, "min_score": -0.1},
    {"max_score": 0.3},
    {"min_score": 0.35},
    {"num_negatives": 20, "range_max": 200},
]


@pytest.mark.peers
@pytest.mark.parametrize("corpus", [False, True], ids=["positives", "corpus"])
@pytest.mark.parametrize("rules", PEER_RULES, ids=str)
def test_the_negatives_of_sentence_transformers(rules: dict[str, Any], corpus: bool) -> None:
    repair_torchvision()
    pytest.importorskip("sentence_transformers")
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    n, m = 60, 90
    query = features(n, 12, seed=0)
    key = torch.nn.functional.normalize(features(m, 12, seed=1) + 0.6 * query[torch.arange(m) % n])
    pairs = pairs_of(n, m, seed=3)
    rules = {"num_negatives": 5, **rules}
    # They know the queries and keys of the pairs, in the order of the pairs, and those of the corpus before.
    keys = list(dict.fromkeys([*(range(m) if corpus else ()), *pairs[:, 1].tolist()]))
    queries = list(dict.fromkeys(pairs[:, 0].tolist()))
    data = Dataset.from_dict({"q": [f"q{i}" for i in pairs[:, 0]], "k": [f"k{i}" for i in pairs[:, 1]]})
    options: dict[str, Any] = {"output_format": "labeled-list", "output_scores": True, "verbose": False}
    if corpus:
        options["corpus"] = [f"k{i}" for i in range(m)]
    theirs = mine_hard_negatives(data, Given(query, key), **options, **rules)  # type: ignore[arg-type]
    numbered = torch.tensor([[queries.index(i), keys.index(j)] for i, j in pairs.tolist()])
    ours = ct.mine_hard_negatives(query[queries], key[keys], positives=numbered, **rules)
    want = {(row["q"], row["k"][0]): (row["k"][1:], row["scores"][1:]) for row in theirs.to_list() if len(row["k"]) > 1}
    assert want
    got = {}
    for i, j in numbered.tolist():
        there = ours.indices[i] >= 0
        if bool(there.any()):
            texts = [f"k{keys[place]}" for place in ours.indices[i, there]]
            got[f"q{queries[i]}", f"k{keys[j]}"] = texts, ours.scores[i, there].tolist()
    assert {pair: texts for pair, (texts, _) in got.items()} == {pair: texts for pair, (texts, _) in want.items()}
    for pair, (_, scores) in want.items():
        assert got[pair][1] == pytest.approx(scores, abs=1e-6)


# --- ranks ----------------------------------------------------------------------------------------------------------

SIZES = [((9,), (20,)), ((8, 9), (20, 11)), ((5, 0, 7), (0, 20, 9)), ((3, 4, 5, 6), (6, 30, 1, 2))]


def mined(queries: tuple[int, ...], keys: tuple[int, ...], rules: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The negatives of this rank's queries."""
    rank = dist.get_rank()
    query, key = whole(sum(queries), 6, seed=0), whole(sum(keys), 6, seed=1)
    pairs, first = pairs_of(len(query), len(key), seed=2), sum(queries[:rank])
    mine = pairs[(pairs[:, 0] >= first) & (pairs[:, 0] < first + queries[rank])] - torch.tensor([first, 0])
    x, y = (all_.split(list(sizes))[rank] for all_, sizes in ((query, queries), (key, keys)))
    found = ct.mine_hard_negatives(x, y, positives=mine, tile=4, **rules)
    return tuple(x.nan_to_num(-99.0) for x in found)  # type: ignore[return-value]


@pytest.mark.parametrize(("queries", "keys"), SIZES, ids=str)
def test_ranks_find_what_one_process_finds(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    query, key = whole(sum(queries), 6, seed=0), whole(sum(keys), 6, seed=1)
    pairs = pairs_of(len(query), len(key), seed=2)
    for rules in ({}, {"relative_margin": 0.2, "range_min": 1}, {"sampling": "random", "range_max": 12}):
        want = ct.mine_hard_negatives(query, key, positives=pairs, group=None, **rules)
        parts = pool(len(queries)).run(mined, queries, keys, rules)
        for got, all_ in zip(zip(*parts, strict=True), want, strict=True):
            assert torch.equal(torch.cat(got), all_.nan_to_num(-99.0)), rules


def refused(bad_rank: int) -> str:
    x = features(4, 3, seed=0)
    if dist.get_rank() == bad_rank:
        x[0, 0] = torch.nan
    try:
        ct.mine_hard_negatives(x, x)
    except ValueError as error:
        return str(error)
    return ""


def test_every_rank_refuses_what_one_rank_cannot_use() -> None:
    told = pool(2).run(refused, 1)
    assert "rank 1: query: expected finite features" in told[0] and told[1].startswith("query: expected finite")


def beyond() -> str:
    x = features(4, 3, seed=0)
    try:
        ct.mine_hard_negatives(x, x, positives=torch.full((4,), 7 + dist.get_rank()))
    except ValueError as error:
        return str(error)
    return ""


def test_positives_are_numbers_of_all_ranks_keys() -> None:
    told = pool(2).run(beyond)
    assert "rank 1: positives: expected indices from 0 to 7" in told[0] and "got 8 to 8" in told[1]


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_negatives": 0}, "num_negatives: expected at least 1"),
        ({"range_min": -1}, "range_min: expected at least 0"),
        ({"range_min": 6, "range_max": 10}, "range_max: expected at least range_min .* 11, got 10"),
        ({"sampling": "best"}, "sampling: expected one of 'top', 'random'"),
        ({"max_score": float("nan")}, "max_score: expected a finite number"),
        ({"tile": 0}, "tile: expected at least 1"),
        ({"sampling": "random", "seed": 2**64}, "seed: expected at most 9223372036854775807, got 1844"),
        ({"seed": 4}, "seed: expected random sampling with it, got sampling 'top'"),
        ({"min_score": 0.9, "max_score": 0.1}, "min_score: expected at most max_score = 0.1, got 0.9"),
        ({"positives": torch.tensor([0, 1])}, r"positives: expected shape \[4\]"),
        ({"positives": torch.tensor([0, 1, 2, 4])}, "positives: expected indices from 0 to 3"),
        ({"positives": torch.tensor([[0, 1], [4, 0]])}, r"positives \(query\): expected indices from 0 to 3"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_values(options: dict[str, Any], message: str) -> None:
    x = features(4, 3, seed=0)
    with pytest.raises(ValueError, match=message):
        ct.mine_hard_negatives(x, x, **options)


def test_bad_types_and_shapes() -> None:
    x = features(4, 3, seed=0)
    with pytest.raises(TypeError, match="relative_margin: expected a number, got str"):
        ct.mine_hard_negatives(x, x, relative_margin="0.05")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positives: expected a tensor of shape"):
        ct.mine_hard_negatives(x, x, positives=torch.zeros(4, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="equally many rows without positives, got 4 and 3"):
        ct.mine_hard_negatives(x, x[:3])
    with pytest.raises(ValueError, match="key: expected at least one key"):
        ct.mine_hard_negatives(x, x[:0], positives=torch.empty(0, 2, dtype=torch.long))


def test_progress_ends_at_one() -> None:
    shares: list[float] = []
    x = randn(10, 3, seed=0)
    ct.mine_hard_negatives(x, x, tile=4, notify=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) == 3


MINE = """
import sys, torch, contratile as ct
from contratile.host_memory import peak_growth
n = int(sys.argv[1])
query, key = (torch.randn(rows, 16) for rows in (1000, n))
ct.mine_hard_negatives(query, key[:1000])
print(peak_growth(lambda: ct.mine_hard_negatives(query, key, positives=torch.arange(1000))))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_memory_does_not_grow_with_the_keys() -> None:
    """The scores would take 64 MiB and 512 MiB."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    peaks = []
    for n in (1 << 14, 1 << 17):
        command = [sys.executable, "-c", MINE, str(n)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert max(peaks) < 48 << 20 and abs(peaks[1] - peaks[0]) < 12 << 20, peaks


MILLION = """
import torch, contratile as ct
from contratile.host_memory import peak_growth
torch.manual_seed(0)
query, key = (torch.nn.functional.normalize(torch.randn(1_000_000, 64)) for _ in range(2))
ct.mine_hard_negatives(query[:3000], key[:3000])
class Enough(Exception): pass
def notify(share):
    raise Enough
def begin():
    try:
        ct.mine_hard_negatives(query, key, notify=notify)
    except Enough:
        pass
print(peak_growth(begin))
few = torch.arange(0, 1_000_000, 31_250)
found = ct.mine_hard_negatives(query[few], key, positives=few)
scores = query[few] @ key.t()
scores[torch.arange(len(few)), few] = -2
best = scores.topk(5)
print(int(((best.indices != found.indices) & (best.values != found.scores)).sum()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_a_million_queries_and_keys() -> None:
    """Memory is complete after the first row of tiles; the result of all queries is a part of it."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    peak, different = map(int, done.stdout.split())
    assert 60e6 < peak < 160 << 20 and different == 0, (peak, different)

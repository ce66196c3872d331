"""The loss of a step: options of the configuration, hard negatives, ids."""

from typing import Any

import pytest
import torch

import contratile as ct
from contratile.data.chunk_maker import Chunk, Negatives
from contratile.train.config import LossConfig
from contratile.train.objective import SecondFeatures, batch_loss, pair_facts, text_ids
from tests.helpers import features

N, H, D = 6, 2, 8


def chunk(texts: list[str], names: list[str], hard: list[list[str]] | None = None) -> Chunk:
    negatives = None
    if hard is not None:
        there = torch.tensor([[bool(text) for text in row] for row in hard])
        negatives = Negatives(None, there, [text for row in hard for text in row])
    return Chunk(None, None, torch.arange(len(texts)), names, texts, names, negatives)


TEXTS = ["a", "b", "a", "c", "d", "e"]
NAMES = ["1", "1", "2", "3", "4", "5"]
HARD = [["x", "b"], ["", ""], ["y", ""], ["a", "z"], ["", "w"], ["x", "x"]]


def parts() -> tuple[Any, ...]:
    left, right = (features(N, D, seed=seed).requires_grad_() for seed in (1, 2))
    return left, right, features(N * H, D, seed=3).requires_grad_(), torch.tensor(7.0, requires_grad=True)


def test_facts_hold_ids_and_places() -> None:
    facts = pair_facts(chunk(TEXTS, NAMES, HARD), "right")
    assert facts.shape == (N, 1 + 2 * H)
    assert torch.equal(facts[:, 0], text_ids(TEXTS))
    assert facts[:, 1:3].tolist() == [[int(bool(text)) for text in row] for row in HARD]
    assert torch.equal(facts[:, 3:], text_ids([text for row in HARD for text in row]).view(N, H))
    assert torch.equal(pair_facts(chunk(TEXTS, NAMES), "left"), text_ids(NAMES).unsqueeze(1))


@pytest.mark.parametrize("loss", ["clip", "infonce"])
@pytest.mark.parametrize("ids", ["left", "right"])
@pytest.mark.parametrize("mode", ["all", "own"])
@pytest.mark.parametrize("swapped", [False, True])
def test_hard_negatives_reach_the_loss(loss: Any, ids: Any, mode: Any, swapped: bool) -> None:
    """Against the public functions, called as their documentation says."""
    left, right, hard, scale = parts()
    config = LossConfig(loss=loss, ids=ids, hard_negatives=mode)
    facts = pair_facts(chunk(TEXTS, NAMES, HARD), ids)
    found, stats, *_ = batch_loss(config, left, right, facts, hard, scale=scale, swapped=swapped)
    there = torch.tensor([[bool(text) for text in row] for row in HARD])
    options: dict[str, Any] = {"ids": text_ids(TEXTS if ids == "right" else NAMES)}
    if mode == "own":
        options |= {"hard_negatives": hard.view(N, H, D), "hard_mask": there}
    else:
        options["extra_keys"] = hard[there.flatten()]
        if ids == "right":
            options["extra_ids"] = text_ids([text for row in HARD for text in row if text])
    function = ct.clip_loss if loss == "clip" else ct.info_nce
    sides = (right, left) if swapped else (left, right)
    expected, _ = function(*sides, scale, return_stats=True, **options)
    assert torch.equal(found, expected) and stats is not None
    inputs = [left, right, hard, scale]
    for a, b in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert torch.equal(a, b)
    without, *_ = batch_loss(config, left, right, facts[:, :1], scale=scale)
    assert not torch.equal(found, without)


def test_a_negative_that_is_a_positive_is_spared() -> None:
    """Row 0 has text a, and a is a hard negative of row 3: with ids of texts it is no negative of row 0."""
    left, right, hard, scale = parts()
    facts = pair_facts(chunk(TEXTS, NAMES, HARD), "right")
    moved = hard.detach().clone()
    moved[6] = left[0].detach() * 3  # the place of that "a"
    config = LossConfig(ids="right")
    blind = LossConfig(ids="right", same_id="negative")
    spared, counted = (batch_loss(x, left, right, facts, moved, scale=scale)[0] for x in (config, blind))
    assert counted.item() > spared.item() + 0.5


@pytest.mark.parametrize("same_id", ["exclude", "positive", "negative"])
@pytest.mark.parametrize("loss", ["clip", "infonce", "siglip"])
def test_pairs_of_equal_id(loss: Any, same_id: Any) -> None:
    left, right, _, scale = parts()
    config = LossConfig(loss=loss, ids="right", same_id=same_id)
    bias = (torch.tensor(-3.0),) if loss == "siglip" else ()
    facts = pair_facts(chunk(TEXTS, NAMES), "right")
    found, stats, *_ = batch_loss(config, left, right, facts, scale=scale, bias=bias[0] if bias else None)
    functions: dict[str, Any] = {"clip": ct.clip_loss, "infonce": ct.info_nce, "siglip": ct.siglip_loss}
    options: dict[str, Any] = {} if same_id == "negative" else {"ids": text_ids(TEXTS), "same_id": same_id}
    expected, wanted = functions[loss](left, right, scale, *bias, return_stats=True, **options)
    assert torch.equal(found, expected) and stats == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "supcon", "same_id": "positive"},
        {"loss": "ntxent", "same_id": "negative"},
        {"same_id": "positive", "margin": 0.1},
        {"same_id": "positive", "label_smoothing": 0.1},
    ],
)
def test_what_equal_ids_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="same_id"):
        LossConfig(**options).check()


@pytest.mark.parametrize("loss", ["clip", "infonce", "siglip"])
def test_matryoshka_dimensions(loss: Any) -> None:
    left, right, _, scale = parts()
    config = LossConfig(loss=loss, same_id="negative", matryoshka_dims=(2, 4), matryoshka_weights=(1.0, 0.5))
    bias = (torch.tensor(-3.0),) if loss == "siglip" else ()
    found, stats, *_ = batch_loss(
        config, left, right, pair_facts(chunk(TEXTS, NAMES), "right"), scale=scale, bias=bias[0] if bias else None
    )
    function: Any = {"clip": ct.clip_loss, "infonce": ct.info_nce, "siglip": ct.siglip_loss}[loss]
    expected = function(left, right, scale, *bias, matryoshka_dims=(2, 4), matryoshka_weights=(1.0, 0.5))
    assert torch.equal(found, expected) and stats is None


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "supcon"},
        {"margin": 0.1},
        {"label_smoothing": 0.1},
        {"cache_mib": 1},
        {"same_id": "positive"},
        {"matryoshka_dims": (4, 4)},
        {"matryoshka_weights": (1.0,)},
    ],
)
def test_what_matryoshka_dimensions_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="matryoshka"):
        LossConfig(**{"matryoshka_dims": (2, 4), **options}).check()


@pytest.mark.parametrize("role", ["guide", "teacher"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"same_id": "negative"},
        {"cache_mib": 1},
        {"backend": "dense"},
        {"margin": 0.1},
        {"label_smoothing": 0.1},
        {"same_id": "positive"},
        {"matryoshka_dims": (2, 4)},
        {"directions": ("query_to_doc", "doc_to_query")},
        {"directions": ("query_to_doc", "query_to_query")},
        {"hardness_mode": "in_batch_negatives", "hardness_strength": 1.0},
    ],
)
def test_a_second_model_beside_other_options(role: str, options: dict[str, Any]) -> None:
    """The configuration refuses what the losses refuse, and nothing else."""
    left, right, _, scale = parts()
    options = {**options, role: "runs/first"}
    config = LossConfig(loss="infonce", ids="right", **options)
    second = SecondFeatures(features(N, D + 2, seed=4), features(N, D + 2, seed=5), None, 30.0)
    refusals = []
    for call in (
        config.check,
        lambda: batch_loss(config, left, right, pair_facts(chunk(TEXTS, NAMES), "right"), None, second, scale=scale),
    ):
        try:
            call()
            refusals.append(False)
        except ValueError as error:
            assert role in str(error)
            refusals.append(True)
    allowed = len(options) == 1 or options.keys() & {"cache_mib", "backend"} or options.get("same_id") == "negative"
    assert refusals == [not allowed, not allowed]


def test_a_second_model_sees_swapped_sides() -> None:
    """Pictures as hard negatives: the texts are the queries, of the guide too."""
    left, right, hard, scale = parts()
    config = LossConfig(same_id="negative", guide="runs/first", guide_margin=0.1)
    facts = pair_facts(chunk(TEXTS, NAMES, HARD), "right")
    guide = SecondFeatures(features(N, 3, seed=4), features(N, 3, seed=5), features(N * H, 3, seed=6), 1.0)
    found = batch_loss(config, left, right, facts, hard, guide, scale=scale, swapped=True)
    there = torch.tensor([bool(text) for row in HARD for text in row])
    assert guide.negatives is not None
    more = {"extra_keys": hard[there], "extra_guide": guide.negatives[there], "guide_margin": 0.1}
    expected, _ = ct.clip_loss(right, left, scale, guide=(guide.right, guide.left), return_stats=True, **more)
    assert torch.equal(found.loss, expected)


ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives"])
def test_directions_and_hardness_reach_the_loss(mode: Any) -> None:
    left, right, hard, scale = parts()
    options: dict[str, Any] = {"directions": ALL, "hardness_mode": mode, "hardness_strength": 3.0}
    config = LossConfig(loss="infonce", ids="right", hard_negatives="own", **options)
    config.check()
    found, stats, *_ = batch_loss(
        config, left, right, pair_facts(chunk(TEXTS, NAMES, HARD), "right"), hard, scale=scale
    )
    there = torch.tensor([[bool(text) for text in row] for row in HARD])
    options |= {"hard_negatives": hard.view(N, H, D), "hard_mask": there, "ids": text_ids(TEXTS)}
    expected, wanted = ct.info_nce(left, right, scale, return_stats=True, **options)
    assert torch.equal(found, expected) and stats == wanted


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": "clip", "directions": ALL}, "directions and hardness: expected --loss infonce, got clip"),
        ({"directions": ALL, "partition_mode": "per_direction"}, "'query_to_query' never contains it"),
        ({"hardness_strength": 2.0}, "hardness_strength: expected hardness_mode= with it"),
        ({"directions": ALL, "label_smoothing": 0.1}, "label_smoothing and directions or hardness"),
        ({"directions": ALL, "margin": 0.1}, "margin and directions or hardness"),
        ({"hardness_mode": "all_negatives", "hardness_strength": 2.0, "same_id": "positive"}, "same_id=positive and"),
    ],
)
def test_directions_that_mean_nothing(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LossConfig(**{"loss": "infonce", **options}).check()

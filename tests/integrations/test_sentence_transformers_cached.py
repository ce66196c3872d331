"""sentence-transformers' cached loss on GradCache: its numbers, its trainer, its options."""

import copy
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from contratile.integrations.sentence_transformers import (
    CachedMultipleNegativesRankingLoss,
    CachedMultipleNegativesSymmetricRankingLoss,
    MultipleNegativesRankingLoss,
    MultipleNegativesSymmetricRankingLoss,
)
from tests.grad_cache.towers import ROUNDING, Tower, gap, gradients, padded, twins
from tests.integrations.test_sentence_transformers import (
    ALL,
    REFUSED,
    SYMMETRIC,
    Given,
    Words,
    curve,
    pairs,
    texts_of,
    theirs,
)
from tests.ranks import pool

assert theirs  # the fixture


GTE: dict[str, Any] = {"directions": ALL, "hardness_mode": "in_batch_negatives", "hardness_strength": 3.0}


class Texts(nn.Sequential):
    """A transformer with dropout under the package's calls."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(Tower(1, dropout=dropout))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self[0](features["input_ids"], features["attention_mask"])}

    def get_embedding_dimension(self) -> int:
        return 16


def columns(number: int, n: int = 21) -> list[dict[str, Tensor]]:
    return [padded(n, seed) for seed in range(number)]


@pytest.mark.peers
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("size", [{"mini_batch_size": 4}, {"mini_batch_num_tokens": 20}], ids=["rows", "tokens"])
@pytest.mark.parametrize("options", [{}, SYMMETRIC, GTE], ids=["one way", "both ways", "all"])
def test_values_and_gradients(theirs: ModuleType, number: int, size: dict[str, int], options: dict[str, Any]) -> None:
    """With dropout: mini-batches and their order are the package's, so the draws are the same."""
    ours, others = twins(Texts())
    values = []
    kinds: list[Any] = [CachedMultipleNegativesRankingLoss, theirs.CachedMultipleNegativesRankingLoss]
    for model, kind in zip((ours[0], others[0]), kinds, strict=True):
        torch.manual_seed(3)
        mine = {"lengths": "off"} if model is ours[0] else {}
        value = kind(model, 7.0, **size, **options, **mine)(columns(number), None)
        (value / 3).backward()
        values.append(value.item())
    assert values[0] == pytest.approx(values[1], rel=ROUNDING)
    assert gap(gradients(*ours), gradients(*others)) <= ROUNDING


@pytest.mark.peers
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("size", [{"mini_batch_size": 4}, {"mini_batch_num_tokens": 20}], ids=["rows", "tokens"])
@pytest.mark.parametrize("kept", [0, 3, "auto"])
def test_texts_are_sorted(theirs: ModuleType, number: int, size: dict[str, Any], kept: Any) -> None:
    """Without dropout: the package's gradients with fewer tokens, with texts of all columns in a mini-batch."""
    ours, others = twins(Texts(dropout=0.0))
    theirs.CachedMultipleNegativesRankingLoss(others[0], 7.0, **size)(columns(number), None).backward()
    limit = 1 << 30 if kept == "auto" else None
    loss = CachedMultipleNegativesRankingLoss(ours[0], 7.0, **size, keep_graphs=kept, memory_limit=limit)
    for _ in range(2):
        ours[0].zero_grad()
        loss(columns(number), None).backward()
    assert gap(gradients(*ours), gradients(*others)) <= ROUNDING
    assert loss.padding.real <= loss.padding.encoded <= 1.1 * loss.padding.real < loss.padding.given
    assert len(loss._caches) == 1, "kept for the second step"
    assert not copy.deepcopy(loss)._caches


def test_a_memory_limit_needs_graphs_that_are_kept_by_it() -> None:
    with pytest.raises(ValueError, match="memory_limit: expected keep_graphs='auto' with it, got 2"):
        CachedMultipleNegativesRankingLoss(Texts(), keep_graphs=2, memory_limit=1 << 30)


@pytest.mark.peers
def test_defaults_and_order_of_arguments_are_theirs(theirs: ModuleType) -> None:
    want = inspect.signature(theirs.CachedMultipleNegativesRankingLoss.__init__).parameters.values()
    got = inspect.signature(CachedMultipleNegativesRankingLoss.__init__).parameters
    positional = [x for x in got.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert [x.name for x in positional] == [x.name for x in want]
    for x in want:
        assert x.name == "similarity_fct" or got[x.name].default == x.default
    card = theirs.CachedMultipleNegativesRankingLoss(Texts()).get_config_dict()
    ours = CachedMultipleNegativesRankingLoss(Texts()).get_config_dict()
    assert {name: ours[name] for name in card} == card


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.*SymmetricRankingLoss is deprecated:DeprecationWarning")
def test_the_symmetric_name(theirs: ModuleType) -> None:
    kinds: list[Any] = [CachedMultipleNegativesSymmetricRankingLoss, theirs.CachedMultipleNegativesSymmetricRankingLoss]
    got, want = (inspect.signature(kind.__init__).parameters for kind in kinds)
    positional = [x for x in got.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert [x.name for x in positional] == list(want)
    assert all(x.name == "similarity_fct" or got[x.name].default == x.default for x in want.values())
    ours, others = twins(Texts(dropout=0.0))
    values = []
    for kind, (model, *_) in zip(kinds, (ours, others), strict=True):
        values.append(kind(model, mini_batch_size=4)(columns(2), None))
        values[-1].backward()
    assert values[0].item() == pytest.approx(values[1].item(), rel=ROUNDING)
    assert gap(gradients(*ours), gradients(*others)) <= ROUNDING


@pytest.mark.peers
def test_wrapped_in_matryoshka(theirs: ModuleType) -> None:
    ours, others = twins(Texts(dropout=0.0))
    for model, kind in (
        (ours[0], CachedMultipleNegativesRankingLoss),
        (others[0], theirs.CachedMultipleNegativesRankingLoss),
    ):
        loss = theirs.MatryoshkaLoss(model, kind(model, mini_batch_size=4), [16, 8, 4], [1, 2, 3])
        loss(columns(3), None).backward()
    assert gap(gradients(*ours), gradients(*others)) <= ROUNDING


@pytest.mark.parametrize("kind", [CachedMultipleNegativesRankingLoss, CachedMultipleNegativesSymmetricRankingLoss])
def test_matryoshka_in_one_pass(kind: Any) -> None:
    """The loss without a cache equals the package's, see `test_sentence_transformers.py`."""
    ours, others = twins(Words())
    options: dict[str, Any] = {"matryoshka_dims": [8, 2], "matryoshka_weights": [1, 3]}
    kind(ours[0], mini_batch_size=5, **options)(texts_of(2, 12), None).backward()
    plain = (
        MultipleNegativesRankingLoss
        if kind is CachedMultipleNegativesRankingLoss
        else MultipleNegativesSymmetricRankingLoss
    )
    plain(others[0], **options)(texts_of(2, 12), None).backward()
    torch.testing.assert_close(gradients(*ours), gradients(*others))


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_equals_the_loss_that_keeps_everything(offload: Any) -> None:
    """Also without the package."""
    ours, others = twins(Words())
    texts = texts_of(3, 12)
    texts[1]["input_ids"][5] = texts[1]["input_ids"][7]
    same: dict[str, Any] = {"exclude_duplicates": True}
    value = CachedMultipleNegativesRankingLoss(ours[0], mini_batch_size=5, offload=offload, **same)(texts, None)
    value.backward()
    want = MultipleNegativesRankingLoss(others[0], **same)(texts, None)
    want.backward()
    assert value.item() == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(gradients(*ours), gradients(*others))
    with torch.no_grad():
        assert CachedMultipleNegativesRankingLoss(ours[0], **same)(texts, None).item() == pytest.approx(want.item())


@pytest.mark.parametrize(
    ("options", "text"), [*REFUSED, ({"mini_batch_size": 0}, "mini_batch_size"), ({"offload": "cloud"}, "offload")]
)
def test_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CachedMultipleNegativesRankingLoss(Given(), **options)(texts_of(2, 3))


def test_options_may_be_set_after_a_step() -> None:
    """They take effect from the next call on, and are checked like those of the constructor."""
    model, calls = Texts(), 0

    def count(*given: Any) -> None:
        nonlocal calls
        calls += 1

    model.register_forward_hook(count)
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=42, lengths="off")
    for option, value, forwards in (
        ("mini_batch_size", 42, 4),  # two columns, twice
        ("mini_batch_size", 7, 12),
        ("keep_graphs", 6, 6),
        ("keep_graphs", 0, 12),
        ("lengths", "auto", 14),  # and texts with and without padding
    ):
        calls = 0
        setattr(loss, option, value)
        loss(columns(2), None).backward()
        assert calls == forwards, option
    for option in ("mini_batch_size", "mini_batch_num_tokens"):
        with pytest.raises(ValueError, match=f"{option}: expected at least 1, got 0"):
            setattr(loss, option, 0)


@pytest.mark.parametrize(("name", "remedy"), [("cu_seq_lens_q", "flattening"), ("offsets", "use MultipleNegatives")])
def test_flattened_inputs_are_refused(name: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"sentence_features: expected padded inputs, got flattened ones.*{remedy}"):
        CachedMultipleNegativesRankingLoss(Words())([{name: torch.arange(3)}] * 2)


def shared_gradient(sizes: tuple[int, ...]) -> Tensor:
    model = Words()
    loss = CachedMultipleNegativesRankingLoss(
        DistributedDataParallel(model), mini_batch_size=2, gather_across_devices=True
    )
    mine = [{"input_ids": x["input_ids"].split(sizes)[dist.get_rank()]} for x in texts_of(3, sum(sizes))]
    loss(mine, None).backward()
    assert model.words.grad is not None
    return model.words.grad


def test_negatives_are_shared() -> None:
    model = Words()
    MultipleNegativesRankingLoss(model)(texts_of(3, 11), None).backward()
    for grad in pool(2).run(shared_gradient, (8, 3)):
        torch.testing.assert_close(grad, model.words.grad)


@pytest.mark.peers
def test_trainer(theirs: ModuleType, tmp_path: Path) -> None:
    """MiniLM with dropout: the same curve, step by step."""
    data = pairs()
    got = curve(CachedMultipleNegativesRankingLoss, data, tmp_path, mini_batch_size=3, lengths="off")
    want = curve(theirs.CachedMultipleNegativesRankingLoss, data, tmp_path, mini_batch_size=3)
    assert len(got) == 4 and got == pytest.approx(want, abs=1e-4)
    assert max(got) - min(got) > 0.01
    assert not list(tmp_path.iterdir())

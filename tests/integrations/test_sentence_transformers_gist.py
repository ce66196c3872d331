"""GISTEmbed's losses of sentence-transformers: their numbers, plain and cached, and negatives of all ranks."""

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.integrations.sentence_transformers import CachedGISTEmbedLoss, GISTEmbedLoss
from tests.helpers import randn
from tests.integrations.test_sentence_transformers import theirs
from tests.ranks import pool

assert theirs  # the fixture

N, D, G = 33, 7, 5


class Tokenizer:
    """The calls that the losses make; a text is a row of numbers."""

    def __init__(self, words: int = 50) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {str(word): word for word in range(self.words)}

    def batch_decode(self, rows: Any, skip_special_tokens: bool) -> list[str]:
        return [" ".join(str(int(word)) for word in row) for row in rows]


class Words(nn.Module):
    """Sums of word vectors."""

    def __init__(self, d: int, seed: int) -> None:
        super().__init__()
        self.words = nn.Parameter(randn(50, d, seed=seed, dtype=torch.float64))

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.words[features["input_ids"]].sum(1)}


class Model(nn.Sequential):
    """What the losses use of a SentenceTransformer."""

    max_seq_length = 8
    device = torch.device("cpu")

    def __init__(self, d: int, seed: int, words: int = 50) -> None:
        super().__init__(Words(d, seed))
        self.tokenizer = Tokenizer(words)

    def preprocess(self, texts: list[str]) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[int(word) for word in text.split()] for text in texts])}


def texts(number: int, *, duplicates: bool) -> list[dict[str, Tensor]]:
    columns = [torch.randint(50, (N, 4), generator=torch.Generator().manual_seed(seed)) for seed in range(number)]
    if duplicates:  # an anchor that is its positive, and two equal pairs
        columns[1][:5] = columns[0][:5]
        for column in columns:
            column[20] = column[3]
    return [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in columns]


@pytest.fixture
def known(theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Their losses, with this file's tokenizer taken for one of transformers."""
    for name in ("gist_embed", "cached_gist_embed"):
        module = sys.modules[f"sentence_transformers.sentence_transformer.losses.{name}"]
        monkeypatch.setattr(module, "PreTrainedTokenizerBase", Tokenizer)
    return theirs


def value_and_grad(loss: Any, model: nn.Module, columns: list[dict[str, Tensor]]) -> list[Tensor]:
    model.zero_grad()
    value = loss([dict(x) for x in columns], None)
    value.backward()
    return [value.detach(), next(model.parameters()).grad.clone()]  # type: ignore[union-attr]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"margin_strategy": "absolute", "margin": 0.1, "temperature": 0.05},
    {"margin_strategy": "relative", "margin": 0.2, "contrast_anchors": False},
    {"margin_strategy": "absolute", "margin": -0.5, "contrast_positives": False},  # even an anchor itself counts
    {"margin": 0.05, "contrast_anchors": False, "contrast_positives": False},
]


@pytest.mark.peers
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("duplicates", [False, True])
def test_values_and_gradients(known: ModuleType, options: dict[str, Any], number: int, duplicates: bool) -> None:
    model, columns = Model(D, 1), texts(number, duplicates=duplicates)
    for words in (50, 51):  # with one tokenizer, or two
        guide = Model(G, 2, words)
        want = value_and_grad(known.GISTEmbedLoss(model, guide, **options), model, columns)
        for loss in (
            GISTEmbedLoss(model, guide, **options, tile=8),
            CachedGISTEmbedLoss(model, guide, **options, mini_batch_size=10),
        ):
            torch.testing.assert_close(value_and_grad(loss, model, columns), want)
            torch.testing.assert_close(loss([dict(x) for x in columns]).detach(), want[0])


@pytest.mark.peers
def test_any_number_of_negatives(known: ModuleType) -> None:
    model, guide, columns = Model(D, 1), Model(G, 2), texts(5, duplicates=False)
    want = value_and_grad(known.CachedGISTEmbedLoss(model, guide, mini_batch_size=10), model, columns)
    for loss in (GISTEmbedLoss(model, guide), CachedGISTEmbedLoss(model, guide, mini_batch_size=10)):
        torch.testing.assert_close(value_and_grad(loss, model, columns), want)
    with torch.no_grad():
        assert torch.isclose(CachedGISTEmbedLoss(model, guide)(columns), want[0])


@pytest.mark.peers
def test_defaults_order_and_options_are_theirs(known: ModuleType) -> None:
    for ours in (GISTEmbedLoss, CachedGISTEmbedLoss):
        want = inspect.signature(getattr(known, ours.__name__).__init__).parameters.values()
        got = inspect.signature(ours.__init__).parameters
        positional = [x for x in got.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        assert [(x.name, x.default) for x in positional] == [(x.name, x.default) for x in want]
        made = [kind(Model(D, 1), Model(G, 2)) for kind in (ours, getattr(known, ours.__name__))]
        assert set(made[0].get_config_dict()) == set(made[1].get_config_dict())
    assert made[0].citation.strip() == known.GISTEmbedLoss(Model(D, 1), Model(G, 2)).citation.strip()


def test_refusals() -> None:
    model, guide = Model(D, 1), Model(G, 2)
    with pytest.raises(ValueError, match="margin_strategy: expected one of 'absolute', 'relative'"):
        GISTEmbedLoss(model, guide, margin_strategy="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="margin_strategy"):
        setattr(GISTEmbedLoss(model, guide), "margin_strategy", "half")  # noqa: B010  # a type checker refuses it
    with pytest.raises(ValueError, match="temperature: expected a positive number"):
        GISTEmbedLoss(model, guide, temperature=0.0)
    with pytest.raises(TypeError, match="guide: expected a model with a tokenizer, got Linear"):
        GISTEmbedLoss(model, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="sentence_features: expected two columns or more, got 1"):
        GISTEmbedLoss(model, guide)(texts(1, duplicates=False))
    flat = [{"input_ids": torch.arange(5), "offsets": torch.tensor([0, 2])}] * 2
    with pytest.raises(ValueError, match=r"expected padded inputs, got flattened .*: use GISTEmbedLoss\."):
        CachedGISTEmbedLoss(model, guide)(flat)


def dense(columns: list[Tensor], seen: list[Tensor], sizes: list[int], margin: float) -> Tensor:
    """The mean over ranks: anchors against all documents, their own rank's anchors, and all positives."""
    columns, seen = ([F.normalize(x) for x in y] for y in (columns, seen))
    rank = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    apart = rank.unsqueeze(1) != rank
    pairs = [(0, 1), (0, 0), (1, 1), (0, 2)]
    scores, guided = (torch.cat([x[a] @ x[b].T for a, b in pairs], 1) for x in (columns, seen))
    n = len(rank)
    limit = guided[:, :n].diagonal().unsqueeze(1) - margin
    drop = (guided > limit) & ~F.pad(torch.eye(n, dtype=torch.bool), (0, 3 * n))
    drop[:, n : 2 * n] |= apart
    scores = (scores / 0.1).masked_fill(drop, -torch.inf)
    losses = F.cross_entropy(scores, torch.arange(n), reduction="none")
    return torch.stack([x.mean() for x in losses.split(sizes)]).mean()


def over_ranks(sizes: list[int]) -> list[float]:
    whole = [randn(sum(sizes), D, seed=seed, dtype=torch.float64) for seed in range(3)]
    seen = [randn(sum(sizes), G, seed=seed, dtype=torch.float64) for seed in range(3, 6)]
    rank = dist.get_rank()
    mine = [x.split(sizes)[rank].clone().requires_grad_() for x in whole]
    loss = GISTEmbedLoss(Model(D, 1), Model(G, 2), 0.1, margin=0.05, gather_across_devices=True, tile=4)
    value = loss.compute_loss_from_embeddings(mine, [x.split(sizes)[rank] for x in seen])
    value.backward()
    leaves = [x.clone().requires_grad_() for x in whole]
    want = dense(leaves, seen, sizes, 0.05)
    (want * len(sizes)).backward()
    mean = value.detach().clone()
    dist.all_reduce(mean)
    errors = [float((mean / len(sizes) - want.detach()).abs())]
    for x, y in zip(mine, leaves, strict=True):
        assert x.grad is not None and y.grad is not None
        errors.append(float((x.grad - y.grad.split(sizes)[rank]).abs().max()))
    return errors


@pytest.mark.parametrize("world", [2, 3])
def test_over_ranks(world: int) -> None:
    for errors in pool(world).run(over_ranks, [7] * world):
        assert max(errors) < 1e-11, errors

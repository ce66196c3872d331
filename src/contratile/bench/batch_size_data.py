"""The pairs of `bench.batch_size` as tensors that are made once: pixels of icons, token ids of texts, and ids.

    pairs = load_pairs("wordnet", folder)
    pairs.train.left, pairs.train.right       # [N, ...] tensors; rows belong together

Training pairs are shuffled once with a fixed seed, so that a smaller data set is the beginning of a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from contratile.data.icons import Icons
from contratile.data.sample import Split
from contratile.data.wordnet import WordNet
from contratile.models.tiny import train_tokenizer

DataName = Literal["icons", "wordnet"]
VOCABULARY = 4096
TOKENS = 24
TEST = 1024
"""Pairs of a test: every one is searched among all of them."""


class PairTensors(NamedTuple):
    """Rows of pairs."""

    left: Tensor
    """Pixels [N, 1, 32, 32] as bytes, or token ids [N, T]."""

    right: Tensor
    ids: Tensor
    """[N] equal for pairs with the same right text: such pairs are not negatives of each other."""

    def rows(self, index: Tensor | slice) -> PairTensors:
        """Choose rows."""
        return PairTensors(*(x[index] for x in self))


class PairData(NamedTuple):
    """The data of one source."""

    name: DataName
    train: PairTensors
    test: PairTensors
    vocabulary: int


def load_pairs(name: DataName, folder: Path | None = None) -> PairData:
    """Read a source and turn it into tensors.

    Args:
        name: "icons" or "wordnet".
        folder: WordNet's files, if they are not in one of the usual places.
    """
    sources: Any = {split: _source(name, split, folder) for split in ("train", "test")}
    tokenizer = train_tokenizer(sources["train"].texts(), VOCABULARY)
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]", length=TOKENS)
    made = {split: _pairs(source, tokenizer, seed) for seed, (split, source) in enumerate(sources.items())}
    test = made["test"]
    first = {number: row for row, number in reversed(list(enumerate(test.ids.tolist())))}  # one pair per right text
    chosen = torch.tensor(sorted(first.values())[:TEST])
    return PairData(name, made["train"], test.rows(chosen), tokenizer.get_vocab_size())


def _source(name: DataName, split: Split, folder: Path | None) -> Icons | WordNet:
    return Icons(split) if name == "icons" else WordNet(split, folder=folder)


def _pairs(source: Any, tokenizer: Any, seed: int) -> PairTensors:
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(seed)).tolist()
    samples = [source[i] for i in order]
    rights = [sample.right for sample in samples]
    known: dict[str, int] = {}
    ids = torch.tensor([known.setdefault(text, len(known)) for text in rights])
    lefts = [sample.left for sample in samples]
    left = _tokens(lefts, tokenizer) if isinstance(lefts[0], str) else _pixels(lefts)
    return PairTensors(left, _tokens(rights, tokenizer), ids)


def _pixels(images: Sequence[Any]) -> Tensor:
    grey = [torch.frombuffer(bytearray(image.convert("L").tobytes()), dtype=torch.uint8) for image in images]
    edge = images[0].width
    return torch.stack(grey).view(-1, 1, edge, edge)


def _tokens(texts: Sequence[str], tokenizer: Any) -> Tensor:
    return torch.tensor([found.ids for found in tokenizer.encode_batch(list(texts))], dtype=torch.int32)

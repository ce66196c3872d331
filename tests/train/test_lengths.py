"""Texts of a batch are sorted by length before they are cut into chunks: same losses, fewer tokens."""

import json
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contratile.report.tracking import history, line
from contratile.train.config import TrainConfig
from contratile.train.loop import Trainer
from tests.ranks import pool
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import COLOURS, SHAPES, losses, sentence_folder, shapes, siglip_folder, small, weights

RUN: dict[str, Any] = {"steps": 4, "batch": 24, "chunk": 4}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of texts: most are short, some long, and one is broken."""
    rows = []
    for number, colour in enumerate(COLOURS):
        for place, shape in enumerate(SHAPES):
            more = f" {shape}" * (8 if (number + 3 * place) % 7 == 0 else place)
            rows.append(f"{colour} {shape}{more if place == 3 else ''},{shape} {colour}{more}")
    path = tmp_path_factory.mktemp("texts") / "texts.csv"
    path.write_text("\n".join(["left,right", *rows, ",nothing"]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT without dropout, whose draws would depend on the order of the rows."""
    return without_dropout(sentence_folder(tmp_path_factory.mktemp("bert")))


def without_dropout(folder: Path, share: float = 0.0) -> Path:
    file = folder / "config.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "hidden_dropout_prob": share, "attention_probs_dropout_prob": share}))
    return folder


def texts(table: Path, encoder: Path, out: Path, **changes: Any) -> TrainConfig:
    return small(table, out, towers=f"st:{encoder}", **{**RUN, **changes})


def counted(trainer: Trainer) -> list[int]:
    """A list that grows by the tokens of each forward pass of a training step."""
    found: list[int] = []

    def count(module: nn.Module, args: Any, tokens: dict[str, Any]) -> None:
        if module.training:
            found.append(tokens["input_ids"].numel() if tokens else args[0]["input_ids"].numel())

    trainer.towers.right.register_forward_pre_hook(count, with_kwargs=True)
    return found


def tokens_of(out: Path) -> list[int]:
    return [entry["tokens"] for entry in history(out) if "tokens" in entry]


def test_a_run_with_sorted_texts_is_the_same_run(table: Path, encoder: Path, tmp_path: Path) -> None:
    """Rounding alone differs; over 4 steps it grows to well below 1e-4. Every token is encoded in two passes."""
    encoded = {}
    for lengths in ("off", "auto"):
        trainer = Trainer(texts(table, encoder, tmp_path / lengths, lengths=lengths))
        encoded[lengths] = counted(trainer)
        trainer.run()
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "off"), rel=1e-4)
    assert 2 * sum(tokens_of(tmp_path / "auto")) == sum(encoded["auto"]) < 0.85 * sum(encoded["off"])
    assert not tokens_of(tmp_path / "off")
    entry = next(entry for entry in history(tmp_path / "auto") if "padding_saved" in entry)
    assert 0.1 < entry["padding_saved"] < 0.7
    assert f"{entry['padding_saved']:.0%} padding saved" in line(entry)


def trained(config: TrainConfig) -> tuple[list[int], int]:
    repair_torchvision()
    trainer = Trainer(config)
    found = counted(trainer)
    trainer.run()
    return found, trainer.cache.padding.encoded


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_each_sort_their_share(table: Path, encoder: Path, tmp_path: Path, fsdp: bool) -> None:
    """Also where a broken sample leaves one rank with fewer rows, and forward passes are collective."""
    Trainer(texts(table, encoder, tmp_path / "alone", lengths="off")).run()
    found = pool(2).run(trained, texts(table, encoder, tmp_path / "shared", fsdp=fsdp))
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)
    chunks = {len(tokens) for tokens, _ in found}
    assert chunks == {4 * 2 * 2 * 3} or not fsdp  # steps, passes, columns, chunks of a share
    assert tokens_of(tmp_path / "shared")[-1] == found[0][1]


def test_a_run_that_is_resumed_ends_with_the_same_weights(table: Path, tmp_path: Path) -> None:
    """To the last bit, with dropout."""
    encoder = without_dropout(sentence_folder(tmp_path / "bert"), 0.1)
    Trainer(texts(table, encoder, tmp_path / "whole", save_every=1, keep=9)).run()
    middle = tmp_path / "whole" / "checkpoints" / "step-00000002"
    Trainer(texts(table, encoder, tmp_path / "resumed", resume=str(middle))).run()
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[2:]


def test_pictures_stay_and_their_captions_are_sorted(tmp_path: Path) -> None:
    """`tiny`, whose captions end at a token, so that padding behind it changes nothing."""
    table = shapes(tmp_path / "shapes")
    named = table.read_text().replace("of size 1", "").replace("of size 2", "of some size which is two")
    table.write_text(named)
    for lengths in ("off", "auto"):
        Trainer(small(table, tmp_path / lengths, lengths=lengths, words=12)).run()
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "off"), rel=1e-4)
    assert all(0 < entry["padding_saved"] < 1 for entry in history(tmp_path / "auto") if "loss" in entry)


def test_hard_negatives_come_back_to_their_pairs(tmp_path: Path) -> None:
    rows = [
        {"image": name, "caption": f"{colour} {shape}{' indeed' * (at % 5)}", "no": [f"{other} {shape}" + " no" * at]}
        for at, (colour, other) in enumerate(pairwise(COLOURS))
        for shape in SHAPES
        for name in [f"{colour}-{shape}-1.png"]
    ]
    shapes(tmp_path)
    table = tmp_path / "pairs.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for lengths in ("off", "auto"):
        options: dict[str, Any] = {"lengths": lengths, "negatives": ("no",), "hard_negatives": "own", "words": 12}
        Trainer(small(table, tmp_path / lengths, **{**RUN, "batch": 16, **options})).run()
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "off"), rel=1e-4)


def test_texts_that_were_trained_with_all_their_padding_keep_it(tmp_path: Path) -> None:
    """SigLIP reads its features at the last token, padding or not: neither cut nor a reason to warn."""
    config = small(shapes(tmp_path / "shapes"), tmp_path / "run", steps=1, towers=f"hf:{siglip_folder(tmp_path)}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        Trainer(config).run()
    assert not tokens_of(tmp_path / "run")

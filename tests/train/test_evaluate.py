"""Evaluation: what belongs together is found together, and what is not finite is neither good nor saved."""

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contratile.cli import main
from contratile.data.catalog import open_source
from contratile.models.encoding import SourceFeatures, encode, matches
from contratile.models.towers import build_towers
from contratile.train import checkpoint, load
from contratile.train.evaluate import chance, not_finite, retrieval
from contratile.train.loop import Trainer
from tests.train.runs import shapes, small


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


def encoded(names: list[str], texts: list[str], left: Tensor, right: Tensor) -> SourceFeatures:
    return SourceFeatures(left, right, torch.arange(len(names)), [f"row {i}" for i in range(len(names))], texts, names)


def perfect(names: list[str], texts: list[str]) -> SourceFeatures:
    """Pictures are orthogonal; a text is its first picture, and a little of itself: every text differs."""
    eye, more = torch.eye(64), torch.randn(len(texts), 64, generator=torch.Generator().manual_seed(0))
    first = {text: names[texts.index(text)] for text in texts}
    place = {name: i for i, name in enumerate(dict.fromkeys(names))}
    left = torch.stack([eye[place[name]] for name in names])
    right = torch.stack([eye[place[first[text]]] + 0.01 * more[texts.index(text)] for text in texts])
    return encoded(names, texts, left, torch.nn.functional.normalize(right, dim=1))


# --- what repeats -------------------------------------------------------------------------------------------------


def test_five_captions_of_an_image() -> None:
    names = [f"{i}.png" for i in range(6) for _ in range(5)]
    found = retrieval(perfect(names, [f"text {i}" for i in range(30)]))
    assert found["image_to_text_R@1"] == found["text_to_image_R@1"] == 1.0
    assert found["image_to_text_mean_rank"] == 1.0
    assert found["image_to_text_R@1_pairwise"] == pytest.approx(0.2), "each row's own caption alone"


def test_two_images_of_one_caption() -> None:
    names, texts = ["a", "b", "c", "d"], ["same", "same", "other", "more"]
    found = perfect(names, texts)
    metrics = retrieval(found)
    assert metrics["text_to_image_R@1"] == 1.0 > metrics["text_to_image_R@1_pairwise"]
    assert matches(found).pairs.tolist() == [[0, 0], [1, 0], [2, 1], [3, 2]]
    # One picture twice under one caption is one pair.
    twice = perfect(["a", "a", "b"], ["x", "x", "y"])
    assert matches(twice).pairs.tolist() == [[0, 0], [1, 1]]
    assert retrieval(twice)["image_to_text_R@1"] == retrieval(twice)["text_to_image_R@1"] == 1.0


def test_without_repeats_there_is_one_kind_of_metrics() -> None:
    found = perfect(["a", "b", "c"], ["x", "y", "z"])
    assert not [name for name in retrieval(found) if "pairwise" in name]
    assert chance(found, ks=(1, 2)) == pytest.approx(
        {f"{way}_R@{k}": k / 3 for way in ("image_to_text", "text_to_image") for k in (1, 2)}
    )


def test_chance_among_several_right_ones() -> None:
    """As often as a random choice of k holds one of the right ones, counted."""
    names = ["a", "a", "a", "b", "c", "c", "d"]
    texts = ["1", "2", "3", "4", "5", "1", "6"]
    found = perfect(names, texts)
    pairs = {(n, t) for n, t in zip(names, texts, strict=True)}
    for k in (1, 5, 10):
        for way, queries, keys, own in (
            ("image_to_text", "abcd", "123456", lambda q: {t for n, t in pairs if n == q}),
            ("text_to_image", "123456", "abcd", lambda q: {n for n, t in pairs if t == q}),
        ):
            draws = list(combinations(keys, min(k, len(keys))))
            hits = sum(bool(own(query) & set(draw)) for query in queries for draw in draws)
            assert chance(found)[f"{way}_R@{k}"] == pytest.approx(hits / len(queries) / len(draws))
    assert chance(found)["text_to_image_R@5_pairwise"] == pytest.approx(5 / 7)


def test_names_of_pictures_are_their_paths(table: Path, tmp_path: Path) -> None:
    """Several captions of one file are seen as such, however its path is written."""
    folder = table.parent
    rows = ["path,caption", "red-arc-1.png,one", "./red-arc-1.png,two", "red-arc-2.png,one", "red-arc-3.png,three"]
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")
    config = small(folder / "captions.csv", tmp_path, test_data=str(folder / "captions.csv"))
    source = open_source(config.data, "test")
    found = encode(build_towers(config.towers, texts=source.texts()), source, chunk=3)
    assert found.names == ["red-arc-1.png", "red-arc-1.png", "red-arc-2.png", "red-arc-3.png"]
    assert matches(found).pairs.tolist() == [[0, 0], [0, 1], [1, 0], [2, 2]]


# --- what is not finite -------------------------------------------------------------------------------------------


def test_features_that_are_all_alike_are_not_perfect() -> None:
    alike = torch.ones(20, 4)
    found = retrieval(encoded([f"{i}" for i in range(20)], [f"text {i}" for i in range(20)], alike, alike))
    assert found["text_to_image_R@1"] == found["image_to_text_R@5"] == 0.0
    assert found["text_to_image_mean_rank"] == pytest.approx(10.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_tower_is_named(value: float) -> None:
    found = perfect(["a", "b", "c"], ["x", "y", "z"])
    assert not_finite(found, ("image", "text")) == ""
    found.right[1, 3] = value
    assert not_finite(found, ("image", "text")).endswith(": the right (text) tower, 1 of 3 rows")
    found.left[:] = value
    assert "the left (image) tower, 3 of 3 rows and the right" in not_finite(found, ("image", "text"))


def spoil(monkeypatch: pytest.MonkeyPatch, side: str, after: int, value: float = math.nan) -> None:
    """Weights of one side are NaN (or have another value) after a step, as those of a diverged run."""
    step = Trainer.train_step

    def spoiled(self: Trainer, batch: Any) -> dict[str, float]:
        facts = step(self, batch)
        if self.step + 1 == after:
            with torch.no_grad():
                for parameter in getattr(self.towers, side).parameters():
                    parameter.fill_(value)
        return facts

    monkeypatch.setattr(Trainer, "train_step", spoiled)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_diverged_run_keeps_its_last_good_checkpoint(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    config = small(table, tmp_path, save_every=1, eval_every=2)
    spoil(monkeypatch, side, after=4)
    kind = {"left": "image", "right": "text"}[side]
    with pytest.raises(
        FloatingPointError, match=rf"after step 4 .* the {side} \({kind}\) tower.*step-00000003"
    ) as told:
        Trainer(config).run()
    assert "Lower the learning rate" in str(told.value)
    last = checkpoint.latest(tmp_path)
    assert last is not None and last.name == "step-00000003"
    assert (tmp_path / "best").resolve().name <= last.name
    monkeypatch.undo()
    again = Trainer(config)
    assert again.step == 3 and 0 <= again.best < 1
    assert again.run().finished


def test_weights_that_are_not_finite_are_not_saved(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between evaluations too: the next step would tell, after the checkpoint."""
    spoil(monkeypatch, "left", after=4)
    with pytest.raises(FloatingPointError, match=r"step 4 has left weights that are not finite.*: left\."):
        Trainer(small(table, tmp_path, save_every=1, eval_every=6)).run()
    last = checkpoint.latest(tmp_path)
    assert last is not None and last.name == "step-00000003"


def test_a_checkpoint_of_diverged_weights_is_set_aside(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are finite, and what they compute is not: the next step tells."""
    config = small(table, tmp_path, save_every=1, eval_every=6)
    spoil(monkeypatch, "left", after=4, value=1e38)
    with pytest.raises(FloatingPointError, match=r"loss of step 5 is nan.*last checkpoint: .*step-00000003"):
        Trainer(config).run()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000003", "diverged-step-00000004"}
    monkeypatch.undo()
    again = Trainer(config)
    assert again.step == 3 and again.run().finished


def test_a_gradient_that_is_not_finite_stops_the_run(table: Path, tmp_path: Path) -> None:
    trainer = Trainer(small(table, tmp_path))
    before = {name: x.clone() for name, x in trainer.towers.state_dict().items()}
    next(trainer.towers.right.parameters()).register_hook(lambda grad: grad * math.inf)
    with pytest.raises(FloatingPointError, match=r"norm of the gradient of step 1 is nan: expected finite"):
        trainer.run()
    assert all(torch.equal(x, before[name]) for name, x in trainer.towers.state_dict().items())


def test_eval_of_spoiled_weights(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(small(table, tmp_path, steps=2)).run()
    real = load.load_run

    def spoiled(*arguments: Any, **options: Any) -> load.Run:
        run = real(*arguments, **options)
        with torch.no_grad():
            next(run.towers.right.parameters()).fill_(math.nan)
        return run

    monkeypatch.setattr(load, "load_run", spoiled)
    assert main(["eval", str(tmp_path), "--json"]) == 2
    told = capsys.readouterr()
    assert "the right (text) tower" in told.err and "Traceback" not in told.err and not told.out

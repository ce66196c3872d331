"""Zero-shot classification during training: the right numbers at the right steps, on any number of processes."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from contratile.cli import main
from contratile.models.encoding import encode_texts, evaluating
from contratile.report.tracking import history
from contratile.train import class_names
from contratile.train.config import EvalConfig, TrainConfig
from contratile.train.config_file import load_config, to_toml
from contratile.train.evaluate import class_features
from contratile.train.load import load_run
from contratile.train.loop import Trainer
from contratile.train.results import write_results
from tests.data import benchmarks
from tests.ranks import pool
from tests.train.runs import COLOURS, losses, shapes, small, texts

KEYS = ("zero_shot_top1", "zero_shot_top5", "zero_shot_per_class")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def coloured(table: Path) -> Path:
    """89 of the pictures with their colours as texts: 5 are red, 12 of each other colour."""
    rows = [row.split(",")[0] for row in table.read_text().splitlines()[8:]]
    path = table.parent / "colours.csv"
    path.write_text("\n".join(["path,caption", *(f"{row},{row.split('-')[0]}" for row in rows)]) + "\n")
    return path


def zero_shot_of(run: Path) -> dict[int, dict[str, float]]:
    """Zero-shot metrics by step."""
    found = {}
    for entry in history(run):
        mine = {name: value for name, value in entry.items() if name.startswith("zero_shot")}
        if mine:
            found[entry["step"]] = mine
    return found


def expected(run: Path, coloured: Path, names: list[str], templates: tuple[str, ...]) -> dict[str, float]:
    """Of the last weights, picture by picture, in numpy."""
    towers = load_run(run, "last").towers
    weights = benchmarks.class_weights(towers.right, names, templates)
    rows = [row.split(",") for row in coloured.read_text().splitlines()[1:]]
    rows = [row for row in rows if row[1] in names]
    images = [benchmarks.encode(towers.left, [Image.open(coloured.parent / path).convert("RGB")]) for path, _ in rows]
    order = (-(np.concatenate(images) @ weights.T)).argsort(1)
    targets = np.array([names.index(colour) for _, colour in rows])
    recalls = [float((order[targets == c, 0] == c).mean()) for c in sorted(set(targets))]
    found = {"zero_shot_top1": float((order[:, 0] == targets).mean()), "zero_shot_per_class": float(np.mean(recalls))}
    top5 = {"zero_shot_top5": float((order[:, :5] == targets[:, None]).any(1).mean())}
    return found | (top5 if len(names) >= 5 else {})


def test_texts_of_the_data_are_the_classes(table: Path, coloured: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainer = Trainer(small(table, out, steps=12, eval_every=6, warmup=0, zero_shot=str(coloured)))
    outcome = trainer.run()
    found = zero_shot_of(out)
    assert list(found) == [0, 6, 12] and all(tuple(sorted(values)) == tuple(sorted(KEYS)) for values in found.values())
    templates = ("{c}", "a photo of a {c}.", "a picture of {c}.")
    assert found[12] == pytest.approx(expected(out, coloured, sorted(COLOURS), templates), abs=1e-9)
    assert found[12].items() <= outcome.metrics.items() and found[12] != found[0]
    written = write_results(trainer, outcome)
    page = written.report.read_text(encoding="utf-8")
    assert (
        "zero-shot mean per-class recall" in page
        and f'<td>zero-shot top-1</td><td class="number">{found[12]["zero_shot_top1"]:.2%}' in page
    )
    assert "Zero-shot metrics are of colours.csv" in page and "12.50%" in page, "chance"


def test_names_prompts_and_steps_of_their_own(
    table: Path, coloured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line: some names only, own prompts, between evaluations too."""
    names, prompts = tmp_path / "names.txt", tmp_path / "prompts.txt"
    names.write_text("red\ngreen\nblue\npink\n")
    prompts.write_text("{c} line\n{}\n")
    recipe = tmp_path / "recipe.toml"
    out = tmp_path / "run"
    recipe.write_text(to_toml(small(table, out, eval_every=4, steps=6)), encoding="utf-8")
    words = ["--zero-shot", str(coloured), "--classes", str(names), "--templates", str(prompts)]
    assert main(["train", "--config", str(recipe), *words, "--zero-shot-every", "3"]) == 0
    found = zero_shot_of(out)
    assert list(found) == [0, 3, 6]
    assert [entry["step"] for entry in history(out) if "text_to_image_R@1" in entry] == [0, 4, 6]
    few = expected(out, coloured, ["red", "green", "blue", "pink"], ("{c} line", "{c}"))
    assert found[6] == pytest.approx(few | {"zero_shot_left_out": 60}, abs=1e-9)
    told = capsys.readouterr()
    assert f"zero-shot top-1 {few['zero_shot_top1']:.4f} (chance 0.2500)" in told.out
    assert "zero-shot samples left out 60" in told.err and "step 3: zero-shot top-1" in told.err
    assert "zero-shot      89 of colours.csv" in told.err, "the header"


def test_a_run_is_the_same_with_and_without(table: Path, coloured: Path, tmp_path: Path) -> None:
    Trainer(small(table, tmp_path / "without")).run()
    Trainer(small(table, tmp_path / "with", zero_shot=str(coloured), zero_shot_every=1)).run()
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_data_sets_of_clip_benchmark(table: Path, tmp_path: Path) -> None:
    bench = benchmarks.benchmark(tmp_path / "bench")
    Trainer(small(table, tmp_path / "one", zero_shot=str(bench / "wds_colours"))).run()
    towers = load_run(tmp_path / "one", "last").towers
    numbers = benchmarks.expected_classification(towers, benchmarks.NAMES, range(31))
    expected = dict(zip(KEYS, (numbers[name] for name in ("acc1", "acc5", "mean_per_class_recall")), strict=True))
    assert zero_shot_of(tmp_path / "one")[6] == pytest.approx(expected, abs=1e-9)
    Trainer(small(table, tmp_path / "many", zero_shot=str(bench / "wds_many"))).run()
    towers = load_run(tmp_path / "many", "last").towers
    numbers = benchmarks.expected_multilabel(towers, benchmarks.MANY, range(23))
    found = zero_shot_of(tmp_path / "many")[6]
    assert found == pytest.approx({"zero_shot_mAP": numbers["mean_average_precision"]}, abs=1e-9)


# --- several processes ----------------------------------------------------------------------------------------------


def trained(config: TrainConfig) -> dict[str, float]:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    return Trainer(config).run().metrics


def refused(config: TrainConfig) -> str:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    with pytest.raises(ValueError) as caught:
        Trainer(config).run()
    return str(caught.value)


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes(table: Path, coloured: Path, tmp_path: Path, fsdp: bool) -> None:
    """All of them get the metrics of the main one, which are those of its weights."""
    config = small(table, tmp_path, zero_shot=str(coloured), zero_shot_every=2, fsdp=fsdp)
    first, second = pool(2).run(trained, config)
    assert first == second
    found = zero_shot_of(tmp_path)
    assert list(found) == [0, 2, 4, 6]
    templates = ("{c}", "a photo of a {c}.", "a picture of {c}.")
    assert found[6] == pytest.approx(expected(tmp_path, coloured, sorted(COLOURS), templates), abs=0.03)


def test_all_processes_hear_of_damaged_data(table: Path, tmp_path: Path) -> None:
    folder = benchmarks.classification(tmp_path / "wds_x", benchmarks.NAMES)
    tar = folder / "test" / "1.tar"
    tar.write_bytes(tar.read_bytes()[:2000])
    for text in pool(2).run(refused, small(table, tmp_path / "run", zero_shot=str(folder))):
        assert "wds_x/test/1.tar: expected a tar, got one that cannot be read to its end" in text


# --- what is refused ------------------------------------------------------------------------------------------------


def test_weights_that_diverged_between_evaluations(
    table: Path, coloured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.train_step

    def spoiled(self: Trainer, batch: Any) -> dict[str, float]:
        facts = step(self, batch)
        if self.step + 1 == 2:
            with torch.no_grad():
                next(self.towers.right.parameters()).fill_(math.nan)
        return facts

    monkeypatch.setattr(Trainer, "train_step", spoiled)
    told = r"zero-shot evaluation after step 2 found features that are not finite: 8 of 8 class names"
    with pytest.raises(FloatingPointError, match=told):
        Trainer(small(table, tmp_path, zero_shot=str(coloured), zero_shot_every=2, save_every=6)).run()
    assert 2 not in zero_shot_of(tmp_path)


@pytest.mark.parametrize("name", ["classes", "templates", "zero_shot_every"])
def test_options_without_data(name: str) -> None:
    value: Any = 3 if name == "zero_shot_every" else "imagenet"
    with pytest.raises(ValueError, match=rf"{name}: expected data to classify \(--zero-shot\), got {value}"):
        EvalConfig(**{name: value})


def test_data_that_cannot_be_classified(table: Path, coloured: Path, tmp_path: Path) -> None:
    bench = benchmarks.benchmark(tmp_path / "bench")
    colours = str(bench / "wds_colours")
    for changes, told in (
        ({"zero_shot": str(bench / "wds_pairs")}, r"zero_shot: expected a data set with classes, got one of retrieval"),
        ({"zero_shot": str(bench)}, r"zero_shot: expected one data set of CLIP_benchmark"),
        ({"zero_shot": "nothing/here"}, r"zero_shot: expected data as in --data, or the folder .* got 'nothing/here'"),
        ({"zero_shot": colours, "classes": "imagenet"}, r"classes: expected none with the folder of a data set"),
        ({"zero_shot": str(coloured), "classes": "nope"}, r"classes: expected imagenet, or a file"),
        ({"zero_shot": str(texts(tmp_path))}, r"towers: expected encoders of text and text, got image and text"),
    ):
        with pytest.raises(ValueError, match=told):
            Trainer(small(table, tmp_path / "run", **changes))
    names = tmp_path / "names.txt"
    names.write_text("cat\ndog")
    with pytest.raises(ValueError, match=r"classes: expected names that are texts of the data, got 'cat', 'dog'"):
        Trainer(small(table, tmp_path / "run", zero_shot=str(coloured), classes=str(names))).run()


def test_a_recipe_cannot_start_programs_through_it(table: Path, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    config = small(table, tmp_path / "run", zero_shot=f"pipe:touch {trap}; cat x.tar")
    (tmp_path / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    with pytest.raises(ValueError, match=r"local files, because the name comes from .*recipe.toml"):
        Trainer(load_config(tmp_path / "recipe.toml"))
    assert not trap.exists()


def test_names_and_paths_in_the_saved_configuration(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths are absolute, names stay; a source wins over a folder of its name."""
    monkeypatch.chdir(tmp_path)
    benchmarks.classification(tmp_path / "wds_x", benchmarks.NAMES)
    (tmp_path / "icons").mkdir()
    (tmp_path / "prompts.txt").write_text("{}")
    for name, saved in (("wds_x", f"{tmp_path}/wds_x/"), ("icons", "icons")):
        trainer = Trainer(small(table, tmp_path / f"run-{name}", zero_shot=name, templates="prompts.txt"))
        assert trainer.config.eval.zero_shot == saved
        assert trainer.config.eval.templates == str(tmp_path / "prompts.txt")
    assert load_config(tmp_path / "run-wds_x" / "config.toml").eval == EvalConfig(
        zero_shot=f"{tmp_path}/wds_x/", templates=str(tmp_path / "prompts.txt")
    )


def test_class_features_are_computed_in_evaluation_mode() -> None:
    class Noisy(nn.Module):
        width = 8

        def __init__(self) -> None:
            super().__init__()
            self.table, self.drop = nn.Linear(1, 8), nn.Dropout(0.5)

        def prepare(self, texts: list[str]) -> torch.Tensor:
            return torch.tensor([[float(len(text))] for text in texts])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.normalize(self.drop(self.table(x)), dim=-1)

    tower: Any = Noisy().train()
    names = [f"{'x' * i}" for i in range(1, 8)]
    first = class_features(tower, names, ("{}", "a {}"), chunk=3)
    assert torch.equal(first, class_features(tower, names, ("{}", "a {}"), chunk=3)) and tower.training
    torch.testing.assert_close(first, class_features(tower, names, ("{}", "a {}"), chunk=100))
    assert encode_texts(tower, [], 4).shape == (0, 8)
    with evaluating(tower):
        assert not tower.training
    assert tower.training


def test_folders_of_wordnet_ids_are_the_classes_of_imagenet() -> None:
    """In sorted order, as torchvision's ImageFolder numbers them; some of them alone do not tell which they are."""
    open_clip_names = class_names._of_open_clip("imagenet", "IMAGENET_CLASSNAMES")
    ids = [f"n{1_440_000 + 17 * i:08d}" for i in range(1000)]
    texts = [ids[5], ids[999], ids[0], *ids]
    expected = [open_clip_names[i] for i in (5, 999, 0, *range(1000))]
    assert class_names.of_wordnet_ids(texts, "imagenet") == expected
    assert class_names.of_wordnet_ids(["tench", "n00000001"], "imagenet") == ["tench", "n00000001"]
    assert class_names.of_wordnet_ids(ids[:3], "names.txt") == ids[:3]
    with pytest.raises(ValueError, match="expected folders of all 1,000 WordNet ids of ImageNet, got 3"):
        class_names.of_wordnet_ids(ids[:3], "imagenet")

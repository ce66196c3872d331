"""Two views of an image, augmentation, mixtures and hard negatives in whole runs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from contratile.cli import main
from contratile.data.augment import AugmentConfig
from contratile.models.encoding import SourceFeatures
from contratile.report.tracking import history
from contratile.train import TrainConfig, Trainer
from contratile.train.config_file import from_dict, load_config, to_toml
from contratile.train.evaluate import chance, neighbors, retrieval
from contratile.train.load import load_run
from contratile.train.results import write_results
from tests.train.runs import everything, losses, shapes, small, texts, weights


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def photos(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes in one folder per colour."""
    folder = tmp_path_factory.mktemp("photos")
    for path in table.parent.glob("*.png"):
        colour, rest = path.name.split("-", 1)
        (folder / colour).mkdir(exist_ok=True)
        (folder / colour / rest).write_bytes(path.read_bytes())
    return folder


VIEWS: dict[str, Any] = {"loss": "ntxent", "views": 2, "steps": 4, "save_every": 2}


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    trainer = Trainer(small(photos, out, **VIEWS))
    outcome = trainer.run()
    write_results(trainer, outcome)
    return out


def test_views_train_one_image_encoder(photos: Path, run: Path) -> None:
    towers, config, _ = load_run(run, "last")
    assert towers.left is towers.right and towers.kinds == ("image", "image") and config.augment.views == 2
    last = history(run)[-1]
    assert 0 <= last["neighbor_top1"] <= 1 and 0 < last["neighbor_chance"] < 1
    assert (run / "contact_sheet.png").is_file() and not (run / "tokenizer.json").exists()
    started, ended = losses(run)[0], losses(run)[-1]
    assert started > 0 and ended > 0


def test_a_run_of_views_is_searched_with_pictures(
    photos: Path, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = next(photos.glob("red/*.png"))
    assert main(["search", str(run), str(picture), "--out", str(tmp_path / "found.png")]) == 0
    assert "nearest to" in capsys.readouterr().out
    with Image.open(tmp_path / "found.png") as sheet:
        assert sheet.width > 100
    assert main(["search", str(run), "a red ball"]) != 0
    assert "expected the path of a picture" in capsys.readouterr().err
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"neighbor_top1", "neighbor_chance", "text_to_image_R@1"} <= found.keys()


def test_a_run_of_views_resumes_bitwise(photos: Path, run: Path, tmp_path: Path) -> None:
    Trainer(small(photos, tmp_path, **{**VIEWS, "steps": 2})).run()
    trainer = Trainer(small(photos, tmp_path, **VIEWS, lr=3e-3))
    assert trainer.step == 2
    whole = Trainer(small(photos, tmp_path / "whole", **VIEWS))
    whole.run()
    a, b = weights(run), weights(tmp_path / "whole")
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(ValueError, match="views: expected 2, as in the checkpoint, got 1"):
        Trainer(small(photos, tmp_path, **{**VIEWS, "views": 1, "loss": "supcon"}))


@pytest.mark.parametrize("loss", ["ntxent", "supcon"])
def test_flat_folders(table: Path, tmp_path: Path, loss: str) -> None:
    """Without classes there is nothing for supcon, and nothing to pair images with."""
    folder = tmp_path / "flat"
    folder.mkdir()
    for path in table.parent.glob("*.png"):
        (folder / path.name).write_bytes(path.read_bytes())
    if loss == "ntxent":
        assert "neighbor_top1" not in Trainer(small(folder, tmp_path / "run", **{**VIEWS, "steps": 1})).run().metrics
    else:
        with pytest.raises(ValueError, match=r"data: expected texts or classes, got flat/ \(train\), images without"):
            Trainer(small(folder, tmp_path / "run", **{**VIEWS, "loss": loss}))
    with pytest.raises(ValueError, match="--loss ntxent --views 2"):
        Trainer(small(folder, tmp_path / "other"))


def test_everything_resumes_bitwise(tmp_path: Path) -> None:
    """Augmentation, a mixture, several captions and hard negatives; chunks and workers may differ."""
    options = everything(tmp_path / "data")
    options |= {"steps": 5, "save_every": 1, "keep": 9}
    Trainer(small(tmp_path, tmp_path / "whole", **options)).run()
    older = tmp_path / "whole" / "checkpoints" / "step-00000003"
    Trainer(small(tmp_path, tmp_path / "rest", **options, resume=str(older), workers=1)).run()
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "rest")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert losses(tmp_path / "rest") == losses(tmp_path / "whole")[3:]
    plain = small(tmp_path, tmp_path / "plain", **{**options, "augment": "none", "blur": None})
    Trainer(plain).run()
    assert losses(tmp_path / "plain") != losses(tmp_path / "whole")


def test_own_and_shared_negatives_differ(tmp_path: Path) -> None:
    options = everything(tmp_path / "data") | {"steps": 1}
    found = {}
    kinds: dict[str, dict[str, Any]] = {
        "all": {},
        "own": {"hard_negatives": "own"},
        "none": {"num_negatives": 0},
        "text ids": {"ids": "right"},
    }
    for name, changes in kinds.items():
        Trainer(small(tmp_path, tmp_path / name, **{**options, **changes})).run()
        found[name] = losses(tmp_path / name)[0]
    assert found["all"] > found["own"] and len(set(found.values())) == 4
    assert load_config(tmp_path / "all" / "config.toml").loss.ids == "left", "there are several captions"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"views": 2}, "views: expected 1 with --loss clip, got 2. Pass --loss ntxent"),
        ({"views": 3}, "views: expected 1 or 2, got 3"),
        ({"flip": 0.5}, "flip: expected --augment with it, got 0.5. Pass --augment clip"),
        ({"augment": "clip", "flip": 1.5}, "flip: expected a probability from 0 to 1, got 1.5"),
        ({"augment": "clip", "crop_scale": (0.5, 0.1)}, "crop_scale: expected two numbers in ascending order"),
        (
            {"augment": "clip", "color_jitter": (0, 0, 0, 0.7)},
            "color_jitter: expected numbers from 0 up, hue",
        ),
        ({"loss": "siglip", "negatives": ("caption",)}, "negatives: expected none with --loss siglip"),
        ({"loss": "ntxent", "views": 2, "queries": ("x",)}, "queries: expected none with --views 2"),
        ({"data_weights": (1.0,)}, "data_weights: expected several sources, got one"),
        ({"batching": "homogeneous"}, "batching: expected several sources, got one"),
        ({"num_negatives": -1}, "num_negatives: expected at least 0, got -1"),
        ({"loss": "ntxent", "ids": "left"}, "ids: expected auto with --loss ntxent, got left"),
        ({"data": "icons", "negatives": ("x",)}, "negatives: expected a table with it, got icons"),
        ({"data": "icons", "left": "x"}, "left: expected a table or shards with it, got icons"),
    ],
)
def test_mistakes(table: Path, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        small(table, tmp_path, **changes)


@pytest.mark.parametrize("changes", [{"num_negatives": 3}, {"hard_negatives": "own"}])
def test_options_of_negatives_need_some(table: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected data with hard negatives, and --loss clip or infonce"):
        Trainer(small(table, tmp_path, **changes))


def test_augmentation_needs_images(tmp_path: Path) -> None:
    pairs = texts(tmp_path)
    with pytest.raises(ValueError, match="augment: expected data with images, got text and text"):
        Trainer(small(pairs, tmp_path / "run", augment="clip"))


def test_locked_images_are_kept_or_augmented(table: Path, tmp_path: Path) -> None:
    locked: dict[str, Any] = {"lock": "image", "head": "linear", "augment": "clip", "steps": 1}
    with pytest.raises(ValueError, match=r"augment: expected images that are encoded .*--no-keep-outputs"):
        Trainer(small(table, tmp_path / "refused", **locked))
    trainer = Trainer(small(table, tmp_path / "encoded", **locked, keep_outputs=False))
    assert trainer.kept == {} and trainer.towers.left.locked
    trainer.run()
    kept = Trainer(small(table, tmp_path / "kept", **{**locked, "augment": "none"}))
    assert set(kept.kept) == {"left"}


def test_locked_texts_that_change_are_not_kept(tmp_path: Path) -> None:
    options = everything(tmp_path / "data") | {"lock": "text", "head": "linear", "steps": 1}
    trainer = Trainer(small(tmp_path, tmp_path / "run", **options))
    assert trainer.kept == {} and any("encoded in every step" in notice for notice in trainer.notices)
    trainer.run()


def test_a_section_turns_augmentation_on() -> None:
    def of(section: dict[str, Any]) -> AugmentConfig:
        return from_dict({"augment": section}, TrainConfig(), where="test").augment

    assert not TrainConfig().augment.on
    assert of({"crop_scale": [0.08, 1.0]}) == AugmentConfig(augment="clip", crop_scale=(0.08, 1.0))
    assert of({}).on and of({}).strengths.crop_scale == (0.9, 1.0)
    assert not of({"augment": "none"}).on
    written = from_dict({"augment": {"flip": 0.5}}, TrainConfig(), where="test")
    assert 'augment = "clip"' in to_toml(written)


def test_epochs_of_a_stream(table: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 0, "epochs": 1.5, "samples_per_epoch": 64, "save_every": 9, "eval_every": 9}
    trainer = Trainer(small(table, tmp_path, **options))
    assert (trainer.steps, trainer.loader.steps_per_epoch) == (3, 2)
    trainer.run()
    assert [line["epoch"] for line in history(tmp_path) if "loss" in line] == [0, 0, 1]


def test_neighbors_and_chance() -> None:
    """Against a count by hand: of rows 0 to 3, whose texts repeat, three have a neighbour of the same text."""
    left = torch.tensor([[1.0, 0, 0], [0.8, 0.6, 0], [0, 0.96, 0.28], [0, 0.5, 0.75**0.5], [0, 0, 1.0]])
    texts = ["a", "a", "b", "b", "c"]
    found = SourceFeatures(left, left, torch.arange(5), list("vwxyz"), texts, texts, views=True)
    expected = {"neighbor_top1": 3 / 4, "neighbor_chance": 1 / 4}
    assert neighbors(found) == expected == neighbors(found, block=1)
    assert neighbors(found._replace(texts=list("abcde"))) == {}
    assert retrieval(found)["text_to_image_R@1"] == 1.0 and chance(found)["text_to_image_R@1"] == pytest.approx(0.2)
    assert "text_to_image_R@1_pairwise" not in retrieval(found), "a view belongs to its own image"


def test_a_fixed_scale(photos: Path, tmp_path: Path) -> None:
    options = {**VIEWS, "steps": 2, "learn_scale": False, "init_scale": 5.0}
    trainer = Trainer(small(photos, tmp_path, **options))
    trainer.run()
    assert trainer.towers.log_scale.exp().item() == pytest.approx(5.0, rel=1e-6)
    assert {line["scale"] for line in history(tmp_path) if "scale" in line} == {trainer.towers.log_scale.exp().item()}
    with pytest.raises(ValueError, match="init_scale: expected at most 100, got 200"):
        small(photos, tmp_path, **{**options, "init_scale": 200.0})

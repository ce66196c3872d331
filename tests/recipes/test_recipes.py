"""Recipes by name: those of the package, files of one's own, and words that are neither."""

from pathlib import Path
from typing import Any

import pytest

from contratile.cli import main
from contratile.recipes import FOLDER, find_recipe, recipe_names
from contratile.train.config_file import load_config
from contratile.train.schedule import in_steps

PAPER: dict[str, dict[str, Any]] = {
    "cc3m-clip": {"batch": 16_384, "chunk": 256, "epochs": 40, "samples": 3_018_714, "warmup": 92},
    "cc3m-clip-rn50": {"batch": 4_096, "chunk": 256, "epochs": 40, "samples": 3_018_714, "warmup": 368},
    "cc12m-clip": {"batch": 32_768, "chunk": 512, "epochs": 40, "samples": 10_445_970, "warmup": 159},
    "laion400m-clip": {"batch": 262_144, "chunk": 512, "epochs": 8, "samples": 280_321_756, "warmup": 534},
    "cc3m-lit": {"batch": 16_384, "chunk": 256, "epochs": 20, "samples": 3_018_714, "warmup": 92},
    "cc12m-lit": {"batch": 32_768, "chunk": 1024, "epochs": 20, "samples": 10_445_970, "warmup": 159},
    "laion400m-lit": {"batch": 262_144, "chunk": 512, "epochs": 8, "samples": 280_321_756, "warmup": 534},
}
"""The scripts of the Inf-CL paper. Their warm-up in steps is samples / (2 * batch), rounded down."""


@pytest.mark.parametrize("name", PAPER)
def test_recipes_are_the_papers_scripts(name: str) -> None:
    script, config = PAPER[name], load_config(find_recipe(name))
    run, optim = config.run, config.optim
    found = {"batch": run.batch, "chunk": run.chunk, "epochs": run.epochs, "samples": config.data.samples_per_epoch}
    per_epoch = script["samples"] // script["batch"]
    steps = in_steps(optim, per_epoch, steps=round(run.epochs * per_epoch))
    assert {**found, "warmup": steps.warmup} == script
    assert run.eval_every == run.save_every == per_epoch
    assert (run.precision, optim.schedule, optim.min_lr, config.loss.same_id) == ("fp16", "cosine", 0.0, "negative")
    assert (config.augment.augment, config.augment.crop_scale) == ("clip", (0.08, 1.0))
    rates = (optim.optimizer, optim.lr, optim.betas, optim.weight_decay, optim.clip_grad)
    if name.endswith("lit"):
        assert rates == ("timm:adafactorbv", 1e-3, (0.9, 0.95), 1e-4, 1.0)
        assert (config.towers.lock, config.towers.head, config.towers.text_pooling) == ("image", "linear", "pooler")
    else:
        assert (*rates, optim.eps) == ("adamw", 5e-4, (0.9, 0.98), 0.5, 0.0, 1e-8)


def test_names() -> None:
    assert {"icons", "icons-simclr", "icons-whole", "wordnet", *PAPER} == set(recipe_names())
    for name in recipe_names():
        assert find_recipe(name) == FOLDER / f"{name}.toml" and find_recipe(name).is_file()


def test_a_plain_word_is_a_packaged_recipe_whatever_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "icons").mkdir()
    assert find_recipe("icons") == FOLDER / "icons.toml"
    (tmp_path / "mine").write_text("[run]\n")
    for path in ("mine", "./icons", "icons.toml", "some/folder/icons", tmp_path / "x.toml"):
        assert find_recipe(path) == Path(path)


def test_unknown_names_list_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"expected one of .*cc12m-clip.*icons.*, or a TOML file, got 'icon'.*icons\?"):
        find_recipe("icon")
    pytest.importorskip("tyro")
    assert main(["train", "--config", "zzz"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("contratile train: config: expected one of") and "wordnet" in told


def test_the_help_of_train_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert all(name in told for name in recipe_names())

"""Recipes by name: those of the package, files of one's own, and words that are neither."""

from pathlib import Path

import pytest

from contratile.cli import main
from contratile.recipes import FOLDER, find_recipe, recipe_names


def test_names() -> None:
    names = {"icons", "icons-whole", "wordnet", "cc3m-clip", "cc12m-clip", "cc12m-lit", "laion400m-lit"}
    assert names <= set(recipe_names())
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

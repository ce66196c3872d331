"""The gallery of a run: which pairs it holds, what it says about them, and searching it from Python."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import contratile.train
from contratile.cli import main
from contratile.data.catalog import open_source
from contratile.report.gallery import Gallery, load_gallery, make_gallery, save_gallery
from contratile.train import Trainer, encode, load_run, search, write_results
from contratile.train.config_file import load_config, to_toml
from contratile.train.gallery_search import example_query
from contratile.train.results import held_out_rows
from tests.train.runs import shapes, small


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose gallery holds all pairs."""
    folder = tmp_path_factory.mktemp("gallery")
    trainer = Trainer(small(shapes(folder / "shapes"), folder / "run", queries=("red arc", "blue line")))
    write_results(trainer, trainer.run())
    return folder / "run"


def test_it_holds_all_pairs_and_says_which_were_trained_on(trained: Path) -> None:
    gallery, config = load_gallery(trained), load_config(trained / "config.toml")
    held_out, training = (list(open_source(config.data, split).texts()) for split in ("test", "train"))
    assert sorted(gallery.texts) == sorted(held_out + training)
    marks = dict(zip(gallery.texts, gallery.trained_items("right"), strict=True))
    assert {text for text, mark in marks.items() if mark} == set(training)
    assert gallery.trained_items("left") == [gallery.caption(item) in training for item in range(len(gallery.names))]
    assert f"{len(training)} training, {len(held_out)} held out" in gallery.counts()
    assert all(gallery.pictures)


def test_results_are_marked(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(trained / "config.toml")
    training = set(open_source(config.data, "train").texts())
    assert main(["search", str(trained), "red", "ellipse", "--k", "96"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"-?\d\.\d{3}  ", line)]
    assert len(lines) == 96
    for line in lines:
        text, _, mark = line.split("  ")[-1].rpartition(" (")
        assert mark == ("training)" if text.removesuffix(" (match)") in training else "held out)"), line


def test_searching_from_python_gives_what_the_command_gives(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gallery = load_gallery(trained)
    towers = load_run(trained, "last").towers.train()
    (row,) = search(towers, gallery, ["red ellipse"], k=3)
    assert towers.training and search(towers, gallery, []) == []
    assert main(["search", str(trained), "red ellipse", "--k", "3"]) == 0
    out = capsys.readouterr().out
    found = zip(row.scores, row.names, row.captions, strict=True)
    assert all(f"{score:.3f}  {name}  {text}" in out for score, name, text in found)


def test_the_sheet_of_held_out_queries_has_held_out_items_alone(trained: Path) -> None:
    towers, config, _ = load_run(trained, "last")
    source = open_source(config.data, "test")
    found = encode(towers, source, chunk=16)
    rows = held_out_rows(load_gallery(trained), found, 4)
    assert len(rows) == 8 and all(len(row.images) == 4 and not row.trained for row in rows)
    assert {name for row in rows for name in row.names} <= set(found.names)
    alone = held_out_rows(make_gallery(found, source, 6), found, 4)
    assert [row.names for row in rows] == [row.names for row in alone]


def test_queries_are_in_the_report(trained: Path) -> None:
    page = (trained / "report.html").read_text(encoding="utf-8")
    assert (
        "<h2>Search</h2>" in page
        and "whether it is from the training data" in page
        and page.count("data:image/png") == 2
    )
    assert " training, " in page and "none of their texts" not in page


@pytest.mark.parametrize(
    ("changes", "all_pairs"),
    [({}, True), ({"gallery": "held-out"}, False), ({"steps": 1}, False), ({"steps": 1, "gallery": "all"}, True)],
)
def test_which_pairs_it_holds(trained: Path, tmp_path: Path, changes: dict[str, Any], all_pairs: bool) -> None:
    """By itself all of them, unless training has not even seen each once."""
    trainer = Trainer(small(trained.parent / "shapes" / "pairs.csv", tmp_path, **changes))
    assert trainer.searches_training == all_pairs


def test_all_pairs_of_a_stream_are_refused(trained: Path, tmp_path: Path) -> None:
    import tarfile

    folder = trained.parent / "shapes"
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for path in sorted(folder.glob("*.png")):
            (tmp_path / f"{path.stem}.txt").write_text(path.stem)
            tar.add(path, path.name)
            tar.add(tmp_path / f"{path.stem}.txt", f"{path.stem}.txt")
    config = small(tmp_path / "shard.tar", tmp_path / "run", gallery="all")
    with pytest.raises(ValueError, match=r"gallery: expected data with a length for --gallery all, got .*shard"):
        Trainer(config)
    assert not Trainer(small(tmp_path / "shard.tar", tmp_path / "run")).searches_training


def test_a_gallery_of_an_earlier_version_is_of_held_out_pairs(trained: Path, tmp_path: Path) -> None:
    """It does not say which pairs are training data."""
    save_gallery(load_gallery(trained), tmp_path)
    tensors = load_file(tmp_path / "gallery.safetensors")
    del tensors["trained"]
    save_file(tensors, tmp_path / "gallery.safetensors")
    gallery = load_gallery(tmp_path)
    assert not gallery.trained.any() and "trained" not in gallery.counts()
    (row,) = search(load_run(trained, "last").towers, gallery, ["red arc"])
    assert row.trained == [] and row.mark(0) == ""


def test_marks_that_do_not_fit_are_refused(trained: Path, tmp_path: Path) -> None:
    save_gallery(load_gallery(trained), tmp_path)
    tensors = load_file(tmp_path / "gallery.safetensors")
    tensors["trained"] = tensors["trained"][:-1].clone()
    save_file(tensors, tmp_path / "gallery.safetensors")
    with pytest.raises(ValueError, match=r"gallery of .*: expected what a finished run writes"):
        load_gallery(tmp_path)


def test_the_query_to_try_is_held_out_and_finds_its_own() -> None:
    eye = torch.eye(4)
    pairs = torch.tensor([[0, 0], [1, 1], [2, 2], [3, 3]])
    texts = ["no luck here", "works at once", "works", "was trained"]
    right = torch.stack([eye[1], eye[1], eye[2], eye[3]])
    kinds, trained = ("image", "text"), torch.tensor([False, False, False, True])
    gallery = Gallery(eye, right, pairs, ["a", "b", "c", "d"], texts, kinds, kinds, [], 1, trained)
    assert example_query(gallery) == "works at once"


def test_a_recipe_may_list_queries(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[run]\nqueries = ["red arc", "a \\"b\\""]\n')
    config = load_config(recipe)
    assert config.run.queries == ("red arc", 'a "b"')
    recipe.write_text(to_toml(config))
    assert load_config(recipe).run == config.run
    recipe.write_text('[run]\nqueries = "red arc"\n')
    with pytest.raises(TypeError, match="queries: expected a list, got 'red arc'"):
        load_config(recipe)
    recipe.write_text("[run]\nqueries = [1]\n")
    with pytest.raises(TypeError, match="queries: expected a text in quotes, got 1"):
        load_config(recipe)


def test_one_place_to_import_from() -> None:
    """Everything that examples/own_data.py and the documentation import."""
    for name in ("Trainer", "TrainConfig", "LossConfig", "OptimConfig", "RunConfig", "TowerConfig", "DataConfig"):
        assert isinstance(getattr(contratile.train, name), type)
    for name in ("encode", "retrieval", "chance", "zero_shot", "load_run", "load_gallery", "search", "open_source"):
        assert callable(getattr(contratile.train, name)) and getattr(contratile.train, name).__doc__
    assert callable(contratile.train.write_results)

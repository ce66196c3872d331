"""`contratile train`, `eval` and `search`: one run through all of them, and what they say to mistakes."""

import errno
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from contratile.cli import main
from contratile.cli.serve import parser as serve_parser
from contratile.data.catalog import DataConfig, open_source
from contratile.data.loader import Batch
from contratile.data.rows import Subset
from contratile.models.encoding import encode
from contratile.report.gallery import load_gallery
from contratile.train.config import TrainConfig
from contratile.train.config_file import load_config, to_toml
from contratile.train.load import load_run
from contratile.train.loop import Trainer
from contratile.train.results import is_finished
from contratile.train.setup import fit_batch
from tests.train.runs import shapes, small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, by the command line."""
    folder = tmp_path_factory.mktemp("commands")
    config = small(shapes(folder / "shapes"), folder / "unused", eval_every=1, save_every=1)
    (folder / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    assert main(["train", "--config", str(folder / "recipe.toml"), "--out", str(folder / "run"), "--steps", "8"]) == 0
    return folder / "run"


def test_a_run_leaves_its_files(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    wanted = {"config.toml", "metrics.jsonl", "checkpoints", "best", "report.html", "contact_sheet.png"}
    assert wanted | {"gallery.safetensors", "gallery.json", "tokenizer.json"} <= names
    assert not [name for name in names if "partial" in name or "part" in name.split(".")]
    assert "steps = 8" in (run / "config.toml").read_text()
    with Image.open(run / "contact_sheet.png") as sheet:
        assert sheet.size[0] > 200
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<h1>Training report: tiny encoders on pairs.csv</h1>" in page
    assert "data:image/png;base64," in page and "a dense loss would have taken" in page


def test_the_last_lines_load_and_serve_the_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "it's a run"
    shutil.copytree(run, copy, symlinks=True)
    (copy / "finished.json").unlink()
    assert main(["train", "--config", str(copy / "config.toml"), "--out", str(copy)]) == 0
    load, serve = capsys.readouterr().out.splitlines()[-2:]
    names: dict[str, Any] = {}
    exec(load.removeprefix("load the model in Python: "), names)
    assert names["model"].encode_text(["red"]).shape == (1, names["model"].width)
    words = shlex.split(serve.removeprefix("search it in the browser: "))
    assert words == ["contratile", "serve", str(copy)] and serve_parser().parse_args(words[2:]).corpus == copy


def test_nothing_is_left_to_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "report.html").read_bytes()
    assert main(["train", "--config", str(run / "config.toml")]) == 0
    assert "nothing left to do" in capsys.readouterr().err
    assert (run / "report.html").read_bytes() == before
    assert main(["train", "--config", str(run / "config.toml"), "--resume", "never"]) == 2
    assert "Pass --resume auto to continue it" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["finished.json", "report.html", "gallery.json", "contact_sheet.png"])
def test_what_is_missing_of_a_finished_run_is_made_again(
    run: Path, missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill after the last checkpoint, or somebody's hand."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    (copy / missing).unlink()
    again = ["train", "--config", str(copy / "config.toml"), "--out", str(copy)]
    if missing == "gallery.json":
        assert main(["search", str(copy), "red"]) == 2
        assert "Run its `contratile train` command to the end" in capsys.readouterr().err
    assert main(again) == 0
    told = capsys.readouterr()
    assert "report: " in told.out and "nothing left to do" not in told.err
    for name in ("gallery.safetensors", "gallery.json", "contact_sheet.png", "metrics.jsonl"):
        assert (copy / name).read_bytes() == (run / name).read_bytes(), name
    assert main(["search", str(copy), "red", "--out", str(tmp_path / "found.png")]) == 0
    assert main(again) == 0
    assert "nothing left to do" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": 8, "files": 3}', '{"step": 7, "files": []}', "[" * 99999])
def test_rubbish_does_not_count_as_finished(text: str, tmp_path: Path) -> None:
    (tmp_path / "finished.json").write_text(text)
    assert not is_finished(tmp_path, 8)


def test_a_run_that_went_on_has_no_weights_for_its_old_gallery(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    (copy / "checkpoints" / "step-00000008").rename(copy / "checkpoints" / "step-00000009")
    assert main(["search", str(copy), "red"]) == 2
    told = capsys.readouterr().err
    assert (
        "step-00000008: expected a folder, got none. The run has" in told
        and "writes its gallery again at its end" in told
    )


def test_eval(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (last,) = [entry for entry in recorded if entry["step"] == 8 and "text_to_image_R@1" in entry]
    best = max((entry for entry in recorded if "text_to_image_R@10" in entry), key=lambda e: e["text_to_image_R@10"])
    assert found["text_to_image_R@10"] == pytest.approx(best["text_to_image_R@10"])
    assert last.keys() - {"step"} <= found.keys()
    assert main(["eval", str(run)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{found['pairs']} pairs of ") and told[1].split()[:3] == ["R@1", "R@5", "R@10"]
    assert told[2].startswith("text to image") and f"{found['text_to_image_R@10']:.4f}" in told[2]
    assert told[4].split() == ["chance", *(f"{k / found['pairs']:.4f}" for k in (1, 5, 10))]


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert main(["eval", *words, "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_eval_on_other_pairs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other data is used whole unless a split is asked for, and so are all of the run's with --split all."""
    table = shapes(tmp_path, sizes=1)
    rows = table.read_text().replace("path,caption", "drawing,words")
    table.write_text(rows)
    named = [str(run), "--data", str(table), "--left", "drawing", "--right", "words"]
    pairs = [evaluated(capsys, *named, *more)["pairs"] for more in ([], ["--split", "test"], ["--split", "train"])]
    assert pairs[0] == 32 == pairs[1] + pairs[2]
    counts = {split: evaluated(capsys, str(run), "--split", split)["pairs"] for split in ("all", "test", "train")}
    assert counts["all"] == 96 == counts["test"] + counts["train"]


def test_zero_shot(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = json.loads((run / "gallery.json").read_text())["texts"]
    classes = tmp_path / "classes.txt"
    classes.write_text("\n".join([*texts[:6], "", "a purple elephant", texts[0].upper()]))
    found = evaluated(capsys, str(run), "--classes", str(classes))
    assert (found["classes"], found["classified"]) == (8, 6)
    assert 0 <= found["zero_shot_top1"] <= found["zero_shot_top5"] <= 1
    assert main(["eval", str(run), "--classes", str(classes)]) == 0
    told = capsys.readouterr().out
    assert "zero-shot, 8 classes, 6 samples whose text is one of them" in told
    assert f"top-1 {found['zero_shot_top1']:.4f} (chance 0.1250)" in told


@pytest.mark.parametrize(
    ("names", "templates", "told"),
    [
        ("cat\ndog", "{}", "classes: expected names that are texts of the data, got 'cat', 'dog'"),
        ("", "{}", "classes.txt: expected one name or prompt per line, got an empty file"),
        ("red line of size 1", "a photo", "template: expected a prompt with {} for the name, got 'a photo'"),
    ],
)
def test_mistakes_of_zero_shot(
    run: Path, tmp_path: Path, names: str, templates: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = tmp_path / "classes.txt", tmp_path / "templates.txt"
    for path, text in zip(paths, (names, templates), strict=True):
        path.write_text(text)
    words = ["--split", "all", "--classes", str(paths[0]), "--templates", str(paths[1])]
    assert main(["eval", str(run), *words]) == 2
    assert told in capsys.readouterr().err


def test_weights_may_be_chosen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ranks = {entry["step"]: entry["text_to_image_mean_rank"] for entry in recorded if "text_to_image_R@1" in entry}
    for weights in ("last", "step-00000008"):
        found = evaluated(capsys, str(run), "--weights", weights)
        assert found["step"] == 8 and found["text_to_image_mean_rank"] == pytest.approx(ranks[8])
    assert ranks[evaluated(capsys, str(run))["step"]] < max(ranks.values())
    assert main(["eval", str(run), "--weights", "step-00000099"]) == 2
    assert "step-00000099: expected a folder, got nothing there" in capsys.readouterr().err


def test_search_uses_the_weights_of_the_gallery(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text that is in the gallery scores with its own image what the last evaluation gave them."""
    gallery = load_gallery(run)
    towers, config, step = load_run(run, "last")
    held_out, training = (encode(towers, open_source(config.data, split), chunk=16) for split in ("test", "train"))
    assert gallery.step == step == 8
    best = float((held_out.right[0] @ torch.cat([held_out.left, training.left]).T).max())
    assert main(["search", str(run), gallery.texts[0], "--k", "1"]) == 0
    (score,) = re.findall(r"-?\d\.\d{3}", capsys.readouterr().out)
    assert float(score) == pytest.approx(best, abs=2e-3)  # the gallery is in 16 bit


def test_search(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(run), "red", "ellipse", "--k", "3"]) == 0
    out = capsys.readouterr().out
    assert 'nearest to "red ellipse"' in out and "contact sheet:" in out
    with Image.open(run / "search.png") as sheet:
        assert sheet.format == "PNG"


def test_several_queries_stay_several(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet, heights = tmp_path / "found.png", []
    for words in (["--queries", "red ellipse", "blue line"], ["red", "ellipse"], ["--k", "3", "red", "ellipse"]):
        assert main(["search", str(run), *words, "--k", "3", "--out", str(sheet)]) == 0
        with Image.open(sheet) as picture:
            heights.append(picture.height)
        heads = re.findall('nearest to "(.*)"', capsys.readouterr().out)
        assert heads == (["red ellipse", "blue line"] if words[0] == "--queries" else ["red ellipse"])
    assert heights[0] > heights[1] == heights[2]
    assert main(["search", str(run), "red", "line", "--queries", "blue", "green arc", "--k", "1"]) == 0
    assert re.findall('nearest to "(.*)"', capsys.readouterr().out) == ["red line", "blue", "green arc"]
    for words, told in (([], "got nothing"), (["--queries", "red", " "], "got ' '")):
        assert main(["search", str(run), *words]) == 2
        assert f"query: expected a text, or the path of a picture, {told}" in capsys.readouterr().err


def test_the_contact_sheet_is_refused_before_the_search(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No ending is silently a PNG, and nothing is opened for a name that cannot be written."""
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "no-run")
    for name, told in (
        ("found.txt", "expected the name of a picture that ends in .png, got "),
        ("found", "expected the name of a picture that ends in .png, got "),
        ("found.jpg", "The contact sheet is a PNG: choose a name such as found.png"),
        ("file/found.png", "expected a folder to write to, got "),
    ):
        assert main(["search", nowhere, "red", "--out", str(tmp_path / name)]) == 2
        err = capsys.readouterr().err
        assert "--out: " in err and told in err and "no-run" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert main(["search", nowhere, "red", "--k", "0"]) == 2
    assert "--k: expected at least 1, got 0" in capsys.readouterr().err
    with monkeypatch.context() as read_only:
        read_only.setattr("tempfile.TemporaryFile", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        assert main(["search", nowhere, "red", "--out", str(tmp_path / "found.png")]) == 2
    assert "expected a folder to write to, got " in (err := capsys.readouterr().err) and "Read-only" in err
    assert main(["search", str(run), "red", "--out", str(tmp_path / "new" / "folder" / "Found.PNG")]) == 0
    assert (tmp_path / "new" / "folder" / "Found.PNG").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("contratile.train.gallery_search.encode_queries", None)
    assert main(["search", str(run), "red-line-1.png", "--among", "right", "--out", str(tmp_path / "x.png")]) == 2
    assert "--out: expected a search that finds images" in capsys.readouterr().err


def test_pictures_are_queries_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Among the right side they find texts, among the left side similar pictures; the others may be texts."""
    gallery = load_gallery(run)
    picture = next(path for path in sorted(run.parent.rglob("red-line-3.png")))
    assert main(["search", str(run), "--among", "left", "--queries", str(picture), "red line", "--k", "2"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split("  ")[1] == next(name for name in gallery.names if "red-line-3" in name)
    assert 'nearest to "red line"' in out
    assert main(["search", str(run), "--among", "right", "--queries", str(picture), str(picture), "--k", "2"]) == 0
    assert capsys.readouterr().out.count("among text") == 2
    assert main(["search", str(run), str(picture)]) == 2
    assert "--among left to find similar pictures" in capsys.readouterr().err


def test_a_mistyped_path_is_no_text_unless_asked(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a text it would find something all the same."""
    for among in ([], ["--among", "left"]):
        assert main(["search", str(run), "no-such.PNG", *among]) == 2
        told = "query: expected a text, or the path of a picture, got nothing at no-such.PNG. Check the path, or pass"
        assert told in capsys.readouterr().err
    monkeypatch.chdir(next(run.parent.rglob("red-line-3.png")).parent)
    for query in ("no-such.PNG", "red-line-3.png"):
        assert main(["search", str(run), query, "--text", "--k", "1"]) == 0
        assert f'nearest to "{query}"' in capsys.readouterr().out
    assert main(["search", str(run), "red-line-3.png", "--text", "--among", "right"]) == 2
    assert "--text: expected a search with texts, got one with pictures" in capsys.readouterr().err


def test_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "expected a folder with config.toml" in capsys.readouterr().err
    assert main(["search", str(tmp_path), "x"]) == 2
    for words, told in ((["--data", "icon"], "'icons'"), (["--batchh", "3"], "--batch")):
        with pytest.raises(SystemExit) as done:
            main(["train", *words])
        assert done.value.code == 2
        assert told in capsys.readouterr().err


def test_a_batch_that_is_larger_than_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is as large as the data, with a notice, and the same command goes on with it."""
    config = small(shapes(tmp_path / "shapes"), tmp_path / "run", batch=4096, steps=2)
    (tmp_path / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    words = ["train", "--config", str(tmp_path / "recipe.toml")]
    pairs = len(open_source(config.data, "train"))  # type: ignore[arg-type]
    told = f"batch 4,096 is larger than the {pairs} pairs of an epoch: using {pairs}"
    assert main(words) == 0
    captured = capsys.readouterr()
    assert told in captured.err and f"compared {pairs} pairs" in captured.out and "drop_last" not in captured.err
    assert load_config(tmp_path / "run" / "config.toml").run.batch == pairs
    assert main([*words, "--steps", "4"]) == 0
    captured = capsys.readouterr()
    assert told in captured.err and "continuing at step 2 of 4" in captured.err


@pytest.mark.parametrize(("pairs", "world", "batch"), [(86, 1, 86), (86, 4, 84), (3, 4, 3), (4096, 4, 4096)])
def test_a_batch_that_fits_the_data_and_the_processes(pairs: int, world: int, batch: int) -> None:
    source = Subset(open_source(DataConfig(data="icons"), "train"), range(pairs))  # type: ignore[arg-type]
    assert fit_batch(TrainConfig(), source, world).run.batch == batch


def test_memory_that_does_not_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Trainer, batch: Batch) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Trainer, "train_step", fails)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(small(shapes(tmp_path / "shapes"), tmp_path / "run")), encoding="utf-8")
    assert main(["train", "--config", str(recipe)]) == 1
    assert "CUDA out of memory.\nLower --chunk (now 10)" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for option in ("--batch", "--chunk", "--data", "--towers", "--lock", "--loss", "--lr", "--resume", "--precision"):
        assert option in text

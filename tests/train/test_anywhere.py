"""A run folder works from anywhere, and says what it does: the header, paths, searches in both directions."""

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from contratile.cli import main
from contratile.data.catalog import open_source
from contratile.metrics import nearest
from contratile.models.encoding import encode
from contratile.models.towers import build_towers
from contratile.report.gallery import load_gallery, make_gallery, save_gallery
from contratile.train.config import TrainConfig
from contratile.train.config_file import load_config, to_toml
from contratile.train.load import load_run
from contratile.train.loop import Trainer
from contratile.train.paths import absolute_data, absolute_paths, absolute_towers, missing_data
from tests.train.runs import clip_folder, sentence_folder, shapes, small, texts


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which two runs were trained by relative names: run of pictures, words of text pairs."""
    folder = tmp_path_factory.mktemp("home")
    table = shapes(folder / "shapes")
    # Two captions of each picture, and columns that nobody uses.
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    many = [
        f"{path},{caption},{n},no {caption}"
        for path, caption in rows
        for n, caption in enumerate((caption, f"one {caption}"))
    ]
    table.write_text("\n".join(["path,caption,number,negative", *many]) + "\n")
    pairs = texts(folder)
    pairs.write_text(pairs.read_text().replace("left,right", "anchor,positive"))
    sentence_folder(folder / "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, data, changes in (
            ("run", "shapes/pairs.csv", {}),
            ("words", "texts.csv", {"towers": "st:bert", "lr": None, "pixels": 0}),
        ):
            config = small(Path(data), Path(name), **changes)
            Path("recipe.toml").write_text(to_toml(config), encoding="utf-8")
            with Path(f"{name}.log").open("w") as log, pytest.MonkeyPatch.context() as quiet:
                quiet.setattr(sys, "stderr", log)
                assert main(["train", "--config", "recipe.toml"]) == 0
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- the header ---------------------------------------------------------------------------------------------------


def test_a_run_begins_with_a_header(home: Path) -> None:
    told = dict(line.split("  ", 1) for line in (home / "run.log").read_text().splitlines() if "  " in line)
    told = {title: text.strip() for title, text in told.items()}
    assert "of pairs.csv (train); held out: " in told["pairs"]
    assert told["columns"] == "path (image) and caption (text)"
    assert told["not used"] == "number" and told["negatives"] == "negative (text)"
    assert "tiny: image " in told["towers"] and "parameters from scratch; text " in told["towers"]
    threads = torch.get_num_threads()
    assert told["device"] == f"cpu, 1 process, {threads} thread{'s' * (threads > 1)}, fp32"
    assert told["steps"].startswith("6 of 32 pairs in chunks of 10")
    assert told["learning rate"].startswith("0.003 (adamw, cosine, 10 steps of warm-up")
    assert told["writes to"] == str(home / "run")


def test_the_header_tells_the_rates_of_pretrained_towers(home: Path) -> None:
    log = (home / "words.log").read_text()
    assert "learning rate  0.001; pretrained backbones 2e-05" in log
    assert "one encoder for both" in log and "not used" not in log


def test_logs_hold_no_bars_of_other_packages(home: Path) -> None:
    """Where nobody watches: tqdm's bars are written with a carriage return."""
    code = (
        "from contratile.cli.extras import quiet_progress; quiet_progress();"
        "from tqdm import tqdm; from transformers.utils import logging;"
        "list(tqdm(range(3))); list(logging.tqdm(range(3), desc='Loading weights'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "it/s" not in done.stderr and "Loading weights" not in done.stderr


# --- from another folder ------------------------------------------------------------------------------------------


def test_paths_are_saved_as_seen_from_anywhere(home: Path) -> None:
    saved = load_config(home / "run" / "config.toml")
    assert saved.data.data == str(home / "shapes" / "pairs.csv") and saved.run.out == home / "run"
    assert load_config(home / "words" / "config.toml").towers.towers == f"st:{home / 'bert'}"


@pytest.mark.parametrize("name", ["run", "words"])
def test_eval_and_search_from_another_folder(
    home: Path, elsewhere: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(home / name)]) == 0
    assert main(["search", str(home / name), "the red line", "--k", "2"]) == 0
    moved = elsewhere / "moved"
    shutil.copytree(home / name, moved, symlinks=True)
    assert main(["search", "moved", "the red line", "--k", "2"]) == 0
    assert main(["eval", "moved", "--json"]) == 0


def test_search_needs_the_run_alone(
    home: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures are in the gallery, each once, as they looked."""
    shutil.copytree(home / "shapes", "shapes")
    shutil.copytree(home / "run", "run", symlinks=True)
    config = load_config(Path("run/config.toml"))
    gone = replace(config, data=replace(config.data, data=str(elsewhere / "gone" / "pairs.csv")))
    Path("run/config.toml").write_text(to_toml(gone))
    assert main(["search", "run", "a red line", "--k", "3"]) == 0
    told = capsys.readouterr().out
    assert Path("run/search.png").is_file() and "contact sheet: run/search.png" in told
    gallery = load_gallery(Path("run"))
    assert len(gallery.names) == len(set(gallery.names)) == len(gallery.pictures) == len(gallery.texts) / 2
    with Image.open(home / "shapes" / gallery.names[0]) as image:
        with Image.open(io.BytesIO(gallery.pictures[0])) as kept:
            assert kept.tobytes() == image.tobytes()
    # Data that has moved is told with the way out of it.
    assert main(["eval", "run"]) == 2
    error = capsys.readouterr().err
    assert f"got nothing at {elsewhere / 'gone' / 'pairs.csv'}" in error and "--data PATH --split test" in error
    assert main(["eval", "run", "--data", "shapes/pairs.csv", "--split", "test", "--json"]) == 0
    moved = json.loads(capsys.readouterr().out)
    assert main(["eval", str(home / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == moved


def test_a_picture_that_is_not_in_the_gallery(
    home: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home / "run", "run", symlinks=True)
    gallery = load_gallery(Path("run"))
    save_gallery(gallery._replace(pictures=[b"", b"no picture", *gallery.pictures[2:4]]), Path("run"))
    n = len(gallery.names)
    assert main(["search", "run", "red", "--k", str(n)]) == 0
    told = f"{n - 2} of {n} pictures are missing and left blank: the gallery holds 3 of {n} pictures"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage",
    [
        lambda words: "{",
        lambda words: "[" * 100_000,
        lambda words: json.dumps({**words, "names": words["names"][:-1]}),
        lambda words: json.dumps({**words, "texts": [7] * len(words["texts"])}),
        lambda words: json.dumps({**words, "step": "../../x"}),
        lambda words: json.dumps({"step": 6, "keys": [], "texts": []}),
    ],
    ids=["cut", "deep", "short", "numbers", "step", "older"],
)
def test_a_damaged_gallery(
    home: Path, elsewhere: Path, damage: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(home / "run", "run", symlinks=True)
    listed = Path("run/gallery.json")
    listed.write_text(damage(json.loads(listed.read_text())))
    assert main(["search", "run", "red"]) == 2
    error = capsys.readouterr().err
    assert "gallery of run: expected what a finished run writes" in error and len(error.splitlines()) == 1
    listed.unlink()
    assert main(["search", "run", "red"]) == 2
    assert "Run its `contratile train` command to the end" in capsys.readouterr().err


def test_towers_that_have_moved(home: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(home / "words", "words", symlinks=True)
    config = Path("words/config.toml")
    config.write_text(config.read_text().replace(str(home / "bert"), str(elsewhere / "gone")))
    for words in (["eval", "words"], ["search", "words", "red"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"towers of the run: expected a model at {elsewhere / 'gone'}, got nothing" in error
        assert len(error.splitlines()) == 1


def test_names_of_places(elsewhere: Path) -> None:
    for name in ("wn", "folder", "a+b"):
        (elsewhere / name).mkdir()
    here = str(elsewhere)
    assert absolute_data("icons") == "icons" and absolute_data("wordnet") == "wordnet"
    assert absolute_data("wordnet:wn") == f"wordnet:{here}/wn"
    assert absolute_data("x/pairs.CSV") == f"{here}/x/pairs.CSV"
    assert absolute_data("hf:folder:config") == f"hf:{here}/folder:config"
    assert absolute_data("hf:org/name") == "hf:org/name"
    assert absolute_data("a/{0..3}.tar::s3://b/{4..5}.tar") == f"{here}/a/{{0..3}}.tar::s3://b/{{4..5}}.tar"
    assert absolute_data("pipe:cat a.tar") == "pipe:cat a.tar"
    assert absolute_towers("tiny") == "tiny"
    assert absolute_towers("hf:folder+bert-base") == f"hf:{here}/folder+bert-base"
    assert absolute_towers("hf:a+b") == f"hf:{here}/a+b"
    assert absolute_towers("open_clip:ViT-B-32:laion2b") == "open_clip:ViT-B-32:laion2b"
    config = absolute_paths(TrainConfig())
    assert absolute_paths(config) == config and config.run.out.is_absolute()
    assert missing_data(f"{here}/x/{{0..3}}.tar") == f"{here}/x" and missing_data(f"{here}/{{0..3}}.tar") == ""
    assert not any(map(missing_data, ("icons", "hf:org/name", "wordnet", "pipe:cat x.tar")))
    assert missing_data(f"hf:{here}/gone") == f"{here}/gone" and missing_data("wordnet:gone") == "gone"


def test_pictures_of_shards_are_in_the_gallery(home: Path, tmp_path: Path) -> None:
    """A stream is read once more for them."""
    config = small(home / "shapes" / "pairs.csv", tmp_path)
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for path in sorted((home / "shapes").glob("red-*.png")):
            (tmp_path / f"{path.stem}.txt").write_text(path.stem)
            tar.add(path, path.name)
            tar.add(tmp_path / f"{path.stem}.txt", f"{path.stem}.txt")
    source = open_source(
        replace(config.data, data=str(tmp_path / "shard.tar"), test_data=str(tmp_path / "shard.tar")), "test"
    )
    towers = build_towers(config.towers, texts=["red line"])
    gallery = make_gallery(encode(towers, source, chunk=5), source, 1)
    assert gallery.names == [
        f"shard.tar/red-{shape}-{n}" for shape in ("arc", "ellipse", "line", "rectangle") for n in (1, 2, 3)
    ]
    for name, data in zip(gallery.names, gallery.pictures, strict=True):
        with Image.open(home / "shapes" / f"{name.split('/')[1]}.png") as image, Image.open(io.BytesIO(data)) as kept:
            assert kept.tobytes() == image.tobytes()


# --- searching ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("among", "asked", "found"), [(None, "left", "right"), ("right", "left", "right"), ("left", "right", "left")]
)
def test_text_pairs_are_searched_on_the_other_side(
    home: Path, among: str | None, asked: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gallery = load_gallery(home / "words")
    words = {"left": gallery.names, "right": gallery.texts}
    assert gallery.sides == ("anchor", "positive") and all(text.startswith("the ") for text in words["left"])
    query = words[asked][1]
    towers = load_run(home / "words", "last").towers
    with torch.no_grad():
        features = getattr(towers, asked)(getattr(towers, asked).prepare([query]))
    expected = nearest(features, getattr(gallery, found), 3)[1][0].tolist()
    assert main(["search", str(home / "words"), query, "--k", "3", *(["--among", among] if among else [])]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f'nearest to "{query}" among {"positive" if found == "right" else "anchor"}'
    marks = [" (training)" if trained else " (held out)" for trained in gallery.trained_items(found)]  # type: ignore[arg-type]
    assert all(line.endswith(marks[i]) for line, i in zip(lines, expected, strict=True))
    lines = [line.removesuffix(marks[i]) for line, i in zip(lines, expected, strict=True)]
    assert [line.split("  ", 1)[1].removesuffix(" (match)") for line in lines] == [words[found][i] for i in expected]
    own = words[found][1]
    assert [line.endswith("(match)") for line in lines] == [words[found][i] == own for i in expected]


def test_an_image_is_looked_for_among_texts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(home / "run")
    assert main(["search", run, str(home / "shapes" / "red-line-1.png"), "--among", "right", "--k", "2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.endswith("among text") and len(lines) == 2
    assert main(["search", run, str(home / "shapes" / "red-line-1.png")]) == 2
    assert "query: expected a text, got a picture" in capsys.readouterr().err
    assert main(["search", run, "\udcff\udcfe"]) == 0  # bytes that are not UTF-8
    capsys.readouterr()
    assert main(["search", run, " "]) == main(["search", run, "red line", "--out", str(home)]) == 2
    assert main(["search", str(home / "nowhere"), "red line"]) == 2
    assert "what to search: expected the folder of a run, or features that" in capsys.readouterr().err
    assert main(["search", run, "red line", "--among", "right"]) == 2
    assert "query: expected the path of a picture, got 'red line' (no such file)" in capsys.readouterr().err
    assert main(["search", run, str(home / "shapes" / "red-line-1.png"), "--among", "right", "--out", "x.png"]) == 2


def test_a_long_text_is_one_line_in_a_pipe(home: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "words"):
        shutil.copytree(home / name, name, symlinks=True)
        gallery = load_gallery(Path(name))
        save_gallery(gallery._replace(texts=[f"{text} {'and so on ' * 30}end" for text in gallery.texts]), Path(name))
        assert main(["search", name, "red", "--k", "2"]) == 0
        assert (
            sum(line.endswith((" end (training)", " end (held out)")) for line in capsys.readouterr().out.splitlines())
            == 2
        )


def test_reports_of_text_pairs_speak_of_texts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (home / "words" / "report.html").read_text(encoding="utf-8")
    assert "positive to anchor R@1" in page and "anchor to positive R@10" in page
    assert "text to image" not in page and "Held-out queries" in page and "✓" in page
    assert main(["eval", str(home / "words")]) == 0
    assert "anchor to positive" in capsys.readouterr().out
    assert "step 6: positive to anchor R@1" in (home / "words.log").read_text()


# --- eval ---------------------------------------------------------------------------------------------------------


def test_eval_tells_both_kinds_of_metrics(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(home / "run")
    assert main(["eval", run]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "text to image",
        "",
        "image to text",
        "",
        "text to image, pair by pair",
        "image to text, pair by pair",
        "chance, pair by pair",
    ]
    assert main(["eval", run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"text_to_image_R@1", "text_to_image_R@1_pairwise"} <= found.keys()
    page = (home / "run" / "report.html").read_text(encoding="utf-8")
    assert "text to image R@1, pair by pair" in page


def test_the_split_is_told(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("all", "test", "train"):
        assert main(["eval", str(home / "run"), "--split", split]) == 0
        assert f"of pairs.csv ({split}), " in capsys.readouterr().out
    assert main(["eval", str(home / "run"), "--data", str(home / "shapes" / "pairs.csv")]) == 0
    assert "of pairs.csv (all), " in capsys.readouterr().out


def test_options_that_belong_to_other_data(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("left", "right", "root"):
        assert main(["eval", str(home / "run"), f"--{option}", "x"]) == 2
        assert f"--{option}: expected other data (--data), got x" in capsys.readouterr().err


def test_towers_of_a_folder_go_on_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same options typed in another way are the same ones."""
    table = shapes(tmp_path / "shapes", sizes=1)
    clip_folder(tmp_path / "clip")
    monkeypatch.chdir(tmp_path)
    config = small(table, Path("run"), towers="hf:clip", batch=16, pixels=0, steps=2)
    Trainer(config).run()
    monkeypatch.chdir(tmp_path / "shapes")
    assert Trainer(load_config(tmp_path / "run" / "config.toml")).step == 2

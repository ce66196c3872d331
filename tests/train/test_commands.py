"""`contratile train`, `eval` and `search`: one run through all of them, and what they say to mistakes."""

import json
from pathlib import Path

import pytest
from PIL import Image

from contratile.cli import main
from contratile.train.config import to_toml
from tests.train.runs import shapes, small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, by the command line."""
    folder = tmp_path_factory.mktemp("commands")
    config = small(shapes(folder / "shapes"), folder / "unused")
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
    assert "data:image/png;base64," in page and "a dense loss would have taken" in page


def test_nothing_is_left_to_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "report.html").read_bytes()
    assert main(["train", "--config", str(run / "config.toml")]) == 0
    assert "nothing left to do" in capsys.readouterr().err
    assert (run / "report.html").read_bytes() == before
    assert main(["train", "--config", str(run / "config.toml"), "--resume", "never"]) == 2
    assert "Pass --resume auto to continue it" in capsys.readouterr().err


def test_eval(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (last,) = [entry for entry in recorded if entry["step"] == 8 and "text_to_image_R@1" in entry]
    best = max((entry for entry in recorded if "text_to_image_R@10" in entry), key=lambda e: e["text_to_image_R@10"])
    assert found["text_to_image_R@10"] == pytest.approx(best["text_to_image_R@10"])
    assert last.keys() - {"step"} <= found.keys()
    (tmp_path / "classes.txt").write_text("\n".join(json.loads((run / "gallery.json").read_text())["texts"]))
    assert main(["eval", str(run), "--classes", str(tmp_path / "classes.txt"), "--limit", "10"]) == 0
    assert "zero_shot_top1" in capsys.readouterr().out


def test_search(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(run), "red", "ellipse", "--k", "3"]) == 0
    out = capsys.readouterr().out
    assert 'nearest to "red ellipse"' in out and "contact sheet:" in out
    with Image.open(run / "search.png") as sheet:
        assert sheet.format == "PNG"


def test_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(tmp_path)]) == 2
    assert "expected a folder with config.toml" in capsys.readouterr().err
    assert main(["search", str(tmp_path), "x"]) == 2
    for words, told in ((["--data", "icon"], "'icons'"), (["--batchh", "3"], "--batch")):
        with pytest.raises(SystemExit) as done:
            main(["train", *words])
        assert done.value.code == 2
        assert told in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", "--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for option in ("--batch", "--chunk", "--data", "--towers", "--lock", "--loss", "--lr", "--resume", "--precision"):
        assert option in text

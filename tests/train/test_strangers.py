"""Runs, recipes and models that somebody else made: nothing in them is run, and damage is one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.cli import main
from contratile.data.catalog import open_source
from contratile.models.pretrained import refuse_code
from contratile.models.towers import TowerConfig, build_towers
from contratile.train.config_file import to_toml
from contratile.train.load import load_run
from tests.data.files import shard_members, write_tar
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import clip_folder, sentence_folder, shapes, small


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strangers")
    config = small(shapes(folder / "shapes", sizes=1), folder / "run", batch=16, steps=2)
    (folder / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    assert main(["train", "--config", str(folder / "recipe.toml")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to tamper with."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained, tmp_path / "run", symlinks=True))


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def set_data(run: Path, **names: str) -> None:
    """Other data in the run's config.toml."""

    def changed(text: str) -> str:
        lines = [line for line in text.splitlines() if line.partition(" = ")[0] not in names]
        place = lines.index("[data]") + 1
        return "\n".join([*lines[:place], *(f"{k} = {json.dumps(v)}" for k, v in names.items()), *lines[place:]])

    rewrite(run / "config.toml", changed)


# --- commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        {"data": "pipe:touch ran"},
        {"test_data": "pipe:touch ran"},
        {"data": "x.tar::pipe:touch ran #.tar"},
        {"data": "{pipe:touch ran;,x}.tar"},
    ],
    ids=str,
)
@pytest.mark.parametrize("words", [["eval", "run"], ["eval", "run", "--split", "all"], ["search", "run", "red"]])
def test_a_run_starts_no_programs(
    run: Path, names: dict[str, str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    set_data(run, **names)
    code = main(words)
    told = capsys.readouterr().err
    assert not Path("ran").exists()
    assert code == 0 or "config.toml" in told or "expected" in told
    if words[0] == "eval":
        assert code == 2 or "test_data" in names


def test_a_run_may_be_allowed_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the option, or by typing the command."""
    write_tar(Path("a.tar"), shard_members(range(40)))
    set_data(run, data="pipe:touch ran; cat a.tar")
    with pytest.raises(ValueError, match="--allow-pipe"):
        open_source(load_run(run).config.data, "test")
    assert main(["eval", "run"]) == 2 and not Path("ran").exists()
    assert "run/config.toml" in capsys.readouterr().err
    assert main(["eval", "run", "--allow-pipe"]) == 0 and Path("ran").exists()
    Path("ran").unlink()
    assert main(["eval", "run", "--data", "pipe:touch ran; cat a.tar"]) == 0 and Path("ran").exists()


def test_a_recipe_starts_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tar(Path("a.tar"), shard_members(range(64)))
    command = "pipe:touch ran; cat a.tar"
    Path("recipe.toml").write_text(to_toml(small(Path(command), Path("run"), batch=16, steps=2)), encoding="utf-8")
    words = ["train", "--config", "recipe.toml"]
    assert main(words) == 2 and not Path("ran").exists()
    Path("list.toml").write_text('[data]\ndata = "a.tar::pipe:touch ran #.tar"\n')
    assert main(["train", "--config", "list.toml", "--steps", "1"]) == 2 and not Path("ran").exists()
    assert main([*words, "--data", "a.tar"]) == 0 and not Path("ran").exists()
    # Typed it runs, and so does the same command once more, which resumes.
    for steps in ("3", "4"):
        assert main([*words, "--data", command, "--out", "typed", "--steps", steps]) == 0 and Path("ran").exists()
        Path("ran").unlink()
    assert main([*words, "--allow-pipe", "--out", "allowed"]) == 0 and Path("ran").exists()


def test_a_recipe_does_not_write_among_other_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text("mine")
    config = small(shapes(tmp_path / "shapes", sizes=1), home, batch=16, steps=1)
    (tmp_path / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    words = ["train", "--config", str(tmp_path / "recipe.toml")]
    assert main(words) == 2
    assert "out: expected a new folder, or that of a run" in capsys.readouterr().err
    assert [path.name for path in home.iterdir()] == ["config.toml"] and (home / "config.toml").read_text() == "mine"
    # A folder of a run that was ended before it had written its configuration, and one that had.
    (home / "config.toml").unlink()
    (home / "tokenizer.json").write_text("{}")
    assert main(words) == 0
    assert main([*words, "--steps", "2"]) == 0
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert main([*words, "--out", str(other)]) == 0, "typed, it is what the person wants"


# --- files that are damaged or changed ------------------------------------------------------------------------------


def drop_last_letters(text: str) -> str:
    return text[: len(text) // 2]


def other_word(text: str) -> str:
    settings = json.loads(text)
    settings["model"]["vocab"]["zebra"] = settings["model"]["vocab"].pop("!")
    return json.dumps(settings)


@pytest.mark.parametrize(
    ("change", "told"),
    [(drop_last_letters, "tokenizer.json"), (lambda text: "{}", "tokenizer.json"), (other_word, "tokenizer.json")],
)
def test_another_tokenizer_is_noticed(
    run: Path, change: Callable[[str], str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(run / "tokenizer.json", change)
    for words in (["eval", "run"], ["search", "run", "red"], ["train", "--config", "run/config.toml", "--steps", "3"]):
        more = ["--out", "run"] if words[0] == "train" else []
        assert main([*words, *more]) == 2, words
        captured = capsys.readouterr().err
        assert told in captured and "Restore it" in captured and len(captured.strip().splitlines()) == 1


def test_a_run_without_the_checksum_still_loads(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from contratile.models import towers

    towers.check_recipe({"step": 3}, run)
    with pytest.raises(ValueError, match="expected facts with a step"):
        towers.check_recipe([], run)


def test_a_truncated_tokenizer_of_an_earlier_version(run: Path) -> None:
    rewrite(run / "tokenizer.json", drop_last_letters)
    with pytest.raises(ValueError, match=r"tokenizer .*json: expected the file that the run wrote, got .*EOF"):
        build_towers(TowerConfig(width=32, depth=1, pixels=16, words=8), folder=run)
    rewrite(run / "tokenizer.json", lambda text: '{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[]}}')
    with pytest.raises(ValueError, match=r"expected a tokenizer with the token \[PAD\]"):
        build_towers(TowerConfig(width=32, depth=1, pixels=16, words=8), folder=run)


RUBBISH = ["", "[]", "{}", "nonsense", "\udcff", '{"format": 3, "files": 4}', f"{'[' * 10000}"]
FILES = '{"format": "contratile checkpoint 1", "files": %s}'
RUBBISH += [FILES % files for files in ("{}", "[1]", '{"facts.json": {"bytes": 1e999, "crc32": 1}}', '{"../x": 3}')]
RUBBISH += [FILES % '{"facts.json": {"bytes": "many", "crc32": 1}}', '{"format": "\\u001b[2J", "files": {}}']


@pytest.mark.parametrize("text", RUBBISH)
def test_a_damaged_manifest(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_bytes(text.encode("utf-8", "surrogateescape"))
    for weights in ("best", "step-00000002"):
        assert main(["eval", "run", "--weights", weights]) == 2
        told = capsys.readouterr().err
        assert "Traceback" not in told and "expected" in told and "\x1b" not in told


@pytest.mark.parametrize("name", ["config.toml", "gallery.safetensors"])
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"keys": 3}', "\0\0\0", "9" * 5000])
def test_damaged_files_of_a_run(run: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).write_text(text)
    for words in (["search", "run", "red"], ["eval", "run"]):
        try:
            assert main(words) in (0, 2)
        except SystemExit as done:  # an empty recipe is one of defaults: its data may not be here
            assert done.code == 2
        assert "Traceback" not in capsys.readouterr().err, (name, text, words)


def test_weights_of_other_towers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(run / "config.toml", lambda text: text.replace("width = 32", "width = 64"))
    assert main(["eval", "run"]) == 2
    assert "expected weights of the run's towers" in capsys.readouterr().err


# --- models ---------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


def test_a_pickle_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repair_torchvision()
    monkeypatch.chdir(tmp_path)
    folder = clip_folder(tmp_path / "clip")
    (folder / "model.safetensors").unlink()
    torch.save({"weights": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"towers hf:.*clip: expected weights, got a pickle that holds more"):
        build_towers(TowerConfig(towers=f"hf:{folder}"))
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "preprocessor_config.json"])
def test_a_damaged_model_is_one_line(tmp_path: Path, name: str) -> None:
    repair_torchvision()
    folder = clip_folder(tmp_path / "clip")
    (folder / name).write_text('{"image_mean": [1]')
    with pytest.raises(ValueError, match=r"towers hf:.*clip: expected a model that can be loaded, got "):
        build_towers(TowerConfig(towers=f"hf:{folder}"))


def test_code_in_a_folder_of_sentence_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repair_torchvision()
    monkeypatch.chdir(tmp_path)
    good = sentence_folder(tmp_path / "good")
    refuse_code(good, "towers")
    code = "from pathlib import Path\nPath('ran').touch()\nclass Evil: pass\n"
    own = "sentence_transformers.models.Transformer"
    for name, files in {
        "types": {"modules.json": '[{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}]'},
        "python": {"evil.py": code, "modules.json": f'[{{"idx": 0, "name": "0", "path": "", "type": "{own}"}}]'},
        "deep": {"1_Dense/evil.py": code},
        "map": {"config.json": '{"auto_map": {"AutoModel": "evil.Evil"}, "model_type": "bert"}'},
        "tokens": {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}'},
        "call": {"1_Dense/config.json": '{"activation_function": "os.abort"}'},
    }.items():
        folder = Path(shutil.copytree(good, tmp_path / name))
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text)
        with pytest.raises(ValueError, match=f"towers st:.*{name}: expected weights and settings only, got"):
            build_towers(TowerConfig(towers=f"st:{folder}"))
        assert not Path("ran").exists()


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    for name in ("./none", f"{tmp_path}/none", "a/b/c"):
        with pytest.raises(ValueError, match=f"towers hf:{name}: expected a folder, got nothing at {name}"):
            build_towers(TowerConfig(towers=f"hf:{name}"))
    with pytest.raises(
        ValueError, match=r"got 'org/none', which is not a local folder, and the .* hub cannot be reached"
    ):
        build_towers(TowerConfig(towers="hf:org/none"))


def test_a_caption_cannot_act(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not in what is found, nor in what is said about broken samples and files."""
    table = shapes(tmp_path / "sh\x1b[2Japes", sizes=1)
    rewrite(table, lambda text: text.replace(" of size", " \x1b]0;owned\x07\x1b[31m\u202eof size"))
    table = table.rename(table.with_name("pa\x1b[2Jirs.csv"))
    config = small(table, tmp_path / "run", batch=16, steps=1)
    (tmp_path / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    assert main(["train", "--config", str(tmp_path / "recipe.toml")]) == 0
    assert main(["search", str(tmp_path / "run"), "red \x1b[2J", "--k", "3"]) == 0
    assert main(["eval", str(tmp_path / "run")]) == 0
    table.unlink()
    assert main(["eval", str(tmp_path / "run")]) == 2
    captured = capsys.readouterr()
    for shown in captured:
        assert "size" in shown or shown is captured.err
        assert "\x1b" not in shown and "\u202e" not in shown and "owned" not in shown


# --- files that lead elsewhere ------------------------------------------------------------------------------------


def test_nothing_is_written_through_links(run: Path, tmp_path: Path) -> None:
    """A link in the place of a draft, or of the lock, is replaced or refused; what it points at stays."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("search.png", "search.partial", ".search.png.part"):
        (run / name).symlink_to(victim)
    assert main(["search", str(run), "red circle"]) == 0
    assert victim.read_text() == "mine" and (run / "search.png").read_bytes()[:4] == b"\x89PNG"
    for name in ("config.toml", "finished.json", "contact_sheet.png", "report.html", "gallery.json"):
        (run / f".{name}.part").symlink_to(victim)
    (run / "finished.json").unlink()
    again = ["train", "--config", str(run / "config.toml"), "--out", str(run)]
    assert main(again) == 0
    assert victim.read_text() == "mine" and not list(run.glob(".*.part"))
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(victim)
    assert main(again) == 2
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_best_that_is_not_the_runs_stays(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "project"
    mine = out / "best" / "thesis.txt" if kind == "folder" else out / "best"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    config = small(shapes(tmp_path / "shapes", sizes=1), out, batch=16, steps=1)
    (tmp_path / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    assert main(["train", "--config", str(tmp_path / "recipe.toml"), "--out", str(out)]) == 2
    assert "best: expected a link to a checkpoint, or a copy of one, got a" in capsys.readouterr().err
    assert mine.read_text() == "precious" and not (out / "checkpoints").exists()


def test_a_file_that_is_called_like_a_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "step-00000099").write_text("rubbish")
    assert main(["train", "--config", str(run / "config.toml"), "--out", str(run)]) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"modules.json": [{"idx": 0, "name": "0", "path": "", "type": "evil.Evil", "more": " " * (1 << 20)}]},
        {"router_config.json": {"types": {"query": "evil.Evil"}}},
        {"modules.json": [{"idx": 0, "name": "0", "path": "../code", "type": "sentence_transformers.models.Pooling"}]},
        {"config.json": {"activation_function": "torch.utils.collect_env.main"}},
        {"modules.json": [{"idx": 0, "name": "0", "path": "", "type": "torch.hub"}]},
    ],
)
def test_classes_of_others_by_any_way(settings: dict[str, Any], tmp_path: Path) -> None:
    for name, value in settings.items():
        (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(ValueError, match="expected weights and settings only, got"):
        refuse_code(tmp_path, "towers st:x")


def test_a_link_to_a_folder_with_code(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "evil.py").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "sub").symlink_to(tmp_path / "code")
    with pytest.raises(ValueError, match="got the link sub to another folder"):
        refuse_code(tmp_path / "model", "towers st:x")

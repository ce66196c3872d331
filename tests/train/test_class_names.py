"""Class names and prompts: the lists of open_clip without importing it, files, and what is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from contratile.train import class_names
from contratile.train.class_names import absolute_list, load_classes, load_templates

pytestmark = pytest.mark.peers


def test_neither_open_clip_nor_torchvision_is_imported() -> None:
    code = (
        "import sys; from contratile.train.class_names import load_classes, load_templates;"
        "load_classes('imagenet'); load_templates('openai');"
        "print([name for name in ('open_clip', 'torchvision', 'timm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"


def test_lists_of_open_clip() -> None:
    names, openai, simple = load_classes("imagenet"), load_templates("openai"), load_templates("simple")
    assert names[0] == "tench" and 990 < len(names) == len(set(names)) <= 1000
    assert len(openai) == 80 and openai[0] == "a bad photo of a {}." and len(simple) == 7
    assert all(prompt.count("{}") == 1 for prompt in openai + simple)


def test_without_open_clip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(class_names, "find_spec", lambda name: None)
    told = r"'imagenet' is a list of the package open_clip, which is not installed: pip install open_clip_torch, or"
    with pytest.raises(ImportError, match=told):
        load_classes("imagenet")
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    assert load_classes(str(tmp_path / "names.txt")) == ["cat", "dog"]


@pytest.mark.parametrize("text", ["", "raise RuntimeError('broken')", "def ("])
def test_another_version_of_open_clip(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "open_clip"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (package / "zero_shot_metadata.py").write_text(text)
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"this version has no OPENAI_IMAGENET_TEMPLATES .*: pip install open_clip"):
        load_templates("openai")


def test_a_name_wins_over_a_file_of_that_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a folder or a suffix it is the file."""
    monkeypatch.chdir(tmp_path)
    for name in ("imagenet", "imagenet.txt", "names"):
        Path(name).write_text("cat\n\ncat\n dog \n")
    assert len(load_classes("imagenet")) > 900
    for name in ("./imagenet", str(tmp_path / "imagenet"), "imagenet.txt", "names"):
        assert load_classes(name) == ["cat", "dog"], name
    assert absolute_list("imagenet", class_names.CLASSES) == "imagenet"
    assert absolute_list("./imagenet", class_names.CLASSES) == str(tmp_path / "imagenet")
    assert absolute_list("", class_names.CLASSES) == ""


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a photo of a {c}.\n{}\n")
    assert load_templates(str(path)) == ["a photo of a {}.", "{}"]
    path.write_text("a photo of a {c}.\na photo\n")
    with pytest.raises(ValueError, match=r"template: expected a prompt with \{\} for the name, got 'a photo'"):
        load_templates(str(path))


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"classes: expected imagenet, or a file with one per line, got nothing at 'im"
    ):
        load_classes("imagenett")
    path = tmp_path / "names.txt"
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(ValueError, match=r"names.txt: expected a text file in UTF-8"):
        load_classes(str(path))
    path.write_bytes(b" \n")
    with pytest.raises(ValueError, match=r"names.txt: expected one name or prompt per line, got an empty file"):
        load_classes(str(path))

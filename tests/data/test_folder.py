"""Folders of images: classes, splits, what is skipped."""

import os
from pathlib import Path

import pytest

from contratile.data import Broken, DataConfig, Indexed, open_source
from contratile.data.folder import ImageFolder
from contratile.data.sample import traits_of
from contratile.train.paths import absolute_data, missing_data
from tests.data.files import encoded, picture, shade


def write(folder: Path, files: dict[str, bytes | int]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(content)) if isinstance(content, int) else content)
    return folder


def test_class_folders_become_texts(tmp_path: Path) -> None:
    files: dict[str, bytes | int] = {"red_fox/1.png": 1, "red_fox/deep/2.PNG": 2, "Sea-Eagle/a.png": 3}
    write(tmp_path / "photos", {**files, "readme.txt": b"no", ".hidden/4.png": 4, "red_fox/.5.png": 5})
    found = ImageFolder(tmp_path / "photos", "train", test_share=None)
    samples = [found[i] for i in range(len(found))]
    assert [(x.right, x.key, shade(x.left)) for x in samples] == [
        ("Sea Eagle", "Sea-Eagle/a.png", 3),
        ("red fox", "red_fox/1.png", 1),
        ("red fox", "red_fox/deep/2.PNG", 2),
    ]
    assert found.name == "photos/ (train)" and traits_of(found).labelled and isinstance(found, Indexed)
    assert list(found.texts()) == ["Sea Eagle", "red fox", "red fox"]


def test_a_flat_folder_has_no_classes(tmp_path: Path) -> None:
    found = ImageFolder(write(tmp_path, {"my_cat.png": 1, "b.png": 2}), "train", test_share=None)
    assert not traits_of(found).labelled and [found[i].right for i in range(2)] == ["b", "my cat"]


def test_splits(tmp_path: Path) -> None:
    write(tmp_path, {f"a/{i}.png": i for i in range(100)})
    train, test = (ImageFolder(tmp_path, split, test_share=0.3) for split in ("train", "test"))
    keys = [{source[i].key for i in range(len(source))} for source in (train, test)]
    assert len(keys[0]) + len(keys[1]) == 100 and not keys[0] & keys[1] and 15 < len(keys[1]) < 45


def test_folders_may_have_their_own_splits(tmp_path: Path) -> None:
    write(tmp_path, {"train/cat/1.png": 1, "train/dog/2.png": 2, "val/cat/3.png": 3})
    train, test = (open_source(DataConfig(data=str(tmp_path)), split) for split in ("train", "test"))
    assert isinstance(train, Indexed) and isinstance(test, Indexed)
    assert [train[i].right for i in range(2)] == ["cat", "dog"] and (len(test), test[0].right) == (1, "cat")


def test_broken_images_are_broken_samples(tmp_path: Path) -> None:
    found = ImageFolder(write(tmp_path, {"a/1.png": b"rubbish", "_-/2.png": 2}), "train", test_share=None)
    for index, reason in enumerate(("empty text", "not an image")):
        with pytest.raises(Broken, match=reason):
            found[index]


def test_images_beside_class_folders_are_left_out(tmp_path: Path) -> None:
    found = ImageFolder(write(tmp_path, {"IMG_1.png": 1, "cat/2.png": 2}), "train", test_share=None)
    assert [found[i].right for i in range(len(found))] == ["cat"]


def test_a_train_folder_alone_is_not_a_class(tmp_path: Path) -> None:
    found = ImageFolder(write(tmp_path, {"train/cat/1.png": 1, "train/dog/2.png": 2}), "train", test_share=None)
    assert [found[i].right for i in range(len(found))] == ["cat", "dog"]


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)  # noqa: PTH102  # bytes
    Path(os.fsdecode(folder) + "/1.png").write_bytes(encoded(picture(1)))
    write(tmp_path, {"cat/2.png": 2})
    found = ImageFolder(tmp_path, "train", test_share=None)
    assert list(found.texts()) == ["cat"]
    with pytest.raises(Broken, match="not UTF-8"):
        found[0 if found._files[0].startswith("caf") else 1]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    write(tmp_path / "real", {"cat/1.png": 1})
    (tmp_path / "real" / "cat" / "loop").symlink_to(tmp_path / "real")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "lynx").symlink_to(tmp_path / "real" / "cat")
    found = ImageFolder(tmp_path / "photos", "train", test_share=None)
    assert [found[i].key for i in range(len(found))] == ["lynx/1.png"]


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "photos", {"cat/1.png": 1})
    monkeypatch.chdir(tmp_path)
    assert absolute_data("photos") == f"{tmp_path}/photos/" == absolute_data("photos/")
    assert missing_data(f"{tmp_path}/photos/") == "" and missing_data(f"{tmp_path}/gone/") == f"{tmp_path}/gone/"
    assert absolute_data("icons") == "icons" and absolute_data("") == ""
    for name, told in (("gone/", "expected a folder of images, got nothing at gone"), ("photos/cat/..", "")):
        if told:
            with pytest.raises(ValueError, match=told):
                open_source(DataConfig(data=name), "train")
        else:
            open_source(DataConfig(data=name, test_data="photos"), "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data: expected a folder with images, got none in empty"):
        open_source(DataConfig(data="empty"), "train")

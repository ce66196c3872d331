"""A folder of images, with class folders or without.

    ImageFolder(Path("photos"), "train")[0]       # photos/red_fox/3.jpg: an image and "red fox"

Images in subfolders have the name of the first subfolder as text, in words; images outside of them are left out. If
there are no subfolders, images have no class: their text is their file name, good for reports but not for training. A
folder that holds `train` and `val` (or `test`, `validation`) folders has its own splits.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from contratile.data.images import SUFFIXES, decode
from contratile.data.sample import Broken, Kinds, Sample, Split, Traits, in_split, usable_text
from contratile.errors import bad_value

TESTS = ("test", "val", "validation", "valid")


class ImageFolder:
    """An indexed source: the images of a folder and its subfolders.

    Args:
        folder: The folder.
        split: "train" or "test".
        test_share: Share of the images in the test split, if there are no folders for it; None: both splits are all.

    Raises:
        ValueError: There is no such folder, or there are no images in it.
    """

    kinds: Kinds = ("image", "text")

    def __init__(self, folder: Path, split: Split, *, test_share: float | None = 0.1) -> None:
        if not folder.is_dir():
            bad_value("data", expected="a folder of images", got=f"nothing at {folder}", remedy="Check the path.")
        self.name = f"{folder.resolve().name}/ ({split})"
        own = next((name for name in TESTS if (folder / name).is_dir()), None)
        if (folder / "train").is_dir() and own is not None:
            folder, test_share = folder / ("train" if split == "train" else own), None
        files = sorted(_images(folder))
        if files and all(file.startswith("train/") for file in files):
            folder, files = folder / "train", [file.removeprefix("train/") for file in files]
        self.folder = folder
        if not files:
            remedy = f"It looks for {' '.join(SUFFIXES)} in it and its subfolders."
            bad_value("data", expected="a folder with images", got=f"none in {folder}", remedy=remedy)
        classes = any("/" in file for file in files)
        files = [file for file in files if "/" in file or not classes]
        self._files = [file for file in files if in_split(file, split, test_share)]
        self.traits = Traits(labelled=classes)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        file = self._files[index]
        key = file.encode("utf-8", "backslashreplace").decode()
        text = usable_text(class_name(file), key)
        return Sample(decode(self.folder / file, key), text, key, name=key)

    def texts(self) -> Iterator[str]:
        for file in self._files:
            with suppress(Broken):
                yield usable_text(class_name(file), file)


def class_name(file: str) -> str:
    """The class of a file in words: the name of its first folder; without one, the name of the file."""
    first, slash, _ = file.partition("/")
    return " ".join((first if slash else Path(first).stem).replace("_", " ").replace("-", " ").split())


def _images(folder: Path) -> Iterator[str]:
    """Relative paths of all images. Hidden files and folders are skipped; links to folders are followed once."""
    seen: set[str] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                yield (Path(place) / name).relative_to(folder).as_posix()

"""Data sets in the webdataset layout of CLIP_benchmark, one or a folder of several.

    for name, folder in find_sets(Path("benchmark")).items():       # wds_imagenet1k, wds_flickr8k, ...
        data = open_set(folder, name)                               # task, class names, prompts, shards
        BenchmarkShards(data)                                       # a stream of its samples

    wds_cifar10/classnames.txt                           one class per line; a label is the number of its line, from 0
    wds_cifar10/zeroshot_classification_templates.txt    one prompt per line; {c} stands for the class name
    wds_cifar10/dataset_type.txt                         classification (the default), multilabel or retrieval
    wds_cifar10/test/nshards.txt                         number of tars: test/0.tar, test/1.tar, ...

A sample is an image and a `.cls` (number of its class), a `.npy` (0 or 1 for each class) or a `.txt` (a caption per
line). A sample that cannot be used is broken. A tar that cannot be read to its end makes the whole data set unreadable:
it is unknown how many samples are lost.
"""

import difflib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from os import SEEK_END
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from contratile.data.images import SUFFIXES, decode
from contratile.data.sample import Broken, Cursor, Kinds, Sample, usable_text
from contratile.data.shards import MAX_CAPTION, MAX_PICTURE, ShardRecord
from contratile.data.tars import grouped
from contratile.errors import bad_value

Task: TypeAlias = Literal["classification", "multilabel", "retrieval"]

CLASSES = "classnames.txt"
TEMPLATES = "zeroshot_classification_templates.txt"
TYPE = "dataset_type.txt"
PREFIX = "wds_"
"""Names of data sets begin with it; it may be left out where one is asked for."""

MAX_LIST = 1 << 24
MAX_LABEL = 1 << 10
MAX_VECTOR = 1 << 20
"""Maximum bytes of a list of names, a .cls and a .npy."""

MOST_SHARDS = 1_000_000

_LABEL = {"classification": "cls", "multilabel": "npy", "retrieval": "txt"}
_LIMIT = {"classification": MAX_LABEL, "multilabel": MAX_VECTOR, "retrieval": MAX_CAPTION}


@dataclass(frozen=True)
class BenchmarkSet:
    """What a data set holds, without its samples."""

    name: str
    task: Task
    classes: tuple[str, ...]
    """Class names; empty for retrieval."""

    templates: tuple[str, ...]
    """Prompts, `{}` stands for the class name; empty for retrieval."""

    shards: tuple[Path, ...]


# --- which data sets there are --------------------------------------------------------------------------------------


def is_set(folder: Path) -> bool:
    """Whether a folder looks like one data set, complete or not."""
    return (folder / "test").is_dir() or any((folder / name).is_file() for name in (CLASSES, TYPE))


def find_sets(folder: Path) -> dict[str, Path]:
    """The data sets of a folder by name: the folder itself, or those in it, or one level deeper.

    Args:
        folder: A data set, or a folder of data sets.

    Raises:
        ValueError: There is none.
    """
    if not folder.is_dir():
        remedy = "Pass a data set of CLIP_benchmark, or a folder that holds some (wds_imagenet1k/, ...)."
        bad_value("benchmark", expected="a folder", got=f"nothing at {folder}", remedy=remedy)
    if is_set(folder):
        return {folder.resolve().name: folder}
    found: dict[str, Path] = {}
    for child in _folders(folder):
        inner = {} if is_set(child) else {f"{child.name}/{path.name}": path for path in _folders(child) if is_set(path)}
        if inner:
            found |= inner
        elif is_set(child) or child.name.startswith(PREFIX):  # named like a data set, but incomplete
            found[child.name] = child
    if not found:
        remedy = f"A data set is a folder with {CLASSES} and test/nshards.txt."
        bad_value("benchmark", expected="data sets of CLIP_benchmark", got=f"none in {folder}", remedy=remedy)
    return found


def choose_sets(found: dict[str, Path], names: Sequence[str]) -> dict[str, Path]:
    """The data sets with these names, in this order; `wds_` may be left out. All if no name is given.

    Raises:
        ValueError: There is no such data set.
    """
    if not names:
        return found
    chosen: dict[str, Path] = {}
    for name in names:
        match = next((known for known in (name, f"{PREFIX}{name}") if known in found), None)
        if match is None:
            near = difflib.get_close_matches(
                name, [x for known in found for x in (known, known.removeprefix(PREFIX))], 1
            )
            remedy = f"Did you mean {near[0]}?" if near else "Check the name."
            shown = ", ".join(list(found)[:20]) + (", ..." if len(found) > 20 else "")
            bad_value("datasets", expected=f"one of {shown}", got=repr(name), remedy=remedy)
        chosen[match] = found[match]
    return chosen


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


# --- one data set ---------------------------------------------------------------------------------------------------


def open_set(folder: Path, name: str = "", templates: Sequence[str] = ()) -> BenchmarkSet:
    """Read what a data set holds.

    Args:
        folder: Its folder.
        name: What to call it; by default the name of its folder.
        templates: Prompts to use instead of its own.

    Raises:
        ValueError: A file is missing or cannot be used; the message names it.
    """
    task = _task(folder)
    shards = _shards(folder / "test")
    name = name or folder.resolve().name
    if task == "retrieval":
        return BenchmarkSet(name, task, (), (), shards)
    classes = tuple(_lines(folder / CLASSES, "class name"))
    own = templates or [line.replace("{c}", "{}") for line in _lines(folder / TEMPLATES, "prompt")]
    for prompt in own:
        if "{}" not in prompt:
            remedy = 'Write it like "a photo of a {c}.", or pass --templates.'
            where = str(folder / TEMPLATES) if not templates else "templates"
            bad_value(where, expected="prompts with {c} for the class name", got=repr(prompt[:60]), remedy=remedy)
    return BenchmarkSet(name, task, classes, tuple(own), shards)


def _task(folder: Path) -> Task:
    path = folder / TYPE
    if not path.is_file():
        return "classification"
    text = _read(path).lower()
    for task in ("retrieval", "multilabel", "classification"):
        if task in text:
            return task
    remedy = "Without this file a data set is one of classification."
    bad_value(str(path), expected="classification, multilabel or retrieval", got=repr(text[:60]), remedy=remedy)


def _shards(folder: Path) -> tuple[Path, ...]:
    path = folder / "nshards.txt"
    if not path.is_file():
        remedy = "It holds the number of tars in the folder. Download the data set again."
        bad_value(str(path), expected="a file", got="nothing there", remedy=remedy)
    text = _read(path).strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= MOST_SHARDS):
        remedy = "It holds the number of tars in the folder."
        bad_value(str(path), expected=f"a number from 1 to {MOST_SHARDS:,}", got=repr(text[:60]), remedy=remedy)
    shards = tuple((folder / f"{number}.tar").absolute() for number in range(int(text)))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        got = f"{len(missing)} of them missing, first {missing[0]}"
        bad_value(str(folder), expected=f"{len(shards)} tars", got=got, remedy="Download the data set again.")
    return shards


def _lines(path: Path, what: str) -> list[str]:
    """The lines of a file. An empty line would shift the numbers of the classes after it, so it is refused."""
    if not path.is_file():
        remedy = "Pass --templates." if path.name == TEMPLATES else "Download the data set again."
        bad_value(str(path), expected=f"a file with one {what} per line", got="nothing there", remedy=remedy)
    found = [line.strip() for line in _read(path).strip().split("\n")]
    empty = [number for number, line in enumerate(found, 1) if not line]
    if empty:
        got = "an empty file" if len(found) == 1 else f"nothing in line {empty[0]}"
        bad_value(str(path), expected=f"one {what} per line", got=got, remedy="Repair the file.")
    return found


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_LIST + 1)
    try:
        if len(data) > MAX_LIST:
            raise ValueError
        return data.decode("utf-8-sig")
    except ValueError:
        expected = f"text in UTF-8, at most {MAX_LIST >> 20} MiB"
        bad_value(str(path), expected=expected, got="other bytes or more", remedy="Download the data set again.")


# --- samples --------------------------------------------------------------------------------------------------------


class BenchmarkShards:
    """A stream of the samples of a data set, or of one reader's share of them.

    The right side of a sample is its label as text: the number of its class, the numbers of its classes separated by
    spaces, or its captions separated by line breaks.

    Args:
        data: The data set.
        part: Number of this reader.
        parts: Number of readers. Together they read every sample once.
        limit: Only the first samples of the data set, in its own order; 0: all.
    """

    kinds: Kinds = ("image", "text")

    def __init__(self, data: BenchmarkSet, *, part: int = 0, parts: int = 1, limit: int = 0) -> None:
        self.data, self.name = data, data.name
        self._part, self._parts, self._limit = part, parts, limit
        self._label = _LABEL[data.task]
        pictures = dict.fromkeys((ending[1:] for ending in SUFFIXES), MAX_PICTURE)
        self._limits = {**pictures, self._label: _LIMIT[data.task]}

    def records(
        self, *, seed: int | None, epoch: int, part: int, parts: int, start: Cursor = None
    ) -> Iterator[tuple[ShardRecord | Broken, Cursor]]:
        """Yield this reader's records in order; see `Stream`. Shuffling and resuming are not supported."""
        assert seed is None and start is None and (part, parts) == (0, 1), "read once, in order"
        shards, parts = self.data.shards, self._parts
        # Whole tars if that shares the work evenly. Otherwise all readers read all tars and decode their share.
        whole = not self._limit and (len(shards) % parts == 0 or len(shards) >= 8 * parts)
        mine = shards[self._part :: parts] if whole else shards
        found = (record for shard in mine for record in self._shard(shard))
        taken = found if whole else islice(found, self._part, self._limit or None, parts)
        for place, record in enumerate(taken):
            yield record, place

    def _shard(self, path: Path) -> Iterator[ShardRecord | Broken]:
        where = f"{self.name}/test/{path.name}"
        try:
            with path.open("rb") as stream:
                for name, files in grouped(stream, self._limits):
                    key = f"{where}/{name}"
                    yield Broken(key, files) if isinstance(files, str) else ShardRecord(key, files)
                if not _ends_with_zeros(stream):
                    raise EOFError
        except Exception as error:  # from the file system, the compression or the tar format
            got = f"one that cannot be read to its end ({type(error).__name__})"
            bad_value(where, expected="a tar", got=got, remedy="Download it again.")

    def sample(self, record: ShardRecord | Broken) -> Sample:
        """Decode a record. Raises `Broken` if it cannot be used."""
        if isinstance(record, Broken):
            raise Broken(*record.args)
        key, files = record
        if self._label not in files:
            raise Broken(key, f"no .{self._label} in the sample")
        label = self._read_label(files[self._label], key)
        picture = next((files[ending[1:]] for ending in SUFFIXES if ending[1:] in files), None)
        if picture is None:
            raise Broken(key, "no image in the sample")
        return Sample(decode(picture, key), label, key)

    def texts(self) -> Iterator[str]:
        """The class names."""
        return iter(self.data.classes)

    def _read_label(self, data: bytes, key: str) -> str:
        if self.data.task == "classification":
            return str(_class_number(data, len(self.data.classes), key))
        if self.data.task == "multilabel":
            return " ".join(map(str, _class_numbers(data, len(self.data.classes), key)))
        captions = usable_text(data.decode("utf-8", "surrogateescape"), key).split("\n")
        return "\n".join(filter(None, map(str.strip, captions)))


def _class_number(data: bytes, classes: int, key: str) -> int:
    text = data.decode("ascii", "replace").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Broken(key, ".cls does not hold a number")
    if int(text) >= classes:
        raise Broken(key, f"number of the class is not below {classes:,}, the lines of {CLASSES}")
    return int(text)


def _class_numbers(data: bytes, classes: int, key: str) -> list[int]:
    """The classes of a multi-hot vector. The file is untrusted: nothing is unpickled, and its size is checked first."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = header(stream)
    except Exception:  # numpy parses the header as a Python literal, which fails in many ways
        raise Broken(key, ".npy is damaged") from None
    if dtype.hasobject or dtype.kind not in "buif" or dtype.itemsize > 8:
        raise Broken(key, ".npy does not hold numbers")
    if shape != (classes,):
        raise Broken(key, f".npy does not have shape ({classes},), one number for each line of {CLASSES}")
    rest = data[stream.tell() :]
    if len(rest) != classes * dtype.itemsize:
        raise Broken(key, ".npy is damaged")
    vector = np.frombuffer(rest, dtype)
    if not np.isin(vector, (0, 1)).all():
        raise Broken(key, ".npy holds other numbers than 0 and 1")
    return [int(place) for place in np.flatnonzero(vector)]


def _ends_with_zeros(stream: io.BufferedReader) -> bool:
    """Whether the last entry is followed by zeros only, at least a block of them: a cut tar may look complete."""
    while block := stream.read(1 << 16):
        if block.strip(b"\0"):
            return False
    stream.seek(-512, SEEK_END)
    return not stream.read().strip(b"\0")

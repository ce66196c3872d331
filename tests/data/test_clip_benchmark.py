"""Data sets of CLIP_benchmark: which there are, what they hold, and what is refused."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contratile.data.clip_benchmark import BenchmarkShards, choose_sets, find_sets, open_set
from contratile.data.sample import Broken, Stream
from tests.data import benchmarks
from tests.data.files import encoded, picture, write_tar

NAMES = ("red", "green", "blue")


def read(source: BenchmarkShards) -> tuple[list[str], list[str]]:
    """Labels of the samples, and why others are broken."""
    labels, reasons = [], []
    for record, _ in source.records(seed=None, epoch=0, part=0, parts=1):
        try:
            labels.append(source.sample(record).right)
        except Broken as broken:
            reasons.append(broken.reason)
    return labels, reasons


# --- which data sets there are --------------------------------------------------------------------------------------


def test_all_data_sets_of_a_folder(tmp_path: Path) -> None:
    folder = benchmarks.benchmark(tmp_path)
    (folder / "notes").mkdir()
    (folder / ".cache").mkdir()
    (folder / "wds_unfinished").mkdir()
    found = find_sets(folder)
    assert list(found) == ["vtab/wds_two", "wds_colours", "wds_many", "wds_pairs", "wds_unfinished"]
    assert list(find_sets(folder / "wds_many")) == ["wds_many"]
    (folder / "vtab").rename(folder / "wds_vtab")
    assert "wds_vtab/wds_two" in find_sets(folder) and "wds_vtab" not in find_sets(folder)
    assert list(choose_sets(found, ["pairs", "vtab/wds_two"])) == ["wds_pairs", "vtab/wds_two"]
    assert choose_sets(found, []) == found
    with pytest.raises(ValueError, match=r"datasets: expected one of vtab/wds_two, .* got 'colors'. Did you mean col"):
        choose_sets(found, ["colors"])


def test_no_data_set_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"benchmark: expected data sets of CLIP_benchmark, got none in"):
        find_sets(tmp_path)
    with pytest.raises(ValueError, match=r"benchmark: expected a folder, got nothing at"):
        find_sets(tmp_path / "none")


# --- one data set ---------------------------------------------------------------------------------------------------


def test_what_a_data_set_holds(tmp_path: Path) -> None:
    folder = benchmarks.benchmark(tmp_path)
    data = open_set(folder / "wds_colours")
    assert (data.name, data.task, data.classes) == ("wds_colours", "classification", benchmarks.NAMES)
    assert data.templates == ("a photo of a {}.", "the {} of size 2") and len(data.shards) == 2
    assert open_set(folder / "wds_many").task == "multilabel"
    pairs = open_set(folder / "wds_pairs", "pairs")
    assert (pairs.name, pairs.task, pairs.classes) == ("pairs", "retrieval", ())
    assert open_set(folder / "wds_colours", templates=["{}!"]).templates == ("{}!",)


def test_every_label(tmp_path: Path) -> None:
    folder = benchmarks.benchmark(tmp_path)
    order = [*range(0, 31, 2), *range(1, 31, 2)]  # one tar after the other
    source = BenchmarkShards(open_set(folder / "wds_colours"))
    assert isinstance(source, Stream)
    assert read(source) == ([str(i * i % 6) for i in order], [])
    labels, _ = read(BenchmarkShards(open_set(folder / "wds_many")))
    assert labels[1] == " ".join(str(c) for c, x in enumerate(benchmarks.hot(2, 4)) if x)
    labels, _ = read(BenchmarkShards(open_set(folder / "wds_pairs")))
    assert labels[1] == "\n".join(benchmarks.captions(2)) and labels[1].count("\n") == 2


@pytest.mark.parametrize(("shards", "parts"), [(1, 2), (2, 2), (3, 2), (16, 2), (2, 5), (1, 40)])
@pytest.mark.parametrize("limit", [0, 7])
def test_readers_share_the_samples(tmp_path: Path, shards: int, parts: int, limit: int) -> None:
    """Every sample is read once, whatever the number of tars, and evenly."""
    data = open_set(benchmarks.classification(tmp_path / "wds_x", [f"{i}" for i in range(1000)], shards=shards))
    whole, _ = read(BenchmarkShards(data, limit=limit))
    shares = [read(BenchmarkShards(data, part=part, parts=parts, limit=limit))[0] for part in range(parts)]
    assert sorted(x for share in shares for x in share) == sorted(whole)
    assert len(whole) == (limit or 31) and max(map(len, shares)) - min(map(len, shares)) <= (8 if shards == 16 else 1)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: (f / "test/nshards.txt").unlink(), r"nshards.txt: expected a file, got nothing there"),
        (lambda f: (f / "test/nshards.txt").write_text("two"), r"nshards.txt: expected a number from 1 .* got 'two'"),
        (lambda f: (f / "test/nshards.txt").write_text("0"), r"nshards.txt: expected a number from 1"),
        (lambda f: (f / "test/nshards.txt").write_text("9" * 30), r"nshards.txt: expected a number from 1"),
        (lambda f: (f / "test/nshards.txt").write_text("5"), r"test: expected 5 tars, got 3 of them missing, first 2"),
        (lambda f: (f / "classnames.txt").unlink(), r"classnames.txt: expected a file with one class name per line"),
        (lambda f: (f / "classnames.txt").write_text(""), r"classnames.txt: expected one class name .* an empty file"),
        (lambda f: (f / "classnames.txt").write_text("a\n\nb"), r"classnames.txt: expected .* got nothing in line 2"),
        (lambda f: (f / "classnames.txt").write_bytes(b"\xff\xfe"), r"classnames.txt: expected text in UTF-8"),
        (
            lambda f: (f / "zeroshot_classification_templates.txt").unlink(),
            r"templates.txt: expected .* Pass --templates",
        ),
        (
            lambda f: (f / "zeroshot_classification_templates.txt").write_text("a photo"),
            r"templates.txt: expected prompts with \{c\} .* got 'a photo'",
        ),
        (lambda f: (f / "dataset_type.txt").write_text("detection"), r"dataset_type.txt: expected .* got 'detection"),
    ],
)
def test_a_data_set_that_cannot_be_opened(tmp_path: Path, spoil: Any, told: str) -> None:
    folder = benchmarks.classification(tmp_path / "wds_x", NAMES)
    spoil(folder)
    with pytest.raises(ValueError, match=told):
        open_set(folder)


@pytest.mark.parametrize("keep", [0, 100, 2000, -1024, -10240])
def test_a_tar_that_is_cut(tmp_path: Path, keep: int) -> None:
    """Also between two samples, and also the zeros at its end."""
    folder = benchmarks.classification(tmp_path / "wds_x", NAMES)
    tar = folder / "test" / "1.tar"
    data = tar.read_bytes().rstrip(b"\0")
    whole = -(-len(data) // 512) * 512
    tar.write_bytes(
        tar.read_bytes()[:whole] if keep == -10240 else tar.read_bytes()[: keep if keep >= 0 else whole + keep]
    )
    with pytest.raises(ValueError, match=r"wds_x/test/1.tar: expected a tar, got one that cannot be read to its end"):
        read(BenchmarkShards(open_set(folder)))


def test_a_tar_that_is_none(tmp_path: Path) -> None:
    folder = benchmarks.classification(tmp_path / "wds_x", NAMES)
    (folder / "test" / "0.tar").write_bytes(np.random.default_rng(0).bytes(4000))
    with pytest.raises(ValueError, match="cannot be read to its end"):
        read(BenchmarkShards(open_set(folder)))


# --- samples --------------------------------------------------------------------------------------------------------


def one(
    tmp_path: Path, label: str, data: bytes, *, kind: str, image: bytes | None = None
) -> tuple[list[str], list[str]]:
    folder = benchmarks.write_set(tmp_path / "wds_x", [], shards=1, classes=NAMES, kind=kind)
    image = encoded(picture(3)) if image is None else image
    members = [("s1.png", image)] if image else []
    write_tar(folder / "test" / "0.tar", [*members, (f"s1.{label}", data)])
    return read(BenchmarkShards(open_set(folder)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"3", "number of the class is not below 3, the lines of classnames.txt"),
        (b"-1", ".cls does not hold a number"),
        (b"", ".cls does not hold a number"),
        (b"1.0", ".cls does not hold a number"),
        (b"\xb2", ".cls does not hold a number"),
        (b"9" * 500, ".cls does not hold a number"),
        (b"1" * 5000, "file of more than 1 KiB in the tar"),
    ],
)
def test_wrong_classes(tmp_path: Path, data: bytes, reason: str) -> None:
    assert one(tmp_path, "cls", data, kind="") == ([], [reason])


def test_labels_that_are_missing_or_without_an_image(tmp_path: Path) -> None:
    assert one(tmp_path / "a", "json", b"1", kind="")[1] == ["no .cls in the sample"]
    assert one(tmp_path / "b", "cls", b"1", kind="", image=b"")[1] == ["no image in the sample"]
    assert one(tmp_path / "c", "cls", b"1", kind="", image=b"GIF8")[1][0].startswith("not an image")
    assert one(tmp_path / "d", "cls", b" 2\n", kind="classification") == (["2"], [])


class Trap:
    """Pickled, it creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def header(text: str) -> bytes:
    """A .npy with this header and no data."""
    out = io.BytesIO()
    out.write(np.lib.format.magic(1, 0) + len(text).to_bytes(2, "little") + text.encode())
    return out.getvalue()


@pytest.mark.parametrize("dtype", ["i1", "<i8", ">i4", "f4", "f8", "?", "u1"])
def test_vectors_of_any_number_type(tmp_path: Path, dtype: str) -> None:
    data = benchmarks.npy(np.array([1, 0, 1], dtype=dtype))
    assert one(tmp_path, "npy", data, kind="multilabel") == (["0 2"], [])


def test_a_vector_without_classes(tmp_path: Path) -> None:
    assert one(tmp_path, "npy", benchmarks.npy([0, 0, 0]), kind="multilabel") == ([""], [])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (benchmarks.npy([1, 0]), ".npy does not have shape (3,)"),
        (benchmarks.npy([[1, 0, 0]]), ".npy does not have shape (3,)"),
        (benchmarks.npy([1, 0, 2]), ".npy holds other numbers than 0 and 1"),
        (benchmarks.npy([1, 0, float("nan")]), ".npy holds other numbers than 0 and 1"),
        (benchmarks.npy(["1", "0", "0"]), ".npy does not hold numbers"),
        (benchmarks.npy([1j, 0, 0]), ".npy does not hold numbers"),
        (benchmarks.npy([1, 0, 0])[:-3], ".npy is damaged"),
        (benchmarks.npy([1, 0, 0]) + b"x", ".npy is damaged"),
        (b"", ".npy is damaged"),
        (b"\x93NUMPY\x07\x00", ".npy is damaged"),
        (header("{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999,)}"), ".npy does not have shape (3,)"),
        (header("{'descr': '<i8', 'shape': (" + "(" * 5000), ".npy is damaged"),
    ],
)
def test_damaged_vectors(tmp_path: Path, data: bytes, reason: str) -> None:
    labels, reasons = one(tmp_path, "npy", data, kind="multilabel")
    assert labels == [] and reasons[0].startswith(reason)


def test_pickled_vectors_are_refused_and_not_loaded(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    objects = benchmarks.npy(np.array([Trap(trap), 0, 0], dtype=object), allow_pickle=True)
    for number, data in enumerate((objects, pickle.dumps(Trap(trap)))):
        labels, reasons = one(tmp_path / f"{number}", "npy", data, kind="multilabel")
        assert labels == [] and reasons[0] in (".npy does not hold numbers", ".npy is damaged")
    assert not trap.exists()
    np.load(io.BytesIO(objects), allow_pickle=True)
    assert trap.exists(), "the trap works"


@pytest.mark.parametrize(
    ("data", "labels", "reasons"),
    [
        (b"one\n\n two \r\nthree\n", ["one\ntwo\nthree"], []),
        (b" \n \n", [], ["empty text"]),
        (b"\xff\xfe", [], ["text is not UTF-8 (convert the file, for example with iconv)"]),
    ],
)
def test_captions(tmp_path: Path, data: bytes, labels: list[str], reasons: list[str]) -> None:
    assert one(tmp_path, "txt", data, kind="retrieval") == (labels, reasons)

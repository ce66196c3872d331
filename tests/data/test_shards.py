"""Shards: layout, order, cursors, and tars that are damaged or mean harm."""

import bz2
import gzip
import json
import lzma
import os
import pickle
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contratile.data import Broken, DataConfig, Loader, Sample, open_source, shards
from contratile.data.sample import MAX_TEXT
from contratile.data.shards import Shards, expand
from tests.data.files import encoded, picture, shade, shard_members, write_tar

HERE = {"seed": 0, "epoch": 0, "part": 0, "parts": 1}


def make(folder: Path, *sizes: int) -> str:
    first = 0
    for i, size in enumerate(sizes):
        write_tar(folder / f"{i:05d}.tar", shard_members(range(first, first + size)))
        first += size
    return f"{folder}/{{00000..{len(sizes) - 1:05d}}}.tar"


def numbers(source: Shards, **options: Any) -> list[int]:
    return [number(source.sample(record)) for record, _ in source.records(**{**HERE, **options})]


def number(sample: Sample) -> int:
    n = int(sample.right.split()[1])
    assert shade(sample.left) == n and sample.key.endswith(f".tar/{n:09d}")
    return n


def read(source: Shards, **options: Any) -> Iterator[Sample | Broken]:
    for record, _ in source.records(**{**HERE, "seed": None, **options}):
        try:
            yield source.sample(record)
        except Broken as error:
            yield error


def whole(names: str | Path, **options: Any) -> Shards:
    return Shards(str(names), "train", **{"test_share": None, **options})


# --- names --------------------------------------------------------------------------------------------------------


def test_names(tmp_path: Path) -> None:
    make(tmp_path, 1, 1, 1)
    files = [f"{tmp_path}/{i:05d}.tar" for i in range(3)]
    assert expand(f"{tmp_path}/{{00000..00002}}.tar") == expand(f"{tmp_path}/*.tar") == files
    assert expand(f"{files[2]}::{files[0]}") == [files[2], files[0]]
    assert expand("pipe:cat {0..1}.tar") == ["pipe:cat 0.tar", "pipe:cat 1.tar"]
    with pytest.raises(
        ValueError, match=r"shards: expected tar files, got none of 10, first '.*/7.tar'. Check the path"
    ):
        expand(f"{tmp_path}/{{7..16}}.tar")


def test_names_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shards: expected names with closed braces, got 'x\{1..3.tar' \(Unbalanced"):
        expand("x{1..3.tar")
    with pytest.raises(ValueError, match=r"shards: expected at most 1,000,000 names, got '\{1..1000001\}.tar'"):
        expand("{1..1000001}.tar")


@pytest.mark.parametrize("form", ["file", "pipe", "gzip"])
def test_where_they_are_read_from(tmp_path: Path, form: str) -> None:
    name = write_tar(tmp_path / "a.tar", shard_members(range(5)))
    if form == "gzip":
        (tmp_path / "a.tar.gz").write_bytes(gzip.compress(name.read_bytes()))
        source = whole(tmp_path / "a.tar.gz")
        assert [sample.right for sample in read(source)] == [f"number {n}" for n in range(5)]  # type: ignore[union-attr]
        return
    source = whole(name if form == "file" else f"pipe:cat {name}")
    assert numbers(source, seed=None) == list(range(5)) and source.kinds == ("image", "text")


def test_a_pipe_that_fails_is_broken(tmp_path: Path) -> None:
    name = write_tar(tmp_path / "a.tar", shard_members(range(2)))
    first, *middle, last = read(whole(f"pipe:false::pipe:cat {name}::pipe:cat {name}; exit 3"))
    assert isinstance(first, Broken) and isinstance(last, Broken)
    assert len(middle) >= 2 and all(isinstance(sample, Sample) for sample in middle)


# --- layout -------------------------------------------------------------------------------------------------------


def test_captions(tmp_path: Path) -> None:
    png = encoded(picture(1))
    name = write_tar(
        tmp_path / "a.tar",
        [
            *(("0.png", png), ("0.txt", b"plain"), ("0.json", b'{"caption": "other"}')),
            *(("1.PNG", png), ("1.json", b'{"caption": "from json", "alt": "second"}')),
            *(("2.webp", encoded(picture(1), "WEBP")), ("2.json", b'{"text": "from text"}')),
            *(("3.png", png), ("3.json", b"{torn")),
            *(("4.png", png), ("4.json", b'{"status": "failed"}')),
            *(("5.txt", b"no picture"),),
            *(("6.png", png), ("6.txt", b"\xff\xfe")),
            *(("7.png", png), ("7.json", b"[1, 2]")),
        ],
    )
    assert [x.right if isinstance(x, Sample) else x.reason for x in read(whole(name))] == [
        "plain",
        "from json",
        "from text",
        "damaged JSON",
        "no caption: neither .txt nor caption or text in .json",
        "no file .png .jpg .jpeg .webp .gif .bmp .tif .tiff in the sample",
        "text is not UTF-8 (convert the file, for example with iconv)",
        "no caption: neither .txt nor caption or text in .json",
    ]
    assert list(whole(name).texts()) == ["plain", "from json", "from text", "no picture"]
    alternative = list(read(whole(name, right="alt")))
    assert isinstance(alternative[1], Sample) and alternative[1].right == "second"


def test_text_pairs(tmp_path: Path) -> None:
    name = write_tar(tmp_path / "a.tar", [("0.query", b"how?"), ("0.answer", b"so")])
    source = whole(name, left="query", right="answer")
    (sample,) = read(source)
    assert list(source.texts()) == ["so", "how?"]
    assert source.kinds == ("text", "text") and sample[:2] == ("how?", "so")  # type: ignore[index]


# --- order --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    parts=st.integers(1, 7),
    seed=st.none() | st.integers(0, 1000),
    epoch=st.integers(0, 3),
    window=st.integers(1, 9),
    position=st.integers(0, 40),
)
def test_parts_cover_everything_once_and_go_on_anywhere(
    tmp_path_factory: pytest.TempPathFactory, parts: int, seed: int | None, epoch: int, window: int, position: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    source = whole(make(folder, 7, 1, 12, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "WINDOW", window)
        found: list[int] = []
        for part in range(parts):
            options = {"seed": seed, "epoch": epoch, "part": part, "parts": parts}
            records = list(source.records(**options))  # type: ignore[arg-type]
            mine = [number(source.sample(record)) for record, _ in records]
            found += mine
            assert mine == numbers(source, **options)
            if records:
                cursor = json.loads(json.dumps(records[min(position, len(records) - 1)][1]))
                assert numbers(source, start=cursor, **options) == mine[position + 1 :]
        assert sorted(found) == list(range(24))


def test_epochs_and_seeds_differ(tmp_path: Path) -> None:
    source = whole(make(tmp_path, 20, 20))
    first = numbers(source)
    assert first != numbers(source, epoch=1) and first != numbers(source, seed=1) and first != list(range(40))
    assert numbers(source, seed=None) == list(range(40))
    assert numbers(pickle.loads(pickle.dumps(source))) == first


def test_held_out_by_key(tmp_path: Path) -> None:
    names = make(tmp_path, 50, 50)
    train, test = (numbers(Shards(names, split, test_share=0.2)) for split in ("train", "test"))
    assert sorted(train + test) == list(range(100)) and 8 < len(test) < 35


# --- harm ---------------------------------------------------------------------------------------------------------


def test_bad_tars_are_broken_and_the_next_is_read(tmp_path: Path) -> None:
    good = write_tar(tmp_path / "0.tar", shard_members(range(4)))
    data = good.read_bytes()
    (tmp_path / "1.tar").write_bytes(b"")
    (tmp_path / "2.tar").write_bytes(b"this is no tar" * 100)
    (tmp_path / "3.tar").write_bytes(data[: data.index(b"000000002.png") + 700])
    (tmp_path / "7.tar").write_bytes(data[: data.index(b"000000002.png")])
    long = write_tar(tmp_path / "long.tar", shard_members(range(60))).read_bytes()
    damage = long.index(b"000000003.png")
    (tmp_path / "4.tar").write_bytes(long[:damage] + b"\x13" * 512 + long[damage + 512 :])
    write_tar(tmp_path / "6.tar", shard_members(range(4, 8)))
    source = whole(f"{tmp_path}/{{0..7}}.tar")
    found = list(read(source))
    assert {str(x) for x in found if isinstance(x, Broken)} == {
        f"{i}.tar: shard cannot be read to its end ({kind})"
        for i, kind in (
            *((1, "ReadError"), (2, "ReadError"), (3, "ReadError")),
            *((4, "EOFError"), (5, "FileNotFoundError"), (7, "EOFError")),
        )
    }
    usable = [number(x) for x in found if isinstance(x, Sample)]
    assert usable == [0, 1, 2, 3, 0, 1, 0, 1, 2, 4, 5, 6, 7, 0, 1], "what lies before the damage is used"


def test_nothing_is_unpacked_wherever_names_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "a/b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    png = encoded(picture(9))
    name = write_tar(inner / "evil.tar", [("../../evil.png", png), ("../../evil.txt", b"up"), ("/tmp/x/evil.png", png)])
    with tarfile.open(name, "a") as tar:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    found = list(read(whole("evil.tar")))
    assert isinstance(found[0], Sample) and found[0].right == "up" and isinstance(found[1], Broken) and len(found) == 2
    assert sorted(tmp_path.rglob("*")) == before and not Path("/tmp/x/evil.png").exists()


def test_truncated_pictures_are_broken(tmp_path: Path) -> None:
    torn = encoded(picture(3, (64, 64)))[:-30]
    name = write_tar(tmp_path / "a.tar", [("0.png", torn), ("0.txt", b"torn"), *shard_members([1])])
    found = list(read(whole(name)))
    assert isinstance(found[0], Broken) and found[0].reason.startswith("truncated") and isinstance(found[1], Sample)


def test_one_bad_sample_is_not_the_end_of_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one whose files are too large: what a shard holds behind it is used."""
    monkeypatch.setattr(shards, "MAX_PICTURE", 1000)
    png = encoded(picture(1))
    name = write_tar(
        tmp_path / "a.tar",
        [
            *(("0.png", png), ("0.png", png), ("0.txt", b"twice")),
            *(("1.png", png + b"\0" * 1000), ("1.txt", b"large picture")),
            *(("2.png", png), ("2.txt", b"x" * (4 * MAX_TEXT + 1))),
            *(("3.png", png), ("3.txt", b"x" * (MAX_TEXT + 1))),
            *(("4.png", png), ("4.json", json.dumps({"caption": "x", "more": "x" * (1 << 20)}).encode())),
            *(("5.png", png), ("5.txt", b"fine"), ("5.npy", b"\0" * 10_000), ("5.bin", b"\0"), ("5.bin", b"\0")),
            *(("6.txt", b"no picture"), (".hidden", b"\0"), ("none", b"\0"), ("__meta__/x.txt", b"\0")),
        ],
    )
    found = list(read(whole(name)))
    assert [(x.key, x.right if isinstance(x, Sample) else x.reason) for x in found] == [
        ("a.tar/0", "two files with the same name in the tar"),
        ("a.tar/1", "file of more than 0 KiB in the tar"),
        ("a.tar/2", "file of more than 512 KiB in the tar"),
        ("a.tar/3", "text of more than 131,072 characters"),
        ("a.tar/4", "file of more than 1 MiB in the tar"),
        ("a.tar/5", "fine"),
        ("a.tar/6", "no file .png .jpg .jpeg .webp .gif .bmp .tif .tiff in the sample"),
    ]
    assert list(whole(name).texts()) == ["fine", "no picture"]


def sparse(name: str, size: int, *, longer: bool = False) -> bytes:
    """A header that claims a file of `size`, of which nothing is stored."""
    member = tarfile.TarInfo(name)
    member.type = tarfile.GNUTYPE_SPARSE
    head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    head[386:482] = b"\0" * 96
    head[482] = longer
    head[483:495] = b"%011o\0" % size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 512)


def small_and_huge(kind: str) -> bytes:
    """A tar of a few KB that claims or unpacks to fifty million bytes: two good samples, a huge one, a good one."""
    n, png = 50_000_000, encoded(picture(1))

    def member(name: str, data: bytes, type: bytes = tarfile.REGTYPE) -> bytes:
        facts = tarfile.TarInfo(name)
        facts.size, facts.type = len(data), type
        return facts.tobuf(tarfile.GNU_FORMAT) + padded(data)

    good = [member(f"{i}.png", png) + member(f"{i}.txt", b"fine") for i in (0, 1, 3)]
    if kind in ("sparse", "long sparse"):
        huge = sparse("2.txt", n, longer=kind == "long sparse")
    elif kind == "name":
        huge = member("././@LongLink", b"x" * n, tarfile.GNUTYPE_LONGNAME) + member("2.txt", b"fine")
    elif kind == "attributes":
        huge = member("pax", b"%d comment=" % n + b"x" * (n - 18) + b"\n", tarfile.XHDTYPE) + member("2.txt", b"fine")
    else:
        huge = member("2.txt", b"x" * n)
    return b"".join([*good[:2], huge, good[2], b"\0" * 1024])


@pytest.mark.parametrize(
    ("kind", "pack"),
    [
        *(("text", "gz"), ("text", "bz2"), ("text", "xz"), ("sparse", ""), ("sparse", "gz")),
        *(("long sparse", ""), ("name", "gz"), ("attributes", "gz")),
    ],
)
def test_small_tars_stay_small(tmp_path: Path, kind: str, pack: str) -> None:
    """Whatever they claim or unpack to: the file is skipped, counted, and never held in memory."""
    packers = {"": bytes, "gz": lambda x: gzip.compress(x, 1), "bz2": lambda x: bz2.compress(x, 9), "xz": lzma.compress}
    name = tmp_path / f"a.tar{'.' if pack else ''}{pack}"
    name.write_bytes(packers[pack](small_and_huge(kind)))
    assert name.stat().st_size < 1_000_000
    tracemalloc.start()
    found = [x.right if isinstance(x, Sample) else x.reason for x in read(whole(name))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if kind in ("text", "sparse"):
        reason = "a sparse file in the tar" if kind == "sparse" else "file of more than 512 KiB in the tar"
        assert found == ["fine", "fine", reason, "fine"]
    else:
        assert found == ["fine", "shard cannot be read to its end (ReadError)"]
    assert peak < 20_000_000


def test_a_pipe_among_shards_is_not_waited_for(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", shard_members([0]))
    os.mkfifo(tmp_path / "1.tar")
    (tmp_path / "2.tar").mkdir()
    (tmp_path / "3.tar").symlink_to("3.tar")
    first, *others = read(whole(f"{tmp_path}/*.tar"))
    assert isinstance(first, Sample)
    assert [str(x) for x in others] == [
        *(f"{i}.tar: not a file but a folder, a pipe or a device" for i in (1, 2)),
        "3.tar: shard cannot be read to its end (OSError)",
    ]


def test_windows_of_large_records_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = whole(make(tmp_path, 30))
    monkeypatch.setattr(shards, "WINDOW_BYTES", 500)  # some four records
    records = list(source.records(**HERE))
    mine = [number(source.sample(record)) for record, _ in records]
    assert sorted(mine) == list(range(30)) != mine
    assert all(abs(place - n) < 10 for place, n in enumerate(mine)), "nothing moves far"
    for done in (1, 7, 29):
        assert numbers(source, start=records[done - 1][1]) == mine[done:]


# --- with the loader ----------------------------------------------------------------------------------------------


def lengths(values: list[Any]) -> int:
    return len(values)


def test_loader_over_shards(tmp_path: Path) -> None:
    names = make(tmp_path, 7, 9, 5)
    source = open_source(DataConfig(data=names, test_data=names), "train")

    def keys(loader: Loader, batches: int) -> list[list[str]]:
        found = []
        for _, batch in zip(range(batches), loader, strict=False):
            found.append([key for chunk in batch.chunks for key in chunk.keys])
        return found

    def loader() -> Loader:
        return Loader(source, (lengths, lengths), batch=8, chunk=3, rank=1, world=2)

    expected = keys(loader(), 12)
    first, second = loader(), loader()
    assert keys(first, 5) == expected[:5]
    second.load_state_dict(json.loads(json.dumps([{}, first.state_dict()])))
    assert keys(second, 7) == expected[5:]

"""Embedded files as what `search` and `serve` search: exact, in flat memory, and safe whoever wrote them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contratile.cli import main
from contratile.data.tables import Table
from contratile.embed.corpus import EmbeddedCorpus
from contratile.embed.open_corpus import open_corpus
from contratile.embed.output import Output
from contratile.embed.record import Record
from contratile.embed.stored import open_stored
from contratile.report.corpus import find_hits, searched_side
from contratile.report.gallery import thumbnail
from contratile.train.gallery_search import encode_queries
from contratile.train.loop import Trainer
from tests.train.runs import shapes, small

SUFFIXES = ["npy", "parquet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its pictures, embedded in both formats."""
    folder = tmp_path_factory.mktemp("corpus")
    Trainer(small(shapes(folder / "shapes"), folder / "run")).run()
    for suffix in SUFFIXES:
        embed(folder / "run", folder / "shapes" / "pairs.csv", folder / f"both.{suffix}", "--side", "both")
    return folder


def embed(run: Path, data: Path, out: Path, *options: str) -> None:
    assert main(["embed", str(run), str(data), "--out", str(out), "--chunk", "10", "--save-every", "2", *options]) == 0


def copied(folder: Path, suffix: str, target: Path) -> Path:
    """The embedded files of a format in a folder of their own."""
    target.mkdir(exist_ok=True)
    for path in folder.glob("both.*"):
        if (".parquet" in path.name) == (suffix == "parquet"):
            shutil.copy(path, target)
    return target


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_search_is_a_dense_one(folder: Path, suffix: str) -> None:
    corpus, towers, title, _ = open_corpus(folder / f"both.{suffix}")
    source = Table(folder / "shapes" / "pairs.csv", "train", test_share=None)
    assert (title, corpus.remark, corpus.counts()) == ("both", "", "96 rows of image and text features")
    queries = ["red line of size 2", "something"]
    features = encode_queries(towers.right, queries)
    left = torch.from_numpy(np.load(folder / "both.left.npy"))
    scores, best = (features.double() @ left.double().T).topk(7)
    hits = find_hits(corpus, queries, features, k=7, among="left")
    assert [[hit.item for hit in row] for row in hits] == best.tolist()
    torch.testing.assert_close(torch.tensor([[hit.score for hit in row] for row in hits]), scores.float())
    for hit in hits[0]:
        sample = source[hit.item]
        assert (hit.text, hit.name, hit.match) == (sample.right, sample.name, sample.right == queries[0])
        assert not isinstance(sample.left, str) and corpus.picture(hit.item) == thumbnail(sample.left)
    (texts,) = find_hits(corpus, ["blue-arc-1.png"], left[:1], k=96, among="right")
    assert [hit.text for hit in texts if hit.match] == ["blue arc of size 1"] and not texts[0].name


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_equal_items_are_found_once(folder: Path, tmp_path: Path, suffix: str) -> None:
    table = tmp_path / "pairs.csv"
    rows = [f"{folder}/shapes/red-line-{1 + n % 2}.png,text {n}" for n in range(30)]
    table.write_text("\n".join(["path,caption", *rows, f"{folder}/shapes/blue-arc-3.png,text 0"]) + "\n")
    embed(folder / "run", table, tmp_path / f"f.{suffix}", "--side", "both")
    corpus, towers, _, _ = open_corpus(tmp_path)
    (hits,) = find_hits(corpus, ["red"], encode_queries(towers.right, ["red"]), k=8, among="left")
    assert len(hits) == 3 and len({hit.name for hit in hits}) == 3
    (hits,) = find_hits(corpus, ["red"], encode_queries(towers.right, ["red"]), k=40, among="right")
    assert len(hits) == 30


def test_the_names_that_open_it(folder: Path, tmp_path: Path) -> None:
    copied(folder, "npy", tmp_path / "files")
    for name in ("", "both.npy", "both.left.npy", "both.right.npy", "both.npy.embedded.json"):
        assert open_corpus(tmp_path / "files" / name).corpus.searchable == ("left", "right")
    shutil.copy(folder / "both.npy.embedded.json", tmp_path / "files" / "more.npy.embedded.json")
    with pytest.raises(ValueError, match=r"expected one set of embedded features, got both.npy, more.npy"):
        open_corpus(tmp_path / "files")


def test_every_file_has_a_record_of_its_own(folder: Path, tmp_path: Path) -> None:
    """NAME.npy and NAME.parquet of other weights; NAME.left.npy, written over a side of NAME.npy."""
    shutil.copytree(folder / "run", tmp_path / "run", symlinks=True)
    Trainer(small(folder / "shapes" / "pairs.csv", tmp_path / "other", seed=7)).run()
    data = folder / "shapes" / "pairs.csv"
    embed(tmp_path / "run", data, tmp_path / "f.npy", "--side", "both")
    embed(tmp_path / "other", data, tmp_path / "f.parquet", "--side", "right")
    assert open_corpus(tmp_path / "f.npy").corpus.searchable == ("left", "right")
    assert open_corpus(tmp_path / "f.parquet").corpus.searchable == ("right",)
    runs = [Record.read(tmp_path / f"f.{suffix}.embedded.json").run for suffix in SUFFIXES]
    assert runs == [str(tmp_path / "run"), str(tmp_path / "other")]
    with pytest.raises(ValueError, match=r"got f.npy, f.parquet"):
        open_corpus(tmp_path)
    embed(tmp_path / "other", data, tmp_path / "f.left.npy")
    assert open_corpus(tmp_path / "f.left.npy").corpus.searchable == ("left",)
    with pytest.raises(ValueError, match=r"expected f.npy.embedded.json next to them, got none"):
        open_corpus(tmp_path / "f.npy")


def test_one_side_is_searched_if_there_is_one(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embed(folder / "run", folder / "shapes" / "pairs.csv", tmp_path / "texts.npy", "--side", "right")
    corpus, *_ = open_corpus(tmp_path / "texts.npy")
    assert searched_side(corpus.kinds, corpus.searchable) == "right" and corpus.remark == ""
    picture = str(folder / "shapes" / "red-line-2.png")
    assert main(["search", str(tmp_path / "texts.npy"), picture, "--k", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert main(["search", str(tmp_path / "texts.npy"), "red", "--among", "left"]) == 2
    assert "expected right, the side that was embedded, got left" in capsys.readouterr().err


# --- runs that moved, data that is gone ---------------------------------------------------------------------------


def test_a_moved_run_and_data_that_is_gone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder: the run by --run, pictures from data named now, and none if there is none."""
    shutil.copytree(folder / "run", tmp_path / "run", symlinks=True)
    shutil.copytree(folder / "shapes", tmp_path / "shapes")
    embed(tmp_path / "run", tmp_path / "shapes" / "pairs.csv", tmp_path / "f.npy")
    (tmp_path / "run").rename(tmp_path / "moved run")
    (tmp_path / "shapes").rename(tmp_path / "moved shapes")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["search", "../f.npy", "red line"]) == 2
    assert f"got none at {tmp_path / 'run'}. Say where it is: --run RUN" in capsys.readouterr().err
    words = ["search", "../f.npy", "--run", "../moved run", "--k", "2", "--queries", "red line", "blue arc"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert 'nearest to "red line"' in told and 'nearest to "blue arc"' in told and ".png" in told
    assert f"4 of 4 pictures are missing and left blank: {tmp_path}" in told
    assert "contact sheet: ../f.search.png" in told and (tmp_path / "f.search.png").stat().st_size > 1000
    assert main([*words, "--pictures", "../moved shapes/pairs.csv", "--out", "sheet.png"]) == 0
    assert "left blank" not in capsys.readouterr().out and Path("sheet.png").exists()


def test_a_record_is_read_up_to_a_limit(folder: Path, tmp_path: Path) -> None:
    """It may come from anyone, and of any size."""
    told = next(folder.rglob("*.embedded.json")).read_text()
    file = tmp_path / "f.npy.embedded.json"
    for before, sound in ((1 << 10, True), (1 << 20, False)):
        file.write_text(" " * before + told)
        if sound:
            assert Record.read(file).rows > 0
        else:
            with pytest.raises(
                ValueError, match=r"record .*: expected what `contratile embed` writes, got JSONDecodeError"
            ):
                Record.read(file)


def test_other_weights_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(small(folder / "shapes" / "pairs.csv", tmp_path / "other", seed=7)).run()
    assert main(["search", str(folder / "both.npy"), "red", "--run", str(tmp_path / "other")]) == 2
    assert "expected the weights that embedded" in capsys.readouterr().err
    assert main(["search", str(tmp_path / "other"), "red", "--run", str(folder / "run")]) == 2
    assert "--run: expected embedded features with it" in capsys.readouterr().err


def test_features_without_a_record(folder: Path, tmp_path: Path) -> None:
    target = copied(folder, "npy", tmp_path / "files")
    (target / "both.npy.embedded.json").unlink()
    with pytest.raises(ValueError, match=r"expected both.left.npy.embedded.json next to them, got none"):
        open_corpus(target / "both.left.npy")
    with pytest.raises(ValueError, match="nothing at"):
        open_corpus(tmp_path / "nothing")


@pytest.mark.parametrize("change", ["order", "text"])
def test_a_changed_table_shows_no_other_picture(folder: Path, tmp_path: Path, change: str) -> None:
    """The key of a row of a table is its line."""
    shutil.copytree(folder / "shapes", tmp_path / "shapes")
    table = tmp_path / "shapes" / "pairs.csv"
    embed(folder / "run", table, tmp_path / "f.npy")
    assert open_corpus(tmp_path / "f.npy").corpus.picture(0)
    head, first, second, *rest = table.read_text().splitlines(keepends=True)
    lines = [second, first] if change == "order" else [first.replace("of size", "with size"), second]
    table.write_text("".join([head, *lines, *rest]))
    corpus = open_corpus(tmp_path / "f.npy").corpus
    assert [bool(corpus.picture(item)) for item in range(3)] == [False, change == "text", True]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_open_corpus_does_not_mix_with_a_later_one(folder: Path, tmp_path: Path, suffix: str) -> None:
    """Embedded again under the same name: features and keys stay those that were opened."""
    rows = [f"{folder}/shapes/red-line-{n}.png,red {n}\n" for n in (1, 2, 3)]
    (tmp_path / "pairs.csv").write_text("".join(["path,caption\n", *rows]))
    embed(folder / "run", tmp_path / "pairs.csv", tmp_path / f"f.{suffix}")
    corpus, towers, *_ = open_corpus(tmp_path / f"f.{suffix}")
    for path in tmp_path.glob("f.*"):
        path.unlink()
    (tmp_path / "pairs.csv").write_text("".join(["path,caption\n", *reversed(rows)]))
    embed(folder / "run", tmp_path / "pairs.csv", tmp_path / f"f.{suffix}")
    (hits,) = find_hits(corpus, ["x"], encode_queries(towers.right, ["x"]), k=3, among="left")
    assert sorted((hit.item, hit.text) for hit in hits) == [(0, "red 1"), (1, "red 2"), (2, "red 3")]


# --- files from anyone --------------------------------------------------------------------------------------------


def test_pictures_of_a_stranger_are_not_followed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record could name any folder of this machine. One that this user did not write shows none of it."""
    target = copied(folder, "npy", tmp_path / "files")
    own = open_corpus(target)
    assert own.corpus.picture(3)
    private = tmp_path / "private"
    private.mkdir()
    shutil.copy(folder / "shapes" / "red-line-2.png", private / "me.png")
    record = target / "both.npy.embedded.json"
    changed(record, data={"data": f"{private}/", "columns": ["", ""], "split": "all", "root": None})
    keys = target / "both.keys.jsonl"
    names = ("me.png", "../../etc/passwd", "/etc/passwd", "..\\me.png")
    lines = [{"key": names[n % 4], "name": names[n % 4], "text": "me", "index": 0} for n in range(96)]
    keys.write_text("".join(json.dumps(line) + "\n" for line in lines))
    corpus, *_ = open_corpus(target)
    assert "someone else embedded" in corpus.remark
    assert not any(corpus.has_picture(item) or corpus.picture(item) for item in range(96))
    # Named by the user, the data is read; still only the sample that the row was made of.
    corpus, *_ = open_corpus(target, pictures=f"{private}/")
    assert [bool(corpus.picture(item)) for item in range(4)] == [True, False, False, False]
    assert corpus.picture(-1) == corpus.picture(96) == b""
    # The mark of another machine, and no key at all.
    shutil.copy(folder / "both.npy.embedded.json", record)
    monkeypatch.setenv("CONTRATILE_CACHE", str(tmp_path / "nobody"))
    assert not open_corpus(target).corpus.has_picture(3) and not (tmp_path / "nobody").exists()
    changed(record, mark="\u00e9" * 64)
    assert not open_corpus(target).corpus.has_picture(3)


def test_the_key_is_for_this_user_alone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRATILE_CACHE", str(tmp_path / "cache"))
    record = Record.read(folder / "both.npy.embedded.json")
    assert not record.own
    record.write(tmp_path / "f.npy.embedded.json")
    assert Record.read(tmp_path / "f.npy.embedded.json").own
    assert (tmp_path / "cache" / "embedded.key").stat().st_mode & 0o077 == 0


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harmed"),))


def spoil(target: Path, how: str) -> None:
    """Damage a copy of the .npy form."""
    left, keys, record = target / "both.left.npy", target / "both.keys.jsonl", target / "both.npy.embedded.json"
    array, lines = np.load(left), keys.read_text().splitlines(keepends=True)
    if how == "pickle":
        np.save(left, np.array([Harm()] * 96, dtype=object), allow_pickle=True)
    elif how == "zip":
        np.savez(target / "x.npz", array)
        (target / "x.npz").replace(left)
    elif how == "huge":
        left.write_bytes(left.read_bytes().replace(b"(96, 32)", b"(9" + b"9" * 12 + b", 32)")[:5000])
    elif how in ("short", "empty", "noise"):
        data = left.read_bytes()
        left.write_bytes({"short": data[:-4], "empty": b"", "noise": b"\x93NUMPY" + bytes(range(256))}[how])
    elif how in ("float64", "shape", "fortran"):
        np.save(left, {"float64": array.astype("f8"), "shape": array[:5], "fortran": np.asfortranarray(array)}[how])
    elif how == "gone":
        left.unlink()
    elif how == "lines":
        keys.write_text("".join(lines[:-1]))
    elif how in ("row", "nested", "types"):
        line = {"row": "{]", "nested": "[" * 9000, "types": '{"key": 1, "name": [], "text": {}, "index": "0"}'}[how]
        keys.write_text("".join([f"{line}\n"] * 96))
    elif how == "record":
        record.write_text("[" * 100000)
    else:
        field, value = how.split("=")
        changed(record, **{field: json.loads(value)})


DAMAGE = ["pickle", "zip", "huge", "short", "empty", "noise", "float64", "shape", "fortran", "gone", "lines", "row"]
DAMAGE += ["nested", "types", "record", "rows=-1", 'rows="96"', "rows=95", "width=31", 'sides=["up"]', "sides=7"]
DAMAGE += ["step=true", "step=99", "kinds=null", "names=[1,2]", "data=[]", "run=3", 'format="other"', "extra=1"]


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_files_get_a_reason(
    folder: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spoil(copied(folder, "npy", tmp_path / "files"), how)
    assert main(["search", "files", "red", "--k", "3"]) == 2
    told = capsys.readouterr().err
    assert "expected" in told and "Traceback" not in told and not Path("harmed").exists()


@pytest.mark.parametrize("how", ["short", "noise", "columns", "width", "nulls", "page"])
def test_a_damaged_parquet_gets_a_reason(
    folder: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    target = copied(folder, "parquet", tmp_path / "files")
    file = target / "both.parquet"
    data, table = file.read_bytes(), parquet.read_table(file)
    if how == "columns":
        parquet.write_table(table.drop_columns(["index"]), file)
    elif how == "width":
        narrow = pyarrow.array(np.zeros((96, 5), "f4").tolist(), pyarrow.list_(pyarrow.float32(), 5))
        parquet.write_table(table.set_column(4, "left", narrow), file)
    elif how == "nulls":
        parquet.write_table(table.set_column(4, "left", pyarrow.nulls(96, table.schema.field("left").type)), file)
    else:
        page = data[:200] + bytes(1500) + data[1700:]
        file.write_bytes({"short": data[:-100], "noise": bytes(range(256)) * 9, "page": page}[how])
    assert main(["search", str(target), "red", "--k", "3"]) == 2
    assert f"embedded file {file}: expected" in capsys.readouterr().err


# --- memory -------------------------------------------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_does_not_grow_with_the_rows(folder: Path, tmp_path: Path, suffix: str) -> None:
    """100 MB of features and 25 MB of keys, searched within 90 MB: pyarrow keeps 50 for any number of rows."""
    rows, width = 400_000, 64
    told = json.loads((folder / "both.npy.embedded.json").read_text())
    told |= {"rows": rows, "width": width, "sides": ["left"]}
    (tmp_path / f"f.{suffix}.embedded.json").write_text(json.dumps(told))
    out = tmp_path / f"f.{suffix}"
    if suffix == "npy":
        from contratile.embed.output import write_header

        with out.open("wb") as file:
            write_header(file, (rows, width))
            file.truncate(file.tell() + 4 * rows * width)  # zeros
        line = '{"key": "%d", "name": "name %d", "text": "x", "index": 0}\n'
        out.with_suffix(".keys.jsonl").write_text("".join(line % (n, n) for n in range(rows)))
    else:
        import pyarrow
        import pyarrow.parquet as parquet

        part = 50_000
        kind = pyarrow.list_(pyarrow.float32(), width)
        flat = pyarrow.array(np.zeros(part * width, "f4"))
        columns: dict[str, Any] = {name: [f"{name} {n}" for n in range(part)] for name in ("key", "name", "text")}
        columns |= {"index": list(range(part)), "left": pyarrow.FixedSizeListArray.from_arrays(flat, type=kind)}
        table = pyarrow.table(columns)
        with parquet.ParquetWriter(out, table.schema) as writer:
            for _ in range(rows // part):
                writer.write_table(table, row_group_size=2048)
        del table, columns, flat
        pyarrow.default_memory_pool().release_unused()
    before = anonymous()
    record = Record.read(tmp_path / f"f.{suffix}.embedded.json")
    corpus = EmbeddedCorpus(record, open_stored(Output.of(out, record.sides), record))
    (hits,) = find_hits(corpus, ["x"], torch.ones(1, width), k=5, among="left")
    assert len(hits) == 5 and all(hit.name.startswith("name") for hit in hits)
    assert anonymous() - before < 90 << 20

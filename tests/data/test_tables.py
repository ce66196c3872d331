"""Tables: formats, columns, encodings, paths, broken rows."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from contratile.data import Broken, DataConfig, Indexed, open_source
from contratile.data.sample import left_name
from contratile.data.tables import Table
from tests.data.files import encoded, picture, shade


def table(file: Path, **options: Any) -> Table:
    return Table(file, "train", **{"test_share": None, **options})


def pictures(folder: Path, numbers: range = range(3)) -> Path:
    folder.mkdir(exist_ok=True)
    for n in numbers:
        (folder / f"{n}.png").write_bytes(encoded(picture(n)))
    return folder


def outcomes(source: Indexed) -> list[str]:
    """The right side of each sample, or why it is broken."""
    found = []
    for i in range(len(source)):
        try:
            found.append(source[i].right)
        except Broken as error:
            found.append(f"{error.key}: {error.reason}")
    return found


FORMATS = {
    "pairs.csv": 'path,caption,width\na/0.png,zero,9\na/1.png,"one, with comma\nand line",9\n',
    "tabs.csv": 'path\tcaption\twidth\na/0.png\tzero\t9\na/1.png\t"one, with comma\nand line"\t9\n',
    "semicolons.csv": 'path;caption;width\na/0.png;zero;9\na/1.png;"one, with comma\nand line";9\n',
    "pairs.tsv": 'path\tcaption\twidth\na/0.png\tzero\t9\na/1.png\t"one, with comma\nand line"\t9\n',
    "pairs.jsonl": '{"path": "a/0.png", "caption": "zero"}\n\n'
    '{"path": "a/1.png", "caption": "one, with comma\\nand line"}',
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path: Path, name: str, encoding: str) -> None:
    pictures(tmp_path / "a")
    (tmp_path / name).write_text(FORMATS[name], encoding=encoding)
    source = table(tmp_path / name)
    assert source.kinds == ("image", "text") and len(source) == 2
    assert [shade(source[i].left) for i in range(2)] == [0, 1]
    assert [source[i].right for i in range(2)] == ["zero", "one, with comma\nand line"]
    assert list(source.texts()) == ["zero", "one, with comma\nand line"]
    assert source[0].key == f"{name}:{2 if name.endswith('sv') else 1}"


def test_parquet(tmp_path: Path) -> None:
    """Paths, and pictures inside the file."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pictures(tmp_path / "a")
    bytes_ = [encoded(picture(7)), b"torn"]
    columns = {"path": ["a/0.png", "a/none.png"], "caption": ["zero", "none"], "image": bytes_}
    file = tmp_path / "pairs.parquet"
    parquet.write_table(arrow.table(columns), file)
    config = DataConfig(data=str(file), left="path", cache=tmp_path, test_data=str(file))
    source = open_source(config, "train")
    assert isinstance(source, Indexed) and shade(source[0].left) == 0
    assert outcomes(source)[1].endswith("no such file")
    inside = open_source(DataConfig(data=str(file), test_data=str(file)), "train")
    assert isinstance(inside, Indexed) and shade(inside[0].left) == 7 and inside.kinds == ("image", "text")
    assert "not a picture" in outcomes(inside)[1]


def test_text_pairs_and_familiar_names(tmp_path: Path) -> None:
    file = tmp_path / "pairs.csv"
    file.write_text("id,Question,Answer\n1,how?,so\n")
    source = table(file)
    assert source.kinds == ("text", "text") and source[0][:2] == ("how?", "so")
    assert list(source.texts()) == ["how?", "so"]
    file.write_text("foo,bar\nx.PNG,y\n")
    assert table(file).columns.left == "foo" and table(file).kinds[0] == "image"
    assert pickle.loads(pickle.dumps(table(file, left_kind="text")))[0].right == "y"
    assert table(file, left_kind="text")[0].left == "x.PNG"
    assert table(file, left="bar")[0][:2] == ("y", "x.PNG")
    file.write_text("caption,url\ny,https://example.org/x?size=3\n")
    assert outcomes(table(file)) == [
        "pairs.csv:2: an address instead of a file (fetch with img2dataset, then use its shards)"
    ]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "a,b,c\n1,2,3\n",
            {},
            r"columns of t.csv: expected names such as image and caption, got a, b, c. Say which two",
        ),
        (
            "image,caption\n1,2\n",
            {"left": "imege"},
            r"expected one of image, caption, got 'imege'. Did you mean 'image'",
        ),
        (
            "image,caption\n1,2\n",
            {"right": "zzz"},
            r"column right of t.csv: .* got 'zzz'. Name one of them with --right",
        ),
        ("", {}, r"expected rows of pairs, got an empty table"),
        ("image,caption\n", {}, r"expected rows of pairs, got an empty table"),
        ("image,caption\n1\n", {}, r"got 1 broken ones, first t.csv:2: expected 2 fields, got 1"),
    ],
)
def test_a_table_that_cannot_be_read(tmp_path: Path, text: str, options: dict[str, str], message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        table(tmp_path / "t.csv", **options)


def test_missing_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="table: expected a CSV, TSV or JSONL file, got nothing at"):
        table(tmp_path / "none.csv")


def test_broken_rows_of_csv(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    lines = [b"query,text", b"a,fine", b"b", b"", b"c,x,y", b"d,\xff\xfe latin", b"e,  ", b"f,caf\xc3\xa9"]
    file.write_bytes(b"\n".join(lines))
    assert outcomes(table(file)) == [
        "fine",
        "t.csv:3: expected 2 fields, got 1",
        "t.csv:5: expected 2 fields, got 3",
        "t.csv:6: text is not UTF-8 (convert the file, for example with iconv)",
        "t.csv:7: empty text",
        "caf\xe9",
    ]


def test_an_open_quote_does_not_swallow_the_run(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text('query,text\na,fine\nb,"open\n' + "c,fine\n" * 30_000)
    source = table(file)
    assert outcomes(source)[0] == "fine"
    assert any("line cannot be read (field larger than field limit" in line for line in outcomes(source))
    assert len(source) > 5_000


def test_broken_rows_of_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    good = json.dumps({"query": "a", "text": ["first", "second"]})
    lines = [good, "{torn", "[1]", '{"query": "b"}', '{"query": 3, "text": "c"}', '{"query": null, "text": "d"}']
    file.write_text("\n".join(lines))
    assert outcomes(table(file)) == [
        "first",
        "t.jsonl:2: line is not JSON",
        "t.jsonl:3: line is not a JSON object",
        "t.jsonl:4: expected text, got NoneType",
        "t.jsonl:5: expected text, got int",
        "t.jsonl:6: expected text, got NoneType",
    ]


def test_broken_pictures(tmp_path: Path) -> None:
    pictures(tmp_path / "a")
    (tmp_path / "torn.png").write_bytes(encoded(picture(3, (64, 64)))[:-30])
    names = ["a/0.png", "none.png", "torn.png", "a", "", "https://example.org/x.png", "a/\0.png"]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"path": name, "text": "x"}) + "\n" for name in names))
    assert [line.partition(": ")[2] for line in outcomes(table(file))[1:]] == [
        "no such file",
        "truncated picture (OSError)",
        "no such file",
        "no such file",
        "an address instead of a file (fetch with img2dataset, then use its shards)",
        "damaged or unreadable picture (ValueError)",
    ]


def test_paths_may_not_leave_a_given_root(tmp_path: Path) -> None:
    inside, outside = pictures(tmp_path / "in"), pictures(tmp_path / "out")
    (inside / "link.png").symlink_to(outside / "0.png")
    names = ["0.png", "../in/1.png", "../out/0.png", str(outside / "0.png"), "link.png"]
    file = tmp_path / "t.csv"
    file.write_text("path,text\n" + "".join(f"{name},fine\n" for name in names))
    refused = "path leads out of the root folder"
    assert [line.partition(": ")[2] or line for line in outcomes(table(file, root=inside))] == [
        *("fine", "fine"),
        *(refused, refused, refused),
    ]
    assert outcomes(table(file))[3] == "fine", "without a root, whole paths are what they say"


def test_all_captions_of_a_picture_are_in_one_split(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("path,text\n" + "".join(f"{i // 5}.png,caption {i}\n" for i in range(1000)))
    train, test = (Table(file, split, test_share=0.2) for split in ("train", "test"))
    seen, held = ({row["path"] for _, row in split._rows} for split in (train, test))  # type: ignore[index]
    assert len(train) + len(test) == 1000 and 100 < len(test) < 300 and not seen & held


def test_columns_that_are_not_used_are_known(tmp_path: Path) -> None:
    """With what they seem to hold: a text or a picture may have been meant."""
    file = tmp_path / "pairs.jsonl"
    row = {
        "anchor": "a",
        "positive": "b",
        "negative": "c",
        "negative_2": ["d"],
        "score": 0.5,
        "id": "17",
        "photo_2": "x.jpg",
    }
    file.write_text(json.dumps(row) + "\n")
    found = table(file, left="anchor", right="positive").columns.unused
    assert found == (("negative", "text"), ("negative_2", "text"), ("score", ""), ("id", ""), ("photo_2", "image"))


def test_pictures_are_called_by_their_paths(tmp_path: Path) -> None:
    pictures(tmp_path / "a")
    file = tmp_path / "pairs.csv"
    file.write_text("path,caption\na/0.png,zero\n./a//0.png,null\na/1.png,one\n")
    found = [left_name(table(file)[i]) for i in range(3)]
    assert found == ["a/0.png", "a/0.png", "a/1.png"]
    file.write_text("anchor,positive\nsame,one\nsame,two\n")
    assert [left_name(table(file)[i]) for i in range(2)] == ["same", "same"]

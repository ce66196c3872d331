"""Tables: formats, columns, encodings, paths, broken rows."""

import csv
import json
import math
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from contratile.data import Broken, DataConfig, Indexed, Loader, open_source, tables
from contratile.data.sample import MAX_TEXT, left_name
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
    assert "not an image" in outcomes(inside)[1]


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
        "pairs.csv:2: a URL instead of a file (download with img2dataset, then use its shards)"
    ]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "a,b,c\n1,2,3\n",
            {},
            r"columns of t.csv: expected names such as image and caption, got a, b, c. Name the two",
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


@pytest.mark.parametrize(
    ("text", "line", "rows"),
    [
        ('a,fine\nb,"open\n' + "c,fine\n" * 30_000, 3, 30_001),
        ('a,fine\nb,"open\n' + "c,fine\n" * 10, 3, 11),
        ('a,fine\nb,"open', 3, 1),
        ('a,fine\nb,"open\n' + "c,fine\n" * 50 + 'd,"quoted, as it should be"\ne,fine\n', 3, 53),
        ('a,fine\nb,"open\n' + "c,fine\n" * 50 + 'd,a screen of 24"\ne,fine\n', 3, 53),
        ('a,fine\r\nb,"open\r\n' + "c,fine\r\n" * 50 + 'd,a screen of 24"\r\n', 3, 52),
        ('"two\nlines","open\n' + "c,fine\n" * 10, 3, 10),
        ('a,"two\nlines"\nb,"open\nc,fine\n', 4, 2),
        ('a,fine\nb,"open\n' + "c,fine\n" * 20 + "c,with, comma\n\n" + "c,fine\n" * 20 + 'd,end"\ne,fine\n', 3, 44),
    ],
    ids=[
        "limit",
        "end",
        "last line",
        "closed by the next",
        "closed by inches",
        "windows",
        "second field",
        "after text",
        "rows that are not whole among them",
    ],
)
def test_an_open_quote_costs_its_own_row(tmp_path: Path, text: str, line: int, rows: int) -> None:
    """The csv module would take all that follows for one text, and say nothing."""
    file = tmp_path / "t.csv"
    file.write_text("query,text\n" + text, newline="")
    with pytest.warns(UserWarning, match=rf"^t.csv:{line}: a quote is opened here and not closed .* skipped$"):
        source = table(file)
    found = outcomes(source)
    assert [x for x in found if "quote is opened" in x] == [
        f't.csv:{line}: a quote is opened here and not closed (leave it out, or write "")'
    ]
    assert len(found) == rows + 1 and not any("\nc" in x for x in found)


def test_texts_of_several_lines_are_texts(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    texts = [
        "one\ntwo",
        'she said "no", twice\nand "yes"',
        "\n".join(f"verse {n}, and\nits answer" for n in range(50)),
        "\n\n\n\n\n\n\n\n\n\n\n\nend",
        "x" * 100_000 + "\n" + "y" * 30_000,
    ]
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([["query", "text"], *(["q", text] for text in texts), ["q", "last"]])
    assert outcomes(table(file)) == [*(text.strip() for text in texts), "last"]
    file.write_text('query,text\n"loose\nquote" ,fine\n"odd"ly,fine\n')
    assert [table(file)[n].left for n in range(2)] == ["loose\nquote", "oddly"]


def test_long_texts_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * (MAX_TEXT + 1)
    lines = [{"query": "a", "text": long[1:]}, {"query": "b", "text": long}, {"query": long, "text": "c"}]
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert outcomes(table(file))[1:] == [f"t.jsonl:{n}: text of more than 131,072 characters" for n in (2, 3)]
    (tmp_path / "t.csv").write_text(f"query,text\na,b\nc,{long}\nd,{long[1:]}\ne,f\n")
    first, broken, longest, last = outcomes(table(tmp_path / "t.csv"))
    assert (first, longest, last) == ("b", long[1:], "f")
    assert broken == "t.csv:3: line cannot be read (field larger than field limit (131072))"
    monkeypatch.setattr(tables, "MAX_LINE", 50)
    file.write_text('{"query": "a", "text": "b"}\n' + json.dumps(lines[0]) + '\n{"query": "c", "text": "d"}')
    assert outcomes(table(file)) == ["b", "t.jsonl:2: line is not JSON", "d"]


def test_a_head_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    for head in ("x" * 140_000, 'query,"text'):
        file.write_text(f"{head},text\na,b\n")
        with pytest.raises(
            ValueError, match=r"t.csv, line 1: expected the header of a table, got .*names of the columns"
        ):
            table(file)


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
        "truncated image (OSError)",
        "not a file but a folder, a pipe or a device",
        "no such file",
        "a URL instead of a file (download with img2dataset, then use its shards)",
        "path with characters that are not allowed in file names",
    ]


@pytest.mark.parametrize("rooted", [False, True])
def test_no_path_ends_a_run(tmp_path: Path, rooted: bool) -> None:
    """Whatever stands in the column is a sample, or a broken one that the loader counts."""
    inside = pictures(tmp_path / "in")
    (inside / "loop.png").symlink_to("loop.png")
    (inside / "ring").symlink_to("ring")
    os.mkfifo(inside / "pipe.png")
    names: list[Any] = [
        *("x" * 300 + ".png", "x/" * 3000 + "y.png", "nul\0.png", "half\ud800.png", "loop.png", "ring/0.png"),
        *("pipe.png", "/dev/zero", ".", "", " ", None, 3, 2.5, math.nan, True, ["0.png"], {"path": None}, {"bytes": 5}),
    ]
    file = tmp_path / "in" / "t.jsonl"
    good = json.dumps({"path": "0.png", "text": "fine"})
    file.write_text("\n".join([good, *(json.dumps({"path": name, "text": "x"}) for name in names), good]))
    source = table(file, root=inside if rooted else None)
    counted: Counter[str] = Counter()
    chunks = list(Loader.ordered(source, (len, len), chunk=4, broken=counted, broken_limit=0.999))
    assert [key for chunk in chunks for key in chunk.keys] == ["t.jsonl:1", f"t.jsonl:{len(names) + 2}"]
    assert counted.total() == len(names) and not any("x" * 300 in reason for reason in counted)


@pytest.mark.parametrize("caption", [None, math.nan, 3, True, [], [3], {"a": "b"}, "", " \n", "half\ud800"])
def test_no_caption_ends_a_run(tmp_path: Path, caption: Any) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps({"query": "a", "text": text}) for text in ("first", caption, "last")))
    first, broken, last = outcomes(table(file))
    assert (first, last) == ("first", "last") and broken.startswith("t.jsonl:2: ")
    assert list(table(file).texts()) == ["a", "first", "a", "a", "last"]


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
    found = table(file, left="anchor", right="positive").columns
    assert found.unused == (("score", ""), ("id", ""), ("photo_2", "image"))
    assert found.negatives == ("negative", "negative_2")
    none = table(file, left="anchor", right="positive", num_negatives=0).columns
    assert none.negatives == () and none.unused[:2] == (("negative", "text"), ("negative_2", "text"))


def negatives(file: Path, **options: Any) -> list[tuple[Any, ...]]:
    found = Table(file, "train", test_share=None, **options)
    return [found[i].negatives for i in range(len(found))]


def test_hard_negatives_of_texts(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows: list[dict[str, Any]] = [
        {"query": "q", "answer": "a", "negative_1": "x", "hard_negatives": ["y", "", None, "z"], "far": "w"},
        {"query": "r", "answer": "b", "negative_1": None, "hard_negatives": [], "far": "v"},
        {"query": "s", "answer": "c", "negative_1": " u ", "hard_negatives": "  ", "far": "t"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert negatives(file) == [("x", "y", "z"), (), ("u",)]
    assert negatives(file, negatives=["far", "negative_1"]) == [("w", "x"), ("v",), ("t", "u")]
    assert negatives(file, num_negatives=0) == [(), (), ()]
    traits = table(file).traits
    assert (traits.negatives, traits.negatives_count, traits.several_texts) == ("text", 5, False)
    assert table(file, num_negatives=3).traits.negatives_count == 3
    # A tokenizer is the same with and without negatives.
    for options in ({}, {"num_negatives": 0}, {"negatives": ["far"]}):
        texts = list(Table(file, "train", test_share=None, **options).texts())
        assert texts == ["q", "a", "r", "b", "s", "c"]
    with pytest.raises(ValueError, match="negatives: expected columns other than the pair's own, got 'answer'"):
        table(file, negatives=["answer"])
    with pytest.raises(ValueError, match=r"column negatives of pairs.jsonl: expected one of .* got 'near'"):
        table(file, negatives=["near"])


@pytest.mark.parametrize("first", [None, "", " ", []])
def test_the_first_row_may_have_no_negative(tmp_path: Path, first: Any) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"query": "q", "answer": "a", "negative": first}, {"query": "r", "answer": "b", "negative": "x"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert negatives(file) == [(), ("x",)] and table(file).traits.negatives == "text"


def test_many_negatives_of_the_first_row_are_not_the_rule(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"query": "q", "answer": "a", "negatives": list("abcdefghijklmnop")}) + "\n")
    assert table(file).traits.negatives_count == 8 and table(file, num_negatives=12).traits.negatives_count == 12


def test_hard_negatives_that_are_pictures(tmp_path: Path) -> None:
    pictures(tmp_path)
    file = tmp_path / "pairs.csv"
    file.write_text("image,caption,negative\n0.png,zero,1.png\n1.png,one,\n1.png,one,gone.png\n")
    found = Table(file, "train", test_share=None)
    assert found.traits.negatives == "image" and shade(found[0].negatives[0]()) == shade(found[1].left)  # type: ignore[operator]
    assert found[1].negatives == ()
    with pytest.raises(Broken, match="no such file"):
        found[2].negatives[0]()  # type: ignore[operator]
    assert found[2].right == "one", "it is read only if it is used"
    file.write_text("query,answer,negative\nq,a,1.png\n")
    with pytest.raises(ValueError, match=r"hard negatives of pairs.csv: expected texts, as the pairs are, got pict"):
        table(file)
    file.write_text("image,caption,negative,negative_2\n0.png,zero,1.png,text\n")
    with pytest.raises(ValueError, match=r"hard negatives of pairs.csv: expected texts or pictures, got both"):
        table(file)


def test_several_captions(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [["one", " two ", "one"], ["three"], ["", None, "four"], ["", 7]]
    file.write_text("".join(json.dumps({"query": f"q{i}", "captions": x}) + "\n" for i, x in enumerate(rows)))
    found = Table(file, "train", test_share=None)
    assert found.traits.several_texts
    assert [(found[i].right, found[i].more) for i in range(3)] == [("one", ("two",)), ("three", ()), ("four", ())]
    with pytest.raises(Broken):
        found[3]
    assert set(found.texts()) == {"q0", "q1", "q2", "q3", "one", "two", "three", "four"}


def test_pictures_are_called_by_their_paths(tmp_path: Path) -> None:
    pictures(tmp_path / "a")
    file = tmp_path / "pairs.csv"
    file.write_text("path,caption\na/0.png,zero\n./a//0.png,null\na/1.png,one\n")
    found = [left_name(table(file)[i]) for i in range(3)]
    assert found == ["a/0.png", "a/0.png", "a/1.png"]
    file.write_text("anchor,positive\nsame,one\nsame,two\n")
    assert [left_name(table(file)[i]) for i in range(2)] == ["same", "same"]


def test_a_head_that_is_longer_than_any_name(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a" * 140_000 + ",caption\nx,y\n")
    with pytest.raises(ValueError, match=r"a.csv.* expected .*got .*field larger than field limit"):
        Table(file, "train")

"""The catalogue: every form opens its source, every mistake is explained."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from contratile.data import DataConfig, catalog, open_source
from contratile.data.tables import Table


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("icons", "icons"),
        ("wordnet", "wordnet"),
        ("wordnet:/a/b", "wordnet"),
        ("a/b.CSV", "FILE.csv"),
        ("b.tsv", "FILE.csv"),
        ("b.jsonl", "FILE.csv"),
        ("b.parquet", "hf:"),
        ("s-{00..11}.tar", "SHARDS"),
        ("pipe:cat x", "SHARDS"),
        ("x.tar.gz", "SHARDS"),
        ("hf:org/name:config", "hf:"),
    ],
)
def test_forms(name: str, form: str) -> None:
    assert catalog._entry(name).form.startswith(form)
    assert DataConfig(data=name, test_data=name).data == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": "icon"}, r"data: expected icons, wordnet.* got 'icon'. Did you mean 'icons'\?"),
        ({"test_data": "some.xlsx"}, r"got 'some.xlsx'. A Hugging Face dataset is named hf:NAME"),
        ({"data": ""}, r"data: expected the name of a data source, got ''. There are icons, "),
        ({"test_share": 1.0}, r"test_share: expected a share from 0 to below 1, got 1.0"),
        ({"test_share": float("nan")}, r"test_share: expected a share"),
        ({"broken_limit": -1}, r"broken_limit: expected 0 or more, got -1"),
        ({"limit": -1}, r"limit: expected at least 0, got -1"),
        ({"image_size": 0}, r"image_size: expected at least 1, got 0"),
        ({"workers": -1}, r"workers: expected at least 0, got -1"),
        ({"left_kind": "sound"}, r"left_kind: expected one of 'auto', 'image', 'text', got 'sound'"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


def test_every_option_and_source_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    for field in fields(DataConfig):
        assert f"--{field.name.replace('_', '-')}" in page, field.name
    for name in ("icons", "wordnet", ".csv", ".tsv", ".jsonl", ".parquet", ".tar", "pipe:", "hf:"):
        assert f"{name}" in page and any(name in entry.form for entry in catalog.SOURCES), name


def test_options_reach_the_table(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("a,b,c\n" + "".join(f"x{i}.png,y{i},z\n" for i in range(100)))
    config = DataConfig(data=str(file), left="b", right="a", root=tmp_path, test_share=0.3)
    train, test = open_source(config, "train"), open_source(config, "test")
    assert isinstance(train, Table) and isinstance(test, Table) and len(train) + len(test) == 100
    assert 15 < len(test) < 45 and train.kinds == ("text", "text") and train.columns.confined
    assert open_source(DataConfig(data=str(file), left="a", right="b", left_kind="text"), "train").kinds[0] == "text"


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("query,text\na,b\n")
    with pytest.raises(
        ValueError, match=r"test split of .*t.csv: expected at least one pair, got none. Change the held-out share"
    ):
        open_source(DataConfig(data=str(file), test_share=0.0), "test")


def test_test_data_is_used_whole(tmp_path: Path) -> None:
    for name, rows in (("a", 30), ("b", 20)):
        (tmp_path / f"{name}.csv").write_text("query,text\n" + "".join(f"{name}{i},x\n" for i in range(rows)))
    config = DataConfig(data=f"{tmp_path}/a.csv", test_data=f"{tmp_path}/b.csv")
    train, test = open_source(config, "train"), open_source(config, "test")
    assert isinstance(train, Table) and isinstance(test, Table) and (len(train), len(test)) == (30, 20)

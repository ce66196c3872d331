"""Some rows of a source: the same choice every time, a source like any other."""

from pathlib import Path
from typing import Any

import pytest

from contratile.data import DataConfig, open_source
from contratile.data.rows import Subset, chosen
from contratile.data.sample import Indexed
from contratile.models.locked import encoding_order
from tests.data.sources import Numbers


def test_chosen_rows_are_the_same_and_spread() -> None:
    rows = chosen(1000, 100)
    assert rows == chosen(1000, 100) == sorted(set(rows)) and len(rows) == 100
    assert rows[0] < 100 and rows[-1] >= 900 and rows != list(range(0, 1000, 10))


def test_rows_are_a_source(tmp_path: Path) -> None:
    source = Numbers(10)
    rows = Subset(source, [7, 2])
    assert isinstance(rows, Indexed) and len(rows) == 2 and rows.kinds == source.kinds
    assert [rows[0], rows[1]] == [source[7], source[2]]
    assert list(rows.texts()) == [text for i in (7, 2) for text in source[i][:2]]
    assert rows.name != Subset(source, [7]).name  # a data position of one is none of the other


def table(folder: Path, rows: int) -> DataConfig:
    file = folder / "t.csv"
    file.write_text("query,text\n" + "".join(f"{'x' * (rows - i)},{'y' * (i + 1)}\n" for i in range(rows)))
    return DataConfig(data=str(file), test_share=0.2)


def test_a_limit_is_on_training_pairs(tmp_path: Path) -> None:
    whole = table(tmp_path, 60)
    few = DataConfig(data=whole.data, test_share=0.2, limit=20)
    many = DataConfig(data=whole.data, test_share=0.2, limit=1000)
    sizes = [len(sized(config, split)) for config in (whole, few, many) for split in ("train", "test")]
    assert sizes[2] == 20 and sizes[0] == sizes[4] and sizes[1] == sizes[3] == sizes[5]


def sized(config: DataConfig, split: Any) -> Indexed:
    source = open_source(config, split)
    assert isinstance(source, Indexed)
    return source


def test_a_stream_has_no_limit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"limit: expected data with a length, got pipe:cat x\. Name fewer shards"):
        open_source(DataConfig(data="pipe:cat x", limit=5), "train")


@pytest.mark.parametrize(("side", "first"), [("left", "x"), ("right", "y")])
def test_short_texts_are_encoded_first(side: str, first: str, tmp_path: Path) -> None:
    source = sized(table(tmp_path, 30), "train")
    order = encoding_order(source, side)
    lengths = [len(getattr(source[row], side)) for row in order]
    assert sorted(order) == list(range(len(source))) and lengths == sorted(lengths)
    assert getattr(source[order[0]], side)[0] == first

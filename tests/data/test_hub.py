"""Hugging Face datasets, made and saved here: nothing is fetched."""

import os
import pickle
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from contratile.data import Broken, DataConfig, Indexed, Loader, Stream, open_source
from contratile.data.hub import HubStream, HubTable, open_hub
from contratile.data.sample import Traits, left_name
from tests.data.files import encoded, picture, shade

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
        yield


def pairs(numbers: range, torn: int = -1) -> Any:
    """Pictures inside the dataset; sample n is of shade n."""
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Value("string")})
    images = [{"bytes": b"torn" if n == torn else encoded(picture(n)), "path": None} for n in numbers]
    return datasets.Dataset.from_dict({"image": images, "caption": [f"number {n}" for n in numbers]}, features=features)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    datasets.DatasetDict({"train": pairs(range(40), torn=7), "validation": pairs(range(40, 45))}).save_to_disk(
        folder / "both", num_shards={"train": 4, "validation": 1}
    )
    pairs(range(40)).save_to_disk(folder / "one")
    return folder


def test_own_splits_on_disk(saved: Path) -> None:
    train = open_source(DataConfig(data=f"hf:{saved}/both"), "train")
    test = open_source(DataConfig(data=f"hf:{saved}/both"), "test")
    assert pickle.loads(pickle.dumps(train))[3].right == "number 3"
    assert isinstance(train, HubTable) and isinstance(test, Indexed) and train.kinds == ("image", "text")
    assert len(train) == 40 and [shade(test[i].left) for i in range(len(test))] == list(range(40, 45))
    assert train[3].right == "number 3" and shade(train[3].left) == 3 and train[3].key.endswith("/3")
    with pytest.raises(Broken, match="not an image"):
        train[7]


def test_held_out_where_there_is_no_test_split(saved: Path) -> None:
    train, test = (open_hub(f"hf:{saved}/one", split, test_share=0.3) for split in ("train", "test"))
    assert isinstance(train, HubTable) and isinstance(test, HubTable)
    captions = [{source[i].right for i in range(len(source))} for source in (train, test)]
    assert [set(source.texts()) for source in (train, test)] == captions
    assert not captions[0] & captions[1] and len(captions[0] | captions[1]) == 40 and 4 < len(test) < 20


def test_test_data_of_its_own(saved: Path) -> None:
    config = DataConfig(data=f"hf:{saved}/one", test_data=f"hf:{saved}/both")
    train, test = open_source(config, "train"), open_source(config, "test")
    assert isinstance(train, Indexed) and isinstance(test, Indexed) and (len(train), len(test)) == (40, 5)


def shades(source: HubStream, **options: Any) -> list[int]:
    found = []
    for record, _ in source.records(**{"seed": 0, "epoch": 0, "part": 0, "parts": 1, **options}):
        try:
            found.append(shade(source.sample(record).left))
        except Broken:
            found.append(-1)
    return found


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_streams(saved: Path, parts: int) -> None:
    source = open_hub(f"hf:{saved}/both", "train", streaming=True)
    assert isinstance(source, HubStream) and isinstance(source, Stream)
    assert shades(pickle.loads(pickle.dumps(source))) == shades(source)
    found = []
    for part in range(parts):
        mine = shades(source, part=part, parts=parts)
        found += mine
        assert shades(source, part=part, parts=parts, start=5) == mine[5:]
        assert sorted(mine) != mine or len(mine) < 3
    assert sorted(found) == [-1, *(n for n in range(40) if n != 7)]
    assert shades(source, epoch=1) != shades(source) and shades(source, seed=None)[:5] == [0, 1, 2, 3, 4]


def test_streams_hold_out_too(saved: Path) -> None:
    sources = [open_hub(f"hf:{saved}/one", split, streaming=True, test_share=0.3) for split in ("train", "test")]
    train, test = (shades(source) for source in sources if isinstance(source, HubStream))
    assert sorted(sources[1].texts()) == sorted(f"number {n}" for n in test)
    assert sorted(train + test) == list(range(40)) and 4 < len(test) < 20


def texts(values: list[Any]) -> list[Any]:
    return values


def test_loader_over_a_stream(saved: Path) -> None:
    source = open_source(DataConfig(data=f"hf:{saved}/both", streaming=True), "train")

    def rights(loader: Loader, batches: int) -> list[list[str]]:
        pairs = zip(range(batches), loader, strict=False)
        return [[text for chunk in batch.chunks for text in chunk.right] for _, batch in pairs]

    expected = rights(Loader(source, (texts, texts), batch=9, chunk=4), 8)
    first, second = (Loader(source, (texts, texts), batch=9, chunk=4) for _ in range(2))
    assert rights(first, 3) == expected[:3]
    second.load_state_dict(first.state_dict())
    assert rights(second, 5) == expected[3:]


def test_folder_of_pictures(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.png").write_bytes(encoded(picture(n)))
    lines = [f'{{"file_name": "{n}.png", "text": "number {n}"}}' for n in range(3)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    source = open_hub(f"hf:{tmp_path}", "train", test_share=None)
    assert isinstance(source, HubTable)
    assert sorted(shade(source[i].left) for i in range(3)) == [0, 1, 2]


def test_text_pairs_and_lists_of_captions(tmp_path: Path) -> None:
    data = {"query": ["a", "b"], "text": [["x", "y"], []], "other": [1, 2]}
    datasets.Dataset.from_dict(data).save_to_disk(tmp_path / "d")
    source = open_hub(f"hf:{tmp_path}/d", "train", test_share=None)
    assert isinstance(source, HubTable) and source.kinds == ("text", "text") and source[0][:2] == ("a", "x")
    with pytest.raises(Broken, match="expected text, got list"):
        source[1]


def rows_with_bad_bytes(folder: Path) -> Path:
    """Three rows; the text of the second is not UTF-8, which only its reader notices."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ends, text = struct.pack("<4i", 0, 4, 6, 10), b"fine\xff\xfegood"
    texts = arrow.StringArray.from_buffers(3, arrow.py_buffer(ends), arrow.py_buffer(text))
    parquet.write_table(arrow.table({"query": ["a", "b", "c"], "text": texts}), folder / "t.parquet")
    return folder / "t.parquet"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_the_package_cannot_read(tmp_path: Path, streaming: bool) -> None:
    file = rows_with_bad_bytes(tmp_path)
    source = open_hub(str(file), "train", streaming=streaming, test_share=None)
    counted: Counter[str] = Counter()
    chunks = list(Loader.ordered(source, (texts, texts), chunk=2, broken=counted))
    rights = [text for chunk in chunks for text in chunk.right]
    if streaming:
        assert rights == ["fine"] and counted == {"stream cannot be read on (UnicodeDecodeError)": 1}
        assert list(source.texts()) == ["a", "fine"]
    else:
        assert rights == ["fine", "good"] and counted == {"row cannot be read (UnicodeDecodeError)": 1}
        assert list(source.texts()) == ["a", "fine", "c", "good"]
        splits = [open_hub(str(file), split, test_share=0.5) for split in ("train", "test")]
        assert sum(len(part) for part in splits if isinstance(part, HubTable)) == 3


def test_no_path_and_no_caption_ends_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture(3)))
    (tmp_path / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "pipe.png")
    names = ["a.png", "x" * 300 + ".png", "nul\0.png", "loop.png", "pipe.png", "", None, "a.png", "a.png"]
    captions = [*("fine" for _ in range(7)), None, " "]
    datasets.Dataset.from_dict({"image": names, "caption": captions}).to_parquet(tmp_path / "t.parquet")
    for options in ({}, {"streaming": True}, {"root": tmp_path}):
        source = open_hub(str(tmp_path / "t.parquet"), "train", test_share=None, **options)
        counted: Counter[str] = Counter()
        (chunk,) = Loader.ordered(source, (texts, texts), chunk=9, broken=counted)
        assert chunk.right == ["fine"] and shade(chunk.left[0]) == 3 and counted.total() == 8


def test_errors_teach(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data hf:.*/none: expected a folder, got nothing at .*/none. Check the path"):
        open_hub(f"hf:{tmp_path}/none", "train")
    datasets.Dataset.from_dict({"a": [1], "b": [2], "c": [3]}).save_to_disk(tmp_path / "d")
    with pytest.raises(ValueError, match=r"columns of hf:.*/d: expected names such as image and caption, got a, b, c"):
        open_hub(f"hf:{tmp_path}/d", "train")
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"a dataset that can be loaded, got '.*torn.parquet'"):
        open_hub(str(torn), "train")


def test_equal_pictures_have_one_name(saved: Path, tmp_path: Path) -> None:
    """That of their bytes; a dataset is called the same wherever it lies."""
    pairs(range(3)).save_to_disk(tmp_path / "some")
    source = open_hub(f"hf:{tmp_path / 'some'}", "train", test_share=None)
    other = open_hub(f"hf:{saved / 'one'}", "train", test_share=None)
    assert isinstance(source, HubTable) and isinstance(other, HubTable)
    names = [left_name(source[i]) for i in range(3)]
    assert len(set(names)) == 3 and names == [left_name(other[i]) for i in range(3)]
    assert (source.name, other.name) == ("hf:some (train)", "hf:one (train)")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["text", "image"])
def test_captions_and_hard_negatives_in_lists(tmp_path: Path, streaming: bool, kind: str) -> None:
    """Lists of texts, and columns of texts or of pictures stored in the dataset."""
    numbers = range(6)
    hard = datasets.Value("string") if kind == "text" else datasets.Image()
    negatives: list[Any] = [
        None if n == 2 else f"not {n}" if kind == "text" else {"bytes": encoded(picture(100 + n)), "path": None}
        for n in numbers
    ]
    columns = {
        "image": [{"bytes": encoded(picture(n)), "path": None} for n in numbers],
        "captions": [[f"number {n}", f"the {n}"][: 1 + n % 2] for n in numbers],
        "negative": negatives,
    }
    kinds = {"image": datasets.Image(), "captions": datasets.List(datasets.Value("string")), "negative": hard}
    datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).save_to_disk(tmp_path / "data")
    source = open_hub(f"hf:{tmp_path}/data", "train", streaming=streaming, test_share=None)
    assert source.traits == Traits(several_texts=True, negatives=kind, negatives_count=1)  # type: ignore[arg-type]
    if isinstance(source, HubTable):
        samples = [source[n] for n in numbers]
    else:
        samples = [source.sample(record) for record, _ in source.records(seed=None, epoch=0, part=0, parts=1)]
    for n, sample in enumerate(samples):
        assert (sample.right, sample.more) == (f"number {n}", (f"the {n}",) if n % 2 else ())
        found = [shade(x()) if callable(x) else x for x in sample.negatives]
        assert found == ([] if n == 2 else [f"not {n}" if kind == "text" else 100 + n])
    texts = set(source.texts())
    assert texts == {f"{word} {n}" for n in numbers for word in ("number", "the") if word == "number" or n % 2}

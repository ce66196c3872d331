"""Hugging Face datasets, from the hub, a folder or Parquet files; on disk (indexed) or streaming.

    open_hub("hf:nlphuji/flickr30k", "train")
    open_hub("hf:saved/folder", "test")                 # written by `save_to_disk`, or a folder of images
    open_hub("hf:org/dataset:config", "train", streaming=True)

The test split is the dataset's own test or validation split; without one, pairs are held out by hash. Images are
decoded here rather than by the datasets package, so that a damaged one is a broken sample. A row that the package
cannot read is a broken sample too; in a stream, the rows behind it are lost.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from contratile.data.columns import Columns, LeftKind, choose_columns
from contratile.data.hub_names import found_at_hub, why_not_found
from contratile.data.sample import Broken, Cursor, Sample, Split, generator, in_split, need
from contratile.errors import bad_value

TESTS = ("test", "validation", "valid", "val", "dev")
WINDOW = 1024
"""Size of a stream's shuffle buffer. The order of its files is shuffled too."""


class HubTable:
    """An indexed source: rows of a dataset on disk."""

    def __init__(self, dataset: Any, columns: Columns, name: str, split: Split, test_share: float | None) -> None:
        self.name, self.columns, self.kinds, self.traits = name, columns, columns.kinds, columns.traits
        self._dataset = dataset
        self._rows = range(len(dataset)) if test_share is None else self._of_split(split, test_share)

    def _of_split(self, split: Split, share: float) -> Sequence[int]:
        rows = _readable(_without_pictures(self._dataset, self.columns))
        # A row that cannot be read is assigned to a split by its number.
        names = (f"{i}" if row is None else self.columns.name_of(row) for i, row in enumerate(rows))
        return [i for i, name in enumerate(names) if in_split(name, split, share)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        key = f"{self.name}/{self._rows[index]}"
        try:
            row = self._dataset[self._rows[index]]
        except Exception as error:  # the package raises anything for damaged files and other encodings
            raise Broken(key, f"row cannot be read ({type(error).__name__})") from None
        return self.columns.sample(row, key)

    def texts(self) -> Iterator[str]:
        rows = _readable(_without_pictures(self._dataset, self.columns).select(self._rows))
        return self.columns.texts(row for row in rows if row is not None)


class HubStream:
    """A stream of the rows of a dataset. A cursor is the number of rows read."""

    def __init__(self, dataset: Any, columns: Columns, name: str, split: Split, test_share: float | None) -> None:
        self.name, self.columns, self.kinds, self.traits = name, columns, columns.kinds, columns.traits
        self._dataset, self._split, self._share = dataset, split, test_share

    def records(
        self, *, seed: int | None, epoch: int, part: int, parts: int, start: Cursor = None
    ) -> Iterator[tuple[tuple[str, Any] | Broken, Cursor]]:
        rows = self._dataset
        if seed is not None:
            number = int(torch.randint(2**31, (), generator=generator(seed, epoch)))
            rows = rows.shuffle(seed=number, buffer_size=WINDOW)
        rows = need("datasets.distributed").split_dataset_by_node(rows, rank=part, world_size=parts)
        first = n = start or 0
        try:
            for n, row in enumerate(islice(rows, first, None), first + 1):
                if in_split(self.columns.name_of(row), self._split, self._share):
                    yield (f"{self.name}/{epoch}/{part}/{n - 1}", row), n
        except ValueError as error:  # damaged data; network errors end the run, which can be resumed
            yield Broken(f"{self.name}/{epoch}/{part}/{n}", f"stream cannot be read on ({type(error).__name__})"), n + 1

    def sample(self, record: tuple[str, Any] | Broken) -> Sample:
        if isinstance(record, Broken):
            raise Broken(*record.args)
        key, row = record
        return self.columns.sample(row, key)

    def texts(self) -> Iterator[str]:
        rows = _without_pictures(self._dataset, self.columns)
        with suppress(ValueError):  # `records` reports rows that cannot be read
            yield from self.columns.texts(
                row for row in rows if in_split(self.columns.name_of(row), self._split, self._share)
            )


def open_hub(
    name: str,
    split: Split,
    *,
    left: str = "",
    right: str = "",
    left_kind: LeftKind = "auto",
    negatives: Sequence[str] = (),
    num_negatives: int | None = None,
    root: Path | None = None,
    streaming: bool = False,
    test_share: float | None = 0.1,
) -> HubTable | HubStream:
    """Open a Hugging Face dataset.

    Args:
        name: `hf:dataset[:config]`, where dataset is a folder or a name on the hub; or a Parquet file.
        split: "train" or "test".
        left: Column of the image or first text; empty: found by common names.
        right: Column of the caption or second text, likewise.
        left_kind: What the left column holds; "auto": inferred from the first row.
        negatives: Columns of hard negatives; empty: found by common names.
        num_negatives: Hard negatives per row; 0: none; None: as many as the first row has.
        root: Folder of images that are given as paths, which they must not leave.
        streaming: Read the dataset as a stream instead of storing it.
        test_share: Share of the pairs to hold out if the dataset has no test split; None: nothing.

    Raises:
        ValueError: The dataset does not exist, cannot be loaded, or has no such columns.
        ImportError: The package datasets is missing.
    """
    datasets = need("datasets")
    dataset, own = _of_split(_load(datasets, name, streaming), split, name)
    first = _first(dataset)
    columns = choose_columns(
        first,
        what=name,
        left=left,
        right=right,
        left_kind=left_kind,
        negatives=negatives,
        num_negatives=num_negatives,
        base=root or (Path(name).parent if name.endswith(".parquet") else Path()),
        confined=root is not None,
    )
    kind = HubStream if isinstance(dataset, datasets.IterableDataset) else HubTable
    return kind(dataset, columns, f"{_called(name)} ({split})", split, None if own else test_share)


def _called(name: str) -> str:
    """A name that does not depend on the folder, so that a saved position stays valid if the folder is moved."""
    path, _, config = name.removeprefix("hf:").partition(":")
    if name.endswith(".parquet"):
        return Path(name).name
    return f"hf:{Path(path).name}{':' * bool(config)}{config}" if Path(path).is_dir() else name


def _load(datasets: Any, name: str, streaming: bool) -> Any:
    path, _, config = name.removeprefix("hf:").partition(":")
    saved = any((Path(path) / mark).is_file() for mark in ("dataset_dict.json", "state.json"))
    if name.endswith(".parquet"):
        with _loadable(name):
            return datasets.load_dataset("parquet", data_files={"train": [name]}, streaming=streaming)
    if saved:
        with _loadable(name):
            loaded = datasets.load_from_disk(path)
            splits = loaded if isinstance(loaded, dict) else {"train": loaded}
            return {key: data.to_iterable_dataset() for key, data in splits.items()} if streaming else splits
    with found_at_hub(path, f"data {name}") as folder, _loadable(name, missing="" if folder is not None else path):
        return datasets.load_dataset(path, config or None, streaming=streaming)


@contextmanager
def _loadable(name: str, *, missing: str = "") -> Iterator[None]:
    """Turn whatever is raised inside into a ValueError of one line; `missing` is a name without a local folder."""
    try:
        yield
    except Exception as error:  # errors of the package, the network and the file formats
        if missing and isinstance(error, OSError):
            remedy = "Check the name, the path and the network."
            bad_value("data", expected="a folder or a dataset of the hub", got=why_not_found(missing), remedy=remedy)
        remedy = "Check the name, the configuration (hf:dataset:config) and its files."
        bad_value("data", expected="a dataset that can be loaded", got=f"{name!r} ({_brief(error)})", remedy=remedy)


def _of_split(splits: Any, split: Split, name: str) -> tuple[Any, bool]:
    """The dataset that holds a split, and whether the data has a test split of its own."""
    test = next((key for key in TESTS if key in splits), None)
    train = "train" if "train" in splits else next((key for key in splits if key != test), None)
    wanted = test if split == "test" and test else train
    if wanted is None:
        remedy = "Pass another dataset, and this one as --test-data."
        bad_value(f"splits of {name}", expected="a split to train on", got=", ".join(splits), remedy=remedy)
    dataset = _undecoded(splits[wanted])
    return dataset, test is not None


def _undecoded(dataset: Any) -> Any:
    image = need("datasets").Image
    for column, feature in (dataset.features or {}).items():
        if isinstance(feature, image):
            dataset = dataset.cast_column(column, image(decode=False))
    return dataset


def _without_pictures(dataset: Any, columns: Columns) -> Any:
    """Only the columns of the pairs that hold texts or paths, which can be read quickly."""
    strings = isinstance(_first(dataset).get(columns.left), str)
    names = [*([columns.left] if strings else []), columns.right]
    return dataset.select_columns(names + (list(columns.negatives) if columns.traits.negatives == "text" else []))


def _readable(dataset: Any) -> Iterator[dict[str, Any] | None]:
    """Yield all rows in order; None for rows that cannot be read."""
    done = 0
    try:
        for row in dataset:  # fast: reads many rows at a time
            yield row
            done += 1
        return
    except Exception:  # the package does not say which row it was
        pass
    for place in range(done, len(dataset)):
        try:
            row = dataset[place]
        except Exception:
            row = None
        yield row


def _first(dataset: Any) -> dict[str, Any]:
    for row in _readable(dataset) if hasattr(dataset, "__len__") else dataset:
        if row is not None:
            return dict(row)
    bad_value("dataset", expected="at least one row", got="none", remedy="Check the dataset's splits.")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]

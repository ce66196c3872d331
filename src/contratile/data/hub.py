"""Hugging Face datasets: of the hub, of a folder, of Parquet files; on disk (indexed) or streaming.

    open_hub("hf:nlphuji/flickr30k", "train")
    open_hub("hf:saved/folder", "test")                 # what `save_to_disk` wrote, or a folder of pictures
    open_hub("hf:org/dataset:config", "train", streaming=True)

A dataset's own test (or validation) split is the test split; where it has none, pairs are held out by hash. Pictures
are not decoded by the package but here, so that a damaged one is a broken sample; so is a row that the package cannot
read. Of a stream, what follows such a row is lost too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from contratile.data.columns import Columns, LeftKind, choose
from contratile.data.hub_names import absent, found_at_hub
from contratile.data.sample import Broken, Cursor, Sample, Split, generator, in_split, need
from contratile.errors import bad_value

TESTS = ("test", "validation", "valid", "val", "dev")
WINDOW = 1024
"""Rows among which a stream is shuffled, besides the order of its files."""


class HubTable:
    """Rows of a dataset on disk; indexed."""

    def __init__(self, dataset: Any, columns: Columns, name: str, split: Split, test_share: float | None) -> None:
        self.name, self.columns, self.kinds = name, columns, columns.kinds
        self._dataset = dataset
        self._rows = range(len(dataset)) if test_share is None else self._of_split(split, test_share)

    def _of_split(self, split: Split, share: float) -> Sequence[int]:
        rows = _readable(_without_pictures(self._dataset, self.columns))
        # One that cannot be read is held out by its number.
        names = (f"{i}" if row is None else self.columns.name_of(row) for i, row in enumerate(rows))
        return [i for i, name in enumerate(names) if in_split(name, split, share)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        key = f"{self.name}/{self._rows[index]}"
        try:
            row = self._dataset[self._rows[index]]
        except Exception as error:  # texts in another encoding, damaged files: whatever the package stumbles over
            raise Broken(key, f"row cannot be read ({type(error).__name__})") from None
        return self.columns.sample(row, key)

    def texts(self) -> Iterator[str]:
        rows = _readable(_without_pictures(self._dataset, self.columns).select(self._rows))
        return self.columns.texts(row for row in rows if row is not None)


class HubStream:
    """Rows of a dataset as they arrive; a stream. A cursor is the number of rows behind it."""

    def __init__(self, dataset: Any, columns: Columns, name: str, split: Split, test_share: float | None) -> None:
        self.name, self.columns, self.kinds = name, columns, columns.kinds
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
        except ValueError as error:  # of the data; those of the network end the run, which can be resumed
            yield Broken(f"{self.name}/{epoch}/{part}/{n}", f"stream cannot be read on ({type(error).__name__})"), n + 1

    def sample(self, record: tuple[str, Any] | Broken) -> Sample:
        if isinstance(record, Broken):
            raise Broken(*record.args)
        key, row = record
        return self.columns.sample(row, key)

    def texts(self) -> Iterator[str]:
        rows = _without_pictures(self._dataset, self.columns)
        with suppress(ValueError):  # a row that cannot be read, which `records` reports
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
    root: Path | None = None,
    streaming: bool = False,
    test_share: float | None = 0.1,
) -> HubTable | HubStream:
    """The pairs of a dataset named `hf:dataset[:config]`, or of a Parquet file."""
    datasets = need("datasets")
    dataset, own = _of_split(_load(datasets, name, streaming), split, name)
    first = _first(dataset)
    columns = choose(
        first,
        what=name,
        left=left,
        right=right,
        left_kind=left_kind,
        base=root or (Path(name).parent if name.endswith(".parquet") else Path()),
        confined=root is not None,
    )
    kind = HubStream if isinstance(dataset, datasets.IterableDataset) else HubTable
    return kind(dataset, columns, f"{_called(name)} ({split})", split, None if own else test_share)


def _called(name: str) -> str:
    """What a dataset is called wherever it lies: a position in it stays valid when its folder moves."""
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
    """One line for whatever is raised about a dataset; `missing` is a name that no folder here has."""
    try:
        yield
    except Exception as error:  # the package raises its own, the network's and the file formats' errors
        if missing and isinstance(error, OSError):
            remedy = "Check the name, the path and the network."
            bad_value("data", expected="a folder or a dataset of the hub", got=absent(missing), remedy=remedy)
        remedy = "Check the name, the configuration (hf:dataset:config) and its files."
        bad_value("data", expected="a dataset that can be loaded", got=f"{name!r} ({_brief(error)})", remedy=remedy)


def _of_split(splits: Any, split: Split, name: str) -> tuple[Any, bool]:
    """The dataset that holds the split, and whether it is that split's own."""
    test = next((key for key in TESTS if key in splits), None)
    train = "train" if "train" in splits else next((key for key in splits if key != test), None)
    wanted = test if split == "test" and test else train
    if wanted is None:
        remedy = "Give another dataset, and this one as --test-data."
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
    """The columns of the pair that hold texts or paths: what can be read quickly."""
    strings = isinstance(_first(dataset).get(columns.left), str)
    return dataset.select_columns([columns.left, columns.right] if strings else [columns.right])


def _readable(dataset: Any) -> Iterator[dict[str, Any] | None]:
    """The rows in their order; None where one cannot be read."""
    done = 0
    try:
        for row in dataset:  # many at a time, which is fast
            yield row
            done += 1
        return
    except Exception:  # which row it was, the package does not say
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
    bad_value("dataset", expected="at least one row", got="none", remedy="Look at the dataset's splits.")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]

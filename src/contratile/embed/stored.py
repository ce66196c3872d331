"""Embedded features and keys on disk, read in parts: memory does not grow with the number of rows.

    stored = open_stored(Output.of(Path("features.npy"), ("left",)), record)
    for tile in stored.tiles("left"): ...                # [n, D], in order
    stored.row(17).name

Files may come from anyone: nothing in them is executed, and what does not fit together is refused. They are opened
once: features that are embedded again under the same name do not mix with those that are being searched.
"""

from __future__ import annotations

import json
import mmap
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import torch
from torch import Tensor

from contratile.data.sample import need
from contratile.embed.output import Output
from contratile.embed.record import Record
from contratile.embed.units import EmbeddedRow
from contratile.errors import bad_value

TILE = 16384
"""Rows that are scored at once."""

EVERY = 64
"""The file position of every EVERY-th line of keys is kept."""

BLOCK = 1 << 20
LONGEST = 1 << 22
"""Bytes of a line of keys at most."""

COLUMNS = ("key", "name", "text", "index")


class Stored(Protocol):
    """Rows of features with their keys."""

    def tiles(self, side: str) -> Iterator[Tensor]:
        """The features of a side, a part at a time."""

    def row(self, number: int) -> EmbeddedRow:
        """The key, name and text of a row."""


def open_stored(output: Output, record: Record) -> Stored:
    """Open embedded files and check that they are those of the record.

    Raises:
        ValueError: A file is missing, damaged, or does not fit the others.
    """
    for path in output.parts:
        if not path.is_file():
            remedy = "Keep the files together, or embed the data again."
            bad_value("embedded features", expected=f"a file {path}", got="none", remedy=remedy)
    return Arrays(output, record) if output.keys is not None else Parquet(next(iter(output.features.values())), record)


class Arrays:
    """NAME.npy and NAME.keys.jsonl, mapped into memory."""

    def __init__(self, output: Output, record: Record) -> None:
        assert output.keys is not None
        self._features = {side: _mapped(path, record) for side, path in output.features.items()}
        self._path = output.keys
        self._starts = array("q", [0])
        with self._path.open("rb") as file:
            rows = self._index(file)
            if rows != record.rows:
                _damaged(self._path, f"{record.rows:,} lines", f"{rows:,}")
            self._keys = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _index(self, file: BinaryIO) -> int:
        """Note where lines begin, and count them."""
        import numpy as np

        count = start = 0
        while block := file.read(BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + 1
            chosen = ends[(EVERY - 1 - count) % EVERY :: EVERY]
            self._starts.extend((chosen + start).tolist())
            count, start = count + len(ends), start + len(block)
        return count

    def tiles(self, side: str) -> Iterator[Tensor]:
        whole = self._features[side]
        return (torch.from_numpy(whole[start : start + TILE]) for start in range(0, len(whole), TILE))

    def row(self, number: int) -> EmbeddedRow:
        start, end = 0, self._starts[number // EVERY]
        for _ in range(number % EVERY + 1):
            start, end = end, self._keys.find(b"\n", end, end + LONGEST) + 1
            if end == 0:
                _damaged(self._path, f"lines of at most {LONGEST >> 20} MiB", "a longer or unfinished one")
        return _row(self._keys[start:end], self._path)


class Parquet:
    """NAME.parquet. Features are read again for each search."""

    def __init__(self, path: Path, record: Record) -> None:
        self._path, self._parquet, self._width = path, need("pyarrow.parquet"), record.width
        self._file = need("pyarrow").OSFile(str(path))
        with self._opened() as file:
            counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            kinds = {field.name: _kind(field.type) for field in file.schema_arrow}
        self._ends = list(accumulate(counts))
        if sum(counts) != record.rows:
            _damaged(path, f"{record.rows:,} rows", f"{sum(counts):,}")
        wanted = {"key": "string", "name": "string", "text": "string", "index": "int64"}
        wanted |= dict.fromkeys(record.sides, f"{record.width} x float")
        for name, kind in wanted.items():
            if kinds.get(name) != kind:
                _damaged(path, f"a column {name} of {kind}", kinds.get(name, "none"))

    def _opened(self) -> Any:
        try:
            return self._parquet.ParquetFile(self._file)
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these classes
            _damaged(self._path, "a Parquet file", type(error).__name__)

    def _batches(self, columns: list[str], **chosen: Any) -> Iterator[Any]:
        with self._opened() as file:
            try:
                yield from file.iter_batches(columns=columns, **chosen)
            except (OSError, ValueError) as error:
                _damaged(self._path, "a Parquet file", type(error).__name__)

    def tiles(self, side: str) -> Iterator[Tensor]:
        for batch in self._batches([side], batch_size=TILE):
            column = batch.column(0)
            if column.null_count or column.flatten().null_count:
                _damaged(self._path, "features in every row", "none in some")
            values = column.flatten().to_numpy(zero_copy_only=False)
            yield torch.from_numpy(values.copy()).view(-1, self._width)

    def row(self, number: int) -> EmbeddedRow:
        group = bisect_right(self._ends, number)
        skip = number - (self._ends[group - 1] if group else 0)
        for batch in self._batches(list(COLUMNS), row_groups=[group], batch_size=1024):
            if skip < len(batch):
                return _checked({name: batch.column(name)[skip].as_py() for name in COLUMNS}, self._path)
            skip -= len(batch)
        _damaged(self._path, f"row {number}", "none")


def _kind(column: Any) -> str:
    """The type of a column in words; the name of a list's items, which versions choose differently, is left out."""
    size = getattr(column, "list_size", None)
    return str(column) if size is None else f"{size} x {column.value_type}"


def _mapped(path: Path, record: Record) -> Any:
    """An array on disk, without reading it."""
    import numpy as np

    try:
        found = np.load(path, mmap_mode="c", allow_pickle=False)  # "c": torch warns of arrays that cannot be written
    except (OSError, ValueError, EOFError, SyntaxError, OverflowError, MemoryError, RecursionError) as error:
        _damaged(path, "an array of features", type(error).__name__)
    want = record.rows, record.width
    if not isinstance(found, np.memmap) or found.shape != want or found.dtype != np.dtype("<f4"):
        got = f"{getattr(found, 'dtype', type(found).__name__)} {getattr(found, 'shape', '')}"
        _damaged(path, f"float32 {want}", got)
    if not found.flags.c_contiguous:
        _damaged(path, "rows one after the other", "columns")
    return found.view(np.ndarray)


def _row(line: bytes, path: Path) -> EmbeddedRow:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as error:
        _damaged(path, "JSON lines", type(error).__name__)
    return _checked(told, path)


def _checked(told: Any, path: Path) -> EmbeddedRow:
    """A row whose fields are of their types."""
    found: list[Any] = [told.get(name) for name in COLUMNS] if isinstance(told, dict) else []
    whole = found and (found[3] is None or (isinstance(found[3], int) and not isinstance(found[3], bool)))
    if not whole or not all(isinstance(text, str) for text in found[:3]):
        _damaged(path, "key, name, text and index in every row", "something else")
    return EmbeddedRow(*found)


def _damaged(path: Path, expected: str, got: str) -> NoReturn:
    remedy = "It is damaged, or of other features: embed the data again."
    bad_value(f"embedded file {path}", expected=expected, got=got, remedy=remedy)

"""The table of mined pairs.

    table = MinedTable(keys, query_of_row, first_key, pictures=None, scores=False)
    table.write(Path("mined.jsonl"), indices, scores, positive)

Texts are read from the file of keys when they are needed, by their position in it.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from contratile.data.files import written_whole
from contratile.data.sample import Indexed, Stream
from contratile.embed.parquet import need_parquet
from contratile.errors import bad_value

SUFFIXES = (".jsonl", ".parquet")
ROWS = 4096
"""Rows of a Parquet row group."""


def check_table(out: Path) -> None:
    """Refuse a name that cannot be written to, before the work."""
    if out.suffix not in SUFFIXES:
        remedy = "Choose a name such as mined.jsonl."
        bad_value("--out", expected=f"a name that ends in {' or '.join(SUFFIXES)}", got=out, remedy=remedy)
    if out.is_dir() or not out.absolute().parent.is_dir():
        got = f"the folder {out}" if out.is_dir() else f"{out}, whose folder does not exist"
        bad_value("--out", expected="the name of a file to write", got=got, remedy="Choose another name.")
    if out.suffix == ".parquet":
        need_parquet("NAME.jsonl")


class Pictures:
    """Paths of pictures for a table: of the files that they are, or of files that are written for them."""

    def __init__(self, source: Indexed, base: Path | None, out: Path) -> None:
        self.source, self.base, self.out = source, base, out.absolute()
        self.folder = out.absolute().with_name(f"{out.name}-images")
        self._written: dict[str, Path] = {}  # by name: equal names mean the same picture

    @classmethod
    def of(cls, source: Indexed | Stream, out: Path) -> Pictures | None:
        """Pictures of a source; None if its left sides are texts.

        Raises:
            ValueError: They are in a stream, so that they cannot be found again.
        """
        if source.kinds[0] == "text":
            return None
        if isinstance(source, Stream):
            remedy = "Unpack them into a folder with a table of paths and captions."
            bad_value("data", expected="pictures in files or in a dataset on disk", got=source.name, remedy=remedy)
        columns = getattr(source, "columns", None)
        base = getattr(source, "folder", None) if columns is None else columns.base
        return cls(source, base, out)

    def path(self, name: str, index: int) -> str:
        """The path of a picture, relative to the table."""
        if self.base is not None and name and (self.base / name).is_file():
            found = (self.base / name).absolute()
        else:
            found = self._written.get(name) or self._write(name, index)
        try:
            return Path(os.path.relpath(found, self.out.parent)).as_posix()
        except ValueError:  # another drive
            return str(found)

    def _write(self, name: str, index: int) -> Path:
        """Write a picture. Its file is named after its contents, so that no other picture is written over."""
        self.folder.mkdir(exist_ok=True)
        picture: Any = self.source[index].left
        encoded = BytesIO()
        picture.save(encoded, "PNG")
        data = encoded.getvalue()
        path = self._written[name] = self.folder / f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.png"
        if not path.exists() or path.read_bytes() != data:
            with written_whole(path) as draft:
                draft.write_bytes(data)
        return path


class Lines:
    """The lines of a file of keys by number: one position in the file is kept for each."""

    def __init__(self, file: Path) -> None:
        self._starts = array("q", [0])
        with file.open("rb") as lines:
            for line in lines:
                self._starts.append(self._starts[-1] + len(line))
        self._file: BinaryIO = file.open("rb")

    def __getitem__(self, number: int) -> dict[str, Any]:
        self._file.seek(self._starts[number])
        found: dict[str, Any] = json.loads(self._file.readline())
        return found

    def close(self) -> None:
        self._file.close()


class MinedTable:
    """Writes pairs with their negatives.

    Args:
        keys: File of keys of the embedded rows.
        query: [N] number of each row's left side.
        first_key: [V] first row of each distinct text.
        pictures: Where pictures are, if the left sides are pictures.
        scores: Add a column of scores.
    """

    def __init__(
        self, keys: Path, query: Tensor, first_key: Tensor, pictures: Pictures | None, *, scores: bool
    ) -> None:
        self.keys, self.query, self.first_key, self.pictures, self.scores = keys, query, first_key, pictures, scores

    def write(self, out: Path, indices: Tensor, scores: Tensor, positive: Tensor) -> None:
        """Write the table: a row for each pair, in order, but first one with the most negatives.

        `contratile train` takes the number of negatives from the first row.

        Args:
            out: The table, .jsonl or .parquet.
            indices: [U, k] numbers of the negatives of each left side; -1 for none.
            scores: [U, k] their scores.
            positive: [U] scores of the positives.
        """
        counts = (indices >= 0).sum(1)[self.query]
        lead = int(counts.argmax())
        order = (lead, *range(lead), *range(lead + 1, len(self.query))) if len(self.query) else ()
        lines = Lines(self.keys)
        try:
            rows = (self._row(lines, row, indices, scores, positive) for row in order)
            with written_whole(out) as draft:
                self._write_json(draft, rows) if out.suffix == ".jsonl" else self._write_parquet(draft, rows)
        finally:
            lines.close()

    def _row(self, lines: Lines, row: int, indices: Tensor, scores: Tensor, positive: Tensor) -> dict[str, Any]:
        told, query = lines[row], int(self.query[row])
        found = [number for number in indices[query].tolist() if number >= 0]
        negatives = [lines[int(self.first_key[number])]["text"] for number in found]
        if self.pictures is None:
            made = {"anchor": told["name"], "positive": told["text"]}
        else:
            made = {"image": self.pictures.path(told["name"], told["index"]), "caption": told["text"]}
        made["negatives"] = negatives
        if self.scores:
            made["scores"] = [round(x, 6) for x in (float(positive[query]), *scores[query, : len(found)].tolist())]
        return made

    def _write_json(self, draft: Path, rows: Iterator[dict[str, Any]]) -> None:
        # Paths may hold bytes that are not UTF-8; they are read back in the same way.
        with draft.open("w", encoding="utf-8", errors="surrogateescape") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _write_parquet(self, draft: Path, rows: Iterator[dict[str, Any]]) -> None:
        arrow, parquet = need_parquet("NAME.jsonl")
        names = ("anchor", "positive") if self.pictures is None else ("image", "caption")
        columns = [*((name, arrow.string()) for name in names), ("negatives", arrow.list_(arrow.string()))]
        columns += [("scores", arrow.list_(arrow.float32()))] * self.scores
        schema = arrow.schema(columns)
        with parquet.ParquetWriter(draft, schema) as writer:
            while some := list(islice(rows, ROWS)):
                writer.write_table(arrow.Table.from_pylist(some, schema=schema))

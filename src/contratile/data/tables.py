"""Tables of pairs: CSV, TSV and JSON lines. (`hub` reads Parquet.)

    Table(Path("pairs.csv"), "train")[0]      # columns image and caption, image paths relative to pairs.csv

A line that cannot be read (too few fields, damaged JSON, another encoding, an unclosed quote) is a broken sample. A
table that cannot be read at all (no such column, no rows) raises immediately. All rows are kept in memory: use Parquet
or shards for tens of millions of pairs.
"""

import codecs
import json
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from contratile.data.columns import Columns, LeftKind, choose_columns
from contratile.data.csv_rows import OPEN_QUOTE, csv_rows
from contratile.data.sample import Broken, Sample, Split, in_split
from contratile.errors import bad_value

Row: TypeAlias = dict[str, Any]
SUFFIXES = (".csv", ".tsv", ".jsonl")

MAX_LINE = 1 << 24
"""Maximum characters of a line; the rest is skipped, which makes the row a broken sample."""


class Table:
    """An indexed source: the pairs of one split of a table.

    Args:
        file: A .csv, .tsv or .jsonl file in UTF-8 (or UTF-16 with a byte-order mark).
        split: "train" or "test".
        left: Column of the image or first text; empty: found by common names.
        right: Column of the caption or second text, likewise.
        left_kind: What the left column holds; "auto": inferred from the first row.
        negatives: Columns of hard negatives; empty: found by common names.
        num_negatives: Hard negatives per row; 0: none; None: as many as the first row has.
        root: Folder of the images, which paths must not leave; None: paths are relative to the table.
        test_share: Share of the pairs in the test split; None: both splits are the whole table.

    Raises:
        ValueError: The file does not exist, or has no such columns or no usable row.
    """

    def __init__(
        self,
        file: Path,
        split: Split,
        *,
        left: str = "",
        right: str = "",
        left_kind: LeftKind = "auto",
        negatives: Sequence[str] = (),
        num_negatives: int | None = None,
        root: Path | None = None,
        test_share: float | None = 0.1,
    ) -> None:
        self.name = f"{file.name} ({split})"
        if not file.is_file():
            bad_value("table", expected="a CSV, TSV or JSONL file", got=f"nothing at {file}", remedy="Check the path.")
        rows = _json_lines(file) if file.suffix.lower() == ".jsonl" else _csv(file)
        head = list(_to_first_usable(rows))
        first = head[-1][1] if head else None
        if first is None or isinstance(first, Broken):
            got = f"{len(head)} broken ones, first {head[0][1]}" if head else "an empty table"
            bad_value(str(file), expected="rows of pairs", got=got, remedy="Check the file; it must be UTF-8.")
        self.columns: Columns = choose_columns(
            first,
            what=file.name,
            left=left,
            right=right,
            left_kind=left_kind,
            negatives=negatives,
            num_negatives=num_negatives,
            base=root if root is not None else file.parent,
            confined=root is not None,
        )
        self.kinds, self.traits = self.columns.kinds, self.columns.traits
        used = self.columns.used
        self._rows: list[tuple[str, Row | Broken]] = []
        quotes: list[str] = []
        for key, row in chain(head, rows):
            if isinstance(row, Broken) and row.reason == OPEN_QUOTE:
                quotes.append(key)
            if in_split(key if isinstance(row, Broken) else self.columns.name_of(row), split, test_share):
                self._rows.append((key, row if isinstance(row, Broken) else {name: row.get(name) for name in used}))
        if quotes:
            others = f" ({len(quotes) - 1:,} more like it)" if len(quotes) > 1 else ""
            warnings.warn(f"{quotes[0]}: {OPEN_QUOTE}; that row is skipped{others}", stacklevel=2)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        key, row = self._rows[index]
        if isinstance(row, Broken):
            raise Broken(*row.args)
        return self.columns.sample(row, key)

    def texts(self) -> Iterator[str]:
        return self.columns.texts(row for _, row in self._rows if not isinstance(row, Broken))


def _to_first_usable(rows: Iterator[tuple[str, Row | Broken]]) -> Iterator[tuple[str, Row | Broken]]:
    for key, row in rows:
        yield key, row
        if not isinstance(row, Broken):
            return


def _encoding(file: Path) -> str:
    """The encoding named by the byte-order mark, else UTF-8."""
    with file.open("rb") as opened:
        mark = opened.read(2)
    return "utf-16" if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _csv(file: Path) -> Iterator[tuple[str, Row | Broken]]:
    """Yield keys and rows. Bytes that are not UTF-8 become surrogates, which `usable_text` refuses."""
    with file.open(encoding=_encoding(file), errors="surrogateescape", newline="") as opened:
        head = opened.readline(MAX_LINE)
        opened.seek(0)
        # Some .csv files are separated by tabs or semicolons; the header shows it.
        separator = "\t" if file.suffix.lower() == ".tsv" else max(",\t;", key=head.count)
        rows = csv_rows(_lines(opened), separator)
        line, names = next(rows, (1, []))
        if isinstance(names, str):
            remedy = "The first line must hold the names of the columns."
            bad_value(f"{file}, line {line}", expected="the header of a table", got=names, remedy=remedy)
        for line, row in rows:
            key = f"{file.name}:{line}"
            if isinstance(row, str):
                yield key, Broken(key, row)
            elif len(row) == len(names):
                yield key, dict(zip(names, row, strict=True))
            else:
                yield key, Broken(key, f"expected {len(names)} fields, got {len(row)}")


def _lines(opened: TextIO) -> Iterator[str]:
    """Yield the lines of a file, truncated to MAX_LINE: a file without line breaks must not fill the memory."""
    while line := opened.readline(MAX_LINE):
        yield line
        while len(line) == MAX_LINE and not line.endswith("\n"):
            line = opened.readline(MAX_LINE)


def _json_lines(file: Path) -> Iterator[tuple[str, Row | Broken]]:
    with file.open(encoding=_encoding(file), errors="surrogateescape") as opened:
        for number, line in enumerate(_lines(opened), 1):
            if not line.strip():
                continue
            key = f"{file.name}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                yield key, Broken(key, "line is not JSON")
                continue
            yield key, row if isinstance(row, dict) else Broken(key, "line is not a JSON object")

"""The files that embedding writes: features as .npy or .parquet, and their keys.

    output = Output.of(Path("features.npy"), ("left",))
    output.write(units, done, record)            # features.npy, features.keys.jsonl, features.npy.embedded.json

Units are copied one after the other, so that memory does not grow with the number of rows.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from contratile.data.files import written_whole
from contratile.embed.parquet import need_parquet
from contratile.embed.record import Record, record_file
from contratile.embed.units import EmbeddedRow, Unit, Units
from contratile.errors import bad_value

SUFFIXES = (".npy", ".parquet")
SIDES = ("left", "right")


class Output(NamedTuple):
    """The files of some features."""

    features: dict[str, Path]
    """Files of features by side. A .parquet holds all sides in one file."""

    keys: Path | None
    """JSON lines, one for each row of features; None if they are in the .parquet too."""

    record: Path
    """What the features are."""

    broken: Path
    """JSON lines: key and reason of samples that were left out. Not there if none was."""

    @classmethod
    def of(cls, out: Path, sides: tuple[str, ...]) -> Output:
        """The files for `--out`.

        Raises:
            ValueError: It is neither .npy nor .parquet, or its folder does not exist.
        """
        if out.suffix not in SUFFIXES:
            remedy = "Choose a name such as features.npy or features.parquet."
            bad_value("--out", expected=f"a name that ends in {' or '.join(SUFFIXES)}", got=out, remedy=remedy)
        if out.is_dir() or not out.absolute().parent.is_dir():
            got = f"the folder {out}" if out.is_dir() else f"{out}, whose folder does not exist"
            bad_value("--out", expected="the name of a file to write", got=got, remedy="Choose another name.")
        beside = record_file(out), out.with_name(f"{out.name}.broken.jsonl")
        if out.suffix == ".parquet":
            need_parquet("NAME.npy")  # before the work, not after it
            return cls(dict.fromkeys(sides, out), None, *beside)
        names = [out] if len(sides) == 1 else [out.with_suffix(f".{side}.npy") for side in sides]
        return cls(dict(zip(sides, names, strict=True)), out.with_suffix(".keys.jsonl"), *beside)

    @property
    def files(self) -> list[Path]:
        """The files that exist after `write`, features first."""
        return [*self.parts, self.record] + [self.broken] * self.broken.exists()

    @property
    def parts(self) -> list[Path]:
        """Features and keys."""
        return [*dict.fromkeys(self.features.values()), *filter(None, [self.keys])]

    def write(self, units: Units, done: dict[int, Unit], record: Record) -> None:
        """Write all units, in order. The record is removed first and written last: features with one are complete."""
        for path in self._outdated:
            path.unlink(missing_ok=True)
        self._write_broken(done)
        if self.keys is None:
            self._write_parquet(units, done)
        else:
            self._write_arrays(units, done)
        record.write(self.record)

    @property
    def _outdated(self) -> list[Path]:
        """Records of what is written over: NAME.left.npy may be features of its own, or a side of NAME.npy."""
        others = [whole for part in self.parts if (whole := whole_of(part)) is not None]
        return [self.record, *map(record_file, [*self.features.values(), *others])]

    def _write_broken(self, done: dict[int, Unit]) -> None:
        self.broken.unlink(missing_ok=True)  # of an earlier call
        if any(unit.broken for unit in done.values()):
            with written_whole(self.broken) as draft, draft.open("w", encoding="utf-8") as file:
                for unit in done.values():
                    file.writelines(json.dumps({"key": key, "reason": reason}) + "\n" for key, reason in unit.broken)

    def _write_arrays(self, units: Units, done: dict[int, Unit]) -> None:
        assert self.keys is not None
        rows = sum(unit.rows for unit in done.values())
        with ExitStack() as stack:
            # Entered first, renamed last.
            for side, path in self.features.items():
                file: BinaryIO = stack.enter_context(stack.enter_context(written_whole(path)).open("wb"))
                write_header(file, (rows, units.widths[side]))
                for number in done:
                    with units.file(number, side).open("rb") as part:
                        shutil.copyfileobj(part, file)
            keys = stack.enter_context(stack.enter_context(written_whole(self.keys)).open("wb"))
            for number in done:
                with units.file(number, "rows").open("rb") as part:
                    shutil.copyfileobj(part, keys)

    def _write_parquet(self, units: Units, done: dict[int, Unit]) -> None:
        import numpy as np

        arrow, parquet = need_parquet("NAME.npy")
        texts = [(name, arrow.string()) for name in ("key", "name", "text")]
        sides = [(side, arrow.list_(arrow.float32(), units.widths[side])) for side in self.features]
        schema = arrow.schema([*texts, ("index", arrow.int64()), *sides])
        path = next(iter(self.features.values()))
        with written_whole(path) as draft, parquet.ParquetWriter(draft, schema) as writer:
            for number in done:
                columns: dict[str, Any] = _columns(units.rows(number))
                for side, kind in sides:
                    flat = arrow.array(np.fromfile(units.file(number, side), dtype="<f4"), arrow.float32())
                    columns[side] = arrow.FixedSizeListArray.from_arrays(flat, type=kind)
                if columns["key"]:
                    writer.write_table(arrow.table(columns, schema=schema))


def whole_of(part: Path) -> Path | None:
    """NAME.npy for NAME.left.npy and NAME.right.npy, if these are its sides."""
    for side in SIDES:
        whole = part.with_name(part.name.removesuffix(f".{side}.npy") + ".npy")
        record = record_file(whole)
        if part.name.endswith(f".{side}.npy") and record.exists() and _two_sided(record):
            return whole
    return None


def _two_sided(record: Path) -> bool:
    try:
        return len(Record.read(record).sides) == len(SIDES)
    except ValueError:  # damaged: opening it raises the error
        return True


def write_header(file: BinaryIO, shape: tuple[int, int]) -> None:
    """Begin a .npy file of little-endian float32."""
    from numpy.lib import format as npy

    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})


def _columns(rows: list[EmbeddedRow]) -> dict[str, Any]:
    """Texts by column. Names of files may hold bytes that are not UTF-8."""
    columns: dict[str, Any] = {
        name: [getattr(row, name).encode(errors="replace").decode() for row in rows] for name in ("key", "name", "text")
    }
    return columns | {"index": [row.index for row in rows]}

"""Unfinished features: a folder of units, each of them complete or absent.

    units = Units(folder, {"left": 64})
    units.open(plan)                             # one process: begins, or checks that what is there fits
    for number, unit in units.done().items(): ...
    writer = units.writer(3)
    writer.add(keys, {"left": features}, broken)
    writer.finish(seen=2048, cursor=None)        # from now on unit 3 is done

A unit is a number of consecutive samples. Its boundaries do not depend on the number of processes, so that any number
of them can share the work or continue it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from contratile.data.files import written_whole
from contratile.data.sample import Broken
from contratile.embed.work_folder import read_object
from contratile.errors import bad_value

PLAN = "plan.json"


class EmbeddedRow(NamedTuple):
    """What is stored about a sample in addition to its features."""

    key: str
    name: str
    """Name of the left side; a text itself."""

    text: str
    index: int | None  # type: ignore[assignment]  # hides tuple.index, which is not needed
    """Position in the source; None in a stream."""


class Unit(NamedTuple):
    """A unit that is done."""

    rows: int
    seen: int
    """Samples that were read, broken ones included."""

    broken: list[list[str]]
    """Key and reason of each broken sample."""

    cursor: Any
    """Position in a stream behind the unit."""


class Units:
    """The units in a folder.

    Args:
        folder: Where they are.
        widths: Features per row of each side.
    """

    def __init__(self, folder: Path, widths: Mapping[str, int]) -> None:
        self.folder, self.widths = folder, dict(widths)

    def open(self, plan: Mapping[str, Any]) -> None:
        """Begin in the folder, which exists, or check that its units belong to the same plan.

        Units without a plan could be those of another model, so they are discarded.

        Raises:
            ValueError: They were made with another model, data or options.
        """
        file, now = self.folder / PLAN, json.loads(json.dumps(plan))
        before = read_object(file)
        if not before:
            for path in self.folder.glob("[0-9]*"):
                path.unlink()
            with written_whole(file) as draft:
                draft.write_text(json.dumps(plan) + "\n", encoding="utf-8")
            return
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                remedy = f"Continue with the model, data and options it was started with, or delete {self.folder}."
                expected = f"{before.get(name)!r}, as when it was started"
                bad_value(f"{name} of an unfinished --out", expected=expected, got=repr(now.get(name)), remedy=remedy)

    def file(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:08d}.{kind}"

    def done(self) -> dict[int, Unit]:
        """The units that are done, by number in ascending order."""
        found: dict[int, Unit] = {}
        for meta in sorted(self.folder.glob("*.json")):
            if meta.stem.isdigit():
                unit = self._read(int(meta.stem))
                if unit is not None:
                    found[int(meta.stem)] = unit
        return found

    def _read(self, number: int) -> Unit | None:
        """A unit, unless its files are damaged, as a crash of the machine may leave them."""
        try:
            unit = Unit(**json.loads(self.file(number, "json").read_text(encoding="utf-8")))
            sizes = [self.file(number, side).stat().st_size == 4 * width * unit.rows for side, width in self._sides]
            with self.file(number, "rows").open(encoding="utf-8") as lines:
                return unit if all(sizes) and sum(1 for _ in lines) == unit.rows else None
        except (OSError, ValueError, TypeError):
            return None

    @property
    def _sides(self) -> list[tuple[str, int]]:
        return list(self.widths.items())

    def rows(self, number: int) -> list[EmbeddedRow]:
        """The rows of a unit that is done."""
        with self.file(number, "rows").open(encoding="utf-8") as lines:
            return [EmbeddedRow(**json.loads(line)) for line in lines]

    def writer(self, number: int) -> UnitWriter:
        """Begin a unit. What an interrupted process left of it is written over."""
        return UnitWriter(self, number)


class UnitWriter:
    """Writes a unit chunk by chunk."""

    def __init__(self, units: Units, number: int) -> None:
        self.units, self.number = units, number
        self.count, self.broken = 0, list[list[str]]()
        self._drafts = {kind: units.file(number, f"{kind}.draft") for kind in (*units.widths, "rows")}
        for draft in self._drafts.values():
            draft.write_bytes(b"")

    def add(self, rows: Sequence[EmbeddedRow], features: Mapping[str, Tensor], broken: Sequence[Broken]) -> None:
        """Append rows and their features, float32 on the CPU."""
        lines = "".join(json.dumps(row._asdict()) + "\n" for row in rows)
        with self._drafts["rows"].open("a", encoding="utf-8") as file:
            file.write(lines)
        for side, values in features.items():
            assert len(values) == len(rows), "one row of features for each sample"
            with self._drafts[side].open("ab") as file_of_side:
                file_of_side.write(values.contiguous().numpy().astype("<f4", copy=False).tobytes())
        self.count += len(rows)
        self.broken += [[error.key, error.reason] for error in broken]

    def finish(self, *, seen: int, cursor: Any) -> None:
        """Mark the unit as done. The last file that appears is the one that says so."""
        for kind, draft in self._drafts.items():
            draft.replace(self.units.file(self.number, kind))
        unit = Unit(self.count, seen, self.broken, cursor)
        draft = self.units.file(self.number, f"json.{os.getpid()}.draft")
        draft.write_text(json.dumps(unit._asdict()) + "\n", encoding="utf-8")
        draft.replace(self.units.file(self.number, "json"))

"""Recorded rows: one per contestant and size, as CSV to look at and as JSON with the circumstances.

    save(Recording(rows, environment, command), folder)      # folder/loss.csv, folder/loss.json
    recording = load(folder / "loss.json")

A file appears under its name only when it is complete.
"""

import csv
import io
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant at one size. What was not measured is None, and the status says why."""

    contestant: str
    n: int
    d: int
    dtype: str
    status: str
    """`ok`, `memory only` (no timing was asked for at this size), or what went wrong."""

    seconds_best: float | None = None
    seconds_median: float | None = None
    limit_seconds: float | None = None
    """Best time of four matrix products of this size, measured between the contestant's turns."""

    percent_of_limit: float | None = None
    ratio_to_contratile: float | None = None
    """Best time over that of `contratile`: 2 means twice as slow."""

    peak_extra_mib: float | None = None
    """Memory beyond inputs and gradients."""

    error_value: float | None = None
    error_grad: float | None = None
    """Relative errors against dense fp64: of the loss, and of feature gradients in the maximum norm."""

    error_n: int | None = None
    """Pairs of the problem on which the errors were taken."""

    commit: str
    threads: int
    torch: str
    cpu: str
    command: str


@dataclass(frozen=True)
class Recording:
    """The rows of a run, and what a reader needs to know or to repeat it."""

    rows: tuple[Row, ...]
    environment: dict[str, str]
    command: str


def save(recording: Recording, folder: Path) -> tuple[Path, Path]:
    """Write loss.csv and loss.json."""
    folder.mkdir(parents=True, exist_ok=True)
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in recording.rows)
    paths = folder / "loss.csv", folder / "loss.json"
    for path, text in zip(paths, (table.getvalue(), json.dumps(asdict(recording), indent=1) + "\n"), strict=True):
        draft = path.with_name(f".{path.name}.part")
        draft.write_text(text)
        draft.replace(path)
    return paths


def load(path: Path) -> Recording:
    """Read a loss.json."""
    try:
        recorded = json.loads(path.read_text())
        rows = tuple(Row(**row) for row in recorded["rows"])
        return Recording(rows, recorded["environment"], recorded["command"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a loss.json written by `contratile bench loss`, got {error!r}") from error

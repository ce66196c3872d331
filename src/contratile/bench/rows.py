"""Recorded rows: one per contestant and size, as CSV to look at and as JSON with the circumstances.

    save(Recording(rows, environment, command, "loss"), folder)      # folder/loss.csv, folder/loss.json
    recording = load(folder / "loss.json")

A file appears under its name only when it is complete.
"""

import csv
import io
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

PROVENANCE = ("commit", "threads", "torch", "cpu", "command")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant at one size. What was not measured is None, and the status says why."""

    contestant: str
    n: int
    """Pairs, those of all ranks together."""

    d: int
    dtype: str
    status: str
    """`ok`, `memory only` (no timing was asked for at this size), or what went wrong."""

    seconds_best: float | None = None
    seconds_median: float | None = None
    limit_seconds: float | None = None
    """Best time of the matrix products of a step, four unless said, measured between the turns of all contestants."""

    percent_of_limit: float | None = None
    ratio_to_contratile: float | None = None
    """Best time over that of `contratile`: 2 means twice as slow."""

    peak_extra_mib: float | None = None
    """Memory beyond inputs and gradients."""

    commit: str
    threads: int
    torch: str
    cpu: str
    command: str


@dataclass(frozen=True, kw_only=True)
class LossRow(Row):
    """A row of `bench loss`: one process."""

    error_value: float | None = None
    error_grad: float | None = None
    """Relative errors against dense fp64: of the loss, and of feature gradients in the maximum norm."""

    error_n: int | None = None
    """Pairs of the problem on which the errors were taken."""


@dataclass(frozen=True, kw_only=True)
class FamilyRow(LossRow):
    """A row of `bench family`: one of several losses."""

    loss: str
    package: str | None = None
    """The distribution whose loss it is, where that is not this one."""

    views: int
    """The scores have so many times N rows and columns."""

    products: int
    """Matrix products of that size in the limit."""


@dataclass(frozen=True, kw_only=True)
class RingRow(Row):
    """A row of `bench ring`: times and memory are those of the slowest and of the largest rank.

    A block is what a rank holds of one side: `local` x D numbers.
    """

    world: int
    local: int
    """Pairs of each rank."""

    peak_blocks: float | None = None
    sent_mib: float | None = None
    """Payload that a rank handed to TCP in one step, as the kernel counts it; of the rank that sent most."""

    sent_blocks: float | None = None
    transfer_seconds: float | None = None
    """The ring's transfers of one step with no compute between them."""

    waited_seconds: float | None = None
    """What a rank waited at the hops of the best step, on average over ranks: for transfers, and for slower ranks."""

    exposed_seconds: float | None = None
    """At least so much of it is transfer: what the rank that waited least waited at each hop."""

    hidden_percent: float | None = None
    """The share of the transfers' time that was hidden if all waiting was for transfers: a lower bound."""

    hidden_percent_at_most: float | None = None
    """The same if only the exposed seconds were: an upper bound."""


@dataclass(frozen=True, kw_only=True)
class CacheRow(Row):
    """A row of `bench cache`: a training step of encoders and loss.

    The limit is the encoders' part of it: all chunks forward without gradient, then forward and backward.
    """

    chunk: int
    layers: int
    tokens: int
    loss_percent: float | None = None
    """The part of the best step that is not the encoders'."""


ROWS: dict[str, type[Row]] = {"loss": LossRow, "family": FamilyRow, "ring": RingRow, "cache": CacheRow}
R = TypeVar("R", bound=Row)


def provenance(facts: dict[str, str], command: str) -> dict[str, Any]:
    """The fields that say where a row comes from."""
    known = {name: facts[name] for name in ("commit", "torch", "cpu")}
    return {**known, "threads": int(facts["threads"]), "command": command}


@dataclass(frozen=True)
class Recording(Generic[R]):
    """The rows of a run, and what a reader needs to know or to repeat it."""

    rows: tuple[R, ...]
    environment: dict[str, str]
    command: str
    kind: str = "loss"
    """The benchmark: a key of ROWS."""


def threads(recording: Recording[Any]) -> str:
    """How many, in words."""
    count = recording.environment["threads"]
    return f"{count} thread{'s' * (count != '1')}{' per rank' * (recording.kind == 'ring')}"


def save(recording: Recording[Any], folder: Path) -> tuple[Path, Path]:
    """Write the rows as CSV and everything as JSON, in files named for the benchmark."""
    folder.mkdir(parents=True, exist_ok=True)
    table = io.StringIO(newline="")
    columns = sorted((field.name for field in fields(ROWS[recording.kind])), key=PROVENANCE.__contains__)
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in recording.rows)
    paths = folder / f"{recording.kind}.csv", folder / f"{recording.kind}.json"
    for path, text in zip(paths, (table.getvalue(), json.dumps(asdict(recording), indent=1) + "\n"), strict=True):
        draft = path.with_name(f".{path.name}.part")
        draft.write_text(text)
        draft.replace(path)
    return paths


def load(path: Path) -> Recording[Any]:
    """Read what `save` wrote as JSON. The first recordings did not name their kind: they are of `bench loss`."""
    try:
        recorded = json.loads(path.read_text())
        kind = recorded.get("kind", "loss")
        rows = tuple(ROWS[kind](**row) for row in recorded["rows"])
        return Recording(rows, recorded["environment"], recorded["command"], kind)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "expected a loss.json, family.json, ring.json or cache.json written by `contratile bench`"
        raise ValueError(f"{path}: {expected}, got {error!r}") from error

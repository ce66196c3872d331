"""Recorded rows, one per contestant and size: a CSV file to look at, and a JSON file with the environment.

    save_rows(Recording(rows, environment, command, "loss"), folder)      # folder/loss.csv and folder/loss.json
    recording = load_rows(folder / "loss.json")

Files are replaced only when they are complete.
"""

import csv
import io
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

PROVENANCE = ("commit", "threads", "torch", "cpu", "device", "command")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contestant at one size. Columns that were not measured are None; the status says why."""

    contestant: str
    n: int
    """Pairs, of all ranks together."""

    d: int
    dtype: str
    status: str
    """`ok`, `memory only` (not timed at this size), or what went wrong."""

    seconds_best: float | None = None
    seconds_median: float | None = None
    limit_seconds: float | None = None
    """Best time of the matrix products of a step (four unless noted), measured between the turns of all contestants."""

    percent_of_limit: float | None = None
    ratio_to_contratile: float | None = None
    """Best time divided by that of `contratile`: 2 means twice as slow."""

    peak_extra_mib: float | None = None
    """Peak memory beyond inputs and gradients."""

    commit: str
    threads: int
    torch: str
    cpu: str
    device: str = "cpu"
    """Where the step ran: `cpu`, or a GPU with its name."""

    command: str


@dataclass(frozen=True, kw_only=True)
class LossRow(Row):
    """A row of `bench loss`."""

    error_value: float | None = None
    error_grad: float | None = None
    """Relative errors against dense fp64, of the loss and (maximum norm) of the feature gradients."""

    error_n: int | None = None
    """Pairs of the problem on which the errors were measured."""


@dataclass(frozen=True, kw_only=True)
class FamilyRow(LossRow):
    """A row of `bench family`."""

    loss: str
    package: str | None = None
    """The distribution of the contestant; None for our own code and for plain PyTorch."""

    views: int
    """The score matrix has `views` * N rows and columns."""

    products: int
    """Matrix products of that size in the limit."""

    beside_products: int = 0
    beside_d: int = 0
    """Products of another model's features in the limit, and how many features it has."""

    @property
    def limit(self) -> str:
        """What the limit computes."""
        size = "N" if self.views == 1 else f"{self.views}N"
        more = f" and {self.beside_products} of {size} x {size} x {self.beside_d}" if self.beside_products else ""
        return f"{self.products} products of {size} x {size} x D{more}"


@dataclass(frozen=True, kw_only=True)
class RingRow(Row):
    """A row of `bench ring`: the time of the slowest rank and the memory of the largest.

    A block is what a rank holds of one side: `local` x D numbers.
    """

    world: int
    local: int
    """Pairs of each rank."""

    peak_blocks: float | None = None
    sent_mib: float | None = None
    """What the rank that sent most sent over TCP in one step, as the kernel counts it."""

    sent_blocks: float | None = None
    transfer_seconds: float | None = None
    """Time of the ring's transfers of one step without compute."""

    waited_seconds: float | None = None
    """How long a rank waited at the hops of the best step, for transfers and slower ranks; mean over ranks."""

    exposed_seconds: float | None = None
    """The part of it that is certainly transfer: at each hop, the wait of the rank that waited least."""

    hidden_percent: float | None = None
    """Percent of the transfer time hidden behind compute if all waiting was for transfers: a lower bound."""

    hidden_percent_at_most: float | None = None
    """The same percentage if only the exposed seconds were transfer: an upper bound."""


@dataclass(frozen=True, kw_only=True)
class CacheRow(Row):
    """A row of `bench cache`: a training step of encoder and loss.

    The limit is the time of the encoder: all chunks, of texts sorted by length, forward without gradient, then forward
    and backward.
    """

    chunk: int
    layers: int
    tokens: int
    """Tokens of every text; 0 if they differ."""

    loss_percent: float | None = None
    """Percent of the best step spent on the loss; None if it cannot be timed apart."""

    lengths: str = "equal"
    """Distribution of the texts' lengths."""

    padding: float | None = None
    """Tokens encoded for each real token; None if nothing was timed."""

    kept: int | None = None
    """Chunks whose graphs were kept."""

    cpu_seconds: float | None = None
    """CPU time of the cheapest step, over all threads; neighbours on a shared machine disturb it less than the time."""


@dataclass(frozen=True, kw_only=True)
class DataRow(Row):
    """A row of `bench data`: `n` samples read by the training process with some workers, scaled to D x D pixels.

    The limit is the time to decode the JPEGs whole. `peak_extra_mib` is the growth of the training process.
    """

    workers: int
    pixels: int
    """Height and width of the JPEGs."""

    batch: int
    jpeg_kib: float
    """Mean size of a JPEG."""

    tokenizer: str
    samples_per_second: float | None = None
    samples_per_second_median: float | None = None
    workers_mib: float | None = None
    """Memory of all workers together, shared pages counted once."""


@dataclass(frozen=True, kw_only=True)
class PlanRow(Row):
    """A row of `bench plan`: a training step, measured and predicted. Memory is that of the largest rank."""

    chunk: int
    tokens: int
    checkpointing: bool
    offload: str
    world: int
    allocator: str
    """`returning`: freed tensors go back to the system at once (MALLOC_MMAP_THRESHOLD_=65536); `default`: malloc as it
    is."""

    measured_mib: float | None = None
    """Peak resident memory beyond what the process had before it built anything, without pages of libraries."""

    predicted_mib: float
    """From the definition of the encoders alone."""

    calibrated_mib: float | None = None
    """After two small chunks were run here."""

    predicted_seconds: float | None = None
    """At the rates that the process measured before the step."""


@dataclass(frozen=True, kw_only=True)
class NodesRow(Row):
    """A row of `benchmarks/nodes.py`: a ring (`flat`, `nodes`) on emulated nodes, the time of the slowest rank."""

    world: int
    nodes: int
    local: int
    """Pairs of each rank."""

    link_mbit: int
    """Speed of a rank's link to other nodes in Mbit/s; 0 if it is not limited."""

    pairs: int
    """How often both rings were timed in turn."""

    speedup: float
    """Median over the pairs of the flat ring's time divided by this ring's; the lowest and the highest of the pairs."""

    speedup_lowest: float
    speedup_highest: float


@dataclass(frozen=True, kw_only=True)
class ScaleRow(Row):
    """A row of `bench scale`: memory of one rank of many."""

    world: int
    local: int
    """Pairs of each rank."""

    about: str
    how: str
    """`simulated rank`, `real ranks` (the largest of them), `simulated beside real ranks` (as many ranks, to compare),
    or `formula`: not measured at this size."""

    formula_mib: float
    """What the formula gives for `peak_extra_mib`."""

    hops: int | None = None
    """Visiting blocks that were computed: enough for all buffers of the ring to exist at the same time."""

    queries: int | None = None
    """Queries of the rank that were computed, out of `local`."""

    memory_ratio: float | None = None
    """Memory, measured or by formula, divided by that of `contratile` on as many ranks."""


ROWS: dict[str, type[Row]] = {
    "loss": LossRow,
    "family": FamilyRow,
    "ring": RingRow,
    "cache": CacheRow,
    "data": DataRow,
    "plan": PlanRow,
    "nodes": NodesRow,
    "scale": ScaleRow,
}
R = TypeVar("R", bound=Row)


def provenance(facts: dict[str, str], command: str) -> dict[str, Any]:
    """Return the columns that say where a row comes from."""
    known = {name: facts[name] for name in ("commit", "torch", "cpu", "device")}
    return {**known, "threads": int(facts["threads"]), "command": command}


@dataclass(frozen=True)
class Recording(Generic[R]):
    """The rows of a run, and what is needed to judge or repeat it."""

    rows: tuple[R, ...]
    environment: dict[str, str]
    command: str
    kind: str = "loss"
    """Which benchmark it was, a key of ROWS."""


def hardware_text(facts: dict[str, str]) -> str:
    """Return the device, if it is not the CPU, and the CPU."""
    device = facts.get("device", "cpu")  # older recordings do not say
    return facts["cpu"] if device == "cpu" else f"{device}, {facts['cpu']}"


def threads_text(recording: Recording[Any]) -> str:
    """Return "2 threads" or "1 thread per rank"."""
    count = recording.environment["threads"]
    return f"{count} thread{'s' * (count != '1')}{' per rank' * (recording.kind in ('ring', 'nodes'))}"


def save_rows(recording: Recording[Any], folder: Path) -> tuple[Path, Path]:
    """Write KIND.csv and KIND.json to a folder and return their paths."""
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


def load_rows(path: Path) -> Recording[Any]:
    """Read a JSON file that `save_rows` wrote. Recordings without a kind are of `bench loss`."""
    try:
        recorded = json.loads(path.read_text())
        kind = recorded.get("kind", "loss")
        rows = tuple(ROWS[kind](**row) for row in recorded["rows"])
        return Recording(rows, recorded["environment"], recorded["command"], kind)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = "expected a JSON file of rows written by `contratile bench`"
        raise ValueError(f"{path}: {expected}, got {error!r}") from error

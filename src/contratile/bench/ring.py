"""The run over ranks: time, memory per rank and bytes sent of every contestant at every world size and batch.

    recording = run(RingConfig(worlds=(1, 2), batches=(1024, 2048)), command="...")
    save(recording, config.out)

Ranks are started anew for each world size and batch. A contestant that is not installed, fails, would take too long
or does not fit becomes a row that says so; when one fails, the point is started again without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contratile.bench import memory
from contratile.bench.config import BenchConfig
from contratile.bench.contestants.ring import RING_CONTESTANTS, RING_PACKAGES
from contratile.bench.harness import Notify, environment, unknown, version
from contratile.bench.launch import Event, launch
from contratile.bench.ring_rank import OURS, Measurement
from contratile.bench.rows import Recording, RingRow, provenance
from contratile.errors import bad_value, check_count

MiB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RingConfig(BenchConfig):
    """Time, memory per rank and bytes sent of the symmetric loss over ranks on this machine, against other ways."""

    worlds: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of ranks P."""

    batches: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Global batch sizes N to time; each a multiple of every P."""

    memory_batches: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Global batch sizes N to measure memory and traffic at, besides those that are timed."""

    contestants: tuple[str, ...] = tuple(RING_CONTESTANTS)
    """Who takes part. Packages that are not installed get a row that says so."""

    rounds: int = 3
    """Turns of each contestant at each point; the best and the median are reported."""

    threads: int = 1
    """Threads of torch in each rank."""

    out: Path = Path("bench-ring")
    """Folder for ring.csv, ring.json and ring.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("worlds", "batches", "memory_batches"):
            for value in getattr(self, name):
                check_count(name, value, least=1)
        if not self.worlds or not self.sizes:
            bad_value("worlds and batches", expected="at least one of each", got="none", remedy="Leave them out.")
        for n in self.sizes:
            for world in self.worlds:
                if n % world:
                    remedy = "Ranks hold equally many pairs here; choose batches that every number of ranks divides."
                    bad_value("batches", expected=f"multiples of {world} (worlds)", got=n, remedy=remedy)

    @property
    def sizes(self) -> list[int]:
        """All global batch sizes, ascending."""
        return sorted({*self.batches, *self.memory_batches})


QUICK = RingConfig(
    worlds=(1, 2),
    batches=(1024, 2048),
    memory_batches=(4096,),
    dims=(256,),
    contestants=("contratile", "open_clip_local", "disco"),
    rounds=2,
    patience=10.0,
    quick=True,
)


def run(
    config: RingConfig,
    *,
    command: str,
    notify: Notify = lambda text: None,
    keep: Callable[[Recording[RingRow]], object] = lambda recording: None,
) -> Recording[RingRow]:
    """Measure everything that the config asks for; `keep` is given all rows whenever there are more."""
    facts = environment(RING_PACKAGES) | {"threads": str(config.threads)}
    rows: list[RingRow] = []
    total = len(config.dims) * len(config.worlds) * len(config.sizes) * len(config.contestants)

    def progress(text: str) -> None:
        notify(f"{len(rows)} of {total} rows done · {text}")

    for d in config.dims:
        for world in config.worlds:
            ranks = _Ranks(config, world, d, progress)
            for n in config.sizes:
                found = ranks.measure(n)
                rows.extend(_row(ranks, name, n, found, facts, command) for name in config.contestants)
                keep(Recording(tuple(rows), facts, command, "ring"))
    return Recording(tuple(rows), facts, command, "ring")


class _Ranks:
    """The contestants at one number of ranks and one D, and what is learned about them from batch to batch."""

    def __init__(self, config: RingConfig, world: int, d: int, notify: Notify) -> None:
        self.config, self.world, self.d, self.notify = config, world, d, notify
        self.failed: dict[str, str] = {}
        self.pace: dict[str, float] = {}  # seconds per pair of rows
        for name in config.contestants:
            case = RING_CONTESTANTS.get(name)
            if case is None:
                self.failed[name] = unknown(RING_CONTESTANTS)
            elif case.package and version(case.package) == "not installed":
                self.failed[name] = f"not installed ({case.package})"

    def obstacle(self, name: str, n: int) -> str | None:
        """Why this contestant cannot run at this batch, if so."""
        if name in self.failed:
            return self.failed[name]
        expected = self.pace.get(name, 0.0) * n * n
        if expected > self.config.patience:
            return f"skipped (a step would take about {expected:.0f} s)"
        return memory.no_room(RING_CONTESTANTS[name].predicted_bytes(self.world, n, self.d))

    def measure(self, n: int) -> dict[str, tuple[str, Measurement]]:
        """Status and measurement of every contestant, from as many launches as it takes until none fails."""
        found = {name: Measurement() for name in self.config.contestants}
        status = {name: self.obstacle(name, n) for name in found}
        while going := [name for name in found if status[name] is None]:
            under_way, failure = self._launch(n, going, found)
            if failure is None:
                break
            for name in [under_way] if under_way else going:
                status[name] = self.failed[name] = failure
        for name, measurement in found.items():
            if measurement.seconds_best:
                self.pace[name] = measurement.seconds_best / n**2
        return {name: (status[name] or self._fine(n, found[name]), found[name]) for name in found}

    def _fine(self, n: int, found: Measurement) -> str:
        timed = "ok" if n in self.config.batches else "memory only"
        return timed if found.note == "ok" else found.note

    def _launch(self, n: int, names: list[str], found: dict[str, Measurement]) -> tuple[str | None, str | None]:
        """One start of the ranks: the contestant that failed, or None if it is nobody's fault, and the failure."""
        under_way: str | None = None

        def hear(event: Event) -> None:
            nonlocal under_way
            under_way = event["contestant"]
            if event["event"] == "measured":
                found[event["contestant"]] = Measurement(**event["found"])
            elif event["event"] == "doing":
                self.notify(f"{event['text']}, P={self.world} N={n} D={self.d}")

        config = self.config
        rounds = config.rounds if n in config.batches else 0
        words = f"--batch {n} --d {self.d} --scale {config.scale} --rounds {rounds} --threads {config.threads}"
        self.notify(f"starting {self.world} ranks, N={n} D={self.d}")
        silence = 120 + 10 * config.patience
        failure = launch(
            self.world,
            [*words.split(), "--contestants", *names],
            threads=config.threads,
            silence=silence,
            hear=hear,
        )
        return under_way, failure


def _hidden(seen: float | None, transfer: float | None) -> float | None:
    """The percentage of the transfers' time that was not seen."""
    return 100 * max(0.0, 1 - seen / transfer) if transfer and seen is not None else None


def _row(
    ranks: _Ranks,
    name: str,
    n: int,
    found: dict[str, tuple[str, Measurement]],
    facts: dict[str, str],
    command: str,
) -> RingRow:
    status, got = found[name]
    ours = found[OURS][1].seconds_best if OURS in found else None
    local = n // ranks.world
    block = 4 * local * ranks.d
    best, limit, sent = got.seconds_best, got.limit_seconds, got.sent_bytes
    return RingRow(
        contestant=name,
        world=ranks.world,
        n=n,
        local=local,
        d=ranks.d,
        dtype="float32" if name in RING_CONTESTANTS else "",
        status=status,
        seconds_best=best,
        seconds_median=got.seconds_median,
        limit_seconds=limit,
        percent_of_limit=100 * limit / best if best and limit else None,
        ratio_to_contratile=best / ours if best and ours else None,
        peak_extra_mib=got.peak_extra_mib,
        peak_blocks=None if got.peak_extra_mib is None else got.peak_extra_mib * MiB / block,
        sent_mib=None if sent is None else sent / MiB,
        sent_blocks=None if sent is None else sent / block,
        transfer_seconds=got.transfer_seconds,
        waited_seconds=got.waited_seconds,
        exposed_seconds=got.exposed_seconds,
        hidden_percent=_hidden(got.waited_seconds, got.transfer_seconds),
        hidden_percent_at_most=_hidden(got.exposed_seconds, got.transfer_seconds),
        **provenance(facts, command),
    )

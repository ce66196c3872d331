"""`contratile bench ring`: time, memory per rank and bytes sent of the symmetric loss over ranks of this machine.

    recording = run(BENCH, RingBenchConfig(worlds=(1, 2), batches=(1024, 2048)), command="...")

Ranks are started afresh for each number of ranks and batch size. When a contestant fails, the point is started again
without it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contratile.bench.config import TimedConfig, check_positive_scale
from contratile.bench.contestants.ring import RING_CONTESTANTS, RING_PACKAGES
from contratile.bench.launch import Event, launch
from contratile.bench.memory import MiB
from contratile.bench.ring_rank import RankMeasured
from contratile.bench.runner import OURS, Benchmark, Series
from contratile.errors import bad_value, check_count
from contratile.machine import NOT_INSTALLED, version


@dataclass(frozen=True, kw_only=True)
class RingBenchConfig(TimedConfig):
    """Time, memory per rank and bytes sent of the symmetric loss over ranks on this machine, against other ways."""

    worlds: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of ranks P."""

    batches: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Global batch sizes N to time; each a multiple of every P."""

    memory_batches: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    """Global batch sizes N to measure memory and traffic at, in addition to those that are timed."""

    contestants: tuple[str, ...] = tuple(RING_CONTESTANTS)
    """Which implementations to compare. One whose package is not installed gets a row that says so."""

    rounds: int = 3
    """How often each contestant is timed at each point; the best and the median are reported."""

    scale: float = 14.3
    """Factor on the scores (the inverse temperature)."""

    threads: int = 1
    """Number of torch threads in each rank."""

    out: Path = Path("bench-ring")
    """Folder for ring.csv, ring.json and ring.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_scale(self.scale)
        for name in ("worlds", "batches", "memory_batches"):
            for value in getattr(self, name):
                check_count(name, value, least=1)
        if not self.worlds or not self.all_sizes:
            bad_value("worlds and batches", expected="at least one of each", got="none", remedy="Leave them out.")
        for n in self.all_sizes:
            for world in self.worlds:
                if n % world:
                    remedy = "All ranks hold the same number of pairs here; choose batches that every P divides."
                    bad_value("batches", expected=f"multiples of {world} (worlds)", got=n, remedy=remedy)

    @property
    def all_sizes(self) -> list[int]:
        return sorted({*self.batches, *self.memory_batches})


class RingSeries(Series):
    """The contestants at one number of ranks and one D."""

    def __init__(self, config: RingBenchConfig, world: int, d: int) -> None:
        super().__init__(config, f"P={world} D={d}", config.contestants, RING_CONTESTANTS)
        self.config, self.world, self.d = config, world, d
        for name in config.contestants:
            contestant = RING_CONTESTANTS.get(name)
            if contestant and contestant.package and version(contestant.package) == NOT_INSTALLED:
                self.failed[name] = f"{NOT_INSTALLED} ({contestant.package})"

    def predicted_bytes(self, name: str, n: int) -> float:
        return RING_CONTESTANTS[name].predicted_bytes(self.world, n, self.d)

    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        found = self.measure(n)
        local = n // self.world
        for name, measured in found.items():
            place = {"contestant": name, "world": self.world, "n": n, "local": local, "d": self.d}
            dtype = "float32" if name in RING_CONTESTANTS else ""
            shared = measured.columns(found.get(OURS))
            yield {**place, "dtype": dtype, **shared, **_ring_columns(measured, block=4 * local * self.d)}

    def measure(self, n: int) -> dict[str, RankMeasured]:
        """Start the ranks, and start them again without a contestant that failed, until none fails."""
        found = {name: RankMeasured() for name in self.names}
        obstacles = {name: self.obstacle(name, n) for name in self.names}
        while going := [name for name in self.names if obstacles[name] is None]:
            culprit, failure = self._launch(n, going, found)
            if failure is None:
                break
            for name in [culprit] if culprit else going:
                obstacles[name] = self.failed[name] = failure
        for name, measured in found.items():
            if measured.seconds_best:
                self.pace[name] = measured.seconds_best / n**self.growth
            if obstacles[name] is not None:
                measured.status = str(obstacles[name])
            elif measured.status == "ok" and n not in self.config.batches:
                measured.status = "memory only"
        return found

    def _launch(self, n: int, names: list[str], found: dict[str, RankMeasured]) -> tuple[str | None, str | None]:
        """Run the ranks once; return the contestant that failed, None if it was none of them, and the failure."""
        current: str | None = None

        def hear(event: Event) -> None:
            nonlocal current
            current = event["contestant"]
            if event["event"] == "measured":
                found[event["contestant"]] = RankMeasured(**event["found"])
            elif event["event"] == "doing":
                self.notify(f"{event['text']} at N={n}")

        config = self.config
        rounds = config.rounds if n in config.batches else 0
        words = f"--batch {n} --d {self.d} --scale {config.scale} --rounds {rounds} --threads {config.threads}"
        self.notify(f"starting {self.world} ranks at N={n}")
        failure = launch(
            self.world,
            [*words.split(), "--contestants", *names],
            threads=config.threads,
            silence=self.timeout,
            hear=hear,
        )
        return current, failure


def _ring_columns(measured: RankMeasured, block: int) -> dict[str, Any]:
    """Return what only rows of this benchmark have; `block` is the number of bytes of one side on one rank."""
    peak, sent = measured.peak_extra_mib, measured.sent_bytes
    transfer, waited, exposed = measured.transfer_seconds, measured.waited_seconds, measured.exposed_seconds
    return {
        "peak_blocks": None if peak is None else peak * MiB / block,
        "sent_mib": None if sent is None else sent / MiB,
        "sent_blocks": None if sent is None else sent / block,
        "transfer_seconds": transfer,
        "waited_seconds": waited,
        "exposed_seconds": exposed,
        "hidden_percent": _hidden(waited, transfer),
        "hidden_percent_at_most": _hidden(exposed, transfer),
    }


def _hidden(seen: float | None, transfer: float | None) -> float | None:
    """The percentage of the transfer time that nobody waited for."""
    return 100 * max(0.0, 1 - seen / transfer) if transfer and seen is not None else None


def _series(config: RingBenchConfig) -> Sequence[RingSeries]:
    return [RingSeries(config, world, d) for d in config.dims for world in config.worlds]


BENCH = Benchmark(
    kind="ring",
    default=RingBenchConfig(),
    quick=RingBenchConfig(
        worlds=(1, 2),
        batches=(1024, 2048),
        memory_batches=(4096,),
        dims=(256,),
        contestants=("contratile", "open_clip_local", "disco"),
        rounds=2,
        patience=10.0,
        quick=True,
    ),
    series=_series,
    packages=RING_PACKAGES,
)

"""The loop that all benchmarks share: batch sizes in ascending order, contestants interleaved, one row for each.

    recording = run(BENCH, LossBenchConfig(sizes=(1024, 2048)), command="...")
    save(recording, config.out)

A benchmark is one or more series. In a series only the batch size changes, so what was learned at one size (who failed,
how fast the others are) decides what is tried at the next. A contestant that is not installed, fails, would take too
long or does not fit into memory gets a row that says so.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from contratile.bench import memory
from contratile.bench.clock import Step
from contratile.bench.config import BenchConfig, LocalConfig
from contratile.bench.harness import Notify, Turns, describe, interleave, quiet
from contratile.bench.rows import ROWS, Recording, provenance
from contratile.engine import tuned
from contratile.machine import environment

OURS = "contratile"
C = TypeVar("C", bound=BenchConfig)
P = TypeVar("P")


@dataclass(kw_only=True)
class Measured:
    """What was measured for one contestant at one size; None where nothing was."""

    status: str = "ok"
    seconds_best: float | None = None
    seconds_median: float | None = None
    limit_seconds: float | None = None
    peak_extra_mib: float | None = None

    def add(self, turns: Turns) -> None:
        """Fill in the times."""
        self.seconds_best, self.seconds_median, self.limit_seconds = turns.best, turns.median, turns.limit

    def columns(self, ours: "Measured | None") -> dict[str, Any]:
        """Return the columns that rows of all benchmarks have; `ours` is the measurement to compare with."""
        best, limit, our_best = self.seconds_best, self.limit_seconds, ours.seconds_best if ours else None
        return {
            "status": self.status,
            "seconds_best": best,
            "seconds_median": self.seconds_median,
            "limit_seconds": limit,
            "percent_of_limit": 100 * limit / best if best and limit else None,
            "ratio_to_contratile": best / our_best if best and our_best else None,
            "peak_extra_mib": self.peak_extra_mib,
        }


class Series(ABC):
    """Contestants at growing batch sizes while everything else stays the same.

    Args:
        config: The options.
        place: What stays the same, such as "D=512", for messages about progress.
        names: Contestants that were asked for.
        known: Contestants that exist.
    """

    growth = 2
    """The time of a step is expected to grow like N to this power."""

    def __init__(self, config: BenchConfig, place: str, names: Sequence[str], known: Collection[str]) -> None:
        self.place, self.names, self.patience = place, tuple(names), config.patience
        self.clock = config.clock()
        unknown = f"unknown contestant (there are {', '.join(known)})"
        self.failed = {name: unknown for name in names if name not in known}
        self.pace: dict[str, float] = {}  # seconds / N ** growth
        self.notify: Notify = lambda text: None

    def start(self) -> None:  # noqa: B027 - optional
        """Prepare what all sizes need."""

    @abstractmethod
    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        """Measure every contestant at one size and yield its row, without the columns that say where it comes from."""

    @abstractmethod
    def predicted_bytes(self, name: str, n: int) -> float:
        """Return roughly how much memory a step needs."""

    @property
    def timeout(self) -> float:
        """Seconds for a process to import, compile and run one point."""
        return 120 + 10 * self.patience

    def obstacle(self, name: str, n: int) -> str | None:
        """Return why a contestant cannot run at this size, or None if it can."""
        if name in self.failed:
            return self.failed[name]
        expected = self.pace.get(name, 0.0) * n**self.growth
        if expected > self.patience:
            return f"skipped (a step would take about {expected:.0f} s)"
        return memory.no_room(self.predicted_bytes(name, n), self.clock)


class LocalSeries(Series, Generic[P]):
    """A series whose steps are timed in this process, and whose memory is measured in one process per point.

    P is what the steps of one size share, such as their inputs.
    """

    def __init__(self, config: LocalConfig, place: str, names: Sequence[str], known: Collection[str]) -> None:
        super().__init__(config, place, names, known)
        self.sizes, self.memory_sizes, self.rounds = config.sizes, config.memory_sizes, config.rounds

    @abstractmethod
    def shared(self, n: int) -> P:
        """Make what all steps of a size share."""

    @abstractmethod
    def step(self, name: str, n: int, shared: P) -> Step:
        """Load a contestant, warm it up, and return the step to time."""

    @abstractmethod
    def limit(self, n: int, shared: P) -> Step | Mapping[str, Step]:
        """Return the work that no contestant can avoid, or that of each contestant."""

    @abstractmethod
    def memory_words(self, name: str, n: int) -> list[str]:
        """Return the arguments of `contratile.bench.memory_point` for this point."""

    @abstractmethod
    def columns(self, name: str, n: int, measured: Measured) -> dict[str, Any]:
        """Return the columns that only this benchmark has."""

    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        timed = self.time(n) if n in self.sizes else {}
        for name in self.names:
            measured = timed.get(name, Measured())
            obstacle = self.failed.get(name) if name in timed else self.obstacle(name, n)
            measured.status = obstacle or ("ok" if n in self.sizes else "memory only")
            if n in self.memory_sizes and obstacle is None:
                peak = self.peak(name, n)
                measured.peak_extra_mib = peak.mib
                if peak.status != "ok":
                    measured.status = peak.status
            shared = measured.columns(timed.get(OURS))
            yield {"contestant": name, "n": n, **shared, **self.columns(name, n, measured)}

    def time(self, n: int) -> dict[str, Measured]:
        """Warm up all contestants that can run at this size, then time them in rounds."""
        steps: dict[str, Step] = {}
        shared = self.shared(n)
        for name in self.names:
            if self.obstacle(name, n):
                continue
            self.notify(f"{name}: warm-up at N={n}")
            try:
                with quiet():
                    steps[name] = self.step(name, n, shared)
            except Exception as error:
                self.failed[name] = describe(error)
        where = f" at N={n}"
        limit, clock = self.limit(n, shared), self.clock.seconds
        notify: Notify = lambda text: self.notify(text + where)  # noqa: E731 - a keyword of the next line
        found = interleave(steps, limit, rounds=self.rounds, clock=clock, notify=notify)
        measured: dict[str, Measured] = {}
        for name, turns in found.items():
            if turns.failure:
                self.failed[name] = turns.failure
            else:
                self.pace[name] = turns.best / n**self.growth
            if turns.steps:
                measured[name] = Measured()
                measured[name].add(turns)
        return measured

    def peak(self, name: str, n: int) -> memory.Peak:
        """Measure the memory of a point, unless it is certain not to fit."""
        refusal = memory.no_room(self.predicted_bytes(name, n), self.clock)
        if refusal:
            return memory.Peak(refusal)
        self.notify(f"{name}: peak memory at N={n}, in a process of its own")
        return memory.point(self.memory_words(name, n), timeout=self.timeout)


@dataclass(frozen=True)
class Benchmark(Generic[C]):
    """A benchmark as the command line knows it."""

    kind: str
    """A key of `rows.ROWS`."""

    default: C
    quick: C
    """Defaults under `--quick`."""

    series: Callable[[C], Sequence[Series]]
    packages: tuple[str, ...]
    """Distributions whose versions are recorded."""


def run(
    bench: Benchmark[C],
    config: C,
    *,
    command: str,
    notify: Notify = lambda text: None,
    keep: Callable[[Recording[Any]], object] = lambda recording: None,
) -> Recording[Any]:
    """Measure everything that the config asks for.

    Args:
        bench: The benchmark.
        config: Its options.
        command: The command line, which is recorded with the rows.
        notify: Called with a line of text about what is being done.
        keep: Called with all rows so far whenever there is a new one, so that an interrupted run loses nothing.

    Returns:
        The rows with the environment they were measured in.
    """
    torch.set_num_threads(config.threads)
    facts = environment(bench.packages) | {"device": config.clock().name, "tuned": f"{len(tuned.entries())} entries"}
    every = bench.series(config)
    total = len(config.all_sizes) * sum(len(series.names) for series in every)
    rows: list[Any] = []

    def progress(series: Series) -> Notify:
        return lambda text: notify(f"{len(rows)} of {total} rows done · {series.place} · {text}")

    for series in every:
        series.notify = progress(series)
        series.start()
        for n in config.all_sizes:
            for columns in series.rows(n):
                rows.append(ROWS[bench.kind](**columns, **provenance(facts, command)))
                keep(Recording(tuple(rows), facts, command, bench.kind))
    return Recording(tuple(rows), facts, command, bench.kind)

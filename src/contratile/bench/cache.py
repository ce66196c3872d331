"""The run over gradient caches: time and memory of a training step against the batch.

    recording = run(CacheConfig(sizes=(256, 1024)), command="...")
    save(recording, config.out)

The limit is what the encoders alone take when every chunk is encoded twice: the price of any cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from contratile.bench import memory
from contratile.bench.config import BenchConfig
from contratile.bench.contestants.cache import CONTESTANTS, PACKAGES, Limit, Problem, Step, predicted_bytes
from contratile.bench.contestants.cache_model import LAYERS, TOKENS
from contratile.bench.contestants.loss import quiet
from contratile.bench.harness import Notify, Timing, describe, environment, interleave, unknown
from contratile.bench.rows import CacheRow, Recording, provenance
from contratile.errors import check_count


@dataclass(frozen=True, kw_only=True)
class CacheConfig(BenchConfig):
    """Time and memory of training steps with a transformer and dropout, in chunks, against other ways to do them."""

    sizes: tuple[int, ...] = (256, 1024, 4096)
    """Batch sizes N to time."""

    memory_sizes: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Batch sizes N whose peak memory is measured; may go beyond those that are timed."""

    chunk: int = 64
    """Rows that are encoded at a time."""

    dims: tuple[int, ...] = (128,)
    """Widths of the transformer, which are its feature sizes D."""

    layers: int = LAYERS
    """Layers of the transformer."""

    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    """Who takes part. Packages that are not installed get a row that says so."""

    rounds: int = 3
    """Turns of each contestant at each size; the best and the median are reported."""

    scale: float = 20.0
    """Factor on the scores; here always 20."""

    threads: int = torch.get_num_threads()
    """Threads of torch."""

    patience: float = 120.0
    """Seconds: a step that is predicted, from smaller sizes, to take longer is skipped."""

    out: Path = Path("bench-cache")
    """Folder for cache.csv, cache.json and cache.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sizes", "memory_sizes"):
            for value in getattr(self, name):
                check_count(name, value, least=1)
        check_count("chunk", self.chunk, least=1)
        check_count("layers", self.layers, least=1)

    @property
    def all_sizes(self) -> list[int]:
        """Timed or measured for memory, ascending."""
        return sorted({*self.sizes, *self.memory_sizes})


QUICK = CacheConfig(sizes=(64, 256), memory_sizes=(64, 256, 1024), chunk=32, layers=2, rounds=2, quick=True)


def run(
    config: CacheConfig,
    *,
    command: str,
    notify: Notify = lambda text: None,
    keep: Callable[[Recording[CacheRow]], object] = lambda recording: None,
) -> Recording[CacheRow]:
    """Measure everything that the config asks for; `keep` is given all rows whenever there are more."""
    torch.set_num_threads(config.threads)
    facts = environment(PACKAGES)
    rows: list[CacheRow] = []
    total = len(config.dims) * len(config.all_sizes) * len(config.contestants)

    def progress(text: str) -> None:
        notify(f"{len(rows)} of {total} rows done · {text}")

    for d in config.dims:
        bench = _Width(config, d, progress)
        for n in config.all_sizes:
            steps, timings = bench.time(n) if n in config.sizes else ({}, {})
            for name in config.contestants:
                rows.append(bench.row(name, n, steps.get(name), timings, facts, command))
                keep(Recording(tuple(rows), facts, command, "cache"))
    return Recording(tuple(rows), facts, command, "cache")


class _Width:
    """The contestants at one width, and what is learned about them from size to size."""

    def __init__(self, config: CacheConfig, d: int, notify: Notify) -> None:
        self.config, self.d, self.notify = config, d, notify
        self.failed = {name: unknown(CONTESTANTS) for name in config.contestants if name not in CONTESTANTS}
        self.pace: dict[str, float] = {}  # seconds per row

    def obstacle(self, name: str, n: int) -> str | None:
        """Why this contestant cannot run at this size, if so."""
        if name in self.failed:
            return self.failed[name]
        expected = self.pace.get(name, 0.0) * n
        if expected > self.config.patience:
            return f"skipped (a step would take about {expected:.0f} s)"
        return memory.no_room(predicted_bytes(name, n, width=self.d, layers=self.config.layers))

    def _problem(self, n: int) -> Problem:
        return Problem(n, self.config.chunk, width=self.d, layers=self.config.layers)

    def time(self, n: int) -> tuple[dict[str, Step], dict[str, Timing]]:
        """A warm-up, then the rounds."""
        problem, steps = self._problem(n), dict[str, Step]()
        for name in self.config.contestants:
            if self.obstacle(name, n):
                continue
            self.notify(f"{name}: warm-up")
            try:
                with quiet():
                    CONTESTANTS[name](self._problem(min(n, 2 * self.config.chunk)))()
                    steps[name] = CONTESTANTS[name](problem)
            except Exception as error:
                self.failed[name] = describe(error)
        where = f" at N={n}, width {self.d}"
        timings = interleave(
            steps, Limit(problem), rounds=self.config.rounds, notify=lambda text: self.notify(text + where)
        )
        for name, timing in timings.items():
            if timing.failure:
                self.failed[name] = timing.failure
            else:
                self.pace[name] = timing.best / n
        return steps, timings

    def row(
        self,
        name: str,
        n: int,
        step: Step | None,
        timings: dict[str, Timing],
        facts: dict[str, str],
        command: str,
    ) -> CacheRow:
        config, timing = self.config, timings.get(name)
        done = timing if timing is not None and timing.steps else None
        obstacle = self.failed.get(name) if done else self.obstacle(name, n)
        status = obstacle or ("ok" if n in config.sizes else "memory only")
        peak = memory.Peak(status)
        if n in config.memory_sizes and obstacle is None:
            self.notify(f"{name}: peak memory at N={n}, in a process of its own")
            words = f"--contestant {name} --n {n} --chunk {config.chunk} --d {self.d} --layers {config.layers}"
            words += f" --threads {config.threads}"
            timeout = 120 + 10 * config.patience
            peak = memory.point("contratile.bench.contestants.cache", words.split(), timeout=timeout)
            status = status if peak.status == "ok" else peak.status
        ours = timings.get("contratile")
        spent = step.loss_seconds if step is not None else float("inf")
        return CacheRow(
            contestant=name,
            n=n,
            d=self.d,
            dtype="float32",
            status=status,
            seconds_best=done.best if done else None,
            seconds_median=done.median if done else None,
            limit_seconds=done.limit if done else None,
            percent_of_limit=done.percent_of_limit if done else None,
            ratio_to_contratile=done.best / ours.best if done and ours and ours.steps else None,
            peak_extra_mib=peak.mib,
            chunk=config.chunk,
            layers=config.layers,
            tokens=TOKENS,
            loss_percent=100 * spent / done.best if done and spent < float("inf") else None,
            **provenance(facts, command),
        )

"""`contratile bench scale`: memory per device of the loss against the batch size on 8 and on 128 ranks.

    recording = run(BENCH, ScaleBenchConfig(worlds=(8,), batches=(32768, 65536)), command="...")

Ours is measured on a simulated rank (`contratile.ring.simulated`), in a process per point. What needs N x N or N/P x N
scores is a formula, and so is the paper's loss at large sizes; formulas are checked at sizes that fit: on real ranks,
or, for the paper's ring, on a simulated rank.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contratile.bench.config import BenchConfig
from contratile.bench.contestants.ring import RING_CONTESTANTS
from contratile.bench.contestants.scale import ABOUT, MEMORY
from contratile.bench.memory import MiB
from contratile.bench.ring import RingBenchConfig, RingSeries
from contratile.bench.runner import OURS, Benchmark, Series
from contratile.engine.plan import plan_tiles
from contratile.errors import bad_value, check_choice, check_count
from contratile.machine import NOT_INSTALLED, version

OVER_NODES = "contratile_nodes"
HOPS = {OURS: (3, 1), OVER_NODES: (9, 3), "inf_cl": (4, 1)}
"""Ranks and nodes that are enough for all buffers of a ring to exist at the same time."""
PRODUCTS = {OURS: 4, OVER_NODES: 4, "inf_cl": 80}
"""Matrix products per visiting block, as the budget counts them. The small tiles of the paper's ring (10 products) are
slow here."""
SIMULATED, REAL, CHECK, FORMULA = "simulated rank", "real ranks", "simulated beside real ranks", "formula"
PACKAGES = ("open_clip_torch", "inf-cl")


@dataclass(frozen=True, kw_only=True)
class ScaleBenchConfig(BenchConfig):
    """Memory per device of the symmetric loss up to a million pairs on many ranks, as in the paper's figure 1."""

    worlds: tuple[int, ...] = (8, 128)
    """Numbers of ranks P."""

    batches: tuple[int, ...] = tuple(1024 * 2**power for power in range(5, 11))
    """Global batch sizes N; each a multiple of every P."""

    check_batches: tuple[int, ...] = (2048, 4096)
    """Global batch sizes at which real ranks are started too, to check the simulation and the formulas."""

    check_worlds: tuple[int, ...] = (2, 4, 8)
    """Numbers of these ranks; none starts none."""

    node: int = 8
    """Ranks of a node, for the ring over nodes."""

    budget: float = 2.0
    """Work of a point, in TFLOP. Where a rank would need more, fewer of its queries are computed, at least a tile of
    them: the buffers of a ring hold keys."""

    contestants: tuple[str, ...] = tuple(MEMORY)
    """Which implementations to compare."""

    dims: tuple[int, ...] = (768,)
    """Feature sizes D."""

    threads: int = 2
    """Number of torch threads."""

    out: Path = Path("bench-scale")
    """Folder for scale.csv, scale.json and scale.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("worlds", 2), ("check_worlds", 2), ("batches", 1), ("check_batches", 1)):
            for value in getattr(self, name):
                check_count(name, value, least=least)
        check_count("node", self.node, least=1)
        for name in self.contestants:
            check_choice("contestants", name, tuple(MEMORY))
        if not self.budget > 0:
            bad_value("budget", expected="a positive number of TFLOP", got=self.budget, remedy="Leave it out.")
        for batches, worlds in (("batches", "worlds"), ("check_batches", "check_worlds")):
            for n in getattr(self, batches):
                for world in getattr(self, worlds):
                    if n % world:
                        remedy = "All ranks hold the same number of pairs here; choose batches that every P divides."
                        bad_value(batches, expected=f"multiples of {world} ({worlds})", got=n, remedy=remedy)

    @property
    def all_sizes(self) -> list[int]:
        return sorted({*self.batches, *(self.check_batches if self.check_worlds else ())})


class ScaleSeries(Series):
    """One number of ranks and one D: a simulated rank, and formulas."""

    def __init__(self, config: ScaleBenchConfig, world: int, d: int) -> None:
        super().__init__(config, f"P={world} D={d}", config.contestants, MEMORY)
        self.config, self.world, self.d = config, world, d
        if version("inf-cl") == NOT_INSTALLED:
            self.failed["inf_cl"] = f"{NOT_INSTALLED} (inf-cl)"

    def predicted_bytes(self, name: str, n: int) -> float:
        local = n // self.world
        return MEMORY[name](local, n, self.d) + 4 * 4 * local * self.d

    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        if n not in self.config.batches:
            return
        local = n // self.world
        ours: float | None = None
        for name in self.names:
            if name == OVER_NODES and not self._several_nodes():
                continue
            formula = MEMORY[name](local, n, self.d) / MiB
            found = self._simulate(name, n) if name in HOPS and name not in self.failed else {}
            peak = found.get("peak_extra_mib")
            taken = formula if peak is None else peak
            ours = taken if name == OURS else ours
            yield {
                **_place(name, n, self.world, self.d),
                "status": found.get("status", "ok"),
                "how": SIMULATED if peak is not None else FORMULA,
                "peak_extra_mib": peak,
                "formula_mib": formula,
                "hops": found.get("hops"),
                "queries": found.get("queries"),
                "memory_ratio": None if ours is None else taken / ours,
            }

    def _several_nodes(self) -> bool:
        return self.world > self.config.node and self.world % self.config.node == 0

    def _simulate(self, name: str, n: int) -> dict[str, Any]:
        """Measure in a process of its own, with as much work as the budget allows."""
        local, (world, nodes) = n // self.world, HOPS[name]
        per_query = PRODUCTS[name] * 2 * local * self.d * world
        tile = plan_tiles(local, local, self.d).rows
        queries = min(local, max(tile, int(self.config.budget * 1e12 / per_query)))
        if name == "inf_cl" and queries < local:
            return {}
        refusal = self.obstacle(name, n)
        if refusal:
            return {"status": refusal}
        self.notify(f"{name}: a simulated rank at N={n}")
        return _simulated(
            name, local, self.d, hops=world, nodes=nodes, queries=queries, threads=self.config.threads, series=self
        )


class RealSeries(Series):
    """Real ranks at sizes that fit, and for ours a simulated rank of as many."""

    def __init__(self, config: ScaleBenchConfig, world: int, d: int) -> None:
        names = [name for name in config.contestants if name in RING_CONTESTANTS]
        super().__init__(config, f"{world} real ranks D={d}", names, RING_CONTESTANTS)
        self.sizes, self.world, self.d = config.check_batches, world, d
        ring = RingBenchConfig(
            worlds=(world,), batches=(), memory_batches=config.check_batches, contestants=tuple(names), dims=(d,)
        )
        self.ring = RingSeries(ring, world, d)

    def predicted_bytes(self, name: str, n: int) -> float:
        return self.ring.predicted_bytes(name, n)

    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        if n not in self.sizes:
            return
        self.ring.notify = self.notify
        with _freed_memory_returned():
            found = self.ring.measure(n)
        ours = found[OURS].peak_extra_mib if OURS in found else None
        for name, measured in found.items():
            peak = measured.peak_extra_mib
            status = "ok" if measured.status == "memory only" else measured.status
            yield {
                **self._columns(name, n, peak),
                "status": status,
                "how": REAL,
                "memory_ratio": peak / ours if peak and ours else None,
            }
        if OURS in found:
            self.notify(f"a simulated rank of {self.world} at N={n}")
            one = _simulated(
                OURS, n // self.world, self.d, hops=self.world, nodes=1, queries=n // self.world, threads=1, series=self
            )
            peak = one["peak_extra_mib"]
            yield {**self._columns(OURS, n, peak), "status": one["status"], "how": CHECK}

    def _columns(self, name: str, n: int, peak: float | None) -> dict[str, Any]:
        return {
            **_place(name, n, self.world, self.d),
            "peak_extra_mib": peak,
            "formula_mib": MEMORY[name](n // self.world, n, self.d) / MiB,
            "hops": self.world,
            "queries": n // self.world,
        }


def _place(name: str, n: int, world: int, d: int) -> dict[str, Any]:
    place = {"contestant": name, "n": n, "d": d, "dtype": "float32"}
    return {**place, "world": world, "local": n // world, "about": ABOUT[name]}


@contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """In processes started inside, glibc returns a freed tensor at once: what is resident is what is held."""
    name = "MALLOC_MMAP_THRESHOLD_"
    before = os.environ.get(name)
    os.environ[name] = str(MiB)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _simulated(
    name: str, local: int, d: int, *, hops: int, nodes: int, queries: int, threads: int, series: Series
) -> dict[str, Any]:
    """Measure a simulated rank in a process of its own."""
    words = f"--contestant {name} --local {local} --d {d} --world {hops} --nodes {nodes} --queries {queries}"
    command = [sys.executable, "-m", "contratile.bench.scale_point", *words.split(), "--threads", str(threads)]
    timeout = 20 * series.timeout
    failed = {"peak_extra_mib": None, "hops": hops, "queries": queries}
    try:
        with _freed_memory_returned():
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {**failed, "status": f"memory: no result after {timeout:.0f} s"}
    except (IndexError, ValueError):
        return {**failed, "status": f"memory: process ended with code {done.returncode}"}
    return {**found, "hops": hops, "queries": queries}


def _series(config: ScaleBenchConfig) -> Sequence[Series]:
    simulated = [ScaleSeries(config, world, d) for d in config.dims for world in config.worlds]
    return [*simulated, *(RealSeries(config, world, d) for d in config.dims for world in config.check_worlds)]


BENCH = Benchmark(
    kind="scale",
    default=ScaleBenchConfig(),
    quick=ScaleBenchConfig(
        worlds=(8,), batches=(8192, 16384), check_worlds=(), dims=(256,), budget=0.05, threads=1, quick=True
    ),
    series=_series,
    packages=PACKAGES,
)

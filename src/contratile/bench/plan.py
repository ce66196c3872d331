"""`contratile bench plan`: predicted against measured memory and time of real training steps.

    recording = run(BENCH, PlanBenchConfig(), command="...")

Every point of `plan_points.POINTS` runs in a fresh process, or in one per rank. It is predicted twice: from the
definition of its encoders alone, and after two small chunks of them have been run here (`--calibrate`), also in a
fresh process.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from contratile.bench.config import TimedConfig
from contratile.bench.plan_points import POINTS, QUICK, PlanPoint, definition
from contratile.bench.plan_server import PointServer
from contratile.bench.runner import Benchmark, Series
from contratile.errors import check_count
from contratile.planner.cpu_rates import CpuRates, OperatorClock, mapped_from
from contratile.planner.devices import Devices, parse_devices
from contratile.planner.encoder_cost import encoder_cost
from contratile.planner.memory import device_memory
from contratile.planner.step_seconds import step_seconds
from contratile.planner.workload import Line, Offload, Workload, by_name, count_optimizer

MiB = 1 << 20
MODELS = tuple(dict.fromkeys(point.model for point in POINTS))
Allocator = Literal["returning", "default"]


@dataclass(frozen=True, kw_only=True)
class PlanBenchConfig(TimedConfig):
    """Predicted against measured peak memory and seconds of training steps."""

    contestants: tuple[str, ...] = MODELS
    """Which models to run."""

    rounds: int = 1
    """How often each point is run; the largest peak and the best time count."""

    threads: int = torch.get_num_threads()
    """Number of torch threads, divided among the processes of a point."""

    calibrate: bool = False
    """Also predict with a calibration: two small chunks of each model, run here first."""

    allocator: Allocator = "returning"
    """How malloc treats freed tensors: "returning" sets MALLOC_MMAP_THRESHOLD_=65536, so that memory is what tensors
    take; "default" leaves malloc as it is, which keeps part of what was freed."""

    timed: bool = False
    """Also measure seconds: with one thread processor time, otherwise wall time, which needs an idle machine."""

    every: int = 1
    """Run only every n-th point of the list, starting with the first one."""

    patience: float = 600.0
    """Seconds that a point may take."""

    out: Path = Path("bench-plan")
    """Folder for plan.csv, plan.json and plan.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("every", self.every, least=1)

    @property
    def points(self) -> tuple[PlanPoint, ...]:
        found = tuple(point for point in (QUICK if self.quick else POINTS) if point.model in self.contestants)
        return found[:: self.every]

    @property
    def all_sizes(self) -> list[int]:
        return list(range(len(self.points)))


class PlanSeries(Series):
    """All points, in the order of the list. What the runner calls a size is a position in it."""

    def __init__(self, config: PlanBenchConfig) -> None:
        super().__init__(config, "training steps", ("plan",), ("plan",))
        self.config = config
        self.server = PointServer(config.threads, returning=config.allocator == "returning")
        self.calibrations: dict[PlanPoint, Line | None] = {}

    def predicted_bytes(self, name: str, n: int) -> float:
        return 0.0

    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        point, config = self.config.points[n], self.config
        self.notify(f"{point.model}, batch {point.batch}, chunk {point.chunk}: running")
        asked = asdict(point) | {"timed": config.timed}
        found = [self.server.ask(asked, config.patience) for _ in range(config.rounds)]
        good = [one for one in found if "peak" in one]
        devices = self._devices(point)
        work = workload(point)
        columns: dict[str, Any] = {
            **asdict(point),
            "contestant": point.model,
            "n": point.batch,
            "d": work.width,
            "dtype": "float32",
            "status": "ok" if good else str(found[0].get("status", "failed")),
            "allocator": config.allocator,
            "predicted_mib": device_memory(work, devices).peak / MiB,
        }
        columns.pop("model"), columns.pop("batch")
        if good:
            columns["measured_mib"] = max(one["peak"] for one in good) / MiB
        if good and config.timed:
            columns["seconds_best"] = min(one["seconds"] for one in good)
            columns["seconds_median"] = sorted(one["seconds"] for one in good)[len(good) // 2]
            columns["predicted_seconds"] = seconds_at(point, devices, CpuRates(**good[0]["rates"]))
        if config.calibrate:
            known = self._calibration(point)
            if known is not None:
                columns["calibrated_mib"] = device_memory(replace(work, measured=known), devices).peak / MiB
        if n == config.all_sizes[-1]:
            self.server.stop()
        yield columns

    def _calibration(self, point: PlanPoint) -> Line | None:
        """One for all points with the same encoders; None if it failed."""
        key = replace(point, batch=1, chunk=1, offload="none", world=1)
        if key not in self.calibrations:
            self.notify(f"{point.model}: calibrating")
            found = self.server.ask(asdict(key) | {"calibrate": True}, self.config.patience)
            self.calibrations[key] = Line(**found["memory"]) if "memory" in found else None
        return self.calibrations[key]

    def _devices(self, point: PlanPoint) -> Devices:
        found = parse_devices(f"{point.world}xcpu", memory=1e12)
        return replace(found, keeps_freed=self.config.allocator == "default")


def workload(point: PlanPoint, clock: OperatorClock | None = None) -> Workload:
    """A point by definition; its seconds too, if there is a clock."""
    sides = definition(point)
    every = sides[:1] if sides[0].module is sides[1].module else sides
    costs = [encoder_cost(side.module, side.inputs, rows=(point.chunk, point.chunk), clock=clock) for side in every]
    place: Offload = point.offload  # type: ignore[assignment]  # one of its values
    return Workload(
        batch=point.batch,
        chunk=min(point.chunk, point.batch // point.world),
        ranks=point.world,
        offload=place,
        sides=(costs[0], costs[-1]),
        optimizer=count_optimizer([side.module for side in sides], by_name("adamw"), "adamw", clock),
    )


def seconds_at(point: PlanPoint, devices: Devices, rates: CpuRates) -> float:
    """Seconds of a step at the rates of the process that ran it."""
    here = replace(devices, cpu=rates, flops=rates.flops, bandwidth=rates.bandwidth)
    clock = OperatorClock(rates, rates.flops["fp32"], mapped_from=mapped_from(devices.keeps_freed))
    return step_seconds(workload(point, clock), here).seconds


BENCH = Benchmark(
    kind="plan",
    default=PlanBenchConfig(),
    quick=PlanBenchConfig(quick=True),
    series=lambda config: [PlanSeries(config)],
    packages=("transformers", "sentence-transformers"),
)

"""`contratile bench plan`: predicted against measured memory and time of real training steps.

    recording = run(BENCH, PlanBenchConfig(), command="...")

Every point of `plan_points.POINTS` runs in a fresh process, or in one per rank. It is predicted twice: from the
definition of its encoders alone, and after two small chunks of them have been run here (`--calibrate`), also in a
fresh process.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from contratile.bench.config import BenchConfig
from contratile.bench.plan_points import POINTS, QUICK, Point, definition
from contratile.bench.runner import Benchmark, Series
from contratile.planner.devices import Devices, parse_devices
from contratile.planner.encoder_cost import encoder_cost
from contratile.planner.memory import device_memory
from contratile.planner.step_seconds import step_seconds
from contratile.planner.workload import Line, Offload, Workload, by_name, count_optimizer

MiB = 1 << 20
MODELS = tuple(dict.fromkeys(point.model for point in POINTS))


@dataclass(frozen=True, kw_only=True)
class PlanBenchConfig(BenchConfig):
    """Predicted against measured peak memory and seconds of training steps."""

    contestants: tuple[str, ...] = MODELS
    """Which models to run."""

    rounds: int = 1
    """How often each point is run; the largest peak and the best time count."""

    threads: int = torch.get_num_threads()
    """Number of torch threads, divided among the processes of a point."""

    calibrate: bool = False
    """Also predict with a calibration: two small chunks of each model, run here first."""

    jobs: int = 1
    """Points that run at the same time. With more than one, seconds are not recorded."""

    patience: float = 600.0
    """Seconds that a point may take."""

    out: Path = Path("bench-plan")
    """Folder for plan.csv, plan.json and plan.png."""

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(point for point in (QUICK if self.quick else POINTS) if point.model in self.contestants)

    @property
    def all_sizes(self) -> list[int]:
        return list(range(len(self.points)))


class PlanSeries(Series):
    """All points, in the order of the list. What the runner calls a size is a position in it."""

    def __init__(self, config: PlanBenchConfig) -> None:
        super().__init__(config, "training steps", ("plan",), ("plan",))
        self.config = config
        self.ahead: dict[Point, Future[list[dict[str, Any]]]] = {}
        self.calibrations: dict[Point, Line] = {}

    def start(self) -> None:
        """With several jobs, points run ahead of their rows."""
        if self.config.jobs > 1:
            pool = ThreadPoolExecutor(self.config.jobs)
            self.ahead = {point: pool.submit(self._run, point) for point in self.config.points}

    def _run(self, point: Point) -> list[dict[str, Any]]:
        config = self.config
        return [run_point(point, config.threads, config.patience) for _ in range(config.rounds)]

    def predicted_bytes(self, name: str, n: int) -> float:
        return 0.0

    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        point, config = self.config.points[n], self.config
        self.notify(f"{point.model}, batch {point.batch}, chunk {point.chunk}: running")
        found = self.ahead[point].result() if point in self.ahead else self._run(point)
        good = [one for one in found if "peak" in one]
        status = "ok" if good else str(found[0].get("status", "failed"))
        work, seconds = predict(point, good[0] if good else None)
        columns: dict[str, Any] = {
            **asdict(point),
            "contestant": point.model,
            "n": point.batch,
            "d": work.width,
            "dtype": "float32",
            "status": status,
            "predicted_mib": device_memory(work, _devices(point)).peak / MiB,
            "predicted_seconds": seconds,
        }
        columns.pop("model"), columns.pop("batch")
        if good:
            columns["measured_mib"] = max(one["peak"] for one in good) / MiB
        if good and config.jobs == 1:
            columns["seconds_best"] = min(one["seconds"] for one in good)
            columns["seconds_median"] = sorted(one["seconds"] for one in good)[len(good) // 2]
        if config.calibrate:
            known = self._calibration(point)
            columns["calibrated_mib"] = device_memory(replace(work, measured=known), _devices(point)).peak / MiB
        yield columns

    def _calibration(self, point: Point) -> Line:
        """One for all points with the same encoders."""
        key = replace(point, batch=1, chunk=1, offload="none", world=1)
        if key not in self.calibrations:
            self.notify(f"{point.model}: calibrating")
            found = _process([json.dumps(asdict(key)), "--calibrate"], {}, self.config.patience, self.config.threads)
            self.calibrations[key] = Line(**found["memory"])
        return self.calibrations[key]


def _devices(point: Point) -> Devices:
    return parse_devices(f"{point.world}xcpu", memory=1e12)


def predict(point: Point, rates: dict[str, Any] | None) -> tuple[Workload, float]:
    """A point by definition: the step, and its seconds at the rates of the process that ran it."""
    sides = definition(point)
    rows = (max(1, point.chunk // 2), point.chunk)
    every = sides[:1] if sides[0].module is sides[1].module else sides
    costs = [encoder_cost(side.module, side.inputs, rows=rows) for side in every]
    place: Offload = point.offload  # type: ignore[assignment]  # one of its values
    work = Workload(
        batch=point.batch,
        chunk=min(point.chunk, point.batch // point.world),
        ranks=point.world,
        offload=place,
        sides=(costs[0], costs[-1]),
        optimizer=count_optimizer([side.module for side in sides], by_name("adamw"), "adamw"),
    )
    devices = _devices(point)
    if rates is not None:
        flops = dict.fromkeys(devices.flops, rates["flops"])
        devices = replace(devices, flops=flops, bandwidth=rates["bandwidth"])
    return work, step_seconds(work, devices).seconds


def run_point(point: Point, threads: int, timeout: float) -> dict[str, Any]:
    """Run a point in fresh processes, one per rank."""
    words = [json.dumps(asdict(point))]
    if point.world == 1:
        return _process(words, {}, timeout, threads)
    share = max(1, threads // point.world)
    with tempfile.TemporaryDirectory() as folder:
        shared = {"CONTRATILE_STORE": f"{folder}/store"}
        others = [
            subprocess.Popen(
                _command(words, share), env={**os.environ, **shared, "RANK": str(rank)}, stderr=subprocess.DEVNULL
            )
            for rank in range(1, point.world)
        ]
        try:
            return _process(words, {**shared, "RANK": "0"}, timeout, share)
        finally:
            for other in others:
                try:
                    other.wait(30)
                except subprocess.TimeoutExpired:
                    other.kill()


def _command(words: list[str], threads: int) -> list[str]:
    return [sys.executable, "-m", "contratile.bench.plan_point", *words, "--threads", str(threads)]


def _process(words: list[str], extra: dict[str, str], timeout: float, threads: int) -> dict[str, Any]:
    environment = {**os.environ, **extra, "OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(
            _command(words, threads), env=environment, capture_output=True, text=True, timeout=timeout
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return {"status": f"failed: no result after {timeout:.0f} s"}
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"status": f"failed: {last[:150]}"}


BENCH = Benchmark(
    kind="plan",
    default=PlanBenchConfig(),
    quick=PlanBenchConfig(quick=True),
    series=lambda config: [PlanSeries(config)],
    packages=("transformers", "sentence-transformers"),
)

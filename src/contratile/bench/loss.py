"""`contratile bench loss`: time, memory and accuracy of the symmetric loss in one process.

    recording = run(BENCH, LossBenchConfig(sizes=(1024, 2048), dims=(256,)), command="...")

`LossSeries` measures any case at one D; `family` uses it for the other losses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from contratile.bench.clock import Clock, Step, clock_for
from contratile.bench.config import LocalConfig, check_positive_scale
from contratile.bench.contestants import packages_of
from contratile.bench.contestants.loss import CLIP, DTYPES, LOSS_CONTESTANTS, Case, LossProblem, LossStep
from contratile.bench.harness import GemmLimit, describe, quiet
from contratile.bench.runner import Benchmark, LocalSeries, Measured
from contratile.errors import check_choice

EXACT_UP_TO = 2048
"""Errors are measured at the size itself up to here, and at SAMPLE beyond, because the fp64 oracle is dense."""
SAMPLE = 1024
NEEDS_CUDA = "needs a CUDA device (--device cuda)"


@dataclass(frozen=True, kw_only=True)
class LossBenchConfig(LocalConfig):
    """Time, memory and accuracy of the symmetric contrastive loss, forward and backward, against other packages."""

    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Batch sizes N to time."""

    memory_sizes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    """Batch sizes N to measure peak memory at; may be larger than those that are timed."""

    contestants: tuple[str, ...] = tuple(LOSS_CONTESTANTS)
    """Which implementations to compare. One whose package is not installed gets a row that says so."""

    rounds: int = 5
    """How often each contestant is timed at each size; the best and the median are reported."""

    scale: float = 14.3
    """Factor on the scores (the inverse temperature)."""

    device: str = "cpu"
    """Where the losses run: `cpu`, or a CUDA or ROCm device such as `cuda:0`."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the features of all contestants, except those that are named after one."""

    threads: int = torch.get_num_threads()
    """Number of torch threads."""

    out: Path = Path("bench-loss")
    """Folder for loss.csv, loss.json, loss_memory.png and loss_time.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive_scale(self.scale)
        check_choice("dtype", self.dtype, DTYPES)
        self.clock()  # refuses a device that is not here

    def clock(self) -> Clock:
        return clock_for(self.device)


class Errors(NamedTuple):
    """Relative errors against fp64 on a problem of n pairs."""

    value: float
    grad: float
    n: int


Problems = Callable[[torch.dtype], LossProblem]


class LossSeries(LocalSeries[Problems]):
    """The contestants of a case at one D."""

    def __init__(self, config: LossBenchConfig, case: Case, names: tuple[str, ...], d: int) -> None:
        place = f"D={d}" if case is CLIP else f"{case.name}, D={d}"
        super().__init__(config, place, names, case.contestants)
        self.case, self.d, self.scale, self.threads = case, d, config.scale, config.threads
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        if self.clock.device.type != "cuda":
            known = [case.contestants[name] for name in names if name in case.contestants]
            self.failed |= {contestant.name: NEEDS_CUDA for contestant in known if contestant.needs_cuda}
        self.steps: dict[str, LossStep] = {}
        self.errors: dict[tuple[str, int], Errors] = {}

    def start(self) -> None:
        for name in self.names:
            if name in self.failed:
                continue
            self.notify(f"loading {name}")
            try:
                with quiet():
                    self.steps[name] = self.case.contestants[name].load()
            except Exception as error:
                self.failed[name] = describe(error)

    def predicted_bytes(self, name: str, n: int) -> float:
        return self.case.contestants[name].predicted_bytes(n, self.d)

    def shared(self, n: int) -> Problems:
        return cache(lambda dtype: self.problem(n, dtype))

    def problem(self, n: int, dtype: torch.dtype) -> LossProblem:
        return self.case.problem(n, self.d, scale=self.scale, dtype=dtype, device=self.clock.device)

    def dtype_of(self, name: str) -> torch.dtype:
        return self.case.contestants[name].dtype or self.dtype

    def step(self, name: str, n: int, shared: Problems) -> Step:
        self.check(name, _checked_at(n))
        step = shared(self.dtype_of(name)).bind(self.steps[name])
        step()
        return step

    def limit(self, n: int, shared: Problems) -> Step | Mapping[str, Step]:
        case, device = self.case, self.clock.device
        beside = case.beside_products, case.beside_d(self.d)
        make = partial(GemmLimit, case.views * n, self.d, products=case.products, beside=beside, device=device)
        if device.type == "cpu":
            return make()
        by_dtype = cache(lambda dtype: make(dtype=dtype))
        return {name: by_dtype(self.dtype_of(name)) for name in self.names if name in self.case.contestants}

    def check(self, name: str, n: int) -> None:
        """Measure the errors of a contestant against fp64, once per size."""
        if (name, n) in self.errors:
            return
        contestant = self.case.contestants[name]
        problem = self.problem(n, self.dtype_of(name))
        exact = problem.double()
        value = self.steps[name](*problem.args)
        truth = (contestant.oracle or self.case.oracle)(*exact.args)
        truth.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        pairs = ((got.grad, true.grad) for got, true in zip(problem.features, exact.features, strict=True))
        grad = max(_relative(got, true) for got, true in pairs if got is not None and true is not None)
        self.errors[name, n] = Errors(_relative(value, truth.detach()), grad, n)

    def memory_words(self, name: str, n: int) -> list[str]:
        what = f"loss --case {self.case.name} --contestant {name} --n {n} --d {self.d}"
        how = f"--device {self.clock.device} --dtype {str(self.dtype).removeprefix('torch.')}"
        return f"{what} --scale {self.scale} --threads {self.threads} {how}".split()

    def columns(self, name: str, n: int, measured: Measured) -> dict[str, Any]:
        known = self.case.contestants.get(name)
        errors = self.errors.get((name, _checked_at(n))) if n in self.sizes else None
        return {
            "d": self.d,
            "dtype": str(known.dtype or self.dtype).removeprefix("torch.") if known else "",
            "error_value": errors.value if errors else None,
            "error_grad": errors.grad if errors else None,
            "error_n": errors.n if errors else None,
        }


def _checked_at(n: int) -> int:
    return n if n <= EXACT_UP_TO else SAMPLE


def _relative(got: Tensor, true: Tensor) -> float:
    return ((got.double() - true).abs().max() / true.abs().max()).item()


BENCH = Benchmark(
    kind="loss",
    default=LossBenchConfig(),
    quick=LossBenchConfig(
        sizes=(1024, 2048, 4096),
        memory_sizes=(1024, 4096, 16384),
        dims=(256,),
        contestants=("contratile", "contratile_cached", "dense", "open_clip"),
        rounds=3,
        patience=10.0,
        quick=True,
    ),
    series=lambda config: [LossSeries(config, CLIP, config.contestants, d) for d in config.dims],
    packages=packages_of(LOSS_CONTESTANTS.values()),
)

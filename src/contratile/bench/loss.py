"""The run: time, memory and errors of every contestant at every size.

    recording = run(LossConfig(sizes=(1024, 2048), dims=(256,)), command="...")
    save(recording, config.out)

`measure` does it for any case; `run` for that of the symmetric loss.

A contestant that is not installed, fails, would take too long or does not fit becomes a row that says so.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.bench import memory
from contratile.bench.config import BenchConfig
from contratile.bench.contestants.loss import CLIP, CONTESTANTS, Case, Problem, Step, packages, quiet
from contratile.bench.harness import GemmLimit, Notify, Timing, describe, environment, interleave, unknown
from contratile.bench.rows import LossRow, Recording, provenance
from contratile.errors import check_count

EXACT_UP_TO = 2048
"""Errors are taken at the size itself up to here, and at SAMPLE beyond: the fp64 oracle is dense."""
SAMPLE = 1024


@dataclass(frozen=True, kw_only=True)
class LossConfig(BenchConfig):
    """Time, memory and accuracy of the symmetric contrastive loss, forward and backward, against other packages."""

    sizes: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Batch sizes N to time."""

    memory_sizes: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    """Batch sizes N whose peak memory is measured; may go beyond those that are timed."""

    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    """Who takes part. Packages that are not installed get a row that says so."""

    rounds: int = 5
    """Turns of each contestant at each size; the best and the median are reported."""

    threads: int = torch.get_num_threads()
    """Threads of torch."""

    out: Path = Path("bench-loss")
    """Folder for loss.csv, loss.json, loss_memory.png and loss_time.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("sizes", self.sizes), ("memory_sizes", self.memory_sizes)):
            for value in values:
                check_count(name, value, least=1)

    @property
    def all_sizes(self) -> list[int]:
        """Timed or measured for memory, ascending."""
        return sorted({*self.sizes, *self.memory_sizes})


QUICK = LossConfig(
    sizes=(1024, 2048, 4096),
    memory_sizes=(1024, 4096, 16384),
    dims=(256,),
    contestants=("contratile", "contratile_cached", "dense", "open_clip"),
    rounds=3,
    patience=10.0,
    quick=True,
)


class Errors(NamedTuple):
    """Relative errors against fp64 on a problem of n pairs."""

    value: float
    grad: float
    n: int


def run(
    config: LossConfig,
    *,
    command: str,
    notify: Notify = lambda text: None,
    keep: Callable[[Recording[LossRow]], object] = lambda recording: None,
) -> Recording[LossRow]:
    """Measure everything that the config asks for; `keep` is given all rows whenever there are more."""
    torch.set_num_threads(config.threads)
    facts = environment(packages(CLIP))
    rows: list[LossRow] = []
    total = len(config.dims) * len(config.all_sizes) * len(config.contestants)

    def progress(text: str) -> None:
        notify(f"{len(rows)} of {total} rows done · {text}")

    for row in measure(CLIP, config, config.contestants, facts, command, progress):
        rows.append(row)
        keep(Recording(tuple(rows), facts, command))
    return Recording(tuple(rows), facts, command)


def measure(
    case: Case,
    config: LossConfig,
    contestants: Sequence[str],
    facts: dict[str, str],
    command: str,
    notify: Notify,
) -> Iterator[LossRow]:
    """The rows of one case, at every D and N."""
    for d in config.dims:
        bench = _Dimension(case, config, contestants, d, notify)
        for n in config.all_sizes:
            timed = bench.time(n) if n in config.sizes else {}
            for name in contestants:
                yield _row(config, bench, name, n, timed, facts, command)


class _Dimension:
    """The contestants of a case at one D, and what is learned about them from size to size."""

    def __init__(self, case: Case, config: LossConfig, contestants: Sequence[str], d: int, notify: Notify) -> None:
        self.case, self.config, self.d = case, config, d
        self.notify: Notify = lambda text: notify(f"{case.name}: {text}" if case is not CLIP else text)
        self.steps: dict[str, Step] = {}
        self.failed: dict[str, str] = {}
        self.pace: dict[str, float] = {}  # seconds per pair of rows
        self.errors: dict[tuple[str, int], Errors] = {}
        for name in contestants:
            if name not in case.contestants:
                self.failed[name] = unknown(case.contestants)
                continue
            self.notify(f"loading {name}")
            try:
                with quiet():
                    self.steps[name] = case.contestants[name].load()
            except Exception as error:
                self.failed[name] = describe(error)

    def obstacle(self, name: str, n: int) -> str | None:
        """Why this contestant cannot run at this size, if so."""
        if name in self.failed:
            return self.failed[name]
        expected = self.pace.get(name, 0.0) * n * n
        if expected > self.config.patience:
            return f"skipped (a step would take about {expected:.0f} s)"
        return memory.no_room(self.case.contestants[name].predicted_bytes(n, self.d))

    def time(self, n: int) -> dict[str, Timing]:
        """Errors, a warm-up, then the rounds."""
        runs: dict[str, Callable[[], object]] = {}
        problems: dict[torch.dtype, Problem] = {}
        for name in self.steps:
            if self.obstacle(name, n):
                continue
            try:
                with quiet():
                    self.notify(f"{name}: errors against fp64")
                    self._check(name, n if n <= EXACT_UP_TO else SAMPLE)
                    self.notify(f"{name}: warm-up at N={n} D={self.d}")
                    dtype = self.case.contestants[name].dtype
                    if dtype not in problems:
                        problems[dtype] = self._problem(n, dtype)
                    runs[name] = problems[dtype].bind(self.steps[name])
                    runs[name]()
            except Exception as error:
                runs.pop(name, None)
                self.failed[name] = describe(error)
        limit = GemmLimit(self.case.views * n, self.d, products=self.case.products)
        where = f" at N={n} D={self.d}"
        timings = interleave(runs, limit, rounds=self.config.rounds, notify=lambda text: self.notify(text + where))
        for name, timing in timings.items():
            if timing.failure:
                self.failed[name] = timing.failure
            else:
                self.pace[name] = timing.best / n**2
        return timings

    def _problem(self, n: int, dtype: torch.dtype) -> Problem:
        return self.case.problem(n, self.d, scale=self.config.scale, dtype=dtype)

    def _check(self, name: str, n: int) -> None:
        if (name, n) in self.errors:
            return
        contestant = self.case.contestants[name]
        problem = self._problem(n, contestant.dtype)
        exact = problem.double()
        value = self.steps[name](*problem.args)
        truth = (contestant.oracle or self.case.oracle)(*exact.args)
        truth.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        pairs = ((got.grad, true.grad) for got, true in zip(problem.features, exact.features, strict=True))
        grad = max(_relative(got, true) for got, true in pairs if got is not None and true is not None)
        self.errors[name, n] = Errors(_relative(value, truth.detach()), grad, n)


def _relative(got: Tensor, true: Tensor) -> float:
    return ((got.double() - true).abs().max() / true.abs().max()).item()


def _row(
    config: LossConfig,
    bench: _Dimension,
    name: str,
    n: int,
    timed: dict[str, Timing],
    facts: dict[str, str],
    command: str,
) -> LossRow:
    timing, known = timed.get(name), bench.case.contestants
    done = timing if timing is not None and timing.steps else None
    obstacle = bench.failed.get(name) if done else bench.obstacle(name, n)
    status = obstacle or ("ok" if n in config.sizes else "memory only")
    peak = memory.Peak(status)
    if n in config.memory_sizes and obstacle is None:
        bench.notify(f"{name}: peak memory at N={n} D={bench.d}, in a process of its own")
        patience = 120 + 10 * config.patience  # it imports and compiles for itself
        peak = memory.measure(
            bench.case, name, n, bench.d, scale=config.scale, threads=config.threads, timeout=patience
        )
        status = status if peak.status == "ok" else peak.status
    ours = timed.get("contratile")
    errors = bench.errors.get((name, n if n <= EXACT_UP_TO else SAMPLE)) if n in config.sizes else None
    return LossRow(
        contestant=name,
        n=n,
        d=bench.d,
        dtype=str(known[name].dtype).removeprefix("torch.") if name in known else "",
        status=status,
        seconds_best=done.best if done else None,
        seconds_median=done.median if done else None,
        limit_seconds=done.limit if done else None,
        percent_of_limit=done.percent_of_limit if done else None,
        ratio_to_contratile=done.best / ours.best if done and ours and ours.steps else None,
        peak_extra_mib=peak.mib,
        error_value=errors.value if errors else None,
        error_grad=errors.grad if errors else None,
        error_n=errors.n if errors else None,
        **provenance(facts, command),
    )

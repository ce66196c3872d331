"""Measuring: interleaved rounds, the limit they are compared with, and the facts of the machine.

    limit = GemmLimit(n, d)
    timings = interleave({"dense": step_1, "contratile": step_2}, limit, rounds=5)
    timings["dense"].best, timings["dense"].percent_of_limit

Other users of a machine slow it down for seconds at a time. So contestants take turns, every turn of a contestant
is preceded by one of the limit, which does the same work as plain matrix products, and the best turns are compared:
a contestant's with the best of all turns of the limit at that size.
"""

import gc
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median

import torch

import contratile
from contratile.host_memory import memory_bytes

GiB = 1 << 30
PRODUCTS = 4
"""Matrix products of 2 N^2 D flops in one step that keeps no scores: one forward, three backward."""

CALLS, TURN = 5, 0.1
"""A turn is up to this many calls while they take less than so many seconds: one short call tells of the scheduler."""

Step = Callable[[], object]
Clock = Callable[[Step], float]
Notify = Callable[[str], None]


class GemmLimit:
    """The matrix products of a step, by default four, N rows against M columns (default: N), and nothing else.

    They are done in blocks of up to 4096 x 4096 x D.
    """

    EDGE = 4096

    def __init__(self, n: int, d: int, m: int | None = None, *, products: int = PRODUCTS) -> None:
        self.products = products
        self.rows, self.cols = ([min(self.EDGE, x - at) for at in range(0, x, self.EDGE)] for x in (n, m or n))
        self.a = torch.randn(self.rows[0], d)
        self.b = torch.randn(self.cols[0], d)
        self.out = torch.empty(self.rows[0] * self.cols[0])

    def __call__(self) -> None:
        for _ in range(self.products):
            for rows in self.rows:
                for cols in self.cols:
                    out = self.out[: rows * cols].view(rows, cols)
                    torch.mm(self.a[:rows], self.b[:cols].t(), out=out)


@dataclass(kw_only=True)
class Timing:
    """The seconds of a contestant's turns, and those of the limit before everybody's turns at the same size."""

    steps: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def best(self) -> float:
        return min(self.steps)

    @property
    def median(self) -> float:
        return median(self.steps)

    @property
    def limit(self) -> float:
        return min(self.limits)

    @property
    def percent_of_limit(self) -> float:
        return 100 * self.limit / self.best


def wall_time(step: Step) -> float:
    """Seconds of one call in this process."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def turn(step: Step, clock: Clock = wall_time) -> list[float]:
    """Times of calls on a heap without garbage: one call, or a few if it is short."""
    gc.collect()
    times: list[float] = []
    while not times or (len(times) < CALLS and sum(times) < TURN):
        times.append(clock(step))
    return times


def interleave(
    steps: Mapping[str, Step],
    limit: Step,
    *,
    rounds: int,
    clock: Clock = wall_time,
    notify: Notify = lambda text: None,
) -> dict[str, Timing]:
    """Rounds in which every contestant has one turn. One that fails is out, with its reason."""
    limits: list[float] = []  # shared: the best of all is the limit of this size
    timings = {name: Timing(limits=limits) for name in steps}
    limit()  # the first call of all pays for threads and page faults
    for number in range(1, rounds + 1):
        for name, step in steps.items():
            timing = timings[name]
            if timing.failure:
                continue
            notify(f"{name}, round {number} of {rounds}")
            limits += turn(limit, clock)
            try:
                timing.steps += turn(step, clock)
            except Exception as error:
                timing.failure = describe(error)
    return timings


def describe(error: BaseException) -> str:
    """An exception as the status of a row."""
    text = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"not installed ({text[:100]})"
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return "out of memory"
    return f"failed: {type(error).__name__}: {text[:150]}"


def unknown(contestants: Iterable[str]) -> str:
    """The status of a name that is none of them."""
    return f"unknown contestant (there are {', '.join(contestants)})"


def environment(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """What a number means nothing without. `packages` are distributions whose versions are recorded."""
    facts = {
        "contratile": contratile.__version__,
        "commit": commit(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "memory_gib": f"{memory_bytes('MemTotal') / GiB:.1f}",
        "system": f"{platform.system()} {platform.machine()}",
    }
    return facts | {f"version_{name}": version(name) for name in packages}


def version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit of the sources that run, with a plus sign if they differ from it; `unknown` outside a checkout."""
    here = Path(contratile.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=True).stdout

    try:
        # An installed copy may lie inside somebody else's repository, which does not track it.
        git("ls-files", "--error-unmatch", "__init__.py")
        changed = git("status", "--porcelain", "--", ".").strip()
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    """The processor as it calls itself, and the cores of it that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # no /proc, or a processor family that names itself otherwise
    return f"{name}, {cores} core{'s' if cores > 1 else ''}"

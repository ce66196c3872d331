"""Time and peak memory of a step, for the examples that compare two packages.

    print_table("8192 pairs", {"open_clip": step_1, "contratile": step_2})

Numbers worth recording come from `contratile bench`, which measures every point in a process of its own.
"""

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

ROUNDS = 3
Step = Callable[[], object]


class Cost(NamedTuple):
    seconds: float
    mib: float
    """Peak resident memory minus resident memory before; nan where the system is not Linux."""


def cost(step: Step) -> Cost:
    """Measure one call."""
    before = _restart_peak()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return Cost(seconds, (_status("VmHWM") - before) / (1 << 20))


def print_table(title: str, steps: Mapping[str, Step], *, verbose: bool = True) -> None:
    """Run the steps in turns and print the best time and the memory of each.

    Steps may be collective: every rank calls this with the same steps, and one of them is verbose.
    """
    turns = [{name: cost(step) for name, step in steps.items()} for _ in range(ROUNDS)]
    if verbose:
        print(f"{title:<32}{'ms':>10}{'peak MiB':>12}")
        for name in steps:
            best = Cost(*map(min, zip(*(turn[name] for turn in turns), strict=True)))
            print(f"{name:<32}{best.seconds * 1e3:>10.1f}{best.mib:>12.1f}")


def _restart_peak() -> float:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)  # so that the step cannot reuse memory that was freed before
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return float("nan")
    return _status("VmRSS")


def _status(entry: str) -> float:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith(entry)), float("nan"))

"""Host memory as Linux tells it: what is free, what is resident, and the peak of a piece of work.

peak_growth(lambda: step())        # bytes; None where there is no resettable high-water mark
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def memory_bytes(entry: str) -> int:
    """An entry of /proc/meminfo (MemTotal, MemAvailable) in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(entry + ":"))
    except (OSError, StopIteration):
        return 0


def available_bytes() -> int:
    """What this process may still ask for: of the machine, and of its container if that has a limit."""
    available = memory_bytes("MemAvailable")
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return available if limit == "max" else min(available, int(limit) - int(used))
    except OSError:
        return available


def status_bytes(entry: str) -> int:
    """An entry of /proc/self/status: VmRSS is what is resident, VmHWM its high-water mark."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(entry + ":"))


def trim() -> None:
    """Give freed memory back, so that later work cannot hide its own in it."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc


def peak_growth(work: Callable[[], object]) -> int | None:
    """Resident memory at its highest during some work, beyond what was resident before; None if Linux is missing."""
    trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
    except OSError:
        return None
    work()
    return status_bytes("VmHWM") - before

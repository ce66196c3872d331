"""Host memory as reported by Linux: available, resident, and the peak during a call.

peak_growth(lambda: step())        # bytes; None on other systems
"""

import ctypes
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")

RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
"""Environment with which freed tensors go back to the system at once. glibc reads it when a process starts."""
_SMALL = 1 << 20
"""A threshold in bytes that is small compared with the tensors of a training step."""


def memory_bytes(entry: str) -> int:
    """An entry of /proc/meminfo (MemTotal, MemAvailable) in bytes; 0 on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(entry + ":"))
    except (OSError, StopIteration):
        return 0


def available_bytes() -> int:
    """Memory that this process may still allocate: what the machine has left, or its container if that is less."""
    available = memory_bytes("MemAvailable")
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return available if limit == "max" else min(available, int(limit) - int(used))
    except OSError:
        return available


def status_bytes(entry: str) -> int:
    """An entry of /proc/self/status in bytes: VmRSS is resident memory, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(entry + ":"))


def trim() -> None:
    """Return freed memory to the system, so that later allocations show up in the resident memory."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass  # not glibc


def returns_freed(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether glibc was told to give large blocks back when they are freed, instead of keeping them for later."""
    (name,) = RETURNING
    told = environment.get(name, "")
    return told.isdigit() and int(told) <= _SMALL


def restart_peak() -> int | None:
    """Let VmHWM start from now; returns resident memory in bytes, or None on other systems."""
    trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return status_bytes("VmRSS")
    except OSError:
        return None


def peak_growth(work: Callable[[], object]) -> int | None:
    """Peak resident memory during `work()` minus resident memory before it, in bytes; None on other systems."""
    before = restart_peak()
    if before is None:
        return None
    work()
    return status_bytes("VmHWM") - before

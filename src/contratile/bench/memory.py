"""Peak memory of one step, measured in a process of its own.

    point(["loss", "--contestant", "dense", "--n", "4096", "--d", "512"], timeout=60).mib

The process is `contratile.bench.memory_point`. Measured is the peak of resident memory during the step, minus what was
resident before it (inputs included), minus the gradients it returns. Linux only: it needs the resettable high-water
mark in /proc/self. On a GPU it is the peak of PyTorch's allocator, on any system.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from contratile.bench.clock import Clock, CpuClock, Step
from contratile.host_memory import memory_bytes, status_bytes
from contratile.machine import GiB

MiB = 1 << 20
USABLE = 0.9
"""Share of the available memory that a step may use."""
KILLED = "out of memory (killed by the system)"


class Peak(NamedTuple):
    """The result of a memory measurement."""

    status: str
    mib: float | None = None


def point(words: Sequence[str], *, timeout: float) -> Peak:
    """Measure in a fresh process; `words` are the arguments of `contratile.bench.memory_point`."""
    command = [sys.executable, "-m", "contratile.bench.memory_point", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Peak(f"memory: no result after {timeout:.0f} s")
    if done.returncode == -9:
        return Peak(KILLED)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Peak(f"memory: process ended with code {done.returncode}")
    return Peak(answer["status"], answer["peak_extra_mib"])


def no_room(needed: float, clock: Clock) -> str | None:
    """Return the status of a step that needs more bytes than the device has, or None if it fits."""
    available = clock.available()
    if available and needed > USABLE * available:
        return f"out of memory (predicted {needed / GiB:.1f} GiB)"
    return None


def extra_peak(step: Step, leaves: Sequence[Tensor], *, processes: int = 1, clock: Clock | None = None) -> Peak:
    """Measure one step in this process.

    Args:
        step: Forward and backward.
        leaves: Tensors whose gradients the step returns; those are not counted.
        processes: How many such steps run at the same time and share the machine's memory.
        clock: The clock of the device; by default the CPU's.

    Returns:
        The peak beyond inputs and gradients.
    """
    clock = clock or CpuClock()
    if clock.device.type == "cpu":
        _limit_address_space(processes)
    growth = clock.peak_growth(step)
    if growth is None:
        return Peak("memory: needs a writable /proc/self/clear_refs (Linux)")
    gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    return Peak("ok", max(0.0, (growth - gradients) / MiB))


def _limit_address_space(processes: int) -> None:
    """Make a step that needs too much memory raise, before the system kills other processes."""
    try:
        import resource

        ceiling = status_bytes("VmSize") + int(USABLE * memory_bytes("MemAvailable") / processes)
    except (ImportError, OSError):
        return  # not Linux
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or ceiling < hard:
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))

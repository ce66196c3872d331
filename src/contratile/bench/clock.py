"""Time and memory of a step: wall clock and resident memory on a CPU, events and the allocator on a GPU.

    clock = clock_for("cuda:0")
    clock.seconds(step), clock.peak_growth(step), clock.available()

Both clocks answer the same questions, so that benchmarks are written once.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from contratile.errors import bad_value
from contratile.host_memory import memory_bytes, peak_growth

Step = Callable[[], object]
"""What is timed: forward and backward, without arguments."""


class Clock(Protocol):
    """What benchmarks ask of a device."""

    device: torch.device

    @property
    def name(self) -> str:
        """The device as it is recorded."""

    def seconds(self, step: Step) -> float:
        """Run a step and return its time."""

    def peak_growth(self, step: Step) -> int | None:
        """Run a step and return by how many bytes its peak exceeds what was in use before; None if unknown."""

    def available(self) -> int:
        """Return the bytes that a step may use; 0 if unknown."""


def wall_time(step: Step) -> float:
    """Return the seconds that one call takes in this process."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


class CpuClock:
    """Wall clock, and resident memory of this process."""

    device = torch.device("cpu")

    @property
    def name(self) -> str:
        return "cpu"

    def seconds(self, step: Step) -> float:
        return wall_time(step)

    def peak_growth(self, step: Step) -> int | None:
        return peak_growth(step)

    def available(self) -> int:
        return memory_bytes("MemAvailable")


class CudaClock:
    """Events on the current stream, and what PyTorch's allocator hands out.

    The time runs from the first kernel of a step to its last, launch gaps included. Memory outside the allocator
    (the CUDA context, workspaces of libraries) is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    @property
    def name(self) -> str:
        return f"{self.device}: {torch.cuda.get_device_name(self.device)}"

    def seconds(self, step: Step) -> float:
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            make: Callable[..., Any] = torch.cuda.Event  # torch leaves it unannotated
            start, end = make(enable_timing=True), make(enable_timing=True)
            start.record()
            step()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3

    def peak_growth(self, step: Step) -> int | None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        step()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_allocated(self.device)) - int(before)

    def available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved, used = torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
        return int(free) + int(reserved) - int(used)


def clock_for(device: str | torch.device) -> Clock:
    """Return the clock of a device.

    Raises:
        ValueError: If torch has no such device here, or it is neither a CPU nor a CUDA or ROCm device.
    """
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    try:
        asked = torch.device(device)
    except RuntimeError:
        asked = None
    if asked is not None and asked.type == "cpu":
        return CpuClock()
    if asked is None or asked.type != "cuda" or f"cuda:{asked.index or 0}" not in here:
        remedy = "Check torch.cuda.is_available(), or leave --device out." if len(here) == 1 else "Choose one of these."
        bad_value("device", expected=f"a device that torch sees here ({', '.join(here)})", got=device, remedy=remedy)
    return CudaClock(asked)

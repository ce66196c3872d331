"""Largest batches, the best chunk, and the smallest change that makes a run fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from contratile.planner.devices import Devices
from contratile.planner.memory import LossMethod, device_memory, disk_memory, host_memory
from contratile.planner.step_seconds import step_seconds
from contratile.planner.workload import Offload, Workload

MOST = 1 << 32
"""Largest batch that is looked for."""
LARGEST_CHUNK = 4096
"""Largest chunk that is tried, as with `--chunk auto`."""
NO_FASTER = 0.02
"""A larger chunk must save this share of the time to be worth its memory."""

METHODS: tuple[tuple[str, LossMethod, Offload], ...] = (
    ("dense CLIP", "clip", "none"),
    ("open_clip, local loss", "open_clip", "none"),
    ("Inf-CL", "inf_cl", "none"),
    ("Contratile", "ours", "none"),
    ("Contratile, inputs on host", "ours", "host"),
    ("Contratile, inputs on disk", "ours", "disk"),
)


@dataclass(frozen=True, kw_only=True)
class LargestBatch:
    """The largest batch that fits with a method; 0 if none does."""

    method: str
    batch: int
    limit: str
    """What limits it: device memory, host memory, or nothing up to the largest batch that was tried."""

    disk_bytes: float = 0.0
    """Disk space that it needs per node."""


def fits(work: Workload, devices: Devices, loss: LossMethod = "ours") -> bool:
    """Whether a step fits into device and host memory."""
    return device_memory(work, devices, loss).fits and host_memory(work, devices).fits


def largest_batches(work: Workload, devices: Devices) -> tuple[LargestBatch, ...]:
    """The largest batch of each method, with the chunk of the step."""
    found = []
    for name, loss, offload in METHODS:
        if devices.on_cpu and offload == "host":
            continue  # the same memory
        here = replace(work, offload=offload)
        batch = _largest(here, devices, loss)
        limit = "nothing"
        if batch < MOST:
            above = replace(here, batch=batch + work.ranks)
            limit = "device memory" if not device_memory(above, devices, loss).fits else "host memory"
        disk = disk_memory(replace(here, batch=max(batch, work.ranks)), devices).peak
        found.append(LargestBatch(method=name, batch=batch, limit=limit, disk_bytes=disk))
    return tuple(found)


def _largest(work: Workload, devices: Devices, loss: LossMethod = "ours") -> int:
    """The largest multiple of the number of ranks that fits; assumes that all smaller ones fit too."""
    step = work.ranks

    def good(times: int) -> bool:
        return fits(replace(work, batch=times * step), devices, loss)

    low, high = 0, 1
    while high * step <= MOST and good(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low * step


def best_chunk(work: Workload, devices: Devices) -> int:
    """The smallest power of two that is as fast as any that fits; 1 if none fits."""
    times: dict[int, float] = {}
    chunk = 1
    while chunk <= min(LARGEST_CHUNK, 2 * work.share - 1):
        here = replace(work, chunk=min(chunk, work.share))
        if not fits(here, devices):
            break
        times[here.chunk] = step_seconds(here, devices).seconds
        chunk *= 2
    if not times:
        return 1
    best = min(times.values())
    return min(size for size, seconds in times.items() if seconds <= (1 + NO_FASTER) * best)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of options that makes a run fit."""

    options: str
    """As on the command line."""

    work: Workload


def smallest_change(
    work: Workload, devices: Devices, checkpointed: Callable[[], Workload] | None = None
) -> Change | None:
    """The first change that fits: a smaller chunk, offloaded inputs, checkpointing, sharding, a smaller batch.

    Changes that do not affect the results come first.

    Args:
        work: A step that does not fit.
        devices: Where it should run.
        checkpointed: Makes the same step with checkpointing, if that can be turned on.
    """
    for options, changed in _changes(work, devices, checkpointed):
        if fits(changed, devices):
            return Change(options=options, work=changed)
    return None


def _changes(
    work: Workload, devices: Devices, checkpointed: Callable[[], Workload] | None
) -> Iterator[tuple[str, Workload]]:
    steps = [1 << power for power in range(work.chunk.bit_length() - 1, -1, -1) if 1 << power < work.chunk]
    places: tuple[Offload, ...] = ("disk",) if devices.on_cpu else ("host", "disk")
    elsewhere = [place for place in places if place != work.offload and work.offload != "disk"]
    for chunk in steps:
        yield f"--chunk {chunk}", replace(work, chunk=chunk)
    for place in elsewhere:
        yield f"--offload {place}", replace(work, offload=place)
    for place in elsewhere:
        for chunk in steps:
            yield f"--offload {place} --chunk {chunk}", replace(work, offload=place, chunk=chunk)
    if work.ranks > 1 and not work.fsdp:
        yield "--fsdp", replace(work, fsdp=True)
    if checkpointed is not None:
        again = checkpointed()
        yield "--checkpointing", again
        for chunk in steps:
            yield f"--checkpointing --chunk {chunk}", replace(again, chunk=chunk)
    for here, more in ((work, ""), (replace(work, chunk=1), " --chunk 1")):
        batch = _largest(here, devices)
        if batch:
            yield f"--batch {batch}{more}", replace(here, batch=batch)

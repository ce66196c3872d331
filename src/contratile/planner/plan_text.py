"""A plan as tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contratile.planner.memory import Memory

if TYPE_CHECKING:
    from contratile.planner.run_plan import Plan

Grid = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, headings, rows."""


def decimal_size(count: float) -> str:
    """Bytes with a unit: GB and MB, as vendors count memory.

    >>> decimal_size(80e9), decimal_size(3.2e6), decimal_size(-1.5e9)
    ('80.0 GB', '3.2 MB', '-1.5 GB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def seconds(value: float) -> str:
    """Seconds with a unit.

    >>> seconds(12.3), seconds(0.0123)
    ('12.3 s', '12.3 ms')
    """
    return f"{value:,.3g} s" if value >= 1 else f"{value * 1e3:,.3g} ms"


def heading(plan: Plan) -> list[str]:
    """What is planned, in two lines."""
    work = plan.work
    parts = [work.precision, work.optimizer.name]
    parts += ["FSDP"] if work.fsdp else []
    parts += [f"inputs on {work.offload}"] if work.offload != "none" else []
    rows = f"batch {work.batch:,} ({work.share:,} per device), chunks of {work.chunk:,}"
    return [f"{plan.model} on {plan.devices.name} (prediction)", f"{rows}, {', '.join(parts)}"]


def memory_grid(kind: Memory, title: str) -> Grid:
    """The terms of a kind of memory, those of the peak phase first."""
    phase = kind.phase
    rows = []
    for term in sorted(kind.terms, key=lambda term: (phase not in term.phases, -term.bytes)):
        at = "" if phase in term.phases else f"(in {', '.join(term.phases)})"
        rows.append(
            (term.name, decimal_size(term.bytes) if not at else "", f"{term.how} {at}".strip() + _only(term.bytes, at))
        )
    rows.append(("all", decimal_size(kind.peak), f"in the phase {phase}"))
    if kind.available < float("inf"):
        rows.append(("left", decimal_size(kind.left), f"of {decimal_size(kind.available)}"))
    return title, ("", "bytes", "how"), rows


def _only(count: float, at: str) -> str:
    return f" {decimal_size(count)}" if at else ""


def grids(plan: Plan) -> list[Grid]:
    """All tables of a plan."""
    found = [memory_grid(plan.memory, "memory of each device")]
    for title, kind in (("host memory of each node", plan.host), ("disk of each node", plan.disk)):
        if kind.terms:
            found.append(memory_grid(kind, title))
    batches = [
        (one.method, f"{one.batch:,}" if one.batch else "none", _limit(one.limit, one.disk_bytes))
        for one in plan.largest
    ]
    found.append((f"largest batch that fits, chunks of {plan.work.chunk:,}", ("", "pairs", "ends at"), batches))
    time = plan.time
    times = [(term.name, seconds(term.seconds), term.how) for term in time.terms]
    times.append(("step", seconds(time.seconds), f"{time.samples_per_second:,.0f} samples per second"))
    found.append(("seconds of a step", ("", "seconds", "how"), times))
    return found


def _limit(limit: str, disk: float) -> str:
    return limit + (f"; {decimal_size(disk)} of disk" if disk else "")


def remarks(plan: Plan) -> list[str]:
    """Remarks below the tables."""
    work, time = plan.work, plan.time
    lines = [f"best chunk: {plan.chunk_best:,}"]
    said = f"encoders reach {time.utilisation:.0%} of the rate of large products"
    if work.ranks > 1:
        said += f"; a device sends {decimal_size(time.sent_bytes)} for the loss"
        said += f"; {time.hidden:.0%} of transfers hide behind compute"
    lines.append(said)
    if plan.steps_per_epoch is not None:
        hours = plan.steps * time.seconds / 3600
        whole = f", {plan.steps:,} in all: {hours:,.1f} h" if plan.steps else ""
        lines.append(f"{plan.steps_per_epoch:,} steps per epoch{whole}")
    if plan.calibration is not None:
        lines.append("activations and seconds of the encoders are calibrated on this machine")
    lines += [f"warning: {text}" for text in plan.warnings]
    return [*lines, "assumptions:", *(f"  {text}" for text in plan.assumptions)]


def verdict(plan: Plan) -> str:
    """The last line."""
    if plan.fits:
        return f"fits: {decimal_size(plan.memory.peak)} of {decimal_size(plan.memory.available)} per device"
    short = plan.memory if not plan.memory.fits else plan.host
    missing = f"does not fit: {decimal_size(-short.left)} too much"
    return f"{missing}. Smallest change: {plan.change.options}" if plan.change else f"{missing}, whatever the chunk"


def text(plan: Plan) -> str:
    """The whole plan as text."""
    lines = heading(plan)
    for title, headings, rows in grids(plan):
        widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
        lines += ["", title]
        lines += ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", *remarks(plan), verdict(plan)])

"""A before/after table: time and peak memory of two ways to do one step, in this process.

    print_table("8192 pairs", {"open_clip": step_1, "contratile": step_2})

A step runs a loss and its backward. Steps take turns and the best of `ROUNDS` counts; then each runs once more on a
trimmed heap for the memory. This is meant for examples: recorded numbers come from `contratile bench loss`, which
measures each point in a process of its own. A step may be collective: every rank then calls this with the same steps,
and all but one pass `quiet=True`.
"""

from collections.abc import Mapping

from contratile.bench.harness import Step, wall_time
from contratile.bench.memory import MiB
from contratile.host_memory import peak_growth

ROUNDS = 3


def peak_mib(step: Step) -> float | None:
    """Return by how many MiB resident memory grows during a step; None outside Linux."""
    growth = peak_growth(step)
    return None if growth is None else growth / MiB


def print_table(title: str, steps: Mapping[str, Step], *, quiet: bool = False) -> None:
    """Measure steps and, unless `quiet`, print one line for each."""
    times: dict[str, float] = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name] = min(times[name], wall_time(step))
    peaks = {name: peak_mib(step) for name, step in steps.items()}
    if quiet:
        return
    print(f"{title:<32}{'ms':>10}{'peak MiB':>12}")
    for name in steps:
        peak = peaks[name]
        print(f"{name:<32}{times[name] * 1e3:>10.1f}" + (f"{'-':>12}" if peak is None else f"{peak:>12.1f}"))

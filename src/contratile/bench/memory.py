"""Peak memory of one step, measured in a process of its own.

    python -m contratile.bench.memory --case clip --contestant dense --n 4096 --d 512

prints one JSON object, {"status": "ok", "peak_extra_mib": 193.2}: resident memory at its highest during the step,
less what was resident before it (features included), less the gradients that it returns. Linux only, as it needs
the resettable high-water mark of /proc/self.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from contratile.bench.contestants.family import CASES
from contratile.bench.contestants.loss import Case, Contestant, Problem, Step, quiet
from contratile.bench.harness import GiB, describe
from contratile.host_memory import memory_bytes, status_bytes, trim

MiB = 1 << 20
WARM_UP = 256
USABLE = 0.9
"""Part of the available memory that a point may ask for."""


class Peak(NamedTuple):
    """What a memory point came to."""

    status: str
    mib: float | None = None


def measure(case: Case, contestant: str, n: int, d: int, *, scale: float, threads: int, timeout: float) -> Peak:
    """A point in a fresh process; what would not fit is predicted instead of tried."""
    refusal = no_room(case.contestants[contestant].predicted_bytes(n, d))
    if refusal:
        return Peak(refusal)
    words = f"--case {case.name} --contestant {contestant} --n {n} --d {d} --scale {scale} --threads {threads}"
    return point("contratile.bench.memory", words.split(), timeout=timeout)


def point(module: str, words: list[str], *, timeout: float) -> Peak:
    """Run a module that prints a status and a peak as JSON, and read them."""
    try:
        done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Peak(f"memory: no result after {timeout:.0f} s")
    if done.returncode == -9:
        return Peak("out of memory (killed by the system)")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Peak(f"memory: process ended with code {done.returncode}")
    return Peak(answer["status"], answer["peak_extra_mib"])


def no_room(needed: float) -> str | None:
    """The status of a step that needs more bytes than this machine has, or None if it may run."""
    available = memory_bytes("MemAvailable")
    if available and needed > USABLE * available:
        return f"out of memory (predicted {needed / GiB:.1f} GiB)"
    return None


def peak(case: Case, contestant: Contestant, n: int, d: int, scale: float) -> Peak:
    """The measurement, in this process."""
    try:
        with quiet():
            step = contestant.load()
            make = partial(case.problem, d=d, scale=scale, dtype=contestant.dtype)
            warm_up(step, make)
            return extra_peak(step, make(n))
    except Exception as error:
        return Peak(describe(error))


def warm_up(step: Step, make: Callable[[int], Problem]) -> None:
    """Threads, connections, workspaces of BLAS and compiled code are there before the first step of any size."""
    for rows in (WARM_UP // 2, WARM_UP):
        make(rows).bind(step)()


def extra_peak(step: Step, problem: Problem, *, processes: int = 1) -> Peak:
    """Memory that one step needs beyond inputs and gradients. `processes` such steps run at once and share it all."""
    trim()
    _limit_address_space(processes)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return Peak("memory: needs a writable /proc/self/clear_refs (Linux)")
    before = status_bytes("VmRSS")
    problem.bind(step)()
    after = status_bytes("VmHWM")
    gradients = sum(leaf.grad.nbytes for leaf in problem.leaves if leaf.grad is not None)
    return Peak("ok", max(0.0, (after - before - gradients) / MiB))


def _limit_address_space(processes: int) -> None:
    """A step that asks for more than the machine has gets an exception, not the machine's other processes killed."""
    try:
        import resource

        ceiling = status_bytes("VmSize") + int(USABLE * memory_bytes("MemAvailable") / processes)
    except (ImportError, OSError):
        return  # not Linux
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or ceiling < hard:
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, hard))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.memory", description=__doc__)
    parser.add_argument("--case", choices=CASES, default="clip")
    parser.add_argument("--contestant", required=True)
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--d", type=int, required=True)
    parser.add_argument("--scale", type=float, default=14.3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case = CASES[options.case]
    if options.contestant not in case.contestants:
        parser.error(f"--contestant: expected one of {', '.join(case.contestants)}")
    status, mib = peak(case, case.contestants[options.contestant], options.n, options.d, options.scale)
    print(json.dumps({"status": status, "peak_extra_mib": mib}))


if __name__ == "__main__":
    main()

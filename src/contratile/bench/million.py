"""One step of `clip_loss` over a million pairs on a CPU, with its peak memory, checked by brute force on samples.

    python -m contratile.bench.million                     # N = 1,048,576, D = 32, fp32: about an hour on two cores
    python -m contratile.bench.million --n 65536 --out out # seconds

The dense loss would hold several matrices of N x N numbers, 4 TiB each. Written is OUT/million.json. CPU seconds are
recorded next to wall time, because other programs hardly disturb them.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from contratile.bench.contestants.loss import LossProblem
from contratile.bench.sampled_check import SampledErrors, sampled_errors
from contratile.engine.plan import plan_tiles
from contratile.errors import check_count
from contratile.host_memory import peak_growth, status_bytes
from contratile.losses.functional import clip_loss, pair_lse
from contratile.machine import environment

TRIAL = 32768
"""Pairs of the step from which the time is predicted."""
MINUTE = 60.0


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What one step took."""

    value: float
    scale_grad: float
    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads of the process."""

    predicted_cpu_seconds: float
    """From a smaller step, times (N / smaller N)²."""

    peak_growth_mib: float | None
    """Peak resident memory minus that before the step; gradients included."""

    peak_extra_mib: float | None
    """The same growth without the gradients."""

    peak_process_mib: float | None
    """Peak resident memory of the whole process: Python, torch, features, gradients and the step."""

    dense_gib: float
    """One N x N matrix of fp32 scores."""


@contextmanager
def progress(expected: float, every: float = MINUTE) -> Iterator[None]:
    """Print a line now and then: CPU seconds so far, and how many are expected."""
    done, start = threading.Event(), time.process_time()

    def report() -> None:
        while not done.wait(every):
            spent = time.process_time() - start
            line = f"{spent:,.0f} of about {expected:,.0f} CPU seconds ({spent / expected:.0%})"
            print(line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def trial_seconds(n: int, d: int, scale: float) -> float:
    """CPU seconds that a step of N pairs will take, from one of at most TRIAL pairs."""
    small = min(n, TRIAL)
    problem = LossProblem.make(small, d, scale=scale)
    for _ in range(2):  # the first call creates threads and workspaces
        start = time.process_time()
        clip_loss(*problem.args, group=None).backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        spent = time.process_time() - start
    return spent * (n / small) ** 2


def measure(n: int, d: int, *, scale: float, samples: int) -> tuple[MeasuredStep, SampledErrors]:
    """Run one step of N pairs, then check it."""
    expected = trial_seconds(n, d, scale)
    problem = LossProblem.make(n, d, scale=scale)
    image, text, factor = problem.args
    spent: dict[str, float] = {}

    def step() -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        value = clip_loss(image, text, factor, group=None)
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        spent.update(seconds=time.perf_counter() - wall, cpu_seconds=time.process_time() - cpu, value=value.item())

    with progress(expected):
        growth = peak_growth(step)
    peak = None if growth is None else status_bytes("VmHWM")
    with torch.no_grad():
        lse = pair_lse(image, text, factor, group=None)
    errors = sampled_errors(image, text, factor, spent["value"], lse, samples=samples)
    assert image.grad is not None and text.grad is not None and factor.grad is not None
    gradients = image.grad.nbytes + text.grad.nbytes
    mib = 1 << 20
    measured = MeasuredStep(
        **spent,
        scale_grad=factor.grad.item(),
        predicted_cpu_seconds=expected,
        peak_growth_mib=None if growth is None else growth / mib,
        peak_extra_mib=None if growth is None else (growth - gradients) / mib,
        peak_process_mib=None if peak is None else peak / mib,
        dense_gib=4 * n * n / 2**30,
    )
    return measured, errors


def run_and_record(n: int, d: int, *, scale: float, samples: int, threads: int, out: Path) -> Path:
    """Measure, and write OUT/million.json."""
    for name, value in {"n": n, "d": d, "samples": samples, "threads": threads}.items():
        check_count(name, value, least=1)
    torch.set_num_threads(threads)
    facts = environment()
    measured, errors = measure(n, d, scale=scale, samples=samples)
    options = f"--n {n} --d {d} --scale {scale} --samples {samples} --threads {threads}"
    content: dict[str, Any] = {
        "kind": "million",
        "command": f"python -m contratile.bench.million {options}",
        "environment": facts,
        "n": n,
        "d": d,
        "scale": scale,
        "dtype": "float32",
        "tiles": str(plan_tiles(n, n, d)),
        "measured": asdict(measured),
        "errors": errors._asdict(),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "million.json"
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.million", description=__doc__)
    parser.add_argument("--n", type=int, default=1 << 20, help="pairs (default: 1,048,576)")
    parser.add_argument("--d", type=int, default=32, help="features (default: 32)")
    parser.add_argument("--scale", type=float, default=14.3)
    parser.add_argument("--samples", type=int, default=32, help="pairs that are checked (default: 32)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/million"))
    print(f"written: {run_and_record(**vars(parser.parse_args()))}")


if __name__ == "__main__":
    main()

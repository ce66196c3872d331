"""How long does one step of `clip_loss` take here? A short timing per backend, not a benchmark."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contratile.doctor.inputs import dtype_name, error_text, unit_features
from contratile.engine.backends import Backend
from contratile.losses import functional

ROUNDS = 3


@dataclass(frozen=True)
class StepTime:
    """Best time of one `clip_loss` step, forward and backward."""

    device: str
    backend: str
    n: int
    d: int
    dtype: str
    seconds: float | None
    note: str = ""
    """Why there is no time, if there is none."""


def time_steps(device: torch.device, backends: Sequence[Backend], quick: bool) -> list[StepTime]:
    """Time one step on each backend; backends take turns and the best of `ROUNDS` counts."""
    if device.type == "cpu":
        (n, d), dtype = ((1024, 128) if quick else (4096, 256)), torch.float32
    else:
        (n, d), dtype = ((4096, 512) if quick else (16384, 512)), torch.bfloat16
    inputs = [x.requires_grad_() for x in unit_features(n, d, dtype, device)]
    best: dict[str, float] = {}
    notes: dict[str, str] = {}
    for backend in backends:
        if backend == "triton" and device.type == "cpu":
            notes[backend] = "not timed: Triton is interpreted on the CPU"
    for _ in range(ROUNDS):
        for backend in (name for name in backends if name not in notes):
            try:
                taken = _seconds(device, backend, inputs)
            except Exception as error:  # running out of memory is a result too
                notes[backend] = error_text(error)
                continue
            best[backend] = min(taken, best.get(backend, taken))
    return [
        StepTime(str(device), backend, n, d, dtype_name(dtype), best.get(backend), notes.get(backend, ""))
        for backend in backends
    ]


def _seconds(device: torch.device, backend: Backend, inputs: Sequence[Tensor]) -> float:
    synchronize = getattr(torch, device.type).synchronize if device.type != "cpu" else lambda: None
    synchronize()
    start = time.perf_counter()
    torch.autograd.grad(functional.clip_loss(*inputs, group=None, backend=backend), inputs)
    synchronize()
    return time.perf_counter() - start

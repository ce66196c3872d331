"""One loss step that a dense loss could not do on this machine: what it costs in time and memory.

print(large_loss_step(512).sentence)
# One loss step over 65,536 random pairs took 31 s and 130 MiB (measured, with gradients). A dense loss would ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import normalize

from contratile.host_memory import memory_bytes, peak_growth
from contratile.losses.functional import clip_loss
from contratile.planner.loss_memory import dense_loss_bytes
from contratile.report.tracking import binary_size

LONGEST = 60.0
"""Seconds that the step may take."""

_TRIAL, _MOST = 4096, 1 << 22
"""Pairs of the step that is timed first; pairs at most."""


class LargeLoss(NamedTuple):
    """A measured loss step, forward and backward."""

    pairs: int
    width: int
    """Size of a feature."""

    seconds: float
    used: int | None
    """Peak memory in bytes beyond the features, gradients included; None if it could not be measured."""

    dense: int
    """Bytes that a dense loss would need beyond features and gradients, computed."""

    memory: int
    """Bytes of memory of the machine or the GPU; 0 if unknown."""

    place: str
    """RAM or GPU memory."""

    @property
    def sentence(self) -> str:
        """What was measured, in words."""
        used = "" if self.used is None else f" and {binary_size(self.used)} (measured, gradients included)"
        told = (
            f"One loss step over {self.pairs:,} random pairs of {self.width} features took {self.seconds:.0f} s{used}."
        )
        needs = f"A dense loss would need {binary_size(self.dense)}"
        if not self.memory:
            return f"{told} {needs}."
        if self.dense > self.memory:
            return f"{told} {needs}; this machine has {binary_size(self.memory)} of {self.place}."
        return f"{told} {needs} of this machine's {binary_size(self.memory)} of {self.place}."


def large_loss_step(
    width: int,
    *,
    device: torch.device | str = "cpu",
    longest: float = LONGEST,
    notify: Callable[[str], object] = lambda text: None,
) -> LargeLoss:
    """Run a CLIP loss, forward and backward, on as many random pairs as a dense loss could not hold.

    The number of pairs is the smallest power of two for which a dense loss would need more memory than there is, or
    fewer if that would take more than about `longest` seconds, estimated from a small step.

    Args:
        width: Size of a feature.
        device: Where to run it.
        longest: Seconds that the step may take, about.
        notify: Called with a status text.
    """
    device = torch.device(device)
    memory = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory_bytes("MemTotal")
    )
    _timed(_TRIAL, width, device)  # starts threads, compiles kernels
    rate = _timed(_TRIAL, width, device) / _TRIAL**2
    pairs = 2 * _TRIAL
    while dense_loss_bytes(pairs) <= memory and pairs < _MOST and rate * (2 * pairs) ** 2 <= longest:
        pairs *= 2
    notify(f"one loss step over {pairs:,} random pairs, about {rate * pairs**2:.0f} s")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = _Step(pairs, width, device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    used = peak_growth(step)
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device) - before
    place = "GPU memory" if device.type == "cuda" else "RAM"
    return LargeLoss(pairs, width, step.seconds, used, dense_loss_bytes(pairs), memory, place)


class _Step:
    """A loss step on random features, which are made before it is called."""

    def __init__(self, pairs: int, width: int, device: torch.device) -> None:
        made = torch.Generator(device).manual_seed(0)
        self.image, self.text = (
            normalize(torch.randn(pairs, width, generator=made, device=device), dim=1).requires_grad_()
            for _ in range(2)
        )
        self.device, self.seconds = device, 0.0

    def __call__(self) -> None:
        self._wait()
        began = time.perf_counter()
        torch.autograd.backward(clip_loss(self.image, self.text, 100.0, group=None))
        self._wait()
        self.seconds = time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _timed(pairs: int, width: int, device: torch.device) -> float:
    step = _Step(pairs, width, device)
    step()
    return step.seconds

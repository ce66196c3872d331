"""State of all random number generators, so that a resumed run draws the same numbers."""

import random
import sys
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Read the generators of Python, NumPy (if imported) and torch, on the CPU and every CUDA device."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (str(name), [int(key) for key in keys], *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore what `random_state` returned. CUDA devices that no longer exist are skipped."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if torch.cuda.is_available():
        for device, cuda in zip(range(torch.cuda.device_count()), state.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(cuda, device)

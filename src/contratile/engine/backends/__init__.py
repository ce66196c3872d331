"""Backends carry out the tiles: `torch` on any device, `triton` in kernels of its own on CUDA and ROCm. `dense` is the
reference, for comparison. "auto" is `triton` where `registry.py` finds that it can be, else `torch`."""

from typing import Literal, get_args

Backend = Literal["auto", "torch", "triton", "dense"]
BACKENDS: tuple[str, ...] = get_args(Backend)

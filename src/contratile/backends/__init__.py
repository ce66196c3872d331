"""Backends carry out the tiles. `torch` runs on any device; `dense` is the reference, for comparison."""

from typing import Literal, get_args

Backend = Literal["auto", "torch", "dense"]
BACKENDS: tuple[str, ...] = get_args(Backend)

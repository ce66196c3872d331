"""Backends carry out the tiles. `torch` runs on any device; `dense` is the reference, for comparison."""

from typing import Literal

Backend = Literal["auto", "torch", "dense"]

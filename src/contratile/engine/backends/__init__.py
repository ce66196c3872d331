"""Backends: `torch` (tiles on any device), `triton` (kernels on CUDA and ROCm) and `dense` (materialised scores).

"auto" is `triton` where its kernels run and cover the call (`registry.py`), otherwise `torch`.
"""

from typing import Literal, get_args

Backend = Literal["auto", "torch", "triton", "dense"]
BACKENDS: tuple[str, ...] = get_args(Backend)

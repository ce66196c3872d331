"""The precision of fp32 products on hardware with TF32, for kernels and library products alike.

    ieee      fp32 products
    tf32x3    three TF32 products in kernels, almost as exact; library products are fp32
    tf32      operands rounded to nearest TF32: 11 bits

16-bit features are multiplied exactly in any case, and a CPU has no TF32.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor

Precision = Literal["ieee", "tf32x3", "tf32"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


def resolve(asked: str | None, features: Tensor, backend: str) -> str:
    """The requested precision, or PyTorch's own setting: "high" and "medium" are TF32."""
    if asked or features.dtype != torch.float32 or (features.is_cpu and backend != "triton"):
        return asked or "ieee"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


_UNCHANGED = nullcontext()


def library_products(precision: str | None, features: Tensor) -> AbstractContextManager[None]:
    """Inside, PyTorch's own fp32 products use this precision."""
    if features.is_cpu or features.dtype != torch.float32:
        return _UNCHANGED
    return _matmul_precision("high" if precision == "tf32" else "highest")


@contextmanager
def _matmul_precision(setting: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

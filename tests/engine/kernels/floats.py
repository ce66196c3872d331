"""bf16 and TF32 in numpy, which has neither."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def from_bf16(bits: Array) -> Array:
    """fp32 numbers."""
    numbers: Array = (bits.astype(np.uint32) << 16).view(np.float32)
    return numbers


def to_bf16(x: Array) -> Array:
    """The bits of the nearest bf16 of fp32 numbers, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    numbers: Array = np.where(np.isnan(x), np.uint16(0x7FC0), nearest).reshape(np.shape(x))
    return numbers


def to_tf32(x: Array) -> Array:
    """What a tensor core reads of fp32 operands: the low 13 bits are cut off."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    numbers: Array = (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return numbers

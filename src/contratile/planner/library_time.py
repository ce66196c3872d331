"""Time of a matrix product by a library (cuBLAS, hipBLASLt), from its roofline.

The library is assumed to choose the best of some output tiles and of 1, 2 or 4 splits of the inner dimension. A
multiprocessor works on one tile at a time, so a partial last wave wastes time. Tensor cores reach the sustained share
of their peak, operands come through L2 (shared within clusters) and DRAM, and the slowest of these hides the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from contratile.planner.gpus import Gpu, find
from contratile.planner.tile_time import DEFAULT, Assumptions

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
SPLITS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class LibraryTime:
    """Predicted seconds of a product: of each limit alone, and together."""

    product: float
    """Flops at the sustained rate, with idle multiprocessors of the last wave."""

    l2: float
    dram: float
    seconds: float
    """The largest of them, with the launch."""


def library_kind(kind: str) -> str:
    """How the library multiplies where a kernel multiplies by `kind`: it has no `tf32x3`.

    >>> library_kind("tf32x3")
    'ieee'
    """
    return "ieee" if kind == "tf32x3" else kind


def library_time(
    gpu: Gpu | str,
    rows: int,
    cols: int,
    inner: int,
    *,
    kind: str = "16-bit",
    read_bytes: float | None = None,
    assumptions: Assumptions = DEFAULT,
) -> LibraryTime:
    """Seconds of `out[rows, cols] += a[rows, inner] @ b[inner, cols]` with an fp32 result.

    Args:
        gpu: A GPU or its name.
        rows: Rows of the result.
        cols: Columns of the result.
        inner: Length of the sums.
        kind: How it is multiplied; `tf32x3` means fp32 here, as in the backward pass.
        read_bytes: What comes from DRAM; by default both factors once, and the result read and written.
        assumptions: The share of DRAM bandwidth, and the time of a launch.

    Returns:
        The limits and their maximum: a prediction.

    Example:
        >>> big = library_time("A100", 8192, 8192, 8192)
        >>> 240 < 2 * 8192**3 / big.seconds / 1e12 < 280
        True
    """
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    kind = gpu.kind(library_kind(kind))
    itemsize = 2 if kind == "16-bit" else 4
    if read_bytes is None:
        read_bytes = itemsize * inner * (rows + cols) + 8 * rows * cols
    rate = gpu.processor.flops_per_clock[kind] * gpu.sustained
    choices = []
    for m, n in TILES:
        for splits in SPLITS:
            tiles = -(-rows // m) * -(-cols // n) * splits
            waves, depth = -(-tiles // gpu.processors), -(-inner // splits)
            product = waves * 2 * m * n * depth / rate
            l2 = waves * (m + n) * depth * itemsize / gpu.processor.cluster / gpu.l2_bytes_per_clock
            choices.append((max(product, l2), product, l2))
    _, product, l2 = min(choices)
    dram = read_bytes / (gpu.dram_bandwidth * assumptions.dram_share)
    limits = (product / gpu.clock, l2 / gpu.clock, dram)
    return LibraryTime(product=limits[0], l2=limits[1], dram=dram, seconds=max(limits) + assumptions.launch_seconds)

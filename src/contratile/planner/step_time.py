"""Predicted seconds of a step of `clip_loss` on a GPU, term by term.

    >>> step = predict("H100", n=32768, d=512)
    >>> "prediction, not run on a GPU" in str(step)
    True

The forward kernel computes every tile of scores once, and parts of its statistics are merged (read once, from DRAM).
The gradient kernel computes the tiles again and writes G in chunks; two library products per chunk make the gradients
of the features. `kernel_time` predicts the kernels, `library_time` the library products. Nothing here was run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from contratile.engine.backends.triton_configs import WORKSPACE_BYTES, cut_backward, kind_of
from contratile.errors import bad_value, check_count
from contratile.planner.candidates import SECOND_GENERATION, Costs, KernelCost
from contratile.planner.gpus import Gpu, find
from contratile.planner.kernel_time import KernelTime, kernel_time, lengths_of_pieces, stays_in_l2
from contratile.planner.library_time import LibraryTime, library_kind, library_time
from contratile.planner.tile_time import DEFAULT, Assumptions


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a step of `clip_loss`: a prediction from counts and rates, not run on a GPU."""

    gpu: Gpu
    n: int
    d: int
    kind: str
    forward: KernelTime
    gradient: KernelTime
    products: LibraryTime
    """Both library products of all chunks."""

    merge_seconds: float
    """Reading the parts of statistics."""

    @property
    def forward_seconds(self) -> float:
        return self.forward.seconds + self.merge_seconds

    @property
    def backward_seconds(self) -> float:
        return self.gradient.seconds + self.products.seconds

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def flops(self) -> float:
        """Flops of the four products."""
        return 4 * 2.0 * self.n * self.n * self.d

    @property
    def least_seconds(self) -> float:
        """The four products at the vendor's peak: two in kernels, two of the library."""
        library = self.gpu.peak(library_kind(self.kind))
        return self.flops / 2 * (1 / self.gpu.peak(self.kind) + 1 / library)

    @property
    def share_of_peak(self) -> float:
        """`least_seconds` over the predicted time, from 0 to 1."""
        return self.least_seconds / self.seconds

    def __str__(self) -> str:
        ms = 1e3
        f, g, p = self.forward, self.gradient, self.products
        lines = [
            f"{self.gpu.name}, N = {self.n:,}, D = {self.d}, {self.kind} (prediction, not run on a GPU)",
            f"  forward    {self.forward_seconds * ms:9.3f} ms   {_terms(f)}",
            f"  gradient   {g.seconds * ms:9.3f} ms   {_terms(g)}",
            f"  products   {p.seconds * ms:9.3f} ms   product {p.product * ms:.3f}, L2 {p.l2 * ms:.3f}, "
            f"DRAM {p.dram * ms:.3f}",
            f"  step       {self.seconds * ms:9.3f} ms   {self.share_of_peak:.0%} of the peak of "
            f"{self.gpu.peak(self.kind) / 1e12:.0f} TFLOP/s",
        ]
        return "\n".join(lines)


def _terms(time: KernelTime) -> str:
    ms, cost = 1e3, time.cost
    return (
        f"product {time.product * ms:.3f}, exp2 {time.exp2 * ms:.3f}, shuffles {time.shuffles * ms:.3f}, "
        f"issue {time.issue * ms:.3f}, L2 {time.l2 * ms:.3f}, DRAM {time.dram * ms:.3f}; "
        f"tile {cost.m}x{cost.n}, {cost.warps} warps, {time.blocks} per SM, {time.waves:.2f} waves"
    )


def predict(
    gpu: Gpu | str,
    n: int,
    d: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    precision: str | None = None,
    costs: Costs | Sequence[KernelCost] | None = None,
    workspace: int = WORKSPACE_BYTES,
    assumptions: Assumptions = DEFAULT,
) -> Prediction:
    """Predict the time of a step (forward and backward) of `clip_loss` with N pairs on one GPU.

    Args:
        gpu: A GPU or its name.
        n: Pairs.
        d: Features.
        dtype: Dtype of the features.
        precision: How fp32 features are multiplied: "ieee" (default), "tf32" or "tf32x3".
        costs: Instructions and resources of the kernels: a generation, or candidates for both kernels of this kind. The
            first candidate of each is used. None: today's kernels.
        workspace: Bytes of the chunk of G.
        assumptions: How much overlaps.

    Returns:
        Seconds, term by term: a prediction, not a measurement.

    Raises:
        ValueError: An unknown GPU, a size below 1, or no candidate that fits.

    Example:
        >>> from contratile.planner.candidates import FIRST_GENERATION
        >>> before = predict("H100", 32768, 512, costs=FIRST_GENERATION)
        >>> after = predict("H100", 32768, 512)
        >>> 0 < after.seconds < before.seconds
        True
    """
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    check_count("n", n, least=1)
    check_count("d", d, least=1)
    kind = gpu.kind(kind_of(gpu.arch, dtype, precision))
    costs = SECOND_GENERATION if costs is None else costs
    pool = costs[gpu.arch] if isinstance(costs, dict) else tuple(costs)
    default = {}  # the first candidate
    for name in ("forward", "gradient"):
        mine = [cost for cost in pool if cost.kernel == name and cost.kind == kind and cost.blocks(gpu) > 0]
        if not mine:
            bad_value(
                "costs", expected=f"a {name} kernel ({kind}) that fits on {gpu.name}", got="none", remedy="Add one."
            )
        default[name] = kernel_time(gpu, mine[0], n, d, workspace=workspace, assumptions=assumptions)
    forward, gradient = default["forward"], default["gradient"]
    merged = 8.0 * n * -(-n // forward.cost.n) / (gpu.dram_bandwidth * assumptions.dram_share)
    return Prediction(
        gpu=gpu,
        n=n,
        d=d,
        kind=kind,
        forward=forward,
        gradient=gradient,
        products=_products(gpu, gradient.cost, n, d, workspace, assumptions),
        merge_seconds=merged,
    )


def _products(gpu: Gpu, cost: KernelCost, n: int, d: int, workspace: int, assumptions: Assumptions) -> LibraryTime:
    """dQ += G K and dK += G^T Q of every chunk."""
    itemsize = 2 if cost.kind == "16-bit" else 4
    rows, cols = cut_backward(n, n, cost.config, itemsize=itemsize, symmetric=False, workspace=workspace)
    held = stays_in_l2(gpu, rows * cols * itemsize)
    product = l2 = dram = seconds = 0.0
    for down, times in lengths_of_pieces(n, rows):
        for across, more in lengths_of_pieces(n, cols):
            for out, inner in ((down, across), (across, down)):
                read = itemsize * (0 if held else down * across) + itemsize * inner * d + 8 * out * d
                one = library_time(gpu, out, d, inner, kind=cost.kind, read_bytes=read, assumptions=assumptions)
                product += times * more * one.product
                l2 += times * more * one.l2
                dram += times * more * one.dram
                seconds += times * more * one.seconds
    return LibraryTime(product=product, l2=l2, dram=dram, seconds=seconds)

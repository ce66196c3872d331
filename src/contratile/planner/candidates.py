"""Launch candidates of the kernels: what each executes and occupies, from the rows of `kernel_costs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from contratile.engine.backends.triton_configs import Arch, Config
from contratile.planner import kernel_costs
from contratile.planner.gpus import Gpu
from contratile.planner.kernel_costs import Row
from contratile.planner.tile_time import resident_blocks

KernelName = Literal["forward", "gradient"]


@dataclass(frozen=True)
class KernelCost:
    """A launch candidate: its tile, its resources, and what it executes per score."""

    kernel: str
    """"forward" or "gradient"."""

    kind: str
    """How it multiplies: a column of `triton_configs.TABLE`."""

    m: int
    """Rows of a tile."""

    n: int
    """Columns of a tile."""

    d: int
    """Features per step of the product."""

    warps: int
    """Warps of a block."""

    stages: int
    """Stages of its pipeline of copies."""

    registers: int
    """Registers per thread."""

    shared_bytes: int
    """Bytes of shared memory per block."""

    exp2: float
    """exp2 executed per score."""

    shuffles: float
    """Shuffles executed per score."""

    other: float
    """All other instructions executed per score, the product's own aside."""

    fp32: float = 0.0
    """How many of `other` are fp32 additions, multiplications and FMAs."""

    counted: Arch = 80
    """The architecture whose code was counted."""

    @property
    def config(self) -> Config:
        """The launch table's form of this candidate, without a limit of registers."""
        return Config(self.m, self.n, self.d, self.warps, self.stages)

    def blocks(self, gpu: Gpu) -> int:
        """Resident blocks per multiprocessor; 0 if a block does not fit."""
        return resident_blocks(
            gpu.processor, warps=self.warps, registers=self.registers, shared_bytes=self.shared_bytes
        )


Costs = dict[Arch, tuple[KernelCost, ...]]


def _costs(table: dict[Arch, list[Row]]) -> Costs:
    return {arch: tuple(KernelCost(*row) for row in rows) for arch, rows in table.items()}


FIRST_GENERATION: Costs = _costs(kernel_costs.FIRST_GENERATION)
"""Two exp2 per score, masks on every tile: for comparison."""

SECOND_GENERATION: Costs = _costs(kernel_costs.SECOND_GENERATION)
"""One exp2 per score, interior tiles without masks."""


def candidates(gpu: Gpu, kernel: KernelName, kind: str, costs: Costs = SECOND_GENERATION) -> tuple[KernelCost, ...]:
    """The launch candidates of a kernel on a GPU's architecture.

    Args:
        gpu: Where the kernel runs.
        kernel: "forward" or "gradient".
        kind: How features are multiplied, for example "16-bit" or "tf32".
        costs: A generation of kernels; by default today's.

    Returns:
        The candidates, the default first.

    Example:
        >>> from contratile.planner.gpus import find
        >>> len(candidates(find("A100"), "forward", "16-bit")) >= 2
        True
    """
    kind = gpu.kind(kind)
    return tuple(cost for cost in costs[gpu.arch] if cost.kernel == kernel and cost.kind == kind)

"""Predicted seconds of one kernel over all tiles of scores, and which launch candidate is the fastest.

`tile_time` says what a tile takes and what overlaps, `traffic` how many bytes pass through L2. On top of that:

- **Waves.** Programs run in waves of (multiprocessors * resident blocks). A forward program walks a number of tiles, as
  `triton_configs.cut_forward` cuts them. Gradient tiles of one chunk are one launch.
- **DRAM.** Forward: one side once, the other once per wave of programs, and the parts of statistics. Gradient: G is
  written once, its features are read once per chunk. G stays in L2 if a chunk takes at most half of it.
- **A kernel's time** is the larger of its tiles' clocks and its DRAM bytes, and a fixed time per launch. Clocks tick at
  the clock of the vendor's peak; what power limits take away is in the sustained share of the product alone.
- **Edges.** Partial tiles cost whole ones. Positives, excluded pairs and the exact path are not counted: few tiles have
  them. D is taken for a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from contratile.engine.backends.triton_configs import WORKSPACE_BYTES, cut_backward, cut_forward
from contratile.errors import bad_value
from contratile.planner.candidates import KernelCost
from contratile.planner.gpus import Gpu, find
from contratile.planner.tile_time import DEFAULT, Assumptions, TileWork, grid_clocks, tile_clocks
from contratile.planner.traffic import StepTraffic


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Seconds of one kernel over all tiles (a prediction): what each term would take alone, and all together."""

    cost: KernelCost
    """The candidate."""

    blocks: int
    """Resident blocks per multiprocessor."""

    waves: float
    """Programs over what is resident at once; what is missing to a whole number idles."""

    product: float
    exp2: float
    shuffles: float
    issue: float
    l2: float
    l2_bytes: float
    dram: float
    dram_bytes: float
    launches: int
    launch_seconds: float
    seconds: float
    """All of it, launches included."""


def kernel_time(
    gpu: Gpu,
    cost: KernelCost,
    n: int,
    d: int,
    *,
    workspace: int = WORKSPACE_BYTES,
    assumptions: Assumptions = DEFAULT,
) -> KernelTime:
    """Predicted seconds of one kernel over all N x N scores.

    Args:
        gpu: Where it runs.
        cost: The kernel's tile, resources and instructions.
        n: Rows and columns.
        d: Features.
        workspace: Bytes of the chunk of G, and of the parts of statistics.
        assumptions: How much overlaps.

    Returns:
        The terms and their sum: a prediction.

    Raises:
        ValueError: A block does not fit on a multiprocessor.

    Example:
        >>> from contratile.planner.candidates import FIRST_GENERATION
        >>> h100, cost = find("H100"), FIRST_GENERATION[90][0]
        >>> time = kernel_time(h100, cost, 32768, 512)
        >>> time.blocks, time.seconds > time.product
        (1, True)
    """
    blocks = cost.blocks(gpu)
    if blocks == 0:
        bad_value("cost", expected=f"a block that fits on {gpu.name}", got=cost, remedy="Use a smaller tile.")
    itemsize = 2 if cost.kind == "16-bit" else 4
    step = StepTraffic(n, d, itemsize, cost.config, gpu.processors, workspace)
    traffic = step.forward() if cost.kernel == "forward" else step.gradient()
    work = _work(cost, d, itemsize, step.interior(cost.kernel))  # other launches are small
    if cost.kernel == "forward":
        cut = cut_forward(n, n, cost.config, processors=gpu.processors, fields=2, workspace=workspace)
        groups, per_program = lengths_of_pieces(step.col_blocks, cut.blocks), cut.span // cost.m
        grids = [(count * cut.splits, times) for count, times in groups]
        waves = sum(-(-programs // (gpu.processors * blocks)) * times for programs, times in grids)
        launches = 2 + 4 * sum(times for _, times in grids)  # positives, bounds; of a chunk: fast, careful, merges
        dram_bytes = itemsize * n * d * (1.0 + waves) + 16.0 * n * step.col_blocks
    else:
        rows, cols = cut_backward(n, n, cost.config, itemsize=itemsize, symmetric=False, workspace=workspace)
        grids = [
            (-(-down // cost.m) * -(-across // cost.n), times * more)
            for down, times in lengths_of_pieces(n, rows)
            for across, more in lengths_of_pieces(n, cols)
        ]
        per_program, launches = 1, 3 + 2 * sum(times for _, times in grids)  # bounds, weights; fast and careful
        stored = 0.0 if stays_in_l2(gpu, rows * cols * itemsize) else float(itemsize * n * n)
        dram_bytes = stored + itemsize * n * d * (-(-n // rows) + -(-n // cols))
    clocks = sum(
        times * grid_clocks(gpu, work, blocks, programs=programs, tiles=per_program, assumptions=assumptions)
        for programs, times in grids
    )
    tile, alone = tile_clocks(gpu, work, blocks, assumptions), step.tiles / gpu.processors / gpu.clock
    dram = dram_bytes / (gpu.dram_bandwidth * assumptions.dram_share)
    return KernelTime(
        cost=cost,
        blocks=blocks,
        waves=sum(programs * times for programs, times in grids) / (gpu.processors * blocks),
        product=tile.product * alone,
        exp2=tile.exp2 * alone,
        shuffles=tile.shuffles * alone,
        issue=tile.issue * alone,
        l2=tile.l2 * alone,
        l2_bytes=traffic.total,
        dram=dram,
        dram_bytes=dram_bytes,
        launches=launches,
        launch_seconds=launches * assumptions.launch_seconds,
        seconds=max(clocks / gpu.clock, dram) + launches * assumptions.launch_seconds,
    )


def _work(cost: KernelCost, d: int, itemsize: int, l2_bytes: float) -> TileWork:
    features = max(16, min(cost.d, 1 << max(0, d.bit_length() - 2)))  # of a step, as `config_for` shortens it
    padded = -(-d // features) * features
    return TileWork(
        flops=2.0 * cost.m * cost.n * padded,
        kind=cost.kind,
        scores=cost.m * cost.n,
        exp2=cost.exp2,
        shuffles=cost.shuffles,
        other=cost.other,
        fp32=cost.fp32,
        l2_bytes=l2_bytes,
        stages=cost.stages,
        bytes_on_the_way=max(1, cost.stages - 1) * (cost.m + cost.n) * features * itemsize,
    )


def lengths_of_pieces(total: int, size: int) -> list[tuple[int, int]]:
    """Lengths of the pieces of `total`, and how many of each there are."""
    whole, rest = divmod(total, size)
    return [(length, times) for length, times in ((size, whole), (rest, 1)) if length and times]


def stays_in_l2(gpu: Gpu, chunk_bytes: int) -> bool:
    """Whether a chunk of G is still in L2 when the library products read it."""
    return 2 * chunk_bytes <= gpu.l2_bytes


def rank(
    gpu: Gpu | str,
    costs: Iterable[KernelCost],
    *,
    n: int = 32768,
    d: int = 512,
    assumptions: Assumptions = DEFAULT,
) -> list[KernelTime]:
    """Launch candidates by predicted time, the best first. Those that do not fit on the GPU are left out.

    Args:
        gpu: A GPU or its name.
        costs: Candidates for the same kernel.
        n: Rows and columns of the scores.
        d: Features.
        assumptions: How much overlaps.

    Returns:
        Their predictions.

    Example:
        >>> from contratile.planner.candidates import candidates
        >>> found = rank("A100", candidates(find("A100"), "forward", "16-bit"))
        >>> found[0].seconds <= found[-1].seconds
        True
    """
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    fitting = [cost for cost in costs if cost.blocks(gpu) > 0]
    return sorted(
        (kernel_time(gpu, cost, n, d, assumptions=assumptions) for cost in fitting), key=lambda time: time.seconds
    )

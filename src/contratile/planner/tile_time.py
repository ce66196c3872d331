"""Clocks that a multiprocessor spends on one tile of scores: the heart of the prediction.

A tile is a product, and an epilogue of other instructions on its scores:

    product     flops / (flops per clock * sustained share)
    epilogue    the slowest of exp2, shuffles, issue slots and fp32 lanes, plus (1 - pipe_overlap) of the others
    l2          bytes from L2 / the multiprocessor's part of the L2 bandwidth, or less: bytes on the way / latency
    fill        clocks until the first operands are there: copies are asynchronous within a tile, not across tiles

    serial      max(product, l2) + epilogue + fill       what a block alone on its multiprocessor takes
    ideal       max(product, epilogue, l2, serial / b)   b resident blocks that never wait for each other
    clocks      ideal + (1 - overlap) * (serial - ideal)

With one resident block `ideal` is `serial`: nothing overlaps except asynchronous copies with the product. With more,
one block multiplies while another exponentiates; `overlap` says how much of the possible gain is had, since nothing
keeps blocks out of step. Without asynchronous copies (one stage) loads come on top of the product. Products without
tensor cores issue from the same lanes as the epilogue, so these two never overlap.

`overlap` and `pipe_overlap` were set once, to meet published rates of attention kernels, which are loops of the same
kind (`tests/planner/test_published.py`). They are not fitted to this library's kernels, which have not been timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from contratile.planner.gpus import Gpu, Processor


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What the prediction assumes beyond the table of GPUs."""

    overlap: float = 0.7
    """Share of the possible overlap between resident blocks that happens."""

    pipe_overlap: float = 0.5
    """Share of the faster pipes' time that the slowest pipe hides, within the epilogue of a tile."""

    latency_clocks: int = 600
    """Latency of loads from a busy L2, including the barriers around them."""

    dram_share: float = 0.85
    """Share of the DRAM bandwidth that is reached (gpu-benches measures 0.81 on an H200 to 0.95 on an A100)."""

    launch_seconds: float = 3e-6
    """From the end of one kernel to full speed of the next. The host runs ahead and is not counted."""

    def __post_init__(self) -> None:
        for name in ("overlap", "pipe_overlap", "dram_share"):
            assert 0 <= getattr(self, name) <= 1, name


DEFAULT = Assumptions()


@dataclass(frozen=True, kw_only=True)
class TileWork:
    """What one tile asks of its multiprocessor."""

    flops: float
    """Flops of its products."""

    kind: str = "16-bit"
    """How they are multiplied."""

    scores: int
    """Scores of the tile."""

    exp2: float
    """exp2 per score."""

    shuffles: float
    """Shuffles per score."""

    other: float
    """Every other instruction per score, the product's own (matrix instructions and their loads) aside."""

    fp32: float = 0.0
    """How many of `other` are fp32 additions, products and FMAs. Matters where these lanes are few (GA100)."""

    l2_bytes: float
    """Loaded from and stored to L2."""

    stages: int = 3
    """Pipeline stages; with 1, copies are not asynchronous."""

    bytes_on_the_way: float = math.inf
    """Asynchronous copies of a block in flight at once: all stages but the one that is multiplied."""

    fills: float = 1.0
    """How often per tile the pipeline of copies restarts; 0 if it continues across tiles, as in attention."""


@dataclass(frozen=True, kw_only=True)
class TileClocks:
    """Clocks of one tile, term by term. The terms overlap; `clocks` is what they take together."""

    product: float
    exp2: float
    shuffles: float
    issue: float
    fp32: float
    epilogue: float
    l2: float
    fill: float
    serial: float
    clocks: float


def tile_clocks(gpu: Gpu, work: TileWork, blocks: int, assumptions: Assumptions = DEFAULT) -> TileClocks:
    """Clocks per tile of a multiprocessor with some resident blocks.

    Args:
        gpu: Where the tile runs, while all multiprocessors do the same.
        work: What the tile asks for.
        blocks: Resident blocks per multiprocessor, at least 1.
        assumptions: How much overlaps.

    Returns:
        The terms and their sum, per tile (not per round of `blocks` tiles).

    Example:
        >>> from contratile.planner.gpus import find
        >>> work = TileWork(flops=2 * 128 * 128 * 512, scores=128 * 128, exp2=1, shuffles=0, other=7, l2_bytes=0)
        >>> round(tile_clocks(find("H100"), work, 1).exp2)
        1024
    """
    unit, kind = gpu.processor, gpu.kind(work.kind)
    product = work.flops / (unit.flops_per_clock[kind] * gpu.sustained)
    per_score = work.exp2 + work.shuffles + work.other
    pipes = (
        work.scores * work.exp2 / unit.exp2_per_clock,
        work.scores * work.shuffles / unit.shuffles_per_clock,
        work.scores * per_score / unit.issue_per_clock,
        work.scores * work.fp32 / unit.fp32_per_clock,
    )
    slowest = max(pipes)
    epilogue = slowest + (1 - assumptions.pipe_overlap) * (sum(pipes[:2]) + max(pipes[2:]) - slowest)
    latency = assumptions.latency_clocks
    l2 = work.l2_bytes * max(1 / gpu.l2_bytes_per_clock, latency / (blocks * work.bytes_on_the_way))
    fill = latency * work.fills
    loaded = max(product, l2) if work.stages > 1 else product + l2
    serial = loaded + epilogue + fill
    same_lanes = kind == "ieee" and isinstance(gpu.arch, int)
    busy = product + epilogue if same_lanes else max(product, epilogue)
    ideal = max(busy, l2, serial / blocks)
    return TileClocks(
        product=product,
        exp2=pipes[0],
        shuffles=pipes[1],
        issue=pipes[2],
        fp32=pipes[3],
        epilogue=epilogue,
        l2=l2,
        fill=fill,
        serial=serial,
        clocks=ideal + (1 - assumptions.overlap) * (serial - ideal),
    )


def grid_clocks(
    gpu: Gpu, work: TileWork, blocks: int, *, programs: int, tiles: float, assumptions: Assumptions = DEFAULT
) -> float:
    """Clocks of a launch: whole waves of `blocks` programs per multiprocessor, then what is left.

    Programs of the last wave are spread over all multiprocessors, with less to overlap.

    >>> from contratile.planner.gpus import find
    >>> work = TileWork(flops=2 * 128 * 128 * 512, scores=128 * 128, exp2=1, shuffles=0, other=7, l2_bytes=0)
    >>> clocks = [grid_clocks(find("H100"), work, 1, programs=programs, tiles=1) for programs in (132, 133, 264)]
    >>> clocks[0] * 2 == clocks[1] == clocks[2]
    True
    """
    full, rest = divmod(programs, gpu.processors * blocks)
    clocks = full * blocks * tiles * tile_clocks(gpu, work, blocks, assumptions).clocks
    if rest:
        last = -(-rest // gpu.processors)
        clocks += last * tiles * tile_clocks(gpu, work, last, assumptions).clocks
    return clocks


def resident_blocks(unit: Processor, *, warps: int, registers: int, shared_bytes: int) -> int:
    """Blocks that fit on a multiprocessor at once; 0 if not even one does.

    Args:
        unit: The multiprocessor.
        warps: Warps (waves) of a block.
        registers: Registers per thread; they are allocated in steps of 8.
        shared_bytes: Shared memory per block.

    Returns:
        The least of what registers, shared memory, threads and block slots allow.

    Example:
        >>> from contratile.planner.gpus import find
        >>> [resident_blocks(find("H100").processor, warps=8, registers=r, shared_bytes=98304) for r in (128, 133)]
        [2, 1]
    """
    if shared_bytes > unit.shared_bytes_of_a_block:
        return 0
    threads = warps * unit.warp_size
    by_registers = unit.registers // (threads * max(8, -(-registers // 8) * 8))
    by_shared = unit.shared_bytes // max(1, shared_bytes + unit.reserved_shared_bytes)
    return min(by_registers, by_shared, unit.threads // threads, unit.blocks)

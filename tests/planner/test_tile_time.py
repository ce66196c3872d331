"""Clocks of a tile: bounds, monotonicity, occupancy."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contratile.planner.gpus import Gpu, all_gpus, find
from contratile.planner.tile_time import Assumptions, TileWork, grid_clocks, resident_blocks, tile_clocks

gpus = st.sampled_from(all_gpus())
per_score = st.floats(0, 40)
shares = st.floats(0, 1)
assumptions = st.builds(Assumptions, overlap=shares, pipe_overlap=shares, latency_clocks=st.integers(0, 2000))
works = st.builds(
    TileWork,
    flops=st.floats(1e4, 1e9),
    kind=st.sampled_from(["16-bit", "tf32", "tf32x3", "ieee"]),
    scores=st.sampled_from([4096, 8192, 16384, 32768]),
    exp2=per_score,
    shuffles=per_score,
    other=per_score,
    fp32=per_score,
    l2_bytes=st.floats(0, 1e6),
    stages=st.integers(1, 4),
    bytes_on_the_way=st.sampled_from([4096.0, 32768.0, math.inf]),
    fills=st.sampled_from([0.0, 1.0]),
)


@settings(deadline=None)
@given(gpus, works, st.integers(1, 6), assumptions)
def test_no_faster_than_any_unit_and_no_slower_than_one_after_the_other(
    gpu: Gpu, work: TileWork, blocks: int, given: Assumptions
) -> None:
    tile = tile_clocks(gpu, work, blocks, given)
    slack = 1 + 1e-9
    assert tile.clocks * slack >= max(tile.product, tile.exp2, tile.shuffles, tile.issue, tile.l2)
    assert tile.clocks <= tile.serial * slack
    assert max(tile.exp2, tile.shuffles, tile.issue, tile.fp32) <= tile.epilogue * slack
    assert tile.epilogue <= (tile.exp2 + tile.shuffles + tile.issue + tile.fp32) * slack


@settings(deadline=None)
@given(gpus, works, st.integers(1, 6), st.sampled_from(["flops", "exp2", "shuffles", "other", "fp32", "l2_bytes"]))
def test_more_work_never_takes_less_time(gpu: Gpu, work: TileWork, blocks: int, what: str) -> None:
    more = replace(work, **{what: getattr(work, what) * 1.5 + 0.1})
    assert tile_clocks(gpu, more, blocks).clocks >= tile_clocks(gpu, work, blocks).clocks * (1 - 1e-9)


@settings(deadline=None)
@given(gpus, works, st.integers(1, 5))
def test_more_resident_blocks_never_slow_a_tile_down(gpu: Gpu, work: TileWork, blocks: int) -> None:
    assert tile_clocks(gpu, work, blocks + 1).clocks <= tile_clocks(gpu, work, blocks).clocks * (1 + 1e-9)


def test_one_block_overlaps_only_copies() -> None:
    work = TileWork(flops=2 * 128 * 128 * 512, scores=128 * 128, exp2=1, shuffles=1, other=8, l2_bytes=1e5)
    tile = tile_clocks(find("H100"), work, 1)
    assert tile.clocks == max(tile.product, tile.l2) + tile.epilogue + tile.fill
    alone = tile_clocks(find("H100"), replace(work, stages=1), 1)
    assert alone.clocks == pytest.approx(tile.product + tile.l2 + tile.epilogue + tile.fill)


def test_few_bytes_on_the_way_do_not_use_all_of_l2() -> None:
    work = TileWork(flops=1e6, scores=4096, exp2=1, shuffles=0, other=0, l2_bytes=1e5, bytes_on_the_way=8192)
    one, two, many = (tile_clocks(find("H100"), work, blocks).l2 for blocks in (1, 2, 8))
    assert one == pytest.approx(1e5 * 600 / 8192) and one == 2 * two
    assert many == pytest.approx(1e5 / find("H100").l2_bytes_per_clock)


def test_clocks_of_the_design() -> None:
    """An SM of an H100, 128 x 128 scores, D = 512: 0.25 clocks per score on the product at its peak, 0.0625 on each
    exp2, 0.03125 on each shuffle, 0.0078 on every instruction."""
    work = TileWork(flops=2 * 128 * 128 * 512, scores=128 * 128, exp2=1, shuffles=1, other=0, l2_bytes=0)
    h100 = find("H100")
    tile = tile_clocks(h100, work, 1)
    per_tile = 128 * 128
    assert tile.product * h100.sustained / per_tile == pytest.approx(0.25)
    assert (tile.exp2 / per_tile, tile.shuffles / per_tile) == (0.0625, 0.03125)
    assert tile.issue / per_tile == 2 / 128


def test_products_of_cuda_cores_do_not_overlap_with_the_epilogue() -> None:
    work = TileWork(flops=1e6, kind="ieee", scores=4096, exp2=1, shuffles=0, other=8, l2_bytes=0, fills=0)
    for name, together in (("A100", False), ("MI300X", True)):
        tile = tile_clocks(find(name), work, 4, Assumptions(overlap=1))
        assert (tile.clocks < tile.product + tile.epilogue) is together


@settings(deadline=None)
@given(gpus, works, st.integers(1, 4), st.integers(1, 3000))
def test_waves(gpu: Gpu, work: TileWork, blocks: int, programs: int) -> None:
    def clocks(count: int) -> float:
        return grid_clocks(gpu, work, blocks, programs=count, tiles=2)

    assert clocks(programs) <= clocks(programs + 1) * (1 + 1e-9)
    even = programs * 2 / gpu.processors * tile_clocks(gpu, work, blocks).clocks
    assert clocks(programs) >= even * (1 - 1e-9), "an uneven last wave costs, never saves"


@settings(deadline=None)
@given(gpus, st.sampled_from([4, 8]), st.integers(16, 255), st.integers(0, 240 << 10), st.integers(0, 64))
def test_more_resources_never_mean_more_blocks(gpu: Gpu, warps: int, registers: int, shared: int, more: int) -> None:
    unit = gpu.processor
    blocks = resident_blocks(unit, warps=warps, registers=registers, shared_bytes=shared)
    assert resident_blocks(unit, warps=warps, registers=registers + more, shared_bytes=shared) <= blocks
    assert resident_blocks(unit, warps=warps, registers=registers, shared_bytes=shared + (more << 10)) <= blocks
    assert blocks * warps * unit.warp_size <= unit.threads
    assert blocks * warps * unit.warp_size * registers <= unit.registers


def test_two_blocks_need_128_registers_at_8_warps() -> None:
    unit = find("A100").processor
    counts = [resident_blocks(unit, warps=8, registers=r, shared_bytes=65536) for r in (128, 129, 255, 256)]
    assert counts == [2, 1, 1, 1]
    assert resident_blocks(unit, warps=8, registers=64, shared_bytes=164 << 10) == 0

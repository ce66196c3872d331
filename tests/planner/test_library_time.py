"""Library products: limits, waves, sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contratile.planner.gpus import Gpu, all_gpus, find
from contratile.planner.library_time import library_time

gpus = st.sampled_from(all_gpus())
sizes = st.integers(1, 20_000)


@settings(deadline=None)
@given(gpus, sizes, sizes, sizes, st.sampled_from(["16-bit", "tf32", "ieee"]))
def test_never_above_the_sustained_rate(gpu: Gpu, rows: int, cols: int, inner: int, kind: str) -> None:
    time = library_time(gpu, rows, cols, inner, kind=kind)
    assert 2 * rows * cols * inner / time.seconds <= gpu.peak(kind) * gpu.sustained
    assert time.seconds > max(time.product, time.l2, time.dram)


@settings(deadline=None)
@given(gpus, sizes, sizes, sizes)
def test_grows_with_every_dimension(gpu: Gpu, rows: int, cols: int, inner: int) -> None:
    base = library_time(gpu, rows, cols, inner).seconds
    for more in ((2 * rows, cols, inner), (rows, 2 * cols, inner), (rows, cols, 2 * inner)):
        assert library_time(gpu, *more).seconds >= base * (1 - 1e-9)


def test_bytes_in_l2_are_not_read_from_dram() -> None:
    held = library_time("H100", 4096, 512, 8192, read_bytes=0)
    assert held.dram == 0 and held.seconds <= library_time("H100", 4096, 512, 8192).seconds


def test_tf32x3_means_fp32_products() -> None:
    both = [library_time("A100", 4096, 512, 4096, kind=kind) for kind in ("tf32x3", "ieee")]
    assert both[0] == both[1]
    assert both[0].seconds > library_time("A100", 4096, 512, 4096, kind="tf32").seconds


@pytest.mark.parametrize("name", ["A100", "H100", "B200", "RTX 4090", "L4", "MI300X"])
def test_large_products_reach_the_sustained_rate(name: str) -> None:
    gpu = find(name)
    reached = 2 * 16384**3 / library_time(gpu, 16384, 16384, 16384).seconds / gpu.peak()
    assert gpu.sustained * 0.95 < reached <= gpu.sustained

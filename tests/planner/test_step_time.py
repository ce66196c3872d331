"""Predictions of kernels and of a step: growth, bounds, the choice among candidates, the label."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contratile.engine.backends.triton_configs import TABLE, WORKSPACE_BYTES
from contratile.planner import FIRST_GENERATION, SECOND_GENERATION, Gpu, all_gpus, candidates, find, predict, rank
from contratile.planner.candidates import Costs
from contratile.planner.kernel_time import kernel_time
from contratile.planner.traffic import StepTraffic

GPUS = all_gpus()
HOW: list[tuple[torch.dtype, str | None]] = [
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, "tf32"),
    (torch.float32, "tf32x3"),
    (torch.float32, None),
]
gpus = st.sampled_from(GPUS)
hows = st.sampled_from(HOW)
generations = st.sampled_from([FIRST_GENERATION, SECOND_GENERATION])


@settings(deadline=None)
@given(gpus, hows, st.integers(1, 200_000), st.integers(1, 4096), generations)
def test_any_size_is_predicted_and_stays_below_the_peak(
    gpu: Gpu, how: tuple[torch.dtype, str | None], n: int, d: int, costs: Costs
) -> None:
    step = predict(gpu, n, d, how[0], precision=how[1], costs=costs)
    assert 0 < step.share_of_peak < gpu.sustained
    assert step.seconds == pytest.approx(step.forward_seconds + step.backward_seconds)
    for kernel in (step.forward, step.gradient):
        assert kernel.seconds >= max(kernel.product, kernel.exp2, kernel.shuffles, kernel.issue, kernel.l2, kernel.dram)


@settings(deadline=None)
@given(gpus, hows, st.integers(12, 17), st.sampled_from([64, 256, 512, 768, 1024]))  # fewer fit into one wave
def test_time_grows_with_n_and_d(gpu: Gpu, how: tuple[torch.dtype, str | None], log_n: int, d: int) -> None:
    n = 1 << log_n
    base = predict(gpu, n, d, how[0], precision=how[1]).seconds
    assert predict(gpu, 2 * n, d, how[0], precision=how[1]).seconds > base
    assert predict(gpu, n, 2 * d, how[0], precision=how[1]).seconds > base


@settings(deadline=None)
@given(gpus, st.sampled_from(["exp2", "shuffles", "other", "fp32"]), st.floats(0, 20))
def test_time_is_monotone_in_instructions(gpu: Gpu, what: str, more: float) -> None:
    for cost in candidates(gpu, "forward", "16-bit"):
        slower = replace(cost, **{what: getattr(cost, what) + more})
        assert kernel_time(gpu, slower, 8192, 512).seconds >= kernel_time(gpu, cost, 8192, 512).seconds


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_second_generation_is_faster_and_the_text_says_prediction(gpu: Gpu) -> None:
    before, after = (predict(gpu, 32768, 512, costs=costs) for costs in (FIRST_GENERATION, SECOND_GENERATION))
    assert after.seconds < before.seconds
    for step in (before, after):
        assert "prediction, not run on a GPU" in str(step) and gpu.name in str(step)


@pytest.mark.parametrize("generation", [FIRST_GENERATION, SECOND_GENERATION], ids=["first", "second"])
def test_costs_cover_the_launch_table(generation: Costs) -> None:
    assert set(generation) == set(TABLE)
    for arch, costs in generation.items():
        for kind in TABLE[arch]:
            for kernel in ("forward", "gradient"):
                mine = [cost for cost in costs if (cost.kernel, cost.kind) == (kernel, kind)]
                assert mine, (arch, kernel, kind)
                assert all(cost.blocks(gpu) > 0 for cost in mine for gpu in GPUS if gpu.arch == arch)
        for cost in costs:
            assert cost.counted in TABLE and cost.fp32 <= cost.other
            assert cost.exp2 > 0.9 and cost.registers <= 256


def test_rank_puts_the_fastest_first_and_leaves_out_what_does_not_fit() -> None:
    gpu = find("H100")
    costs = candidates(gpu, "forward", "16-bit", FIRST_GENERATION)
    heavy = replace(costs[0], other=100.0)
    slim = replace(costs[0], registers=128)
    huge = replace(costs[0], shared_bytes=300 << 10)
    ranked = rank(gpu, [heavy, *costs, huge, slim])
    assert [time.cost for time in ranked] == [slim, *costs, heavy]
    assert [time.blocks for time in ranked] == [2, 1, 1]
    assert predict(gpu, 32768, 512, costs=[slim, heavy, *FIRST_GENERATION[90]]).forward.cost == slim


def test_l2_bytes_are_those_of_the_traffic_formula() -> None:
    step = predict("A100", 32768, 512, costs=FIRST_GENERATION)
    formula = StepTraffic(32768, 512, 2, step.forward.cost.config, 108, WORKSPACE_BYTES)
    assert (step.forward.l2_bytes, step.gradient.l2_bytes) == (formula.forward().total, formula.gradient().total)
    assert step.forward.l2_bytes == pytest.approx(17e9, rel=0.05)


def test_g_goes_through_dram_unless_a_chunk_fits_in_l2() -> None:
    large, small = (predict("A100", 32768, 512, workspace=size) for size in (64 << 20, 16 << 20))
    assert large.gradient.dram_bytes - small.gradient.dram_bytes > 1e9
    assert large.products.dram > small.products.dram


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="gpu: expected one of"):
        predict("TPU", 1024, 512)
    with pytest.raises(ValueError, match="n: expected"):
        predict("A100", 0, 512)
    with pytest.raises(ValueError, match="costs: expected a forward kernel"):
        predict("A100", 1024, 512, costs=[])
    huge = replace(FIRST_GENERATION[80][0], shared_bytes=1 << 20)
    with pytest.raises(ValueError, match="cost: expected a block that fits on A100"):
        kernel_time(find("A100"), huge, 1024, 512)

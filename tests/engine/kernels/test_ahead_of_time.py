"""Every kernel compiles for every GPU of the launch table, without spills, within its memories, on its tensor cores."""

from collections.abc import Iterator

import pytest
import torch

from contratile.engine.backends.triton_configs import TABLE
from tests.engine.kernels import resources
from tests.engine.kernels.ahead_of_time import TARGETS, Report, Target, name_of, report
from tests.engine.kernels.samples import RULES, sample_launches

MMA: dict[Target, str] = {
    **dict.fromkeys((80, 86, 89, 120), "mma.sync"),
    **{90: "wgmma.mma_async", 100: "tcgen05.mma", "gfx90a": "v_mfma", "gfx942": "v_mfma"},
}
MULTIPLIES = ("forward_tiles", "gradient_tiles")


def test_targets_are_those_of_the_launch_table() -> None:
    assert set(TARGETS) == set(TABLE)


def test_recorded_table_is_of_this_launch_table() -> None:
    """`make kernels` writes it."""
    recorded = resources.OUT.read_text()
    for target in TARGETS:
        for features, tile, launch in resources.ours(target):
            start = resources.row_start(target, features, tile, launch)
            (row,) = (line for line in recorded.splitlines() if line.startswith(start))
            assert "| 0 B |" in row


def kinds(target: Target) -> list[tuple[torch.dtype, str]]:
    """How features are multiplied there."""
    fp32 = [(torch.float32, precision) for precision in TABLE[target] if precision != "16-bit"]
    return [(torch.bfloat16, "ieee"), (torch.float16, "ieee"), *fp32]


def check(target: Target, d: int, dtype: torch.dtype, precision: str, rule: str) -> None:
    for found in reports(target, d, dtype, precision, rule):
        what = f"{found} for D={d}, {dtype}, {precision}, {rule}"
        assert not found.problems, f"{found.problems}: {what}"
        if found.kernel in MULTIPLIES:
            tensor_cores = dtype != torch.float32 or precision != "ieee"
            assert not tensor_cores or MMA[target] in found.mma, f"no tensor cores: {what}"
            copies = isinstance(target, int) and d % 16 == 0  # rows of other lengths are loaded number by number
            assert not copies or found.copies, f"no asynchronous copies: {what}"


def reports(target: Target, d: int, dtype: torch.dtype, precision: str, rule: str) -> Iterator[Report]:
    for launch in sample_launches(target, d, dtype, precision, rule):
        yield report(launch, target)


@pytest.mark.parametrize("target", [80, 90, "gfx942"], ids=name_of)
def test_default_configurations(target: Target) -> None:
    check(target, 512, torch.bfloat16, "ieee", "clip")
    check(target, 512, torch.float32, "tf32", "clip")


@pytest.mark.parametrize("rule", ["hardness", "hardness, statistics"])
def test_hardness_does_not_spill(rule: str) -> None:
    """Its gradients need more registers than are left where two blocks share a multiprocessor."""
    check(90, 512, torch.bfloat16, "ieee", rule)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_all_configurations(target: Target, rule: str) -> None:
    for dtype, precision in kinds(target):
        for d in (48, 512, 768, 1000) if rule == "clip" else (512,):
            check(target, d, dtype, precision, rule)

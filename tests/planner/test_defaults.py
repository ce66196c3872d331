"""The launch table's defaults against the model: the shortest predicted time, or near it with room for more blocks."""

import pytest

from contratile.engine.backends import triton_configs
from contratile.engine.backends.triton_configs import TABLE
from contratile.planner import all_gpus, rank
from contratile.planner.candidates import SECOND_GENERATION, KernelName, candidates
from contratile.planner.gpus import Gpu

NEAR = 1.1
"""The model's own doubts are larger than this."""


@pytest.mark.parametrize("kernel", ["forward", "gradient"])
@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_the_default_is_the_models_choice(gpu: Gpu, kernel: KernelName) -> None:
    for kind in TABLE[gpu.arch]:
        found = rank(gpu, candidates(gpu, kernel, kind), n=32768, d=512)
        default = next(time for time in found if time.cost == candidates(gpu, kernel, kind)[0])
        assert default.seconds <= NEAR * found[0].seconds


def test_costs_are_of_the_candidates() -> None:
    """`make kernels` writes them."""
    assert SECOND_GENERATION.keys() == TABLE.keys()
    for arch, costs in SECOND_GENERATION.items():
        listed = [
            (kernel, kind, *config[:5])
            for kind in TABLE[arch]
            for kernel in ("forward", "gradient")
            for config in triton_configs.candidates(arch, kind, kernel)
        ]
        assert [(x.kernel, x.kind, x.m, x.n, x.d, x.warps, x.stages) for x in costs] == listed

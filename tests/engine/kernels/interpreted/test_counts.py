"""Flops and bytes that kernels spend, counted, equal the formulas that the documentation quotes."""

from tests.engine.kernels.interpreted.battery import numbers  # isort: skip  # first: it sets the mode of Triton

from pathlib import Path
from typing import Any

import pytest
import torch

import contratile as ct
from contratile.engine.backends import triton_configs, triton_launch
from contratile.engine.backends.triton_configs import TABLE, Arch, Config, Kernel, careful_config, config_for, kind_of
from contratile.planner.traffic import StepTraffic
from tests.engine.kernels.interpreter import launches
from tests.losses.test_cost import Meter

ROOT = Path(__file__).parents[4]
KERNELS: tuple[Kernel, Kernel] = ("forward", "gradient")
HOW: dict[str, Any] = {"backend": "triton", "tile": 16, "group": None}


def dtype_of(kind: str) -> torch.dtype:
    return {"bf16": torch.bfloat16}.get(kind, torch.float32)


@pytest.mark.parametrize("workspace", [2048, 1 << 20])
@pytest.mark.parametrize(("n", "d"), [(48, 32), (64, 64), (41, 27)])
@pytest.mark.parametrize("kind", ["bf16", "ieee"])
def test_bytes_are_those_of_the_formula(
    kind: str, n: int, d: int, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_configs, "WORKSPACE_BYTES", workspace)
    q, k = (numbers(n, d, seed=seed, kind=kind).requires_grad_() for seed in (1, 2))
    scale = torch.tensor(5.0, requires_grad=True)
    config = config_for(80, d, kind_of(80, dtype_of(kind), "ieee"), tile=16)
    step = StepTraffic(n, d, q.dtype.itemsize, config, processors=1, workspace=workspace)
    ct.clip_loss(q, k, scale, **HOW)  # the first call of all tries the backend out
    with launches() as seen:
        loss = ct.clip_loss(q, k, scale, **HOW)
        assert (seen.loaded, seen.stored) == step.forward()
    with launches() as seen:
        loss.backward()
        assert (seen.loaded, seen.stored) == step.gradient()


def steps_of(arch: Arch) -> StepTraffic:
    """N = 32k, D = 512, bf16."""
    forward, gradient = (config_for(arch, 512, "16-bit", kernel=kernel) for kernel in KERNELS)
    low = careful_config(arch, forward).m
    return StepTraffic(32768, 512, 2, forward, 108, triton_configs.WORKSPACE_BYTES, gradient, low)


@pytest.mark.parametrize(("m", "n"), [(64, 16), (128, 32), (32, 64)])
def test_bytes_of_tiles_of_other_shapes(m: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Careful tiles are lower. One size is of whole tiles, one is not."""
    config = Config(m, n, 16, 4, 2)
    monkeypatch.setattr(triton_launch, "config_for", lambda *_, **__: config)
    for size in (256, 215):
        q, k = (numbers(size, 16, seed=seed, kind="bf16").requires_grad_() for seed in (1, 2))
        step = StepTraffic(size, 16, 2, config, processors=1, workspace=triton_configs.WORKSPACE_BYTES)
        scale = torch.tensor(5.0, requires_grad=True)
        ct.clip_loss(q, k, scale, backend="triton", group=None)
        with launches() as seen:
            loss = ct.clip_loss(q, k, scale, backend="triton", group=None)
            assert (seen.loaded, seen.stored) == step.forward()
        with launches() as seen:
            loss.backward()
            assert (seen.loaded, seen.stored) == step.gradient()


@pytest.mark.parametrize("kind", ["bf16", "ieee"])
def test_four_products(kind: str) -> None:
    """And the tiles of the positives, which are computed once more, before all others."""
    n, d = 64, 32
    q, k = (numbers(n, d, seed=seed, kind=kind).requires_grad_() for seed in (1, 2))
    scale = torch.tensor(5.0, requires_grad=True)
    one, positives = 2 * n * n * d, 2 * n * 16 * d
    with launches() as seen, Meter() as meter:
        loss = ct.clip_loss(q, k, scale, **HOW)
        assert (seen.flops, meter.flops) == (one + positives, 0)
        torch.autograd.grad(loss, [q, k, scale], retain_graph=True)
        assert (seen.flops, meter.flops) == (2 * one + positives, 2 * one)
    for wanted, kernels, library in (([q], 1, 1), ([k, scale], 1, 1), ([scale], 1, 0)):
        with launches() as seen, Meter() as meter:
            leaves = [x.detach().requires_grad_(any(x is w for w in wanted)) for x in (q, k, scale)]
            loss = ct.clip_loss(leaves[0], leaves[1], leaves[2], **HOW)
            torch.autograd.grad(loss, [x for x in leaves if x.requires_grad])
        assert (seen.flops, meter.flops) == ((1 + kernels) * one + positives, library * one)


def test_one_set_costs_half() -> None:
    """Forward: the tiles on and above the diagonal. Backward, in one chunk: every tile, and one product for both."""
    n, d = 64, 32
    z = numbers(n, d, seed=1, kind="bf16").requires_grad_()
    with launches() as seen, Meter() as meter:
        row, _ = ct.pair_lse(z, None, 5.0, **HOW)
        assert seen.flops == 2 * n * (n + 16) // 2 * d
        torch.autograd.grad(row.sum(), z)
    assert (seen.flops, meter.flops) == (2 * n * (n + 16) // 2 * d + 2 * n * n * d, 2 * n * n * d)


def test_no_large_tensor_is_made() -> None:
    """Beyond gradients and an fp32 accumulator of the keys' gradient: the workspace and vectors."""
    n, d, workspace = 192, 16, 4096
    q, k = (numbers(n, d, seed=seed, kind="bf16").requires_grad_() for seed in (1, 2))
    with pytest.MonkeyPatch.context() as patch, Meter() as meter:
        patch.setattr(triton_configs, "WORKSPACE_BYTES", workspace)
        loss = ct.clip_loss(q, k, 5.0, **HOW)
        torch.autograd.grad(loss, [q, k])
    allowed = max(workspace, 8 * n, n * d * 4)
    assert meter.largest() <= allowed


def test_traffic_of_a_large_batch() -> None:
    """The paper's kernels move 825 GB."""
    for arch in TABLE:  # the gradient of sm_100 has narrow tiles
        assert steps_of(arch).total < (82e9 if arch == 100 else 73e9), (arch, steps_of(arch).total)
    step = steps_of(80)
    parts = [step.forward().total, step.gradient().total, step.products().total]
    forward, gradient, products = (f"{part / 1e9:.0f} GB" for part in parts)
    row = f"| {step.total / 1e9:.0f} GB | forward {forward}, G {gradient}, two library products {products} |"
    assert row in (ROOT / "docs/kernels.md").read_text(), row

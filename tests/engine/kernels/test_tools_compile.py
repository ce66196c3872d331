"""The tools that compile and emulate bite: kernels that are too large, and PTX that is wrong."""

# mypy: disable-error-code="no-untyped-def"
# (kernels)

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from contratile.engine.backends.triton_launch import Launch
from tests.engine.kernels.ahead_of_time import compiled, recorded, report
from tests.engine.kernels.ptx_emulator import Program, emulated, run
from tests.engine.kernels.ptx_machine import Hazard
from tests.helpers import randn


@triton.jit
def product(x, y, out, n, depth, rows: tl.constexpr, width: tl.constexpr, step: tl.constexpr, precision: tl.constexpr):
    """A tile of x [rows, depth] times y [width, depth] transposed, in steps."""
    i, j, d = tl.arange(0, rows), tl.arange(0, width), tl.arange(0, step)
    dots = tl.zeros([rows, width], tl.float32)
    for start in range(0, depth, step):
        a = tl.load(x + i[:, None] * depth + start + d[None, :], mask=i[:, None] < n, other=0.0)
        b = tl.load(y + j[:, None] * depth + start + d[None, :])
        dots = tl.dot(a, tl.trans(b), dots, input_precision=precision)
    tl.store(out + i[:, None] * width + j[None, :], dots, mask=i[:, None] < n)


def tile(
    rows: int, width: int, depth: int, *, dtype: torch.dtype = torch.bfloat16, stages: int = 3, **more: Any
) -> Launch:
    x, y = randn(rows, depth, seed=1, dtype=dtype), randn(width, depth, seed=2, dtype=dtype)
    arguments = {"x": x, "y": y, "out": torch.zeros(rows, width), "n": rows, "depth": depth}
    constants = {"rows": rows, "width": width, "step": 64, "precision": "ieee", **more}
    options = {"num_warps": constants.pop("warps", 4), "num_stages": stages, "enable_fp_fusion": True}
    return Launch(product, (1,), arguments | constants, options)


# --- ahead of time ------------------------------------------------------------------------------------------------


def test_a_report_reads_what_the_compiler_says() -> None:
    found = report(tile(64, 64, 256), 80)
    assert found.kernel == "product" and (found.num_warps, found.num_stages) == (4, 3)
    assert 32 < found.registers < 255 and not found.problems
    assert found.shared >= 2 * (64 + 64) * 64 * 2  # two stages of both operands at least
    assert found.mma["mma.sync"] and found.copies["cp.async"] and "registers" in str(found)
    assert not report(tile(64, 64, 256, stages=1), 80).copies  # nothing to overlap with


def test_too_much_of_anything_is_a_problem() -> None:
    spilling = report(tile(256, 256, 256, warps=4), 80)
    assert any("bytes of spills" in problem for problem in spilling.problems)
    large = report(tile(128, 128, 2048, stages=7), 80)
    assert any("of shared memory, 166912 are there" in problem for problem in large.problems)


def test_recorded_launches_are_not_run() -> None:
    launch = tile(64, 64, 256)
    with recorded() as launches:
        launch.run()
    assert launches == [launch] or launches[0].arguments.keys() == launch.arguments.keys()
    assert not launch.arguments["out"].any()


# --- emulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [
        (torch.bfloat16, "ieee", 2e-5),
        (torch.float16, "ieee", 2e-5),
        (torch.float32, "tf32", 5e-2),
        (torch.float32, "tf32x3", 1e-4),
        (torch.float32, "ieee", 2e-5),
    ],
)
@pytest.mark.parametrize("stages", [1, 3])
def test_emulated_product(dtype: torch.dtype, precision: str, tolerance: float, stages: int) -> None:
    launch = tile(32, 32, 128, dtype=dtype, stages=stages, precision=precision, step=32)
    with emulated():
        launch.run()
    x, y, out = (launch.arguments[name].double() for name in ("x", "y", "out"))
    error = float((out - x @ y.T).abs().max())
    assert error < tolerance
    if precision == "tf32":
        cut = [(z.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double() for z in (x, y)]
        assert float((out - cut[0] @ cut[1].T).abs().max()) < 2e-5 < error


def run_edited(launch: Launch, old: str, new: str) -> None:
    """Run the launch's PTX with something replaced in it."""
    kernel, _ = compiled(launch, 80)
    ptx, edits = re.subn(old, new, kernel.asm["ptx"])
    assert edits
    kept = [name for name, kind in kernel.src.signature.items() if kind != "constexpr"]
    run(Program(ptx), kernel.metadata.shared, launch.grid, [launch.arguments[name] for name in kept])


def test_a_missing_barrier_is_caught() -> None:
    with pytest.raises(Hazard, match=r"shared memory is (read|written) after another warp"):
        run_edited(tile(64, 64, 256), r"bar\.sync", "bar.warp.sync")


def test_a_missing_wait_is_caught() -> None:
    with pytest.raises(Hazard, match="while a copy to it is under way"):
        run_edited(tile(64, 64, 256), r"cp\.async\.wait_group\s+\w+", "cp.async.wait_group 9")


def test_a_load_outside_is_caught() -> None:
    launch = tile(64, 64, 256)
    launch.arguments["y"] = launch.arguments["y"][:63]
    with emulated(), pytest.raises(IndexError, match=r"global memory: .* lanes outside of all tensors"):
        launch.run()


def test_an_unknown_instruction_is_named() -> None:
    with pytest.raises(NotImplementedError, match="brev"):
        run_edited(tile(64, 64, 256), r"\bshl\.b32", "brev.b32")


@triton.jit
def scatter(x, index, out, n: tl.constexpr):
    """Reductions, a gather, whole numbers, and a branch that only some programs take."""
    i = tl.arange(0, n)
    row = tl.program_id(0)
    value = tl.load(x + row * n + tl.load(index + i) % n)
    top = tl.max(value, 0)
    total = tl.sum(tl.exp2(value - top), 0)
    if row % 2 == 1:
        total = total + row // 3
    tl.store(out + row * 2, top)
    tl.store(out + row * 2 + 1, tl.log2(total))


def test_emulated_reductions_on_strided_memory() -> None:
    n, rows = 64, 5
    index = torch.arange(n).flip(0) * 3
    x: Tensor = randn(rows, n, seed=1)
    out = torch.full((rows, 4), float("nan"))
    arguments = {"x": x, "index": index, "out": out.view(-1)[: 2 * rows], "n": n}
    launch = Launch(scatter, (rows,), arguments, {"num_warps": 2, "enable_fp_fusion": True})
    with emulated():
        launch.run()
    gathered = x[:, index % n].double()
    extra = torch.tensor([row // 3 if row % 2 else 0 for row in range(rows)])
    top = gathered.amax(1)
    total = (gathered - top[:, None]).exp2().sum(1) + extra
    expected = torch.stack([top, total.log2()], 1).view(-1)
    torch.testing.assert_close(out.view(-1)[: 2 * rows].double(), expected, rtol=1e-5, atol=1e-5)
    assert out.view(-1)[2 * rows :].isnan().all()

"""The strict interpreter bites: each rule has a kernel that breaks it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.engine.kernels.interpreter import OutOfBounds, Race, launches, same_in_any_order
from tests.helpers import randn

# --- numbers ------------------------------------------------------------------------------------------------------


@triton.jit
def product(x, y, out, n: tl.constexpr, precision: tl.constexpr):  # type: ignore[no-untyped-def]  # a kernel
    i = tl.arange(0, n)
    at = i[:, None] * n + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision=precision))


def dot(x: Tensor, y: Tensor, precision: str = "ieee") -> Tensor:
    out = torch.empty(x.shape)
    product[(1,)](x, y, out, x.shape[0], precision)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_of_every_dtype(dtype: torch.dtype) -> None:
    x, y = (randn(16, 16, seed=seed, dtype=dtype) for seed in (1, 2))
    torch.testing.assert_close(dot(x, y).double(), x.double() @ y.double(), rtol=0, atol=1e-5)


def test_dot_in_tf32_cuts_off_what_tensor_cores_do_not_read() -> None:
    x, y = (randn(16, 16, seed=seed) for seed in (1, 2))
    exact = x.double() @ y.double()
    cut_x, cut_y = ((z.view(torch.int32) & ~0x1FFF).view(torch.float32) for z in (x, y))
    torch.testing.assert_close(dot(x, y, "tf32").double(), cut_x.double() @ cut_y.double(), rtol=0, atol=1e-5)
    errors = {name: float((dot(x, y, name) - exact).abs().max()) for name in ("tf32", "tf32x3", "ieee")}
    assert errors["tf32"] > 1e-3 and errors["tf32x3"] < 2e-5 and errors["ieee"] < 5e-6


@triton.jit
def convert(x, out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
def test_conversions_round_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    special = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 3e38, float("inf"), float("-inf"), 1e-40, -1e-6]
    x = torch.cat([torch.tensor(special), randn(118, seed=1)]).to(source)
    out = torch.empty(128, dtype=target)
    convert[(1,)](x, out, 128)
    assert torch.equal(out, x.to(target))
    x[:] = float("nan")
    convert[(1,)](x, out, 128)
    assert out.isnan().all()


@triton.jit
def arithmetic(x, y, out, n: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, n)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.where(a > b, a * b, -a))


def test_bf16_arithmetic() -> None:
    x, y = (randn(64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    out = torch.empty_like(x)
    arithmetic[(1,)](x, y, out, 64)
    assert torch.equal(out, torch.where(x > y, x * y, -x))


# --- bounds -------------------------------------------------------------------------------------------------------


@triton.jit
def copy_row(x, out, first, count, stride, n: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row per program, from `first` and `count` elements, to the same place of `out`."""
    row, i = tl.program_id(0), tl.arange(0, n)
    ok = i < count
    tl.store(out + row * n + i, tl.load(x + row * stride + first + i, mask=ok, other=0.0), mask=ok)


def test_bounds_are_kept_by_masks() -> None:
    x, out = randn(3, 5, seed=1), torch.full((3, 8), float("nan"))
    copy_row[(3,)](x, out, 0, 5, 5, 8)
    assert torch.equal(out[:, :5], x) and out[:, 5:].isnan().all()


@pytest.mark.parametrize(("first", "count", "element"), [(1, 5, 15), (0, 6, 15), (-1, 5, -1), (1 << 20, 5, 1 << 20)])
def test_a_load_outside_is_caught(first: int, count: int, element: int) -> None:
    """Past the end, before the start, and far away, where another tensor may lie."""
    with pytest.raises(OutOfBounds, match=rf"copy_row, program \d: load of x .*the first at element {element} "):
        copy_row[(3,)](randn(3, 5, seed=1), torch.empty(3, 8), first, count, 5, 8)


def test_a_store_outside_is_caught() -> None:
    with pytest.raises(OutOfBounds, match="store of out by 3 lanes"):
        copy_row[(3,)](randn(3, 8, seed=1), torch.empty(3 * 8 - 3), 0, 8, 8, 8)


def test_a_load_from_the_gap_between_rows_is_caught() -> None:
    whole = randn(3, 9, seed=1)
    copy_row[(3,)](whole[:, :5], torch.empty(3, 8), 0, 5, 9, 8)
    with pytest.raises(OutOfBounds, match=r"load of x by 1 lanes .*shape \[3, 5\], strides \[9, 1\]"):
        copy_row[(3,)](whole[:, :5], torch.empty(3, 8), 0, 6, 9, 8)


def test_a_load_from_another_argument_is_caught() -> None:
    """Both are views of one storage, so the memory is there and the numbers look well."""
    both = randn(6, 8, seed=1)
    with pytest.raises(OutOfBounds, match="load of x by 8 lanes"):
        copy_row[(4,)](both[:3], torch.empty(4, 8), 0, 8, 8, 8)


@triton.jit
def far_row(x, out, row, stride, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    at = row.to(tl.int64) * stride if wide else row * stride
    tl.store(out, tl.load(x + at))


def test_an_offset_beyond_int32_is_caught() -> None:
    stride = 1 << 30
    x = torch.as_strided(torch.empty(2 * stride + 1, dtype=torch.int8), (3, 1), (stride, 1))
    x[2] = 7
    out = torch.zeros(1, dtype=torch.int8)
    far_row[(1,)](x, out, 2, stride, True)
    assert out.item() == 7
    with pytest.raises(OutOfBounds):
        far_row[(1,)](x, out, 2, stride, False)


@triton.jit
def unmasked_rest(x, out, count, n: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i, mask=i < count))


def test_what_was_masked_off_is_poison() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = torch.zeros(8, dtype=dtype)
        unmasked_rest[(1,)](torch.ones(5, dtype=dtype), out, 5, 8)
        assert torch.equal(out[:5], torch.ones(5, dtype=dtype)) and out[5:].isnan().all()


def test_fresh_memory_is_poison() -> None:
    with launches():
        assert torch.empty(9).isnan().all() and torch.ones(2).new_empty(9).isnan().all()
        assert torch.empty_like(torch.ones(9, dtype=torch.bfloat16)).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# --- races --------------------------------------------------------------------------------------------------------


@triton.jit
def everyone_stores(out):  # type: ignore[no-untyped-def]
    tl.store(out, tl.program_id(0).to(tl.float32))


@triton.jit
def neighbour_loads(out):  # type: ignore[no-untyped-def]
    me = tl.program_id(0)
    tl.store(out + me, 1.0)
    tl.store(out + 8 + me, tl.load(out + (me + 7) % 8))


@triton.jit
def neighbour_stores(out):  # type: ignore[no-untyped-def]
    me = tl.program_id(0)
    was = tl.load(out + me)
    tl.store(out + (me + 8) % 9, was)


@triton.jit
def counter_and_load(out):  # type: ignore[no-untyped-def]
    tl.atomic_add(out, 1.0)
    tl.store(out + 1 + tl.program_id(0), tl.load(out))


@triton.jit
def lanes_collide(out):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 8)
    tl.store(out + i // 2, i.to(tl.float32))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (everyone_stores, "store of out after the store of another program"),
        (neighbour_loads, "load of out after the store of another program|store of out after the load"),
        (neighbour_stores, "(load|store) of out after the (load|store) of another program"),
        (counter_and_load, "(load|atomic) of out after the (load|atomic) of another program"),
        (lanes_collide, "two lanes store to one element of out"),
    ],
)
@pytest.mark.parametrize("order", [None, 1, 2])
def test_races_are_caught_in_every_order(kernel: Any, message: str, order: int | None) -> None:
    with launches(order=order), pytest.raises(Race, match=message):
        kernel[(8,)](torch.zeros(32))


def test_a_second_launch_may_read_what_the_first_wrote() -> None:
    x = torch.zeros(8, 8)
    for _ in range(2):
        copy_row[(8,)](x, x, 0, 8, 8, 8)


# --- order and counts ---------------------------------------------------------------------------------------------


@triton.jit
def sum_of_all(x, out):  # type: ignore[no-untyped-def]
    tl.atomic_add(out, tl.load(x + tl.program_id(0)))


def total(x: Tensor) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        out = torch.zeros(1)
        sum_of_all[(len(x),)](x, out)
        return [out]

    return run


def test_a_result_that_depends_on_the_order_is_caught() -> None:
    same_in_any_order(total(torch.arange(16.0)))  # whole numbers: every order has the same sum
    with pytest.raises(AssertionError, match="result 0 depends on the order of programs"):
        same_in_any_order(total(randn(16, seed=1) * 10.0 ** torch.arange(-8, 8)))


def test_every_program_runs_once_in_every_order() -> None:
    for order in (None, 1, 2):
        with launches(order=order) as seen:
            out = torch.empty(6, 8)
            copy_row[(6,)](randn(6, 8, seed=1), out, 0, 8, 8, 8)
        assert not out.isnan().any() and seen.programs == {"copy_row": 6}


def test_counts() -> None:
    x = randn(16, 16, seed=1, dtype=torch.bfloat16)
    with launches() as seen:
        dot(x, x)
        copy_row[(3,)](randn(3, 5, seed=1), torch.empty(3, 8), 0, 5, 5, 8)
    assert seen.flops == 2 * 16**3
    assert seen.loaded == 2 * 16 * 16 * 2 + 3 * 5 * 4
    assert seen.stored == 16 * 16 * 4 + 3 * 5 * 4
    with launches() as nothing:
        pass
    assert nothing.flops == nothing.loaded == nothing.stored == 0 and not nothing.programs

"""Triton's interpreter made strict, to check kernels on a CPU. Import it before anything that holds kernels:

    from tests.engine.kernels.interpreter import launches, same_in_any_order

    with launches(order=3) as seen:  # programs run in a shuffled order, fresh memory is NaN
        ct.clip_loss(image, text, backend="triton").backward()
    seen.flops  # of tl.dot; seen.loaded and seen.stored are bytes, seen.programs counts them by kernel

Importing it sets TRITON_INTERPRET=1, which triton reads when a kernel is decorated: one mode per process. Then

- `tl.dot` rounds as tensor cores do: bf16 operands, TF32 by truncation, "tf32x3" as three products. fp32 becomes bf16
  by rounding to nearest even, and bf16 arithmetic goes through fp32. (The stock interpreter multiplies the bits of bf16
  as if they were integers, truncates, and computes every precision as "ieee".)
- a lane that is not masked off touches an element of the tensor that its pointer was made from, or `OutOfBounds`
- no program touches what another one of the same launch writes, or `Race`; atomics may meet each other
- a lane that is masked off, without an `other`, holds NaN: on a GPU it holds anything.
"""

import os
import random
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError(
        "tests.engine.kernels.interpreter: expected to be imported before triton, got a triton that compiles. "
        "Set TRITON_INTERPRET=1 for the whole process."
    )
os.environ["TRITON_INTERPRET"] = "1"

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter as stock
from triton.runtime.errors import InterpreterError

from tests.engine.kernels import quick_interpreter  # noqa: F401 - the same, in less time
from tests.engine.kernels.floats import Array, from_bf16, to_bf16, to_tf32

Builder = stock.InterpreterBuilder
Handle = stock.TensorHandle


# --- what tests use -----------------------------------------------------------------------------------------------


class OutOfBounds(AssertionError):
    """A lane that is not masked off left the tensor of its pointer."""


class Race(AssertionError):
    """The result depends on which program comes first."""


@dataclass
class Seen:
    """What kernels did."""

    flops: int = 0
    """Of `tl.dot`, two for each multiply-add, padding included."""

    loaded: int = 0
    """Bytes from memory (on a GPU: from L2), each lane that is not masked off."""

    stored: int = 0
    """Bytes to memory, atomics included."""

    stored_by: Counter[str] = field(default_factory=Counter)
    """The same by kernel."""

    programs: Counter[str] = field(default_factory=Counter)
    """How many programs of each kernel ran."""


@contextmanager
def launches(*, order: int | None = None) -> Iterator[Seen]:
    """Watch the launches inside: count, run programs in the `order` of a seed, and let fresh memory be NaN."""
    global _seen, _order
    before = _seen, _order, torch.are_deterministic_algorithms_enabled()
    _seen, _order = Seen(), order
    torch.use_deterministic_algorithms(True)  # which also fills what torch.empty returns
    try:
        yield _seen
    finally:
        _seen, _order = before[:2]
        torch.use_deterministic_algorithms(before[2])


def same_in_any_order(run: Callable[[], Sequence[Tensor]], *, orders: Sequence[int | None] = (None, 1, 2)) -> Seen:
    """Assert that what `run` returns has the same bits in whatever order programs run; what the first run did."""
    every = []
    for order in orders:
        with launches(order=order) as seen:
            every.append((run(), seen))
    first, done = every[0]
    for got, _ in every[1:]:
        for i, (a, b) in enumerate(zip(first, got, strict=True)):
            assert torch.equal(a, b), f"result {i} depends on the order of programs, or holds NaN"
    return done


_seen = Seen()
_order: int | None = None


# --- numbers ------------------------------------------------------------------------------------------------------


def _fp32(handle: Any) -> Array:
    """The numbers of a handle; bf16, which is kept as its bits, as fp32."""
    data: Array = handle.data
    return from_bf16(data) if handle.dtype.scalar == tl.bfloat16 else data


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    x, y, out = _fp32(a), _fp32(b), d.data.dtype
    _seen.flops += 2 * x.shape[-1] * d.data.size
    if a.dtype.scalar == tl.float32:
        precision = str(input_precision).rsplit(".", 1)[-1]
        if precision == "TF32":
            x, y = to_tf32(x), to_tf32(y)
        elif precision == "TF32x3":
            big_x, big_y = to_tf32(x), to_tf32(y)
            small_x, small_y = to_tf32(x - big_x), to_tf32(y - big_y)
            small = np.matmul(small_x, big_y) + np.matmul(big_x, small_y)
            return Handle((small + np.matmul(big_x, big_y) + d.data).astype(out), d.dtype.scalar)
        else:
            assert precision == "IEEE", f"tl.dot: expected tf32, tf32x3 or ieee, got {input_precision}"
    return Handle(np.matmul(x, y, dtype=out) + d.data, d.dtype.scalar)


_stock_cast, _stock_convert = Builder.cast_impl, Builder.create_fp_to_fp
_stock_binary, _stock_unary = Builder.binary_op, Builder.unary_op


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    """bf16 to and from anything goes through fp32."""
    if src.dtype.scalar == tl.bfloat16:
        src = Handle(_fp32(src), tl.float32)
    if dst_type.scalar != tl.bfloat16:
        return _stock_cast(self, src, dst_type)
    return Handle(to_bf16(_stock_cast(self, src, tl.float32).data), tl.bfloat16)


def _convert(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    nearest = rounding_mode in (None, stock._ir.ROUNDING_MODE.RTNE)
    if nearest and {src.dtype.scalar, dst_type.scalar} <= {tl.float16, tl.bfloat16, tl.float32}:
        return _cast(self, src, dst_type)
    return _stock_convert(self, src, dst_type, rounding_mode)


def _binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if lhs.dtype.scalar != tl.bfloat16:
        return _stock_binary(self, lhs, rhs, op)
    out = op(_fp32(lhs), _fp32(rhs))
    return Handle(out, tl.int1) if out.dtype == np.bool_ else Handle(to_bf16(out), tl.bfloat16)


def _unary(self: Any, arg: Any, op: Any) -> Any:
    if arg.dtype.scalar != tl.bfloat16:
        return _stock_unary(self, arg, op)
    return Handle(to_bf16(op(_fp32(arg))), tl.bfloat16)


Builder.create_dot = _dot
Builder.cast_impl, Builder.create_fp_to_fp = _cast, _convert
Builder.binary_op, Builder.unary_op = _binary, _unary


# --- memory -------------------------------------------------------------------------------------------------------

TAG = 48
"""Addresses have fewer bits: in those above, a pointer carries the number of the argument that it was made from."""

CONFLICTS = {"load": ("store", "atomic"), "store": ("load", "store", "atomic"), "atomic": ("load", "store")}
"""What another program may not have done to an element before."""

PAGE = 1 << 16
SEVERAL = -1


class Shadow:
    """Which programs touched the elements of a storage, by kind of access; in pages, as storages may be huge."""

    def __init__(self, start: int, itemsize: int) -> None:
        self.start, self.itemsize = start, itemsize
        self.pages: dict[tuple[str, int], Array] = {}

    def touch(self, kind: str, addresses: Array, program: int) -> str | None:
        """Note an access; the kind of another program's access that it conflicts with, if there is one."""
        elements = (addresses.astype(np.int64) - self.start) // self.itemsize
        pages, within = np.divmod(elements, PAGE)
        clash = None
        for page in np.unique(pages).tolist():
            at = within[pages == page]
            for other in CONFLICTS[kind]:
                if (other, page) in self.pages:
                    before = self.pages[other, page][at]
                    clash = other if np.any((before != 0) & (before != program)) else clash
            mine = self.pages.setdefault((kind, page), np.zeros(PAGE, np.int32))
            before = mine[at]
            mine[at] = np.where((before == 0) | (before == program), program, SEVERAL)
        return clash


class Argument:
    """A tensor that a kernel was given: its elements, which need not be contiguous."""

    def __init__(self, name: str, tensor: Tensor, shadow: Shadow) -> None:
        self.name, self.shadow = name, shadow
        self.start, self.itemsize, self.empty = tensor.data_ptr(), tensor.element_size(), not tensor.numel()
        self.layout = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
        self.dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)

    def outside(self, addresses: Array) -> Array:
        """Which addresses are of none of its elements."""
        rest, part = np.divmod(addresses.astype(np.int64) - self.start, self.itemsize)
        wrong = (rest < 0) | (part != 0) | self.empty
        for stride, size in self.dims:
            if stride:
                rest = rest - np.minimum(rest // stride, size - 1) * stride
        result: Array = wrong | (rest != 0)
        return result


class Launch:
    """One launch: its arguments, and the program that is running."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.arguments: list[Argument] = []
        self.tags: dict[int, int] = {}
        self.shadows: dict[int, Shadow] = {}
        self.program = 0
        self.permutation: list[int] = []

    def add(self, name: str, value: Any) -> None:
        """Register the tensors in the value of an argument."""
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            shadow = self.shadows.setdefault(storage.data_ptr(), Shadow(storage.data_ptr(), value.element_size()))
            self.arguments.append(Argument(name, value, shadow))
            self.tags[id(value)] = len(self.arguments)
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                self.add(f"{name}[{i}]", item)
        elif hasattr(value, "base"):  # a tensor descriptor
            self.add(name, value.base)

    def touch(self, kind: str, pointers: Any, mask: Array) -> Any:
        """Check an access and count it; the pointers with their true addresses."""
        data: Array = pointers.data
        mask = mask.astype(np.bool_)  # of a vector and a scalar the interpreter makes whole numbers
        true = data & np.uint64((1 << TAG) - 1)
        lanes, addresses = (np.broadcast_to(x, mask.shape)[mask] for x in (data >> np.uint64(TAG), true))
        if lanes.size:
            self.check(kind, lanes, addresses)
        moved = lanes.size * max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        if kind == "load":
            _seen.loaded += moved
        else:
            _seen.stored += moved
            _seen.stored_by[self.kernel] += moved
        return Handle(true, pointers.dtype)

    def check(self, kind: str, tags: Array, addresses: Array) -> None:
        """All lanes of an access are elements of one argument, which no other program is at."""
        tag = int(tags[0])
        if not 1 <= tag <= len(self.arguments):
            raise OutOfBounds(f"{self}: {kind} through a pointer that came from no argument, or went far from it")
        argument = self.arguments[tag - 1]
        outside = argument.outside(addresses) | (tags != tag)
        if outside.any():
            first = (int(addresses[outside][0]) - argument.start) // argument.itemsize
            raise OutOfBounds(
                f"{self}: {kind} of {argument.name} by {int(outside.sum())} lanes outside of it, the first at "
                f"element {first} from its start ({argument.layout})"
            )
        if kind == "store" and np.unique(addresses).size != addresses.size:
            raise Race(f"{self}: two lanes store to one element of {argument.name}")
        clash = argument.shadow.touch(kind, addresses, self.program)
        if clash:
            raise Race(f"{self}: {kind} of {argument.name} after the {clash} of another program")

    def __str__(self) -> str:
        return f"{self.kernel}, program {self.program - 1}"


_launch = Launch("none")
_stock_load, _stock_store = Builder.create_masked_load, Builder.create_masked_store
_stock_rmw, _stock_cas = Builder.create_atomic_rmw, Builder.create_atomic_cas
_stock_place = Builder.set_grid_idx
_stock_run, _stock_arguments = stock.GridExecutor.__call__, stock.GridExecutor._init_args_hst
_stock_as_pointer = stock._implicit_cvt


def _load(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any) -> Any:
    true = _launch.touch("load", ptrs, mask.data)
    if other is None:
        other = _poison(ptrs.get_element_ty(), ptrs.data.shape)
    return _stock_load(self, true, mask, other, *hints)  # which are not the same in every version


def _poison(dtype: Any, shape: tuple[int, ...]) -> Any:
    """What a lane holds that was masked off: NaN, or a large number."""
    numpy_dtype = stock._get_np_dtype(dtype)
    worst: Any = np.nan if numpy_dtype.kind == "f" else True if numpy_dtype.kind == "b" else np.iinfo(numpy_dtype).max
    return Handle(np.full(shape, 0x7FC0 if dtype == tl.bfloat16 else worst, numpy_dtype), dtype)


def _store(self: Any, ptrs: Any, value: Any, mask: Any, *hints: Any) -> Any:
    return _stock_store(self, _launch.touch("store", ptrs, mask.data), value, mask, *hints)


def _rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
    return _stock_rmw(self, op, _launch.touch("atomic", ptr, mask.data), val, mask, sem, scope)


def _cas(self: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
    everywhere = np.ones(ptr.data.shape, np.bool_)
    return _stock_cas(self, _launch.touch("atomic", ptr, everywhere), cmp, val, sem, scope)


def _as_pointer(arg: Any) -> Any:
    made = _stock_as_pointer(arg)
    if id(arg) in _launch.tags:
        made.handle.data = made.handle.data + np.uint64(_launch.tags[id(arg)] << TAG)
    return made


def _arguments(self: Any, args_dev: Any, kwargs: Any) -> Any:
    args, named = _stock_arguments(self, args_dev, kwargs)
    for name, value in (*zip(self.arg_names, args, strict=False), *named.items()):
        _launch.add(name, value)
    return args, named


def _place(self: Any, x: int, y: int, z: int) -> None:
    """Begin a program: the one at these coordinates, or the one that a shuffled order puts in its place."""
    wide, high, deep = self.grid_dim
    number = (x * high + y) * deep + z
    if _order is not None:
        if not number:
            _launch.permutation = random.Random(_order).sample(range(wide * high * deep), wide * high * deep)
        number = _launch.permutation[number]
        x, y, z = number // (high * deep), number // deep % high, number % deep
    _launch.program = number + 1
    _seen.programs[_launch.kernel] += 1
    _stock_place(self, x, y, z)


def _run(self: Any, *args: Any, **kwargs: Any) -> None:
    global _launch
    _launch = Launch(self.fn.__name__)
    try:
        with np.errstate(all="ignore"):  # lanes that are masked off may compute anything
            _stock_run(self, *args, **kwargs)
    except InterpreterError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OutOfBounds | Race):
            cause = cause.__cause__
        if cause is None:
            raise
        raise cause from None


Builder.create_masked_load, Builder.create_masked_store = _load, _store
Builder.create_atomic_rmw, Builder.create_atomic_cas = _rmw, _cas
Builder.set_grid_idx = _place
stock.GridExecutor.__call__, stock.GridExecutor._init_args_hst = _run, _arguments
# Arguments are CPU tensors: the kernel wrote to their own memory, and there is nothing to copy back.
stock.GridExecutor._restore_args_dev = lambda *_: None
stock._implicit_cvt = _as_pointer

"""Triton's interpreter in half the time: what it makes anew for every value or launch is kept. Results are the same.

Import it before a kernel runs, in a process with TRITON_INTERPRET=1.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

Semantic = stock.TritonSemantic


# --- values -------------------------------------------------------------------------------------------------------


def _numpy_dtype(dtype: Any) -> Any:
    return _numpy_dtypes.get(dtype.scalar.name) or _numpy_dtypes.setdefault(dtype.scalar.name, _stock_dtype(dtype))


def _block(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple(x.value if isinstance(x, tl.constexpr) else x for x in shape)
    found = _blocks.get((element_ty.name, sizes))
    if found is None:
        _stock_block(self, element_ty, shape)
        self.shown = tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
        self.shape = _shapes.setdefault(sizes, self.shape)
        found = _blocks[element_ty.name, sizes] = dict(self.__dict__)
    self.__dict__.update(found)


def _begin(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.shown if type.is_block() else _scalar


def _equal(self: Any, other: Any) -> bool:
    if isinstance(other, tl.core.dtype):
        return self is other or bool(self.name == other.name)
    return bool(_stock_equal(self, other))


def _unwrapped(value: Any) -> Any:
    kind = type(value)
    if kind is tl.core.tensor:
        return value
    return value.value if kind is tl.constexpr else _stock_unwrapped(value)


def _same_shape(self: Any, lhs: Any, rhs: Any) -> Any:
    left, right = lhs.type, rhs.type
    if left.is_block():
        if right.is_block() and left.shape is right.shape:
            return lhs, rhs
    elif not right.is_block():
        return lhs, rhs
    return _stock_broadcast(self, lhs, rhs)


def _computed_in(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
    key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
    found = _computed.get(key)
    if found is None:
        found = _computed[key] = _stock_computed(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
    return found


def _operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Of one type and shape: they stay as they are."""
    if type(lhs) is type(rhs) is tl.core.tensor and not div_or_mod and lhs.dtype.name in _PLAIN:
        left, right = lhs.type, rhs.type
        if lhs.dtype.name == rhs.dtype.name:
            if left.is_block():
                if right.is_block() and left.shape is right.shape:
                    return lhs, rhs
            elif not right.is_block():
                return lhs, rhs
    return _stock_operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _constant(self: Any, value: Any, dtype: Any) -> Any:
    """Numbers are never written to. (0.0 and -0.0 are different numbers.)"""
    kind = type(value)
    if kind is not int and not (kind is float and value):
        return _stock_constant(self, value, dtype)
    key = kind, value, dtype.name
    found = _constants.get(key)
    if found is None:
        found = _constants[key] = _stock_constant(self, value, dtype)
    return found


def _generic_reduce(self: Any, values: Any) -> Any:
    """By halves, as GPUs reduce, where the stock interpreter combines single elements."""
    if self.axis is None or len(values) > 1:
        return _stock_generic_reduce(self, values)
    data, dtype = values[0].handle.data, values[0].dtype
    while data.shape[self.axis] > 1:
        halves = (self.to_tensor(half, dtype) for half in np.split(data, 2, self.axis))
        data = self.combine_fn.fn(*halves).handle.data
    return [self.to_tensor(data if self.keep_dims else data.squeeze(self.axis), dtype)]


_PLAIN = {"fp32", "int32", "int64", "int1"}
_scalar = tl.core.tuple([]), tl.constexpr(1)
_numpy_dtypes: dict[str, Any] = {}
_blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], Any] = {}
_computed: dict[tuple[str, bool, str, bool, bool], Any] = {}
_stock_dtype, _stock_equal, _stock_block = stock._get_np_dtype, tl.core.dtype.__eq__, tl.core.block_type.__init__
_stock_broadcast, _stock_computed = Semantic.broadcast_impl_value, Semantic.computation_type_impl
_stock_operands, _stock_constant = Semantic.binary_op_type_checking_impl, Semantic.scalar_constant
_constants: dict[tuple[type, Any, str], Any] = {}
_stock_generic_reduce, _stock_unwrapped = stock.ReduceOps.generic_reduce, tl.core._unwrap_if_constexpr
stock._get_np_dtype = _numpy_dtype
tl.core.tensor.__init__, tl.core.dtype.__eq__, tl.core.block_type.__init__ = _begin, _equal, _block
Semantic.broadcast_impl_value, Semantic.computation_type_impl = _same_shape, _computed_in
Semantic.binary_op_type_checking_impl, Semantic.scalar_constant = _operands, _constant
# Ten operations at every sum of whole numbers, for an assertion that is skipped without TRITON_DEBUG.
Semantic.binary_op_sanitize_overflow_impl = lambda *_: None
stock.ReduceOps.generic_reduce, tl.core._unwrap_if_constexpr = _generic_reduce, _unwrapped


# --- launches -----------------------------------------------------------------------------------------------------


@functools.cache
def _patch_for_good(modules: tuple[str, ...]) -> None:
    stock._patch_builtin = _patch_builtin
    _stock_patch(SimpleNamespace(__globals__={name: sys.modules[name] for name in modules}))


def _patch_builtin(module: Any, builder: Any, scope: Any) -> None:
    """Without the wrapper that asks for the argument which is passed here."""
    for name, member in inspect.getmembers(module, tl.core.is_builtin):
        setattr(module, name, _with_semantic(member.__wrapped__ if member.__code__ is _WRAPPER else member))


def _with_semantic(member: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(member, updated=())
    def function(*args: Any, **options: Any) -> Any:
        options["_semantic"] = stock.interpreter_semantic
        return member(*args, **options)

    return function


def _patch(fn: Any) -> Any:
    """Patch `triton.language` once, where the stock interpreter does at every launch and call of a device function."""
    _patch_for_good((tl.__name__, tl.core.__name__))
    return stock._LangPatchScope()


_WRAPPER = tl.core.builtin(lambda: None).__code__
_stock_patch = stock._patch_lang
stock._patch_lang = _patch

"""Checks of arguments. Every message says what was expected, what was passed, and how to fix it.

bad_value("tile", expected="a positive int", got=-1, remedy="Leave it out for the default.")
# ValueError: tile: expected a positive int, got -1. Leave it out for the default.
"""

from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _text(what: str, expected: object, got: object, remedy: str) -> str:
    return f"{what}: expected {expected}, got {got}. {remedy}"


def bad_value(what: str, *, expected: object, got: object, remedy: str) -> NoReturn:
    """Raise a ValueError: the argument has the right type and an unusable value."""
    raise ValueError(_text(what, expected, got, remedy))


def bad_type(what: str, *, expected: object, got: object, remedy: str) -> NoReturn:
    """Raise a TypeError: the argument has the wrong type, dtype or device."""
    raise TypeError(_text(what, expected, got, remedy))


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        bad_value(name, expected=f"one of {listed}", got=repr(value), remedy="Check the spelling.")


def check_count(name: str, value: object, *, least: int) -> None:
    """Raise unless the value is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        bad_type(name, expected="an int", got=type(value).__name__, remedy="Pass a whole number.")
    if value < least:
        bad_value(name, expected=f"at least {least}", got=value, remedy="Leave it out for the default.")


def check_size(name: str, value: float) -> None:
    """Raise a ValueError for numbers that are not finite or do not fit into 64 bits."""
    if not -(2**63) <= value < 2**63:
        got = value if isinstance(value, float) else f"one of {value.bit_length():,} bits"
        bad_value(name, expected="a finite number of 64 bits", got=got, remedy="Leave it out for the default.")


def check_features(named: dict[str, Tensor], *, empty: bool) -> None:
    """Raise unless all features are float tensors [N, D] with the same D, dtype and device.

    Args:
        named: The tensors by name.
        empty: Allow N = 0, for ranks without rows.
    """
    for name, x in named.items():
        if not isinstance(x, Tensor):
            bad_type(name, expected="a tensor of shape [N, D]", got=type(x).__name__, remedy="Pass torch features.")
        check_storage(name, x)
        if x.dim() != 2:
            remedy = "Flatten or pool it to one row of features per example."
            bad_value(name, expected="shape [N, D]", got=list(x.shape), remedy=remedy)
        if x.dtype not in _FLOATS:
            how = ".abs()" if x.is_complex() else ".dequantize()" if x.is_quantized else ".float()"
            remedy = f"Convert it, for example with {name}{how}."
            bad_type(name, expected="dtype float32, float16, bfloat16 or float64", got=x.dtype, remedy=remedy)
        rows, features = x.shape
        if (rows == 0 and not empty) or features == 0:
            remedy = "Skip empty batches, or use drop_last=True in the loader."
            bad_value(name, expected="at least one row and one feature", got=list(x.shape), remedy=remedy)
    (first, x), *rest = named.items()
    for name, y in rest:
        both = f"{first} and {name}"
        if y.shape[1] != x.shape[1]:
            remedy = "Project both sides to one embedding size."
            bad_value(both, expected="one number of features D", got=f"{x.shape[1]} and {y.shape[1]}", remedy=remedy)
        if y.dtype != x.dtype:
            remedy = f"Convert one side, for example {name}.to({first}.dtype)."
            bad_type(both, expected="one dtype", got=f"{x.dtype} and {y.dtype}", remedy=remedy)
        if y.device != x.device:
            remedy = f"Move one side, for example {name}.to({first}.device)."
            bad_type(both, expected="one device", got=f"{x.device} and {y.device}", remedy=remedy)


def check_storage(name: str, x: Tensor) -> None:
    """Raise unless the tensor is dense and local: not sparse, nested, distributed or a wrapper subclass."""
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        remedy = "Pad or pool it to one row per example." if x.is_nested else f"Convert it with {name}.to_dense()."
        bad_type(name, expected="a dense tensor", got=kind, remedy=remedy)
    if type(x) is Tensor or torch.compiler.is_compiling() or type(x).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return
    kind = type(x).__name__
    if kind == "AsyncCollectiveTensor":  # reading its values waits for them
        return
    if kind == "DTensor":
        local = f"this rank's rows, {name}.to_local(): the loss exchanges rows with the other ranks itself."
        remedy = f"Pass {name}.full_tensor()." if x.dim() == 0 else f"Pass {local}"
    elif kind == "MaskedTensor":
        remedy = f"Pass {name}.to_tensor(0), without the masked rows."
    else:
        remedy = "Pass the tensor that it wraps. To compile or export, use torch.compile or torch.export."
    bad_type(name, expected="a plain tensor", got=f"a {kind}", remedy=remedy)


def transform_under_way(tensors: Iterable[object] | Callable[[], Iterable[object]]) -> str | None:
    """Name the active transform that custom autograd functions do not support, or None. Takes under a microsecond.

    The tensors are read only during forward-mode differentiation; pass a function to list them lazily.
    """
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return "a call inside torch.func or torch.vmap"
    if torch._C._get_tracing_state() is not None:
        return "a call inside torch.jit.trace"
    if forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        for x in (tensors() if callable(tensors) else tensors)
    ):
        return "dual tensors of forward-mode differentiation"
    return None


def check_transform(call: str, backend: str, tensors: Iterable[object] | Callable[[], Iterable[object]]) -> None:
    """Raise a RuntimeError under transforms that a backend does not support: tiled losses support only `backward()`."""
    found = transform_under_way(tensors)
    if found is None:
        return
    if "trace" in found:
        remedy = "Use torch.compile or torch.export, which support the losses."
        raise RuntimeError(_text(call, "a call outside of torch.jit.trace", found, remedy))
    if backend != "dense":
        remedy = "Pass backend='dense', which is plain PyTorch, or use loss.backward() and torch.autograd.grad."
        raise RuntimeError(_text(call, "reverse-mode gradients by autograd", found, remedy))


def check_pairs(names: str, left: Tensor, right: Tensor) -> None:
    """Raise a ValueError unless both sides have the same number of rows."""
    if left.shape[0] != right.shape[0]:
        remedy = "Row i of one is the positive of row i of the other. For more keys than queries use info_nce."
        bad_value(names, expected="equally many rows", got=f"{len(left)} and {len(right)}", remedy=remedy)


def check_scale(scale: object, name: str = "scale") -> None:
    """Raise unless a scale, temperature or bias is a number or a float tensor with one element."""
    if isinstance(scale, Tensor):
        check_storage(name, scale)
        if scale.numel() != 1 or not scale.is_floating_point():
            got = f"{scale.dtype} of shape {list(scale.shape)}"
            bad_value(name, expected="a float or a 0-d float tensor", got=got, remedy=f"All pairs share one {name}.")
    elif isinstance(scale, bool) or not isinstance(scale, int | float):
        remedy = "Pass a number, or a tensor if it is learned."
        bad_type(name, expected="a float or a 0-d float tensor", got=type(scale).__name__, remedy=remedy)


def check_vector(name: str, x: Tensor, *, length: int, device: torch.device) -> None:
    """Raise unless labels or ids are an integer tensor with one entry per row."""
    if not isinstance(x, Tensor):
        bad_type(name, expected="an integer tensor", got=_kind(x), remedy=_numbered(name, x))
    check_storage(name, x)
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        bad_type(name, expected="an integer tensor", got=x.dtype, remedy=f"Convert it, for example with {name}.long().")
    if tuple(x.shape) != (length,):
        bad_value(name, expected=f"shape [{length}], one entry per row", got=list(x.shape), remedy="Reshape it.")
    if x.device != device:
        bad_type(name, expected=f"device {device}", got=x.device, remedy=f"Move it with {name}.to({str(device)!r}).")


def _kind(x: object) -> str:
    """The name of a type; for a list also that of its elements."""
    inside = {type(item).__name__ for item in x} if isinstance(x, list | tuple) else set()
    return f"{type(x).__name__} of {inside.pop()}" if len(inside) == 1 else type(x).__name__


def _numbered(name: str, x: object) -> str:
    """How to convert labels that are not a tensor."""
    first = x[0] if isinstance(x, list | tuple) and x else x
    if isinstance(first, str | bytes) or getattr(getattr(x, "dtype", None), "kind", "") in ("U", "S", "O"):
        return (
            "Give equal strings equal numbers, the same on every rank: torch.tensor([int.from_bytes("
            "hashlib.blake2b(s.encode(), digest_size=8).digest(), 'big', signed=True) for s in strings])."
        )
    return f"Convert it, for example with torch.as_tensor({name})."


def check_ids(ids: object) -> None:
    """Raise a TypeError unless ids are an integer tensor, or a pair of them for queries and keys."""
    one = isinstance(ids, Tensor)
    if not one and not (isinstance(ids, tuple | list) and len(ids) == 2 and all(isinstance(x, Tensor) for x in ids)):
        entries = list(ids) if isinstance(ids, tuple | list) else []
        got = f"{_kind(ids)}, {len(entries)} entries" if entries else _kind(ids)
        remedy = _numbered("ids", ids)
        if any(isinstance(x, Tensor) for x in entries):
            remedy = "Pass (query_ids, key_ids), both of them tensors, or one tensor for both."
        bad_type("ids", expected="an integer tensor, or a pair of them", got=got, remedy=remedy)


def check_labels(labels: Tensor, m: int, *, name: str = "labels", rows: str = "key") -> None:
    """Raise a ValueError unless labels are indices below `m`. On accelerators the check is asynchronous."""
    if torch._C._are_functorch_transforms_active():
        return  # inside torch.vmap values cannot be read
    if labels.is_cpu:
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= m:
            remedy = f"The positive of row i is {rows}[{name}[i]], a row of this call's {rows}."
            bad_value(name, expected=f"indices from 0 to {m - 1}", got=f"{low} to {high}", remedy=remedy)
    else:
        torch._assert_async(((labels >= 0) & (labels < m)).all())


def check_temperature(temperature: Tensor | float) -> None:
    """Raise unless a temperature is a positive number or a 0-d tensor. A tensor's value is not read."""
    check_scale(temperature, "temperature")
    if not isinstance(temperature, Tensor) and not temperature > 0:
        bad_value("temperature", expected="a positive number", got=temperature, remedy="SimCLR uses 0.1 to 0.5.")

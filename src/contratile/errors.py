"""Errors that teach: every message says what was expected, what came, and what to do about it."""

from typing import NoReturn

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _text(what: str, expected: object, got: object, remedy: str) -> str:
    return f"{what}: expected {expected}, got {got}. {remedy}"


def bad_value(what: str, *, expected: object, got: object, remedy: str) -> NoReturn:
    """Raise a ValueError for an argument of the right type that cannot be used."""
    raise ValueError(_text(what, expected, got, remedy))


def bad_type(what: str, *, expected: object, got: object, remedy: str) -> NoReturn:
    """Raise a TypeError for an argument of the wrong type, dtype or device."""
    raise TypeError(_text(what, expected, got, remedy))


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        bad_value(name, expected=f"one of {listed}", got=repr(value), remedy="Check the spelling.")


def check_count(name: str, value: object, *, least: int) -> None:
    """Refuse anything but an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        bad_type(name, expected="an int", got=type(value).__name__, remedy="Pass a whole number.")
    if value < least:
        bad_value(name, expected=f"at least {least}", got=value, remedy="Leave it out for the default.")


def check_features(named: dict[str, Tensor], *, empty: bool) -> None:
    """Features are [N, D] float tensors that share D, dtype and device; N is 0 only where `empty` allows it."""
    for name, x in named.items():
        if not isinstance(x, Tensor):
            bad_type(name, expected="a tensor of shape [N, D]", got=type(x).__name__, remedy="Pass torch features.")
        if x.dim() != 2:
            remedy = "Flatten or pool it to one row of features per example."
            bad_value(name, expected="shape [N, D]", got=list(x.shape), remedy=remedy)
        if x.dtype not in _FLOATS:
            remedy = f"Convert it, for example with {name}.float()."
            bad_type(name, expected="dtype float32, float16, bfloat16 or float64", got=x.dtype, remedy=remedy)
        if (x.shape[0] == 0 and not empty) or x.shape[1] == 0:
            remedy = "An empty batch has no loss; skip it or use drop_last=True in the loader."
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


def check_pairs(names: str, left: Tensor, right: Tensor) -> None:
    """Both ways of a loss need a positive for every row."""
    if len(left) != len(right):
        remedy = "Row i of one is the positive of row i of the other. One way takes more keys than queries: info_nce."
        bad_value(names, expected="equally many rows", got=f"{len(left)} and {len(right)}", remedy=remedy)


def check_scale(scale: object, name: str = "scale") -> None:
    """A scale (or temperature, or bias) is a number or a tensor of one float."""
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or not scale.is_floating_point():
            got = f"{scale.dtype} of shape {list(scale.shape)}"
            bad_value(name, expected="a float or a 0-d float tensor", got=got, remedy=f"One {name} serves all pairs.")
    elif isinstance(scale, bool) or not isinstance(scale, int | float):
        remedy = "Pass a number, or a tensor if it is learned."
        bad_type(name, expected="a float or a 0-d float tensor", got=type(scale).__name__, remedy=remedy)


def check_vector(name: str, x: Tensor, *, length: int, device: torch.device) -> None:
    """Labels and ids are whole numbers, one per row."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        bad_type(name, expected="an integer tensor", got=got, remedy=f"Convert it, for example with {name}.long().")
    if tuple(x.shape) != (length,):
        bad_value(name, expected=f"shape [{length}], one entry per row", got=list(x.shape), remedy="Reshape it.")
    if x.device != device:
        bad_type(name, expected=f"device {device}", got=x.device, remedy=f"Move it with {name}.to({str(device)!r}).")


def check_labels(labels: Tensor, m: int) -> None:
    """Labels point at keys. An accelerator reports a bad one later, without being stalled for it."""
    if labels.is_cpu:
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= m:
            remedy = "Labels index this rank's keys: row i's positive is key[labels[i]]."
            bad_value("labels", expected=f"indices from 0 to {m - 1}", got=f"{low} to {high}", remedy=remedy)
    else:
        torch._assert_async(((labels >= 0) & (labels < m)).all())


def check_temperature(temperature: Tensor | float) -> None:
    """A positive number or a 0-d tensor, whose value is not looked at."""
    check_scale(temperature, "temperature")
    if not isinstance(temperature, Tensor) and not temperature > 0:
        bad_value("temperature", expected="a positive number", got=temperature, remedy="SimCLR uses 0.1 to 0.5.")

"""The engine as `torch.library` operators on one process, which `torch.compile` can trace.

The operators take the fields of `Inputs` and `Spec` one after the other (the schema is derived from these records) and
return the tensors of `PairStats` that there are, as a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_origin, get_type_hints

import torch
from torch import Tensor

from contratile.engine.cuts import cached_items, cuts_of
from contratile.engine.passes import backward, forward
from contratile.engine.spec import InputGrads, Inputs, PairStats, Spec, Wanted, shapes
from contratile.errors import check_labels
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE


def pair_stats(x: Inputs, spec: Spec) -> PairStats:
    """The traced call."""
    return _unpacked(x, spec, pair_statistics(*x, *spec))


def _schema(*records: type) -> str:
    """The argument list, in a schema, of an operator that takes the fields of these records."""
    names = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str"}
    optional: dict[Any, str] = {kind | None: f"{name}?" for kind, name in names.items()}
    optional[tuple[int, ...] | None] = "int[]?"
    fields = [(name, kind) for record in records for name, kind in get_type_hints(record).items()]
    kinds = [str if get_origin(kind) is Literal else kind for _, kind in fields]
    return ", ".join(f"{(names | optional)[kind]} {name}" for kind, (name, _) in zip(kinds, fields, strict=True))


def _call(arguments: Iterable[Any]) -> tuple[Inputs, Spec, Ring, list[Any]]:
    """The records that the arguments were made from, the ring of one process, and what follows them."""
    each = iter(arguments)
    x = Inputs(*(next(each) for _ in Inputs._fields))
    spec = Spec(*(next(each) for _ in Spec._fields))
    spec = spec._replace(dims=spec.dims and tuple(spec.dims))  # a list in the operator's arguments
    return x, spec, Ring.flat(ALONE, (x.keys.shape[0],), total=x.query.shape[0]), list(each)


def _packed(results: PairStats) -> list[Tensor]:
    return [t for t in results.tensors() if t is not None]


def _unpacked(x: Inputs, spec: Spec, tensors: Sequence[Any]) -> PairStats:
    """The inverse of `_packed`, which also serves for gradients in the order of the results."""
    expected = shapes(x, spec)._replace(cache=spec.cache_bytes or None)  # type: ignore[arg-type]  # only presence is read
    each = iter(tensors)
    return PairStats.of([None if shape is None else next(each) for shape in expected.tensors()], spec.unit)


def _forward(*arguments: Any) -> list[Tensor]:
    x, spec, ring, _ = _call(arguments)
    if x.labels is not None and not spec.paired:
        check_labels(x.labels, ring.sizes[0])
    return _packed(forward(ring, x, spec))


def _backward(*arguments: Any) -> list[Tensor]:
    """The gradients of `InputGrads`; empty where not wanted."""
    x, spec, ring, (tensors, grads, wanted) = _call(arguments)
    results, given = _unpacked(x, spec, tensors), _unpacked(x, spec, grads)
    out = backward(ring, x, spec, results, given, Wanted(*wanted))
    return [x.query.new_empty(0) if grad is None else grad for grad in out]


_ARGUMENTS = _schema(Inputs, Spec)
pair_statistics = torch.library.custom_op(
    "contratile::pair_statistics", _forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]"
)
pair_gradients = torch.library.custom_op(
    "contratile::pair_gradients",
    _backward,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor[] results, Tensor?[] grads, bool[] wanted) -> Tensor[]",
)


@pair_statistics.register_fake
def _(*arguments: Any) -> list[Tensor]:
    x, spec, ring, _ = _call(arguments)
    expected = shapes(x, spec)
    if spec.cache_bytes:
        known = type(x.query.shape[0]) is type(ring.sizes[0]) is int
        # With symbolic sizes the number of cached tiles is unknown: computing it would specialise the symbols.
        items: Any = cached_items(cuts_of(ring, x, spec)) if known else torch.library.get_ctx().new_dynamic_size()
        expected = expected._replace(cache=(items,))  # type: ignore[arg-type]  # a record of shapes
    dtype = torch.float64 if x.query.dtype == torch.float64 else torch.float32
    return [x.query.new_empty(shape, dtype=dtype) for shape in expected.tensors() if shape is not None]


@pair_gradients.register_fake
def _(*arguments: Any) -> list[Tensor]:
    x, _, _, (_, _, wanted) = _call(arguments)
    inputs = InputGrads(*(getattr(x, name) for name in InputGrads._fields))
    return [
        torch.empty_like(like, memory_format=torch.contiguous_format)
        if needed and like is not None
        else x.query.new_empty(0)
        for like, needed in zip(inputs, wanted, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, spec, _, _ = _call(inputs)
    ctx.save_for_backward(*x, *output)
    ctx.spec = spec


def _op_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    x = Inputs(*(next(saved) for _ in Inputs._fields))
    needs = dict(zip((*Inputs._fields, *Spec._fields), ctx.needs_input_grad, strict=True))
    wanted = Wanted(*(needs[name] for name in Wanted._fields))
    out = pair_gradients(*x, *ctx.spec, list(saved), list(grads), list(wanted))
    found = {name: grad for name, grad, needed in zip(Wanted._fields, out, wanted, strict=True) if needed}
    # To torch an empty list of integers (no `prefixes`) is an empty list of tensors, whose gradients are a list, too.
    return tuple([] if needs[name] == [] else found.get(name) for name in needs)


def no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "contratile losses have no second derivative: expected one backward pass, got a gradient of a gradient. "
        "Use backend='dense' where a double backward is needed (gradient penalties, meta-learning)."
    )


pair_statistics.register_autograd(_op_backward, setup_context=_setup_context)
pair_gradients.register_autograd(no_second_derivative)

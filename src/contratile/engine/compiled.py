"""The primitive as `torch.library` operators on one process, which `torch.compile` can trace.

Their arguments are those of `Inputs` and `Task` one after the other, their results those of `passes.forward` as a list.
"""

from typing import Any

import torch
from torch import Tensor

from contratile.engine.passes import backward, cached_items, forward
from contratile.engine.spec import DIFFERENTIABLE, Inputs, Results, Task, result_shapes
from contratile.errors import check_labels
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE

_INPUTS, _TASK = len(Inputs._fields), len(Task._fields)
_ARGUMENTS = (
    "Tensor query, Tensor? key, Tensor scale, Tensor? bias, Tensor? labels, Tensor? query_ids, Tensor? key_ids, "
    "Tensor? query_classes, Tensor? key_classes, Tensor? query_level, str reduce, bool rows, bool cols, "
    "bool exclude_self, float margin, bool ranks, bool ties, bool differ, SymInt tile, SymInt cache_bytes, "
    "str backend, str precision"
)


def _call(arguments: tuple[Any, ...]) -> tuple[Inputs, Task, Ring]:
    x, task = Inputs(*arguments[:_INPUTS]), Task(*arguments[_INPUTS : _INPUTS + _TASK])
    keys = (x.query if x.key is None else x.key).shape[0]
    return x, task, Ring.flat(ALONE, (keys,), total=x.query.shape[0])


def _names(x: Inputs, task: Task) -> list[str]:
    return [*result_shapes(x, task), *(["cache"] if task.cache_bytes else [])]


def _forward(*arguments: Any) -> list[Tensor]:
    x, task, ring = _call(arguments)
    if x.labels is not None:
        check_labels(x.labels, ring.sizes[0])
    results = forward(ring, x, task)
    return [results[name] for name in _names(x, task)]


def _backward(*arguments: Any) -> list[Tensor]:
    """The gradients of query, key, scale and bias; empty where not wanted."""
    x, task, ring = _call(arguments)
    tensors, grads, wants = arguments[_INPUTS + _TASK :]
    names = _names(x, task)
    results = dict(zip(names, tensors, strict=True))
    given = {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None and name in DIFFERENTIABLE}
    out = backward(ring, x, task, results, given, tuple(wants))
    return [x.query.new_empty(0) if grad is None else grad for grad in out]


pair_statistics = torch.library.custom_op(
    "contratile::pair_statistics", _forward, mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]"
)
pair_gradients = torch.library.custom_op(
    "contratile::pair_gradients",
    _backward,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor[] results, Tensor?[] grads, bool[] wants) -> Tensor[]",
)


@pair_statistics.register_fake
def _(*arguments: Any) -> list[Tensor]:
    x, task, ring = _call(arguments)
    shapes: dict[str, tuple[int, ...]] = result_shapes(x, task)
    if task.cache_bytes:
        known = type(x.query.shape[0]) is type(ring.sizes[0]) is int
        # Of symbols the number of tiles that fit is not known: to find out would fix their values.
        items: Any = sum(cached_items(ring, x, task)) if known else torch.library.get_ctx().new_dynamic_size()
        shapes["cache"] = (items,)
    dtype = torch.float64 if x.query.dtype == torch.float64 else torch.float32
    return [x.query.new_empty(shape, dtype=dtype) for shape in shapes.values()]


@pair_gradients.register_fake
def _(*arguments: Any) -> list[Tensor]:
    x, wants = Inputs(*arguments[:_INPUTS]), arguments[-1]
    inputs = x.query, x.key, x.scale, x.bias
    return [
        torch.empty_like(like, memory_format=torch.contiguous_format)
        if wanted and like is not None
        else x.query.new_empty(0)
        for like, wanted in zip(inputs, wants, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_INPUTS], *output)
    ctx.task = inputs[_INPUTS:]


def _op_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    inputs, results = ctx.saved_tensors[:_INPUTS], ctx.saved_tensors[_INPUTS:]
    wants = list(ctx.needs_input_grad[:4])
    out = pair_gradients(*inputs, *ctx.task, list(results), list(grads), wants)
    found = [grad if wanted else None for grad, wanted in zip(out, wants, strict=True)]
    return (*found, *[None] * (_INPUTS + _TASK - 4))


def no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "contratile losses have no second derivative: expected one backward pass, got a gradient of a gradient. "
        "Use backend='dense' where a double backward is needed (gradient penalties, meta-learning)."
    )


pair_statistics.register_autograd(_op_backward, setup_context=_setup_context)
pair_gradients.register_autograd(no_second_derivative)


def named(x: Inputs, task: Task, output: list[Tensor]) -> Results:
    """The operator's list as results."""
    return dict(zip(_names(x, task), output, strict=True))

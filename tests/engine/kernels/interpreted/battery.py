"""What the files here share: the primitive in kernels, and the rule that judges it.

    error <= 3 * error of the dense formula + rounding

The dense formula runs in fp32 on the same numbers. Features are such that the products of their kind are exact (TF32
features for "tf32"), so that kernels have no excuse but the rounding of sums and, in gradients, of g as it is written.
"""

from tests.engine.kernels import interpreter  # isort: skip  # first: it sets the mode of Triton

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.spec import Inputs, Spec
from contratile.losses.cross_entropy import as_tensor
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE
from tests.helpers import Function, Outcome, assert_error, dense_pair_stats, in_nats, levers, randn, reach, run

KINDS = ["bf16", "fp16", "ieee", "tf32x3", "tf32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WRITTEN = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11, "tf32x3": 0.0, "ieee": 0.0}
"""The largest relative error of g in the workspace."""

WORKSPACES = [800, 8192, 64 << 20]
"""Room for few row blocks and one tile, for several, and for everything."""


def numbers(n: int, d: int, *, seed: int, kind: str, norm: float = 1.0) -> Tensor:
    """Features of about this norm in the dtype of a kind; for TF32, such that TF32 holds them."""
    x = torch.nn.functional.normalize(randn(n, d, seed=seed)) * norm
    return to_tf32(x) if kind == "tf32" else x.to(DTYPES.get(kind, torch.float32))


def to_tf32(x: Tensor) -> Tensor:
    """Rounded to nearest, ties away from zero."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def precision_of(kind: str) -> Any:
    return None if kind in DTYPES else kind


def in_kernels(rule: dict[str, Any], *, kind: str, one_set: bool = False, **options: Any) -> Function:
    """The primitive with `backend="triton"`, in nats. `one_set`: the keys are the queries, and `k` is not used."""
    tensors = {name: value for name, value in rule.items() if name in Inputs._fields}

    def function(q: Tensor, k: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        scale = as_tensor(scale, q) + 0 * k.sum() if one_set else as_tensor(scale, q)
        x = Inputs(q, None if one_set else k, scale, **tensors)
        how = {"backend": "triton", "tile": 16, "precision": precision_of(kind)}
        spec = Spec(exclude_self=rule.get("exclude_self", False), **options, **how)
        ring = Ring.flat(ALONE, (len(q if one_set else k),), total=len(q))
        return in_nats(pair_stats(ring, x, spec), like=q)

    return function


def dense(rule: dict[str, Any], *, one_set: bool = False, **options: Any) -> Function:
    """The oracle in the same form."""

    def function(q: Tensor, k: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        scale = scale + 0 * k.sum() if one_set else scale
        return dense_pair_stats(q, None if one_set else k, scale, **rule, **options)

    return function


def judge(
    ours: Function, oracle: Function, q: Tensor, k: Tensor, scale: Tensor, *, kind: str, weight: float = 12.0
) -> Outcome:
    """Apply the rule to values and gradients. `weight` bounds what a row's upstream gradients add up to."""
    used = [x for x in (q, k, scale) if x is not None]
    exact = run(oracle, *used, dtype=torch.float64)
    naive = run(oracle, *used, dtype=torch.float32)
    with interpreter.launches(order=len(q) + len(k)):
        got = run(ours, *used)
    tiny = 1e-20  # a factor too small to be seen stands for a scale of 0
    noise = (32 if kind == "tf32x3" else 8) * torch.finfo(torch.float32).eps * (1 + reach(q, k, scale))
    for value, near, true in zip(got.values, naive.values, exact.values, strict=True):
        assert value.dtype == torch.float32
        assert_error(value, near, true, floor=noise)
    rows = max(len(q), len(k))
    bounds = zip(levers(q, k, scale), (weight, weight, weight * rows), (1, 1, 0), strict=True)
    for (lever, share, written), grad, near, true in zip(bounds, got.grads, naive.grads, exact.grads, strict=True):
        floor = (noise + written * WRITTEN[kind]) * lever * share + tiny
        if grad.dtype != torch.float32:
            floor += torch.finfo(grad.dtype).eps / 2 * float(true.abs().max()) + torch.finfo(grad.dtype).smallest_normal
        assert_error(grad, near, true, floor=floor)
    return got


def positives(n: int, m: int, *, seed: int = 5) -> Tensor:
    """Random keys, the last one among them."""
    labels = torch.randint(m, (n,), generator=torch.Generator().manual_seed(seed))
    labels[n // 2] = m - 1
    return labels


Rules = dict[str, Callable[[int, int], dict[str, Any]]]


def _ids(n: int, m: int) -> dict[str, Any]:
    return {"query_ids": torch.arange(n) % 5, "key_ids": torch.arange(m) % 6}


TWO_SETS: Rules = {
    "nothing": lambda n, m: {},
    "labels": lambda n, m: {"labels": positives(n, m)},
    "ids": _ids,
    "labels and ids": lambda n, m: {"labels": positives(n, m)} | _ids(n, m),
    "self": lambda n, m: {"exclude_self": True},
    "self, labels and ids": lambda n, m: {"exclude_self": True, "labels": positives(n, m)} | _ids(n, m),
}

ONE_SET: Rules = {
    "nothing": lambda n, m: {},
    "labels": lambda n, m: {"labels": positives(n, n)},
    "self": lambda n, m: {"exclude_self": True},
    "views": lambda n, m: {"exclude_self": True, "labels": (torch.arange(n) + n // 2) % n},
    "itself": lambda n, m: {"exclude_self": True, "labels": torch.arange(n)},
    "ids": lambda n, m: {"query_ids": torch.arange(n) % 7, "key_ids": torch.arange(n) % 7},
    "self, labels and ids": lambda n, m: {
        "exclude_self": True,
        "labels": (torch.arange(n) + n // 2) % n,
        "query_ids": torch.arange(n) % 7,
        "key_ids": torch.arange(n) % 7,
    },
}

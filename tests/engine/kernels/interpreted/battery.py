"""What the files here share: the primitive in kernels, and the rule that judges it.

    error <= 3 * error of the dense formula + rounding

The dense formula runs in fp32 on the same numbers. Features are such that the products of their kind are exact (TF32
features for "tf32"), so that kernels have no excuse but the rounding of sums and, in gradients, of g as it is written.
"""

from tests.engine.kernels import interpreter  # isort: skip  # first: it sets the mode of Triton

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from contratile import reference
from contratile.engine.autograd import pair_stats
from contratile.engine.backends.triton_launch import Launch
from contratile.engine.backends.triton_tiles import interprets_bf16
from contratile.engine.spec import Inputs, PairStats, Spec
from contratile.losses.terms import as_tensor
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE
from tests.helpers import Function, Outcome, assert_error, dense_pair_stats, in_nats, levers, randn, reach, run

KINDS = ["bf16", "fp16", "ieee", "tf32x3", "tf32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WRITTEN = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-11, "tf32x3": 0.0, "ieee": 0.0}
"""The largest relative error of g in the workspace."""

WORKSPACES = [800, 8192, 64 << 20]
"""Room for few row blocks and one tile, for several, and for everything."""


def half(*factors: Iterable[Any]) -> list[Any]:
    """Every combination as parameters of a test, of which those whose places add up to an odd number are slow.

    Any values of all factors but one meet always: of three factors every two, and of two factors every value.
    """
    return [
        pytest.param(*(value for _, value in chosen), marks=pytest.mark.slow if sum(i for i, _ in chosen) % 2 else ())
        for chosen in itertools.product(*map(enumerate, factors))
    ]


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


COUNTS = ("counts", "higher", "equal")
Counts = dict[str, Tensor]


def counting_in_kernels(rule: dict[str, Any], found: Counts, *, one_set: bool = False, **options: Any) -> Function:
    """Like `in_kernels`, with the means of the sums; whatever is counted goes into `found`."""
    tensors = {name: value for name, value in rule.items() if name in Inputs._fields}
    kind, backend = options.pop("kind"), options.pop("backend", "triton")

    def function(q: Tensor, k: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        scale = as_tensor(scale, q) + 0 * k.sum() if one_set else as_tensor(scale, q)
        x = Inputs(q, None if one_set else k, scale, **tensors)
        how = {"backend": backend, "tile": 16, "precision": precision_of(kind), **options}
        spec = Spec(exclude_self=rule.get("exclude_self", False), **how)
        stats: PairStats = pair_stats(Ring.flat(ALONE, (len(x.keys),), total=len(q)), x, spec)
        sides = {"row": stats.row, "col": stats.col}
        for side, of in sides.items():
            found.update({f"{side}_{name}": getattr(of, name) for name in COUNTS if getattr(of, name) is not None})
        sums = [q.new_empty(0) if of.sums is None else stats.nats(of.sums) / len(x.keys) for of in sides.values()]
        return *in_nats(stats, like=q), *sums

    return function


def counting_densely(rule: dict[str, Any], found: Counts, *, one_set: bool = False, **options: Any) -> Function:
    """The oracle in the same form."""
    sums, col_sums = options.pop("sums", ""), options.pop("col_sums", True)
    given = {name: value for name, value in rule.items() if not name.endswith("classes")}
    options = {name: value for name, value in options.items() if name not in ("cache_bytes", "kind", "tile")}

    def function(q: Tensor, k: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        scale, key = scale + 0 * k.sum() if one_set else scale, q if one_set else k
        classes = {
            "": {},
            "all": {f"{x}_classes": torch.zeros(len(of)) for x, of in (("query", q), ("key", key))},
            "equal": {name: value for name, value in rule.items() if name.endswith("classes")},
            "differ": {f"{x}_classes": rule.get(f"{x}_ids") for x in ("query", "key")},
        }["differ" if sums == "same" else sums]
        which = {"differ": sums == "differ", "without_labelled": sums == "same"}
        got = reference.pair_stats(q, key, scale, **given, **classes, **options, **which)
        if not col_sums:
            got = {name: value for name, value in got.items() if name not in ("col_sums", "col_counts")}
        found.update({name: value for name, value in got.items() if name.endswith(COUNTS)})
        values = [got.get(name, q.new_empty(0)) for name in ("row", "col", "pos", "row_sums", "col_sums")]
        return *values[:3], *(value / len(key) for value in values[3:])

    return function


def judge_counts(
    rule: dict[str, Any], q: Tensor, k: Tensor, scale: Tensor, *, kind: str, one_set: bool = False, **options: Any
) -> Outcome:
    """Values and gradients by the rule, and counts exactly."""
    found: Counts = {}
    true: Counts = {}
    ours = counting_in_kernels(rule, found, kind=kind, one_set=one_set, **options)
    oracle = counting_densely(rule, true, one_set=one_set, **options)
    outcome = judge(ours, oracle, q, k, scale, kind=kind, weight=36.0)
    assert set(found) == set(true), (set(found), set(true))
    for name, value in found.items():
        assert torch.equal(value.double(), true[name].double()), (name, value, true[name])
    return outcome


@dataclass
class Paths:
    """Which tiles took which way, over all launches that were watched."""

    programs: int = 0
    marked: int = 0
    fast: int = 0
    special: int = 0
    gradient_fast: int = 0
    gradient_special: int = 0
    far: int = 0


@contextmanager
def watched(order: int | None = None) -> Iterator[Paths]:
    """Watch what fast launches leave to the careful ones. Fresh memory is neither 0 nor 1."""
    interprets_bf16()  # a launch of its own, once
    paths, run_launch = Paths(), Launch.run

    def noting(self: Launch) -> None:
        run_launch(self)
        given = self.arguments
        if given.get("CAREFUL") is not False:
            return
        if "marks" in given:
            special = given["special"][: self.grid[0]]
            paths.fast += int((special == 0).sum())
            paths.special += int((special == 1).sum())
            if not given["SOFTPLUS"]:
                marks = given["marks"][: self.grid[0] * self.grid[1]]
                paths.programs += len(marks)
                paths.marked += int((marks != 0).sum())
        else:
            paths.gradient_fast += int((given["special"] == 0).sum())
            paths.gradient_special += int((given["special"] == 1).sum())
            if given["row_far"] is not None:
                paths.far += int(given["row_far"].sum() + given["col_far"].sum())

    Launch.run = noting  # type: ignore[method-assign]
    try:
        with interpreter.launches(order=order):
            yield paths
    finally:
        Launch.run = run_launch  # type: ignore[method-assign]


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


def close_positives(n: int, m: int) -> Tensor:
    """Two rows share a positive near the diagonal, so that tiles far from it hold none."""
    return (torch.arange(n) // 2 * 2).clamp(max=m - 1)


def close_ids(n: int, m: int) -> dict[str, Any]:
    """Ids that only tiles near the diagonal share: large, negative, and small ones."""
    far = torch.tensor([1 << 40, -(1 << 33), -1, 7])
    query, key = (torch.arange(size) // 3 for size in (n, m))
    return {"query_ids": query * 5 + far[query % 4], "key_ids": key * 5 + far[key % 4]}


def colliding_ids(n: int, m: int) -> dict[str, Any]:
    """No two are equal, but those of a query and of some far key have the same 32-bit hash."""
    of_keys = torch.arange(m) * 3 + 1
    other = of_keys[torch.arange(n) * 7 % m]
    return {"query_ids": other ^ ((1 << 32) + (1 << 0)), "key_ids": of_keys}


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

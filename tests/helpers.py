"""What the tests share: features, one way to run a loss and its gradients, and the rule that judges precision."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile import reference
from contratile.engine import autograd
from contratile.engine import spec as engine
from contratile.engine.rule import PairRule
from contratile.engine.spec import Inputs, Spec
from contratile.losses.terms import as_tensor
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """What the library promises to compute in: fp64 for fp64 features, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def features(n: int, d: int, *, seed: int, norm: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of one norm."""
    return (torch.nn.functional.normalize(randn(n, d, seed=seed).double()) * norm).to(dtype)


def labels_of(n: int, m: int, *, seed: int) -> Tensor:
    """Random positives, with repeats."""
    return torch.randint(m, (n,), generator=torch.Generator().manual_seed(seed))


Function = Callable[..., Tensor | tuple[Tensor, ...]]


class Outcome(NamedTuple):
    values: list[Tensor]
    grads: list[Tensor]


def run(function: Function, *inputs: Tensor, dtype: torch.dtype | None = None) -> Outcome:
    """Values and gradients of every input, the upstream gradient being 1 for a scalar and random for a vector.

    Inputs keep their strides unless they are converted to `dtype`.
    """
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    result = function(*leaves)
    values = [result] if isinstance(result, Tensor) else [value for value in result if len(value)]
    upstream = [_upstream(value, seed) for seed, value in enumerate(values)]
    grads = torch.autograd.grad(values, leaves, upstream)
    return Outcome([value.detach() for value in values], list(grads))


def _upstream(value: Tensor, seed: int) -> Tensor:
    return torch.ones_like(value) if value.dim() == 0 else randn(*value.shape, seed=1000 + seed, dtype=value.dtype)


def reach(query: Tensor, key: Tensor, scale: Tensor) -> float:
    """No score is larger than this."""
    norms = query.double().norm(dim=1).max() * key.double().norm(dim=1).max()
    return float(norms * scale.detach().double().abs().max())


def levers(query: Tensor, key: Tensor, scale: Tensor) -> list[float]:
    """How far an error of 1 in a row's softmax moves the gradients of query, key and scale."""
    q, k = query.double(), key.double()
    s = float(scale.detach().double().abs().max())
    return [s * float(k.abs().max()), s * float(q.abs().max()), float(q.norm(dim=1).max() * k.norm(dim=1).max())]


def assert_precise(
    ours: Function,
    oracle: Function,
    query: Tensor,
    key: Tensor,
    scale: Tensor,
    *,
    share: float = 1.0,
    roundings: int = 1,
) -> Outcome:
    """Values and gradients of query, key and scale are as close to fp64 as the dense formula is.

        error <= 3 * error of the dense formula + 8 * eps * (1 + reach) * lever + rounding of the result

    The dense formula is run on the same numbers in the accumulation dtype (fp32, or fp64 for fp64 features), which
    is stricter than running it in 16 bit. `eps` is that dtype's: what one rounding of the largest score does to an
    exponential, times how far that can move the result (`share` is the weight of a row in the loss). The rounding
    of the result is half an ulp of a gradient that is returned in 16 bit, `roundings` times if it is a sum of several
    such, and nothing for the others.
    """
    acc = accumulation(query.dtype)
    actual = run(ours, query, key, scale)
    naive = run(oracle, query, key, scale, dtype=acc)
    exact = run(oracle, query, key, scale, dtype=torch.float64)
    noise = 8 * torch.finfo(acc).eps * (1 + reach(query, key, scale))
    rows = max(len(query), len(key))
    for got, dense, true in zip(actual.values, naive.values, exact.values, strict=True):
        assert got.dtype == acc
        assert_error(got, dense, true, floor=noise * max(1.0, rows * share))
    weights = [share, share, rows * share]
    given = zip(actual.grads, naive.grads, exact.grads, [query, key, scale], strict=True)
    for (got, dense, true, x), lever, weight in zip(given, levers(query, key, scale), weights, strict=True):
        assert got.dtype == x.dtype and got.shape == x.shape
        info = torch.finfo(got.dtype)
        rounding = (
            0.0
            if got.dtype == acc
            else roundings * info.eps / 2 * float(true.abs().max()) + info.smallest_normal * info.eps
        )
        assert_error(got, dense, true, floor=noise * lever * weight + rounding)
    return actual


def assert_error(got: Tensor, dense: Tensor, true: Tensor, *, floor: float) -> None:
    error = float((got.double() - true).abs().max())
    allowed = 3 * float((dense.double() - true).abs().max()) + floor
    assert error <= allowed, f"error {error:.3e}, allowed {allowed:.3e}, of values up to {float(true.abs().max()):.3e}"


def assert_same(left: Outcome, right: Outcome) -> None:
    """Bitwise equality."""
    for a, b in zip(left.values + left.grads, right.values + right.grads, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


class PairStats(NamedTuple):
    """What most tests look at; a side that was not asked for is empty."""

    row_lse: Tensor
    col_lse: Tensor
    pos: Tensor


def pair_stats(
    query: Tensor,
    key: Tensor | None,
    scale: Tensor | float,
    rule: PairRule,
    *,
    rows: bool = True,
    cols: bool = True,
    tile: int | None = None,
    cache_bytes: int = 0,
) -> PairStats:
    """The primitive on one process, in nats."""
    ring = Ring.flat(ALONE, (len(query if key is None else key),), total=len(query))
    x = Inputs(
        query,
        key,
        as_tensor(scale, query),
        labels=rule.labels,
        query_ids=rule.query_ids,
        key_ids=rule.key_ids,
    )
    spec = Spec(rows=rows, cols=cols, exclude_self=rule.exclude_self, tile=tile, cache_bytes=cache_bytes)
    return in_nats(autograd.pair_stats(ring, x, spec), like=query)


def dense_pair_stats(query: Tensor, key: Tensor | None, scale: Tensor | float = 1.0, **options: Any) -> PairStats:
    """The oracle in the same form."""
    found = reference.pair_stats(query, key, scale, **options)
    return PairStats(*(found.get(name, query.new_empty(0)) for name in ("row", "col", "pos")))


def in_nats(stats: engine.PairStats, *, like: Tensor) -> PairStats:
    parts = stats.row.total, stats.col.total, stats.pos
    return PairStats(*(like.new_empty(0) if x is None else stats.nats(x) for x in parts))

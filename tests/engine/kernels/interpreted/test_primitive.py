"""The primitive in kernels against fp64: all rules, kinds of numbers and ragged shapes."""

from tests.engine.kernels.interpreted.battery import (  # isort: skip  # first: it sets the mode of Triton
    KINDS,
    ONE_SET,
    TWO_SETS,
    WORKSPACES,
    dense,
    half,
    in_kernels,
    judge,
    numbers,
    positives,
    precision_of,
)

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile.engine.backends import triton_configs, triton_launch
from contratile.engine.backends.triton_configs import Config
from tests.engine.kernels.interpreter import launches, same_in_any_order
from tests.helpers import randn, run

N, M, D = 33, 37, 21
"""Three tiles of 16 each way, the last ones all but empty, and two steps of features."""
SCALE = torch.tensor(7.0)
HOW: dict[str, Any] = {"backend": "triton", "tile": 16}
DENSE: dict[str, Any] = {"backend": "dense"}


@pytest.fixture(params=WORKSPACES[:1], autouse=True)
def workspace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small, so that small problems take several launches."""
    monkeypatch.setattr(triton_configs, "WORKSPACE_BYTES", request.param)
    return int(request.param)


# Two kinds of number meet every rule always, the others some rules; all meet all in the slow tests.
MANY = [pytest.param(kind, marks=() if kind in ("bf16", "ieee") else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("name", TWO_SETS)
@pytest.mark.parametrize("kind", MANY)
def test_two_sets(kind: str, name: str) -> None:
    q, k = numbers(N, D, seed=1, kind=kind), numbers(M, D, seed=2, kind=kind)
    rule = TWO_SETS[name](N, M)
    judge(in_kernels(rule, kind=kind), dense(rule), q, k, SCALE, kind=kind)


@pytest.mark.parametrize("name", ONE_SET)
@pytest.mark.parametrize("kind", MANY)
def test_one_set(kind: str, name: str) -> None:
    q, rule = numbers(M, D, seed=1, kind=kind), ONE_SET[name](M, M)
    unused = numbers(M, D, seed=2, kind=kind)
    ours, oracle = in_kernels(rule, kind=kind, one_set=True), dense(rule, one_set=True)
    # Labels and ids make pairs that are not symmetric: the set is taken as queries and keys, two gradients are added.
    judge(ours, oracle, q, unused, SCALE, kind=kind, weight=24.0)


@pytest.mark.parametrize("workspace", WORKSPACES[1:], indirect=True)
@pytest.mark.parametrize("one_set", [False, True], ids=["two sets", "one set"])
@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_any_workspace(kind: str, one_set: bool, workspace: int) -> None:
    q, k = numbers(M, D, seed=1, kind=kind), numbers(M, D, seed=2, kind=kind)
    rule = (ONE_SET["views"] if one_set else TWO_SETS["labels and ids"])(M, M)
    judge(in_kernels(rule, kind=kind, one_set=one_set), dense(rule, one_set=one_set), q, k, SCALE, kind=kind)


@pytest.mark.parametrize(
    ("config", "one_set"),
    [
        (Config(32, 16, 16, 4, 2), False),
        (Config(64, 16, 32, 4, 2), False),
        (Config(16, 32, 16, 4, 2), False),
        (Config(32, 32, 16, 8, 2), True),
    ],
    ids=str,
)
def test_tiles_of_other_shapes(config: Config, one_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "config_for", lambda *_, **__: config)
    q, k = numbers(75, D, seed=1, kind="fp16"), numbers(75, D, seed=2, kind="fp16")
    rule = (ONE_SET["labels"] if one_set else TWO_SETS["labels and ids"])(75, 75)
    judge(in_kernels(rule, kind="fp16", one_set=one_set), dense(rule, one_set=one_set), q, k, SCALE, kind="fp16")


SHAPES = [(1, 1, 1), (1, 40, 3), (40, 1, 16), (16, 16, 32), (17, 33, 64), (31, 15, 65), (48, 32, 40)]


@pytest.mark.parametrize(("kind", "shape"), half(["bf16", "ieee"], SHAPES))
def test_ragged_shapes(kind: str, shape: tuple[int, int, int]) -> None:
    n, m, d = shape
    q, k = numbers(n, d, seed=1, kind=kind), numbers(m, d, seed=2, kind=kind)
    rule: dict[str, Any] = {"labels": positives(n, m)}
    judge(in_kernels(rule, kind=kind), dense(rule), q, k, SCALE, kind=kind)
    rule = {"exclude_self": True, "labels": (torch.arange(n) + 1) % n} if n > 1 else {}
    judge(in_kernels(rule, kind=kind, one_set=True), dense(rule, one_set=True), q, k, SCALE, kind=kind)


@pytest.mark.parametrize("sides", [{"cols": False}, {"rows": False}], ids=["rows", "columns"])
@pytest.mark.parametrize("one_set", [False, True], ids=["two sets", "one set"])
def test_one_side(one_set: bool, sides: dict[str, bool]) -> None:
    q, k = numbers(N, D, seed=1, kind="ieee"), numbers(M, D, seed=2, kind="ieee")
    rule = TWO_SETS["labels"](N, N if one_set else M)
    judge(
        in_kernels(rule, kind="ieee", one_set=one_set, **sides),
        dense(rule, one_set=one_set, **sides),
        q,
        k,
        SCALE,
        kind="ieee",
    )


@pytest.mark.parametrize(("kind", "cols", "bias"), half(["bf16", "fp16", "ieee"], [False, True], [None, -10.0, 3.0]))
def test_softplus(kind: str, cols: bool, bias: float | None) -> None:
    q, k = numbers(N, D, seed=1, kind=kind), numbers(M, D, seed=2, kind=kind)
    rule = {"labels": positives(N, M), "bias": None if bias is None else torch.tensor(bias)}
    options: dict[str, Any] = {"reduce": "softplus", "cols": cols}
    judge(in_kernels(rule, kind=kind, **options), dense(rule, **options), q, k, SCALE, kind=kind)


def test_gradient_of_the_bias() -> None:
    q, k = numbers(N, D, seed=1, kind="ieee"), numbers(N, D, seed=2, kind="ieee")
    for scale, bias in ((10.0, -10.0), (2.0, 5.0)):
        grads = []
        for how, dtype in ((HOW, torch.float32), (DENSE, torch.float64)):
            b = torch.tensor(bias, dtype=dtype, requires_grad=True)
            ct.siglip_loss(q.to(dtype), k.to(dtype), scale, b, **how).backward()
            grads.append(b.grad)
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7, check_dtype=False)


@pytest.mark.parametrize("bias", [-12.0, -18.0, -40.0])
def test_softplus_of_scores_far_below_zero_is_not_lost(bias: float) -> None:
    """Where exp(s) cannot be seen beside 1, a plain log(1 + exp(s)) is 0."""
    q, k = numbers(N, D, seed=1, kind="ieee"), numbers(M, D, seed=2, kind="ieee")
    ours = in_kernels({"bias": torch.tensor(bias)}, kind="ieee", reduce="softplus", cols=False)(q, k, SCALE)
    true = dense({"bias": bias}, reduce="softplus", cols=False)(q.double(), k.double(), SCALE.double())
    torch.testing.assert_close(ours[0].double(), true[0], rtol=2e-5, atol=0.0)


# --- numbers that hurt --------------------------------------------------------------------------------------------


def shaped(name: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k = numbers(N, D, seed=1, kind="ieee"), numbers(M, D, seed=2, kind="ieee")
    if name == "scale 100":
        return q, k, torch.tensor(100.0)
    if name == "no scale":
        return q, k, torch.tensor(0.0)
    if name == "negative scale":
        return q, k, torch.tensor(-30.0)
    if name == "long features":
        return q * 30, k * 30, torch.tensor(10.0)
    if name == "one huge and one tiny row":
        q[3] *= 1000
        q[20] *= 1e-6
        k[7] *= 100
        return q, k, torch.tensor(5.0)
    assert name == "all far below zero"
    ones = torch.ones(1, D)
    return ones - q * 0.1, -ones.expand(M, D) - k * 0.1, torch.tensor(50.0)


@pytest.mark.parametrize(
    "name",
    ["scale 100", "no scale", "negative scale", "long features", "one huge and one tiny row", "all far below zero"],
)
def test_extreme_scores(name: str) -> None:
    q, k, scale = shaped(name)
    rule = TWO_SETS["labels"](N, M)
    judge(in_kernels(rule, kind="ieee"), dense(rule), q, k, scale, kind="ieee")
    rule = ONE_SET["views"](N, N)
    judge(in_kernels(rule, kind="ieee", one_set=True), dense(rule, one_set=True), q, k, scale, kind="ieee")


@pytest.mark.parametrize("scale", [7.0, 0.3])
def test_rows_and_columns_without_pairs(scale: float) -> None:
    """Query 3 has the id of every key but its log-sum-exp of -inf harms no other; likewise key 5."""
    q, k = (numbers(n, D, seed=n, kind="ieee").requires_grad_() for n in (N, M))
    query_ids, key_ids = torch.zeros(N, dtype=torch.long), torch.ones(M, dtype=torch.long)
    query_ids[3] = 1
    key_ids[5] = 0
    query_ids[9] = key_ids[9] = 2
    rule: dict[str, Any] = {"query_ids": query_ids, "key_ids": key_ids}
    got, expected = in_kernels(rule, kind="ieee")(q, k, scale), dense(rule)(q.double(), k.double(), scale)
    for a, b in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b.float())
    grads = []
    for row, col, _ in (got, expected):
        weights = [torch.where(x.isfinite(), randn(len(x), seed=4), 0.0) for x in (row, col)]
        kept = [torch.where(x.isfinite(), x, 0.0) for x in (row, col)]
        grads.append(torch.autograd.grad([*kept], [q, k], weights))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_nan_is_not_swallowed() -> None:
    """Not by maxima, and not by rounding to TF32, where the NaN of CUDA's own arithmetic would carry over into -0."""
    cuda_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    for kind, nan in itertools.product(("ieee", "tf32", "bf16"), (torch.tensor([torch.nan]), cuda_nan)):
        q, k = numbers(N, D, seed=1, kind=kind), numbers(M, D, seed=2, kind=kind)
        q[N - 1, D - 1] = nan[0].to(q.dtype) if kind == "bf16" else nan[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy has an opinion on NaN
            row, col, _ = in_kernels({}, kind=kind)(q, k, SCALE)
        assert row.isnan().nonzero().flatten().tolist() == [N - 1] and col.isnan().all()


# --- memory -------------------------------------------------------------------------------------------------------


def strided(name: str, x: Tensor) -> Tensor:
    n, d = x.shape
    if name == "transposed":
        return x.t().contiguous().t()
    if name == "columns of a wider one":
        return torch.nn.functional.pad(x, (2, 5), value=torch.nan)[:, 2 : d + 2]
    if name == "every other row and feature":
        wide = torch.full((2 * n, 2 * d), torch.nan, dtype=x.dtype)
        wide[::2, ::2] = x
        return wide[::2, ::2]
    assert name == "one row for all"
    return x[:1].expand(n, d)


@pytest.mark.parametrize(
    "name", ["transposed", "columns of a wider one", "every other row and feature", "one row for all"]
)
@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_strides(kind: str, name: str) -> None:
    """Features are read in several steps."""
    n, m, d = 18, 21, 70
    q, k = numbers(n, d, seed=1, kind=kind), numbers(m, d, seed=2, kind=kind)
    rule = TWO_SETS["labels"](n, m)
    for left, right in ((strided(name, q), k), (q, strided(name, k))):
        assert not (left.is_contiguous() and right.is_contiguous())
        judge(in_kernels(rule, kind=kind), dense(rule), left, right, SCALE, kind=kind)


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("far", ["rows", "features"])
def test_features_that_lie_beyond_32_bits(far: str, side: str) -> None:
    """Elements are 2^31 and more apart, features within one step too; memory that is not touched does not exist."""
    n, d = (3, 16) if far == "rows" else (2, 18)
    step = 2**30 + 7 if far == "rows" else 2**31 // 15 + 1
    strides = (step, 1) if far == "rows" else (1, step)
    extent = (n - 1) * strides[0] + (d - 1) * strides[1] + 1
    assert extent > 2**31
    x, y = numbers(n, d, seed=1, kind="fp16"), numbers(5, d, seed=2, kind="fp16")
    wide = torch.empty(extent, dtype=torch.float16).as_strided((n, d), strides)
    wide.copy_(x)
    q, k = (wide, y) if side == "query" else (y, wide)
    row, col = ct.pair_lse(q, k, 3.0, **HOW)
    scores = 3.0 * q.double() @ k.double().T
    torch.testing.assert_close(row, scores.logsumexp(1).float())
    torch.testing.assert_close(col, scores.logsumexp(0).float())


@pytest.mark.parametrize("one_set", [False, True], ids=["two sets", "one set"])
@pytest.mark.parametrize("workspace", WORKSPACES[:2], indirect=True)
def test_results_do_not_depend_on_the_order_of_programs(workspace: int, one_set: bool) -> None:
    """Nor on what memory held before: it is NaN here."""
    rule = (ONE_SET["views"] if one_set else TWO_SETS["labels and ids"])(M, M)
    q, k = numbers(M, D, seed=1, kind="bf16"), numbers(M, D, seed=2, kind="bf16")
    ours = in_kernels(rule, kind="bf16", one_set=one_set)

    def results() -> list[Tensor]:
        outcome = run(ours, q, k, SCALE)
        assert all(x.isfinite().all() for x in outcome.values + outcome.grads)
        return outcome.values + outcome.grads

    seen = same_in_any_order(results)
    assert seen.programs["forward_tiles"] > 2 and seen.programs["gradient_tiles"] > 2


NEEDS = [x for x in itertools.product((False, True), repeat=3) if any(x)]


@pytest.mark.parametrize(
    ("one_set", "needs"), [(False, x) for x in NEEDS] + [(True, x) for x in NEEDS if not x[1]], ids=str
)
def test_only_wanted_gradients(one_set: bool, needs: tuple[bool, bool, bool]) -> None:
    """They are those of the whole set, and g is written only where a product needs it."""
    rule = TWO_SETS["labels"](N, N)
    inputs = numbers(N, D, seed=1, kind="ieee"), numbers(N, D, seed=2, kind="ieee"), SCALE
    ours = in_kernels(rule, kind="ieee", one_set=one_set)
    full = run(ours, *inputs)
    leaves = [x.clone().requires_grad_(needed) for x, needed in zip(inputs, needs, strict=True)]
    stats = [x for x in ours(*leaves) if len(x)]
    upstream = [randn(len(x), seed=1000 + seed) for seed, x in enumerate(stats)]
    with launches() as seen:
        grads = torch.autograd.grad(stats, [x for x in leaves if x.requires_grad], upstream)
    expected = [x for x, needed in zip(full.grads, needs, strict=True) if needed]
    for got, true in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-5, atol=1e-6)
    written = seen.stored_by["gradient_tiles"]
    assert written < 4 * N * N / 2 if needs == (False, False, True) else written >= 4 * N * N / 2


def test_precision_of_a_call_follows_pytorch() -> None:
    """ "high" and "medium" are TF32 unless the call says otherwise."""
    q, k = (numbers(N, D, seed=seed, kind="ieee") for seed in (1, 2))
    found = {name: ct.pair_lse(q, k, 9.0, **HOW, precision=name)[0] for name in ("ieee", "tf32")}
    assert not torch.equal(found["ieee"], found["tf32"])
    before = torch.get_float32_matmul_precision()
    try:
        for setting, name in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
            torch.set_float32_matmul_precision(setting)
            assert torch.equal(ct.pair_lse(q, k, 9.0, **HOW)[0], found[name])
            assert torch.equal(ct.pair_lse(q, k, 9.0, **HOW, precision="ieee")[0], found["ieee"])
    finally:
        torch.set_float32_matmul_precision(before)


def test_precision_is_of_no_concern_to_16_bit_features() -> None:
    q, k = (numbers(N, D, seed=seed, kind="bf16") for seed in (1, 2))
    found = [ct.pair_lse(q, k, 9.0, **HOW, precision=precision_of(kind))[0] for kind in KINDS]
    assert all(torch.equal(x, found[0]) for x in found)

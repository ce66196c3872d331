"""Which tiles are computed fast, which carefully: by what kernels record, and that results are right either way."""

from tests.engine.kernels.interpreted.battery import (  # isort: skip  # first: it sets the mode of Triton
    Paths,
    dense,
    half,
    in_kernels,
    judge,
    judge_counts,
    numbers,
    watched,
)

from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile.engine.backends import triton_configs, triton_launch
from contratile.engine.backends.triton_configs import Config
from contratile.engine.backends.triton_launch import Device
from tests.helpers import assert_same, run

N, D = 64, 24
"""Four tiles of 16 each way, whole ones: 12 of the interior and 4 with positives."""
SCALE = torch.tensor(7.0)
RULE: dict[str, Any] = {"labels": torch.arange(N)}


def pair(kind: str = "ieee") -> tuple[Tensor, Tensor]:
    return numbers(N, D, seed=1, kind=kind), numbers(N, D, seed=2, kind=kind)


def examined(q: Tensor, k: Tensor, scale: Tensor, **options: Any) -> Paths:
    """Judge them, and say what was done."""
    with watched() as paths:
        judge_counts(RULE, q, k, scale, kind="ieee", **options)
    return paths


@pytest.mark.parametrize(("scale", "kind"), half([1.0, 14.3, -20.0, 0.0], ["bf16", "fp16", "ieee"]))
def test_ordinary_tiles_are_fast(scale: float, kind: str) -> None:
    q, k = pair(kind)
    with watched() as paths:
        judge(in_kernels(RULE, kind=kind), dense(RULE), q, k, torch.tensor(scale), kind=kind)
    assert (paths.fast, paths.special, paths.marked) == (12, 4, 0)
    assert (paths.gradient_fast, paths.gradient_special, paths.far) == (12, 4, 0)


def test_rules_of_one_set() -> None:
    """Tiles above the diagonal, the diagonal and the views."""
    z, unused = pair()
    views = (torch.arange(N) + N // 2) % N
    expected: list[tuple[dict[str, Any], tuple[int, int]]] = [
        ({}, (10, 0)),
        ({"exclude_self": True}, (6, 4)),
        ({"exclude_self": True, "labels": views}, (4, 6)),
        ({"query_ids": torch.arange(N) // 16, "key_ids": torch.arange(N) // 16}, (6, 4)),
    ]
    for rule, tiles in expected:
        with watched() as paths:
            judge(in_kernels(rule, kind="ieee", one_set=True), dense(rule, one_set=True), z, unused, SCALE, kind="ieee")
        assert (paths.fast, paths.special, paths.marked) == (*tiles, 0)
        assert paths.gradient_fast > 0


@pytest.mark.parametrize("kind", ["bf16", "ieee"])
def test_one_set_whose_positives_lie_on_one_side(kind: str) -> None:
    """Columns have their positives in the first row block; rows of that block have theirs on the diagonal."""
    z, unused = pair(kind)
    rule = {"labels": torch.arange(N) // 4}
    with watched() as paths:
        judge_counts(rule, z, unused, SCALE, kind=kind, one_set=True, cols=False, ranks=True)
    assert (paths.fast, paths.special, paths.marked) == (6, 4, 0)
    whole = torch.randint(-1, 3, (N, 6), generator=torch.Generator().manual_seed(1)).float()
    judge_counts(rule, whole, whole, torch.tensor(0.5), kind="ieee", one_set=True, cols=False, ranks=True, ties=True)


def test_more_row_blocks_than_a_group() -> None:
    """11 of them in one chunk: two groups, the second one not full."""
    n, m = 170, 50
    q, k = numbers(n, D, seed=1, kind="ieee"), numbers(m, D, seed=2, kind="ieee")
    rule = {"labels": torch.arange(n) * m // n}
    with watched() as paths:
        judge_counts(rule, q, k, SCALE, kind="ieee", ranks=True)
    assert paths.gradient_fast and paths.gradient_special and paths.gradient_fast + paths.gradient_special == 44


def test_edges_are_careful() -> None:
    """Three whole tiles each way and a fourth of one row or one column."""
    for n, m in ((48, 49), (49, 48), (49, 49)):
        q, k = numbers(n, D, seed=1, kind="ieee"), numbers(m, D, seed=2, kind="ieee")
        with watched() as paths:
            judge(in_kernels({}, kind="ieee"), dense({}), q, k, SCALE, kind="ieee")
        edges = {(48, 49): 3, (49, 48): 3, (49, 49): 7}[n, m]
        assert (paths.fast, paths.special) == (9, edges) == (paths.gradient_fast, paths.gradient_special)


# --- programs whose sums are out of range -------------------------------------------------------------------------


def unusual(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Features of which some programs, or all, are marked."""
    q, k = pair()
    if name == "a huge row":
        q[5] *= 40
        return q, k, SCALE
    if name == "a huge row in the last tile":
        q[60] *= 40
        return q, k, SCALE
    if name == "a huge column":
        k[37] *= 60
        return q, k, SCALE
    if name == "a low row":
        k = k.abs()
        q = q.abs()
        q[20] *= -30
        return q, k, SCALE
    if name == "a low column":
        q, k = q.abs(), k.abs()
        k[35] *= -30
        return q, k, SCALE
    if name == "scale 100, some against the others":
        direction = torch.nn.functional.normalize(torch.ones(1, D))
        q = torch.nn.functional.normalize(direction + 0.1 * q)
        k = torch.nn.functional.normalize(direction + 0.1 * k)
        q[::7] *= -1
        return q, k, torch.tensor(100.0)
    assert name == "long features"
    return q * 30, k * 30, SCALE


SOME = ["a huge row", "a huge row in the last tile", "a huge column", "a low row", "a low column"]
ALL = ["scale 100, some against the others", "long features"]


@pytest.mark.parametrize(("name", "options"), half(SOME + ALL, [{}, {"ranks": True, "sums": "all"}]))
def test_programs_out_of_range(name: str, options: dict[str, Any]) -> None:
    q, k, scale = unusual(name)
    paths = examined(q, k, scale, **options)
    assert paths.fast == 12  # as the fast launch sees them; marked programs compute them again
    assert paths.programs == 4
    assert paths.marked == 4 if name in ALL else 1 <= paths.marked <= 4, paths


@pytest.mark.parametrize("name", ["a huge column", "a low column"])
def test_only_the_program_of_the_column_is_marked(name: str) -> None:
    q, k, scale = unusual(name)
    if name == "a huge column":
        q = q.abs()
        k = k.abs()
    assert examined(q, k, scale).marked == 1


@pytest.mark.parametrize("sides", [{"cols": False}, {"rows": False}], ids=["rows", "columns"])
@pytest.mark.parametrize("name", SOME)
def test_one_side_out_of_range(name: str, sides: dict[str, bool]) -> None:
    """Rows are not looked at if only columns are wanted, nor columns if only rows are."""
    q, k, scale = unusual(name)
    paths = examined(q, k, scale, **sides)
    if (sides == {"cols": False} and name == "a low row") or (sides == {"rows": False} and name == "a low column"):
        assert paths.marked


def test_several_splits_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of both kinds in one launch, and of one column block."""
    monkeypatch.setattr(triton_configs, "WORKSPACE_BYTES", 3 * 8 * N)
    monkeypatch.setattr(Device, "of", lambda device: Device(80, 3))
    for name in SOME:
        q, k, scale = unusual(name)
        paths = examined(q, k, scale, ranks=True)
        assert paths.programs > 8 and 1 <= paths.marked < paths.programs


@pytest.mark.parametrize("name", SOME)
def test_one_set_out_of_range(name: str) -> None:
    q, unused, scale = unusual(name)
    rule = {"exclude_self": True, "labels": (torch.arange(N) + N // 2) % N}
    with watched() as paths:
        judge_counts(rule, q, unused, scale, kind="ieee", one_set=True, cols=False, ranks=True)
    assert paths.marked or "column" in name


@pytest.mark.parametrize(
    "config", [Config(64, 32, 16, 4, 2), Config(128, 32, 16, 8, 2), Config(32, 64, 16, 4, 2)], ids=str
)
def test_marked_programs_of_other_tiles(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Careful tiles are lower than the tiles of the program that was marked."""
    monkeypatch.setattr(triton_launch, "config_for", lambda *_, **__: config)
    n, m = 256, 192
    for row in (3, 130, 255):
        q, k = numbers(n, 16, seed=1, kind="fp16"), numbers(m, 16, seed=2, kind="fp16")
        q[row] *= 60
        rule = {"labels": torch.arange(n) * m // n}
        with watched() as paths:
            judge_counts(rule, q, k, SCALE, kind="fp16", ranks=True, sums="all")
        assert paths.marked and paths.fast


def test_marks_do_not_change_what_is_in_range() -> None:
    """The rows that are not huge have the same log-sum-exps as without it, but for roundings."""
    q, k = pair()
    huge = q.clone()
    huge[5] *= 40
    for how in ({"backend": "triton", "tile": 16}, {"backend": "torch"}):
        row, _ = ct.pair_lse(q, k, 7.0, **how)
        other, _ = ct.pair_lse(huge, k, 7.0, **how)
        keep = torch.arange(N) != 5
        torch.testing.assert_close(row[keep], other[keep], rtol=1e-6, atol=1e-6)


# --- the gradient -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME + ALL)
def test_far_blocks(name: str) -> None:
    """Blocks with a log-sum-exp 60 and more from the median are careful in the gradient, the others are not."""
    q, k, scale = unusual(name)
    scores = (scale * q @ k.T / torch.log(torch.tensor(2.0))).double()
    row, col = (torch.logsumexp(scores * torch.log(torch.tensor(2.0)), dim) / 0.6931471805599453 for dim in (1, 0))
    middle = row.median()
    far = [((x - middle).abs() > 60).view(4, 16).any(1) for x in (row, col)]
    tiles = far[0][:, None] | far[1][None, :] | torch.eye(4, dtype=torch.bool)
    paths = examined(q, k, scale)
    assert paths.far == int(far[0].sum() + far[1].sum())
    assert paths.gradient_special == int(tiles.sum()) and paths.gradient_fast == 16 - paths.gradient_special
    if name in SOME[:3]:
        assert paths.far


def test_gradients_of_one_side_have_no_far_blocks() -> None:
    q, k, scale = unusual("a huge row")
    paths = examined(q, k, scale, cols=False)
    assert paths.far == 0 and paths.gradient_fast == 12


def test_weights_at_the_limit() -> None:
    """Log-sum-exps 59 and 61 from the median: fast and careful, and right."""
    for gap, far in ((59.0, 0), (61.0, 1)):
        for sign in (1, -1):
            q, k = torch.zeros(N, 16), torch.zeros(N, 16)
            q[:, 0], k[:, 0] = 1.0, 1.0
            k[:, 1:] = 0.1 * numbers(N, 15, seed=3, kind="ieee")
            q[:, 1:] = 0.1 * numbers(N, 15, seed=4, kind="ieee")
            scale = torch.tensor(0.6931471805599453)
            q[9, 0] = 1 + sign * gap
            with watched() as paths:
                judge(in_kernels({}, kind="ieee"), dense({}), q, k, scale, kind="ieee")
            rows = int(sign < 0) * far if sign < 0 else far
            assert paths.far >= rows, (gap, sign, paths)
            if not far and sign < 0:
                assert paths.far == 0


@pytest.mark.parametrize("scale", [7.0, 0.3])
def test_a_row_and_a_column_without_any_pair(scale: float) -> None:
    """Their log-sum-exps are -inf, and all others and the gradients are as without them."""
    q, k = (x.requires_grad_() for x in pair())
    found = []
    for query_ids, key_ids in (
        (torch.where(torch.arange(N) == 3, 1, 0), torch.ones(N, dtype=torch.long)),
        (torch.ones(N, dtype=torch.long), torch.where(torch.arange(N) == 3, 1, 0)),
    ):
        ours = in_kernels({"query_ids": query_ids, "key_ids": key_ids}, kind="ieee")(q, k, torch.tensor(scale))
        row = query_ids[3] == 1 and query_ids[0] == 0
        assert ours[0 if row else 1][3] == -torch.inf
        keep = torch.arange(N) != 3
        values = [ours[0][keep], ours[1]] if row else [ours[0], ours[1][keep]]
        scores = scale * (q[keep] if row else q).double() @ (k if row else k[keep]).double().T
        true = [scores.logsumexp(1), scores.logsumexp(0)]
        for a, b in zip(values, true, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)
        weights = [torch.linspace(-1, 1, len(x)) for x in values]
        found.append([torch.autograd.grad(values, [q, k], weights), torch.autograd.grad(true, [q, k], weights)])
    for grads, expected in found:
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("config", [Config(64, 32, 16, 4, 2), Config(128, 32, 16, 8, 2)], ids=str)
def test_gradient_of_the_scale_of_other_tiles(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of both launches, of which the careful one has more and lower tiles."""
    monkeypatch.setattr(triton_launch, "config_for", lambda *_, **__: config)
    q, k = numbers(256, 16, seed=1, kind="ieee"), numbers(256, 16, seed=2, kind="ieee")
    grads = []
    ways: list[tuple[torch.dtype, dict[str, Any]]] = [
        (torch.float32, {"backend": "triton"}),
        (torch.float64, {"backend": "dense"}),
    ]
    for dtype, how in ways:
        scale = torch.tensor(7.0, dtype=dtype, requires_grad=True)
        ct.clip_loss(q.to(dtype), k.to(dtype), scale, **how).backward()
        grads.append(scale.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6, check_dtype=False)


# --- chunks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "a huge row", "a low column"])
def test_chunks_do_not_matter(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are the same bits however columns are cut into launches."""
    q, k, scale = (*pair(), SCALE) if name is None else unusual(name)
    found = []
    for workspace in (64 << 20, 2 * 8 * N, 1):
        monkeypatch.setattr(triton_configs, "WORKSPACE_BYTES", workspace)
        monkeypatch.setattr(Device, "of", lambda device: Device(80, 0))
        with watched():
            found.append(run(lambda *x: tuple(y for y in in_kernels(RULE, kind="ieee")(*x)), q, k, scale))
    for other in found[1:]:
        torch.testing.assert_close(other.values, found[0].values, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(other.grads, found[0].grads, rtol=1e-5, atol=1e-5)


def test_paths_do_not_depend_on_the_order_of_programs() -> None:
    for name in ("a huge row", "a low column"):
        q, k, scale = unusual(name)
        outcomes = []
        for order in (None, 3):
            with watched(order):
                outcomes.append(run(in_kernels(RULE, kind="ieee"), q, k, scale))
        assert_same(*outcomes)

"""Sums over classes against the masks they replace, with slices so small that every loop turns."""

import pytest
import torch
from torch import Tensor

from contratile.engine import classes
from contratile.engine.classes import LeftOut, add_class_grads, class_sums
from tests.helpers import randn

N, M, D = 23, 31, 5
ALPHA = torch.tensor(1.7, dtype=torch.float64)


def integers(n: int, kinds: int, seed: int) -> Tensor:
    return torch.randint(-kinds, kinds, (n,), generator=torch.Generator().manual_seed(seed)) * 1_000_003


def selves(z: Tensor) -> LeftOut:
    each = torch.arange(len(z))
    return LeftOut(each, each)


@pytest.mark.parametrize("step", [1, 4, 2048])
@pytest.mark.parametrize("kinds", [1, 5, 100])
@pytest.mark.parametrize("differ", [False, True])
def test_sums_and_gradients(differ: bool, kinds: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "STEP", step)
    q, k = randn(N, D, seed=1, dtype=torch.float64), randn(M, D, seed=2, dtype=torch.float64)
    left, right = integers(N, kinds, 3), integers(M, kinds, 4)
    same = ((left.unsqueeze(1) == right) != differ).double()
    scores = ALPHA * q @ k.T * same
    sums = class_sums(q, k, ALPHA, left, right, rows=True, cols=True, differ=differ)
    torch.testing.assert_close(tuple(sums), (scores.sum(1), same.sum(1), scores.sum(0), same.sum(0)))
    rows_only = class_sums(q, k, ALPHA, left, right, rows=True, cols=False, differ=differ)
    assert torch.equal(rows_only.row, sums.row) and not rows_only.col.any()
    u, v = randn(N, seed=5, dtype=torch.float64), randn(M, seed=6, dtype=torch.float64)
    for row, col in ((u, v), (u, None), (None, v)):
        weights = torch.zeros(N, M, dtype=torch.float64)
        weights += 0 if row is None else row.unsqueeze(1)
        weights += 0 if col is None else col
        dq = torch.ones(N, D, dtype=torch.float64)
        add_class_grads(dq, k, ALPHA, left, right, row, col, differ=differ)
        torch.testing.assert_close(dq, 1 + ALPHA * (weights * same) @ k)


@pytest.mark.parametrize("step", [1, 4, 2048])
def test_nobody_counts_for_itself(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "STEP", step)
    z, kinds = randn(N, D, seed=1, dtype=torch.float64), integers(N, 5, 3)
    same = (kinds.unsqueeze(1) == kinds).double().fill_diagonal_(0)
    sums = class_sums(z, z, ALPHA, kinds, kinds, rows=True, cols=False, left_out=selves(z))
    torch.testing.assert_close((sums.row, sums.row_count), ((ALPHA * z @ z.T * same).sum(1), same.sum(1)))
    u, v = randn(N, seed=5, dtype=torch.float64), randn(N, seed=6, dtype=torch.float64)
    for row, col in ((u, v), (u, None), (None, v)):
        weights = (0 if row is None else row.unsqueeze(1)) + (0 if col is None else col) + torch.zeros_like(same)
        dz = torch.ones(N, D, dtype=torch.float64)
        add_class_grads(dz, z, ALPHA, kinds, kinds, row, col, left_out=selves(z).row)
        torch.testing.assert_close(dz, 1 + ALPHA * (weights * same) @ z)


@pytest.mark.parametrize("differ", [False, True])
def test_what_is_left_of_a_long_sum(differ: bool) -> None:
    """One row is much longer than its partner, or one key of many is of another class: neither drowns in the rest."""
    z = randn(4096, 8, seed=1) + 2
    kinds = torch.zeros(4096, dtype=torch.long)
    kinds[-1] = 1
    if not differ:
        kinds = torch.arange(4096) // 2
        z[0] *= 1e4
    same = ((kinds.unsqueeze(1) == kinds) != differ).fill_diagonal_(False)
    want = (z.double() @ z.double().T * same).sum(1)
    out = LeftOut() if differ else selves(z)
    sums = class_sums(z, z, torch.tensor(1.0), kinds, kinds, rows=True, cols=False, differ=differ, left_out=out)
    torch.testing.assert_close(sums.row.double(), want, rtol=1e-5, atol=1e-5)
    dz, row = torch.zeros_like(z), torch.ones(4096)
    add_class_grads(dz, z, torch.tensor(1.0), kinds, kinds, row, row, differ=differ, left_out=out.row)
    torch.testing.assert_close(dz.double(), 2 * same.double() @ z.double(), rtol=1e-5, atol=1e-5)


def test_nothing_in_common() -> None:
    q, k = randn(3, D, seed=1), randn(4, D, seed=2)
    zero, one = torch.zeros(3, dtype=torch.long), torch.ones(4, dtype=torch.long)
    assert not any(part.any() for part in class_sums(q, k, ALPHA.float(), zero, one, rows=True, cols=True))

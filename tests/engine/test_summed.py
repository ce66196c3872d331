"""Gradients that several calls add to in one place."""

import pytest
import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.spec import Inputs, Spec
from contratile.engine.summed import summed, sums_of
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE

N, D = 12, 5


def features() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    query, key = (torch.randn(N, D, generator=random, dtype=torch.float64).requires_grad_() for _ in range(2))
    return query, key, torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


def loss(query: Tensor, key: Tensor, scale: Tensor) -> Tensor:
    """Features are queries, keys and both, and are used outside of the engine."""
    ring, spec = Ring.flat(ALONE, (N,), total=N), Spec(cols=False, tile=5)
    calls = [Inputs(query, key, scale), Inputs(key, query, scale), Inputs(query, None, scale), Inputs(key, None, scale)]
    totals = [pair_stats(ring, x, spec).row.total for x in calls]
    found = sum(total.square().sum() for total in totals if total is not None)
    return found + (query * key).sum().square()


def test_gradients_are_those_of_autograd_alone() -> None:
    args = features()
    expected = torch.autograd.grad(loss(*args), args)
    query, key, scale = args
    got = torch.autograd.grad(loss(summed(query), summed(key), scale), args)
    for mine, true in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


def test_each_pass_starts_from_zero() -> None:
    query, key, scale = features()
    expected = torch.autograd.grad(loss(query, key, scale), (query, scale))
    value = loss(summed(query), summed(key), scale)
    torch.autograd.grad(value, scale, retain_graph=True)  # nobody asks for the sums
    for _ in range(2):
        got = torch.autograd.grad(value, (query, scale), retain_graph=True)
        for mine, true in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


def test_gradients_that_are_differentiated_again_still_raise() -> None:
    query, key, scale = features()
    (grad,) = torch.autograd.grad(loss(summed(query), summed(key), scale), query, create_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_features_have_another_way(dtype: torch.dtype) -> None:
    x = torch.randn(3, 2).to(dtype).requires_grad_()
    assert summed(x) is x and sums_of(x) is None


def test_constants_stay_as_they_are() -> None:
    x = torch.randn(3, 2)
    assert summed(x) is x
    with torch.no_grad():
        assert summed(x.requires_grad_()) is x
    assert summed(x) is not x and sums_of(summed(x)) is not None

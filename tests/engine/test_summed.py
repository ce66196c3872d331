"""Gradients that several calls add to in one place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.passes import backward
from contratile.engine.spec import Inputs, Spec
from contratile.engine.summed import summed, sums_of
from contratile.losses.directions import Direction
from contratile.losses.gist import gist_loss
from contratile.losses.info_nce import info_nce
from contratile.losses.options import PairOptions
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


def gte(query: Tensor, key: Tensor) -> Tensor:
    directions: tuple[Direction, ...] = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    return info_nce(query, key, 3.0, directions=directions, group=None)


def gist(query: Tensor, key: Tensor) -> Tensor:
    guide = query.detach().roll(1, 1), key.detach().roll(1, 1)
    return gist_loss(query, key, 3.0, PairOptions(), guide, contrast_queries=True, contrast_keys=True, group=None)


@pytest.mark.parametrize("loss", [gte, gist])
def test_losses_of_several_calls_hold_one_gradient(
    loss: Callable[[Tensor, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call adds to the same buffers, and returns no gradient of the features."""
    seen: list[tuple[Any, ...]] = []

    def noted(*args: Any) -> Any:
        found = backward(*args)
        seen.append((*(x is not None for x in args[-2:]), found.query, found.key))
        return found

    monkeypatch.setattr("contratile.engine.autograd.backward", noted)
    query, key, _ = features()
    loss(query, key).backward()
    assert sorted(seen) == [(True, False, None, None), (True, False, None, None), (True, True, None, None)]

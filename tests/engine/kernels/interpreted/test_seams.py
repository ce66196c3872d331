"""Where kernels meet the rest: another backend halfway, odd scales, tiny gradients, another default dtype."""

from tests.engine.kernels.interpreted.battery import numbers  # isort: skip  # first: it sets the mode of Triton

from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile.engine.autograd import pair_stats
from contratile.engine.backends import registry
from contratile.engine.backends.block import KernelError
from contratile.engine.backends.triton_launch import Launch
from contratile.engine.spec import Inputs, Spec
from contratile.engine.summed import summed
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE
from tests.helpers import run

HOW: dict[str, Any] = {"backend": "triton", "tile": 16, "group": None}
SCALE = torch.tensor(7.0)


@pytest.mark.parametrize("options", [{}, {"margin": 0.1}], ids=str)
@pytest.mark.parametrize("broken", ["gradient_tiles", "side_weights", "careful"])
def test_scores_that_kernels_kept_are_not_read_by_torch(
    broken: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of the backward pass cannot be built: torch computes all scores again, also for calls under way."""
    monkeypatch.setattr(registry, "on_gpu", lambda x: True)
    monkeypatch.setattr(registry, "_failed", {})
    monkeypatch.setattr(registry, "_warned", {"the kernel x could not be built"})
    stock = Launch.run

    def fail(self: Launch) -> None:
        backward = self.kernel.__name__ in ("gradient_tiles", "side_weights")
        if self.kernel.__name__ == broken or (broken == "careful" and backward and self.arguments.get("CAREFUL")):
            raise KernelError("the kernel x could not be built")
        stock(self)

    q, k = numbers(70, 16, seed=1, kind="ieee"), numbers(70, 16, seed=2, kind="ieee")
    how: dict[str, Any] = {"tile": 16, "group": None, "cache_bytes": 1 << 20, **options}
    under_way = [x.clone().requires_grad_() for x in (q, k)]
    later = ct.clip_loss(under_way[0], under_way[1], 7.0, **how)
    monkeypatch.setattr(Launch, "run", fail)
    got = run(lambda *x: ct.clip_loss(*x, **how), q, k, SCALE)
    true = run(lambda *x: ct.clip_loss(*x, **how | {"backend": "torch"}), q, k, SCALE)
    grads = torch.autograd.grad(later, under_way)
    monkeypatch.undo()
    for a, b in zip([*got.values, *got.grads, *grads], [*true.values, *true.grads, *true.grads[:2]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [7.0, 0.0])
def test_shares_of_several_calls_stay_as_they_are(scale: float) -> None:
    """Every call adds to what is there, whether its features are queries, keys or both."""

    def loss(how: dict[str, Any], q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        ring, spec = Ring.flat(ALONE, (len(q),), total=len(q)), Spec(tile=16, **how)
        calls = [Inputs(q, k, s), Inputs(q, None, s), Inputs(k, q, s), Inputs(k, None, s)]
        every = [pair_stats(ring, x, spec) for x in (*calls, *calls)]  # each after all others
        return torch.cat([stats.nats(stats.row.total) for stats in every if stats.row.total is not None]).square().sum()

    q, k = (numbers(20, 8, seed=seed, kind="ieee").requires_grad_() for seed in (1, 2))
    s = torch.tensor(scale, requires_grad=True)
    got = torch.autograd.grad(loss({"backend": "triton"}, summed(q), summed(k), s), [q, k, s])
    exact = [x.detach().double().requires_grad_() for x in (q, k, s)]
    true = torch.autograd.grad(loss({"backend": "dense"}, *exact), exact)
    for mine, other in zip(got, true, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5 * (1 + float(other.abs().max())))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, -2.0])
@pytest.mark.parametrize("n", [1, 40])
def test_gradient_of_a_small_scale_beside_a_bias(n: int, scale: float) -> None:
    """A positive's product is not told from its score, in which the bias would have rounded it."""
    q, k = numbers(n, 8, seed=1, kind="ieee", norm=30.0), numbers(n, 8, seed=2, kind="ieee", norm=30.0)

    def loss(how: dict[str, Any], q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        value: Tensor = ct.siglip_loss(q, k, s, -10.0, **how)
        return value

    got = run(lambda *x: loss(HOW, *x), q, k, torch.tensor(scale))
    dense: dict[str, Any] = {"backend": "dense", "group": None}
    true = run(lambda *x: loss(dense, *x), q, k, torch.tensor(scale), dtype=torch.float64)
    torch.testing.assert_close(got.grads[2].double(), true.grads[2], rtol=1e-5, atol=1e-6)


def test_the_smallest_upstream_gradients_of_fp16() -> None:
    q, k = (numbers(20, 8, seed=seed, kind="fp16").requires_grad_() for seed in (1, 2))
    (ct.clip_loss(q, k, 7.0, reduction="sum", **HOW) * 1e-44).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k))


def test_another_default_dtype() -> None:
    q, k = numbers(20, 8, seed=1, kind="ieee"), numbers(20, 8, seed=2, kind="ieee")
    expected = ct.clip_loss(q, k, torch.tensor(37.77), **HOW)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(ct.clip_loss(q, k, torch.tensor(37.77, dtype=torch.float32), **HOW), expected)
    finally:
        torch.set_default_dtype(torch.float32)

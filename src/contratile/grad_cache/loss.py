"""The second phase: the loss of all features, and the gradients of features, keywords and the loss's parameters.

Loss keywords that require a gradient (a learned scale) are replaced by leaves. Their gradients are averaged over the
ranks before they are backpropagated further, because DDP's reducer does not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from contratile.errors import bad_value
from contratile.grad_cache.chunks import map_tensors
from contratile.grad_cache.encoded import Encoded
from contratile.grad_cache.wrappers import wrappers_of
from contratile.ring.team import Team


class LossCall:
    """One call of the loss, to be backpropagated once."""

    def __init__(self, loss: Callable[..., Any], encoded: Encoded, keywords: dict[str, Any]) -> None:
        self.encoded = encoded
        self.given: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self.parameters = _own_parameters(loss, encoded)
        self.answer = loss(*encoded.features, **map_tensors(self._leaf, keywords))
        self.loss = self.answer[0] if isinstance(self.answer, tuple) else self.answer
        if not isinstance(self.loss, Tensor) or self.loss.numel() != 1:
            got = list(self.loss.shape) if isinstance(self.loss, Tensor) else type(self.loss).__name__
            remedy = "Use reduction='mean' or 'sum'. To return more, return a tuple that starts with the loss."
            bad_value("loss", expected="a scalar", got=got, remedy=remedy)

    def _leaf(self, x: Tensor) -> Tensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        self.given.append(x)
        self.leaves.append(x.detach().requires_grad_())
        return self.leaves[-1]

    @property
    def value(self) -> Tensor:
        value: Tensor = self.loss.detach()
        return value

    def answer_with(self, value: Tensor) -> Any:
        """The loss's own result, detached, with `value` in place of the loss."""
        if not isinstance(self.answer, tuple):
            return value
        return (value, *(map_tensors(Tensor.detach, x) for x in self.answer[1:]))

    def differentiate(self, team: Team, gradient: Tensor | None = None) -> None:
        """Compute the gradients of features, and those of keywords and loss parameters averaged over ranks."""
        before = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        try:
            with self.encoded.autocast.off():
                torch.autograd.backward(self.loss, gradient)
            found = [_mean(x, team) for x in (*self.leaves, *self.parameters)]
        finally:
            for p, grad in zip(self.parameters, before, strict=True):
                p.grad = grad
        pairs = zip((*self.given, *self.parameters), found, strict=True)
        used = [(x, grad) for x, grad in pairs if grad is not None]
        if used:
            torch.autograd.backward([x for x, _ in used], [grad for _, grad in used])


def _own_parameters(loss: Callable[..., Any], encoded: Encoded) -> list[nn.Parameter]:
    """Parameters of the loss that no wrapper synchronises."""
    if not isinstance(loss, nn.Module) or wrappers_of(loss):
        return []
    encoders = {id(p) for side in encoded.sides for p in side.owner.parameters()}
    return [p for p in loss.parameters() if p.requires_grad and id(p) not in encoders]


def _mean(leaf: Tensor, team: Team) -> Tensor | None:
    """A leaf's gradient, averaged over ranks; a rank that did not use it contributes 0."""
    if team.size == 1:
        return leaf.grad
    return team.sum(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) / team.size

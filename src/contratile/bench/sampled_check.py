"""An independent check of a large `clip_loss` step, by brute force in fp64 for a few sampled pairs.

    value = clip_loss(image, text, scale, group=None)
    value.backward()
    with torch.no_grad():
        lse = pair_lse(image, text, scale, group=None)
    errors = sampled_errors(image, text, scale, value.item(), lse, samples=32)

Brute force computes all scores of a sampled row or column in fp64, nothing else. The log-sum-exp of a sampled row or
column needs only those. The gradient of image i also needs the log-sum-exps of all columns: those come from `pair_lse`,
which computes the same tiles as the step, and are checked on samples too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Keys whose scores are in memory at the same time."""


class SampledSide(NamedTuple):
    """What brute force finds for sampled queries: log-sum-exps, and gradients of the mean loss."""

    lse: Tensor
    grad: Tensor


class SampledErrors(NamedTuple):
    """How far a step is from brute force; errors of gradients are relative, in the maximum norm."""

    samples: int
    row_lse: float
    """Largest absolute error of the sampled rows' log-sum-exps, in nats."""

    col_lse: float
    value: float
    """Relative error of the loss, given these log-sum-exps and positives in fp64."""

    image_grad: float
    text_grad: float
    scale_grad: float
    """Relative difference between the gradient of the scale and sum(image * image gradient) / scale in fp64."""

    scale_grad_sampled: float
    """The gradient of the scale that brute force estimates from the sampled rows."""

    scale_grad_spread: float
    """Standard error of that estimate."""


def brute_force(query: Tensor, key: Tensor, scale: float, rows: Tensor, other_lse: Tensor) -> SampledSide:
    """Log-sum-exps and gradients of sampled queries from all their scores, in fp64 on blocks of keys.

    Args:
        query: Features [N, D]; query i belongs to key i.
        key: Features [N, D].
        scale: Scale of the scores.
        rows: Indices of the sampled queries.
        other_lse: Log-sum-exps of all keys over the queries.

    Returns:
        The log-sum-exp over the keys, and the gradient of the mean of both cross entropies.
    """
    q = query[rows].double()
    blocks = range(0, len(key), BLOCK)
    lse = torch.stack([(scale * q @ key[b : b + BLOCK].double().T).logsumexp(1) for b in blocks]).logsumexp(0)
    grad = torch.zeros_like(q)
    for b in blocks:
        k = key[b : b + BLOCK].double()
        scores = scale * q @ k.T
        weights = (scores - lse.unsqueeze(1)).exp_() + (scores - other_lse[b : b + BLOCK].double()).exp_()
        grad += weights @ k
    grad -= 2 * key[rows].double()
    return SampledSide(lse, grad * (scale / (2 * len(query))))


def sampled_errors(
    image: Tensor,
    text: Tensor,
    scale: Tensor,
    value: float,
    lse: tuple[Tensor, Tensor],
    *,
    samples: int,
    seed: int = 0,
) -> SampledErrors:
    """Compare a step whose gradients are in `image`, `text` and `scale` with brute force on sampled pairs.

    `lse` are the log-sum-exps of all rows and columns in nats, from `pair_lse`.
    """
    assert image.grad is not None and text.grad is not None and scale.grad is not None
    n, number = len(image), scale.item()
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:samples]
    row_lse, col_lse = (x.detach().double() for x in lse)
    with torch.no_grad():
        images = brute_force(image, text, number, rows, col_lse)
        texts = brute_force(text, image, number, rows, row_lse)
        products = _paired_sum(image, text) * number
        expected = ((row_lse + col_lse).sum().item() / 2 - products) / n
        through_grad = _paired_sum(image, image.grad) / number
        shares = (image[rows].double() * images.grad).sum(1) * (n / number)
    return SampledErrors(
        samples=len(rows),
        row_lse=(row_lse[rows] - images.lse).abs().max().item(),
        col_lse=(col_lse[rows] - texts.lse).abs().max().item(),
        value=abs(value - expected) / abs(expected),
        image_grad=_relative(image.grad[rows], images.grad),
        text_grad=_relative(text.grad[rows], texts.grad),
        scale_grad=abs(scale.grad.item() - through_grad) / abs(through_grad),
        scale_grad_sampled=shares.mean().item(),
        scale_grad_spread=(shares.std() / len(rows) ** 0.5).item(),
    )


def _paired_sum(a: Tensor, b: Tensor) -> float:
    """sum(a * b) in fp64 without fp64 copies of whole tensors."""
    pairs = zip(torch.split(a, BLOCK), torch.split(b, BLOCK), strict=True)
    return float(sum((x.double() * y.double()).sum().item() for x, y in pairs))


def _relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).abs().max() / expected.abs().max()).item()

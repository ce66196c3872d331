"""Contestants of the loss summed over the first 64, 128, ... features.

    value = nested(clip_loss)(*LossProblem.make(1024, 768, scale=20.0).args)

All dimensions come from one score matrix: 4 products of a step, forward and backward.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contratile.bench.contestants.loss import LossFunction, LossStep, with_backward


def widths(d: int) -> tuple[int, ...]:
    """Matryoshka dimensions of D features: 64, 128, 256, ... and D."""
    return (*(64 << power for power in range(d) if 64 << power < d), d)


def nested(loss: LossFunction) -> LossFunction:
    """The loss summed over dimensions."""
    return lambda query, key, scale, **how: loss(query, key, scale, matryoshka_dims=widths(query.shape[1]), **how)


def looped(loss: LossFunction) -> LossFunction:
    """The same loss with a call for each dimension."""

    def summed(query: Tensor, key: Tensor, scale: Tensor, **how: Any) -> Tensor:
        cut = ((F.normalize(x[:, :dim], dim=1) for x in (query, key)) for dim in widths(query.shape[1]))
        return torch.stack([loss(*sides, scale, **how) for sides in cut]).sum()

    return summed


def matryoshka_loss() -> LossStep:
    """sentence-transformers' wrapper around its symmetric loss."""
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    class Given(torch.nn.Module):
        """Embeddings are given: no model is run."""

        def get_embedding_dimension(self) -> None:
            """Read for labels that are embeddings, which these are not."""

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return dict(features)

    def make(scale: float, dims: tuple[int, ...]) -> LossFunction:
        model: Any = Given()
        both: Any = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        loss = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model, scale=scale, **both), dims)
        return lambda *columns: loss([{"sentence_embedding": x} for x in columns], torch.empty(0))

    module = cache(make)
    return with_backward(lambda query, key, scale: module(scale.item(), widths(query.shape[1]))(query, key))

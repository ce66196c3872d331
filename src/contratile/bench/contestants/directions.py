"""Contestants of losses with more negatives from the batch: GTE's four directions in one softmax, for pairs and with a
column of hard negatives.

    problem = triplets(1024, 256, scale=20.0)
    value = gte_hard(info_nce)(*problem.args)

Products of a step, forward and backward: queries x documents 4, queries x queries and documents x documents 2 each, and
4 each for queries and for documents x hard negatives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contratile.bench.contestants.loss import LossFunction, LossProblem
from contratile.losses.directions import Direction

FOUR: tuple[Direction, ...] = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PAIRS, TRIPLETS = 8, 16
"""Products of a step."""


def triplets(n: int, d: int, **how: Any) -> LossProblem:
    """Make pairs, a hard negative of each, and a scale; keywords are those of `LossProblem.make`."""
    query, key, scale = LossProblem.make(n, d, **how).args
    random = torch.Generator().manual_seed(n + d + 1 + how.get("seed", 0))
    noise = torch.randn(n, d, generator=random).mul_(2 / d**0.5).to(query)
    hard = F.normalize(noise.add_(query.detach()), dim=1).requires_grad_()
    return LossProblem((query, key, hard, scale))


def gte(loss: LossFunction) -> LossFunction:
    """All directions of `info_nce`, ours or the reference."""
    return lambda query, key, scale, **how: loss(query, key, scale, directions=FOUR, **how)


def gte_hard(loss: LossFunction) -> LossFunction:
    """The same loss with a column of hard negatives, shared by all queries."""

    def call(query: Tensor, key: Tensor, hard: Tensor, scale: Tensor, **how: Any) -> Tensor:
        shared: dict[str, Any] = {"hard_negatives": hard.unsqueeze(1), "share_hard_negatives": True}
        return loss(query, key, scale, directions=FOUR, **shared, **how)

    return call


def theirs(scale: float) -> LossFunction:
    """sentence-transformers' loss of embeddings: queries, documents and any number of columns of hard negatives."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model: Any = torch.nn.Sequential(torch.nn.Identity())  # embeddings are given: no model is run
    directions: Any = FOUR
    loss = MultipleNegativesRankingLoss(model, scale=scale, directions=directions)
    return lambda *columns: loss.compute_loss_from_embeddings(list(columns), torch.empty(0))

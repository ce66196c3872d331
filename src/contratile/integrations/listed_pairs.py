"""Losses over lists of pairs, as miners return them. Memory is linear in the number of pairs.

As in pytorch-metric-learning, (a, p) are pairs of an anchor and a positive, and (a2, n) pairs of an anchor and a
negative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile.errors import bad_value

CHUNK = 1 << 19
"""Number of feature values in a chunk of pairs."""


class Listed(NamedTuple):
    """Indices of anchors and of the embeddings they are compared with."""

    a: Tensor
    p: Tensor
    a2: Tensor
    n: Tensor

    @classmethod
    def of(cls, indices: Any, device: torch.device) -> Listed:
        """From a tuple of triplets (a, p, n) or of pairs (a, p, a2, n)."""
        tensors = isinstance(indices, tuple | list) and all(isinstance(x, Tensor) for x in indices)
        if not tensors or len(indices) not in (3, 4):
            remedy = "Pass what a miner returns."
            got = f"{len(indices)} entries" if isinstance(indices, tuple | list) else type(indices).__name__
            bad_value("indices_tuple", expected="three or four tensors of indices", got=got, remedy=remedy)
        a, p, *negatives = (x.to(device).long() for x in indices)
        return cls(a, p, *negatives) if len(negatives) == 2 else cls(a, p, a, *negatives)


def nt_xent_of_listed(query: Tensor, key: Tensor, scale: Tensor, pairs: Listed) -> Tensor:
    """For each positive pair: softplus(log-sum-exp of the anchor's listed negatives - score of the pair)."""
    negatives = _logsumexp(scores_of(query, key, scale, pairs.a2, pairs.n), pairs.a2, len(query))
    return F.softplus(negatives[pairs.a] - scores_of(query, key, scale, pairs.a, pairs.p))


def sup_con_of_listed(query: Tensor, key: Tensor, scale: Tensor, pairs: Listed) -> tuple[Tensor, Tensor]:
    """For each anchor: log-sum-exp over its listed pairs minus the mean score of its positives, and their number.

    A pair that is listed several times counts once.
    """
    size, n = len(key), len(query)
    positive, negative = (torch.unique(a * size + b) for a, b in ((pairs.a, pairs.p), (pairs.a2, pairs.n)))
    every = torch.unique(torch.cat([positive, negative]))
    if len(every) < len(positive) + len(negative):
        remedy = "Pass what a miner returns for the labels of these embeddings."
        bad_value("indices_tuple", expected="positives or negatives", got="pairs that are both", remedy=remedy)
    lse = _logsumexp(scores_of(query, key, scale, every // size, every % size), every // size, n)
    anchor = positive // size
    terms = lse[anchor] - scores_of(query, key, scale, anchor, positive % size)
    count = torch.bincount(anchor, minlength=n)
    return terms.new_zeros(n).index_add(0, anchor, terms) / count.clamp(min=1), count


def scores_of(query: Tensor, key: Tensor, scale: Tensor, left: Tensor, right: Tensor) -> Tensor:
    products: Tensor = _Products.apply(query, key, left, right)  # type: ignore[no-untyped-call]
    return products * scale


def _logsumexp(scores: Tensor, group: Tensor, groups: int) -> Tensor:
    """The log-sum-exp of each group's scores; a number far below all scores for an empty group."""
    floor = torch.finfo(scores.dtype).min / 4
    top = scores.new_full((groups,), floor).scatter_reduce(0, group, scores.detach(), "amax")
    total = scores.new_zeros(groups).index_add(0, group, (scores - top[group]).exp())
    return torch.where(total > 0, total, 1).log() + top


class _Products(torch.autograd.Function):
    """<query[left], key[right]> of each pair, a chunk of pairs at a time, in fp32 or fp64."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, left, right)
        acc = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty(len(left), dtype=acc, device=query.device)
        for at in _chunks(left, query):
            out[at] = (query[left[at]].to(acc) * key[right[at]].to(acc)).sum(1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, left, right = ctx.saved_tensors
        dquery, dkey = (torch.zeros_like(x, dtype=grad.dtype) for x in (query, key))
        for at in _chunks(left, query):
            slope = grad[at].unsqueeze(1)
            dquery.index_add_(0, left[at], slope * key[right[at]].to(grad.dtype))
            dkey.index_add_(0, right[at], slope * query[left[at]].to(grad.dtype))
        return dquery.to(query.dtype), dkey.to(key.dtype), None, None


def _chunks(pairs: Tensor, query: Tensor) -> list[slice]:
    size = max(1, CHUNK // query.shape[1])
    return [slice(start, start + size) for start in range(0, len(pairs), size)]

"""Adds the positives to statistics that kernels gathered over negatives: a few operations on vectors.

Several rows may share a positive. Their terms are added by `index_put_`, which sorts on a GPU, and so always in the
same order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile.engine.backends.block import Scores
from contratile.engine.backends.torch_tiles import score_positives_
from contratile.engine.spec import Spec
from contratile.engine.stats import SideParts, Stats, lowest


def add_positives(row: SideParts, col: SideParts, scores: Scores, spec: Spec, level: Tensor) -> None:
    """Add each row's positive to its row, and to the column that it lies in.

    `level` holds the positives' products. Columns of symmetric scores are rows: there a pair of rows that are each
    other's positive is added once to each of them.
    """
    labels = scores.rule.labels
    assert labels is not None
    at = torch.arange(len(labels), device=labels.device)
    counted = torch.ones_like(labels, dtype=torch.bool)
    if scores.rule.exclude_self:
        counted = labels != at
    pos = level.clone()
    score_positives_(scores, pos)
    _add(row, pos, counted, None)
    if row.equal is not None:
        row.equal.add_(counted)
    symmetric = scores.k is None
    back = counted & (labels[labels] != at) if symmetric else counted
    other = row if symmetric else col
    _add(other, pos, back, labels)
    bar = scores.row_level if symmetric else scores.col_level
    if other.higher is not None and bar is not None:
        of_key = bar[labels]
        other.higher.index_put_((labels,), (back & (level > of_key)).to(level.dtype), accumulate=True)
        if other.equal is not None:
            other.equal.index_put_((labels,), (back & (level == of_key)).to(level.dtype), accumulate=True)


def _add(side: SideParts, pos: Tensor, counted: Tensor, index: Tensor | None) -> None:
    """Add one score per entry, or one per label."""
    if side.total is None:
        return
    if side.level is None:
        terms = torch.where(counted, F.softplus(-pos), 0)
        if index is None:
            side.total.add_(terms)
        else:
            side.total.index_put_((index,), terms, accumulate=True)
        return
    top = pos.masked_fill(~counted, lowest(pos.dtype))
    terms = counted.to(pos.dtype)
    if index is not None:
        least = torch.full_like(side.level, lowest(pos.dtype))
        highest = least.scatter_reduce(0, index, top, "amax", include_self=True)
        terms = terms * (top - highest[index]).exp2_()
        top, terms = highest, torch.zeros_like(highest).index_put_((index,), terms, accumulate=True)
    Stats(side.level, side.total).merge_(top, terms)

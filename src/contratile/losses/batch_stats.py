"""Batch statistics (accuracy, ranks, mean logits) that `return_stats=True` adds to a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.spec import PairStats
from contratile.ring.team import Team


class BatchStats(NamedTuple):
    """Statistics over the pairs of all ranks: detached 0-d tensors.

    The rank of a positive is 1 + the number of other keys that score strictly higher, and top-1 means rank 1. Pairs
    that a margin drops count, pairs of equal id do not, also where they are positives (`same_id="positive"`): positives
    here are the labelled ones. `col_*` are None for losses with one direction, and
    `negative_logit` is NaN if there is no negative. Scores are compared by their products, before the scale: exact
    ties are ties, while products that differ by rounding alone may be ranked either way.
    """

    row_top1: Tensor
    row_rank: Tensor
    col_top1: Tensor | None
    col_rank: Tensor | None
    positive_logit: Tensor
    negative_logit: Tensor


class Tally(NamedTuple):
    """What queries read from one source of keys, or from several joined.

    `above` is the log-sum-exp minus the positive. Late in training the two are almost equal, so their difference is
    kept instead of both.
    """

    above: Tensor
    total: Tensor | None  # sums of scores: of all keys that count, or of positives beside the labelled one
    number: Tensor | None  # how many scores
    higher: Tensor | None  # how many above the positive

    def join(self, other: Tally, stats: PairStats) -> Tally:
        """Over the keys of both sources."""
        sums = (_sum(getattr(self, name), getattr(other, name)) for name in ("total", "number", "higher"))
        return Tally(stats.logaddexp(self.above, other.above), *sums)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


def batch_stats(
    rows: Tally, cols: Tally | None, stats: PairStats, team: Team, negatives: tuple[Tensor, Tensor] | None = None
) -> BatchStats:
    """From complete tallies. One sum over the ranks.

    `negatives`: the sum of all negatives' scores and their number. None: the tallies hold all keys that count, with one
    positive each.
    """
    pos = stats.pos
    assert pos is not None and rows.total is not None and rows.number is not None
    if negatives is None:
        negatives = (rows.total - pos).sum(), (rows.number - 1).sum()
    sums = [pos.new_full((), len(pos)), pos.sum(), *negatives]
    for side in (rows,) if cols is None else (rows, cols):
        assert side.higher is not None
        sums += [(side.higher == 0).sum(), (side.higher + 1).sum()]
    n, positive, negative, number, *found = team.sum(torch.stack([x.detach().to(pos) for x in sums]))
    row_top1, row_rank, *col = (x / n for x in found)
    col_top1, col_rank = col or (None, None)
    negative_logit = torch.where(number > 0, stats.nats(negative) / number, torch.nan)
    return BatchStats(row_top1, row_rank, col_top1, col_rank, stats.nats(positive) / n, negative_logit)

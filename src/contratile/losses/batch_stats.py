"""Batch statistics (accuracy, ranks, mean logits) that `return_stats=True` adds to a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.spec import Inputs, PairStats
from contratile.losses.call import Rings
from contratile.losses.hard_negatives import own_products
from contratile.losses.options import PairOptions
from contratile.ring.team import Team


class BatchStats(NamedTuple):
    """Statistics over the pairs of all ranks: detached 0-d tensors.

    The rank of a positive is 1 + the number of other keys that score strictly higher; top-1 means rank 1. Positives are
    the labelled ones. Pairs that a margin drops are counted, pairs of equal id are not (even with
    `same_id="positive"`). `col_*` are None for losses with one direction, and `negative_logit` is NaN if there is no
    negative. Products are compared, before the scale: exact ties are ties, while products that differ only by rounding
    may be ranked either way.
    """

    row_top1: Tensor
    row_rank: Tensor
    col_top1: Tensor | None
    col_rank: Tensor | None
    positive_logit: Tensor
    negative_logit: Tensor


class Tally(NamedTuple):
    """What the queries gather from one source of keys, or from several joined.

    `above` is the log-sum-exp minus the positive. Late in training the two are almost equal, so their difference is
    kept instead of both.
    """

    above: Tensor
    total: Tensor | None  # sums of scores: of all keys that count, or of further positives
    number: Tensor | None  # how many scores
    higher: Tensor | None  # how many are above the positive

    def join(self, other: Tally, stats: PairStats) -> Tally:
        """Over the keys of both sources."""
        sums = (_sum(getattr(self, name), getattr(other, name)) for name in ("total", "number", "higher"))
        return Tally(stats.logaddexp(self.above, other.above), *sums)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a + b


def batch_stats(
    rows: Tally, cols: Tally | None, stats: PairStats, team: Team, negatives: tuple[Tensor, Tensor] | None = None
) -> BatchStats:
    """Batch statistics from complete tallies, with one sum over the ranks.

    `negatives`: the sum of all negatives' scores and their number. None: take it from the tallies, which hold all keys
    that count with one positive each.
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


def all_negatives(
    x: Inputs, rows: Tally, stats: PairStats, options: PairOptions, rings: Rings
) -> tuple[Tensor, Tensor]:
    """The sum of the scores of this rank's queries with all keys except their positives, and the number of such pairs.

    Scores of all pairs add up to the product of the sums of queries and of keys.
    """
    pos, others, count = stats.pos, rows.total, rows.number
    assert pos is not None and others is not None and count is not None
    exact = torch.float32 if pos.device.type == "mps" else torch.float64
    of_keys = torch.zeros(x.query.shape[1], dtype=exact, device=pos.device)
    size = 0
    for keys, ring in ((x.keys if options.in_batch_negatives else None, rings.keys), (options.extra_keys, rings.extra)):
        if keys is not None and ring is not None:
            of_keys, size = of_keys + keys.detach().sum(0, dtype=exact), size + sum(ring.sizes)
    of_keys = rings.keys.team.sum(of_keys)
    total = stats.logits((x.query.detach().sum(0, dtype=exact) * of_keys).sum(), x.scale.detach())
    number: Tensor | int = len(pos) * size
    if options.hard_negatives is not None:
        products = own_products(x.query.detach(), options.hard_negatives.detach(), options.hard_mask)
        total = total + stats.logits(products.sum(dtype=exact), x.scale.detach())
        there = products.numel() if options.hard_mask is None else options.hard_mask.sum()
        number = number + there
    if x.bias is not None:
        total = total + number * x.bias.detach()
    positives, labelled = others, count
    if options.in_batch_negatives:  # the labelled ones are among these keys
        positives, labelled = pos + others, count + 1
    return total - positives.detach().sum(dtype=exact), number - labelled.sum()


def sigmoid_stats(x: Inputs, stats: PairStats, options: PairOptions, rings: Rings) -> BatchStats:
    """The statistics of `siglip_loss`."""
    row, col, pos = stats.row, stats.col, stats.pos
    assert x.bias is not None and pos is not None and row.total is not None and col.total is not None
    assert row.sums is not None and row.counts is not None
    total, number = row.sums + row.counts * x.bias, row.counts  # sums are without the bias
    negatives = None
    if options.several_positives:
        rows = Tally(row.total, total, number, row.higher)
        negatives = all_negatives(x, rows, stats, options, rings)
    elif x.query_ids is not None and x.key_ids is not None:  # sums over other ids lack positives of the same id
        spared = x.query_ids == x.key_ids
        total, number = total + torch.where(spared, pos, 0), number + spared
    rows = Tally(row.total, total, number, row.higher)
    return batch_stats(rows, Tally(col.total, None, None, col.higher), stats, rings.keys.team, negatives)

"""Small steps that losses share: numbers as tensors, and log-sum-exps minus the positives' scores."""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.spec import Inputs, PairStats, SideStats, Spec
from contratile.losses.batch_stats import Tally
from contratile.ring.ring import Ring


def as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """A 0-d tensor on the features' device, at least fp32. A number is created there: copying it would synchronise."""
    if isinstance(value, Tensor):
        value = value if value.dim() == 0 else value.reshape(())
        return value.to(like.device, torch.promote_types(value.dtype, torch.float32))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.scalar_tensor(value, dtype=dtype, device=like.device)


def without_bias(stats: PairStats, x: Inputs) -> Tensor:
    """The positives' scores without `key_bias`, as they enter sums of scores."""
    assert stats.pos is not None and x.labels is not None
    if x.key_bias is None:
        return stats.pos
    return stats.pos - with_axes(stats.of_nats(x.key_bias.detach()[x.labels]), stats.pos)


def with_axes(x: Tensor, like: Tensor) -> Tensor:
    """A value per pair, with trailing axes of size 1 to broadcast against `like` [N, dims]."""
    return x.reshape(*x.shape, *(1 for _ in range(like.dim() - x.dim())))


def tally_of(
    side: SideStats, pos: Tensor, spared: Tensor | None, plain: Tensor | None = None, *, own: bool = True
) -> Tally:
    """The tally of one side of the statistics.

    Args:
        side: Rows or columns.
        pos: The positives' scores.
        spared: Which positives have the query's id. Sums over other ids leave these out, so they are added here.
        plain: The positives' scores without bias.
        own: The positives are among the keys.
    """
    total, count = side.sums, side.counts
    if total is not None and count is not None and spared is not None:
        assert plain is not None
        total, count = total + torch.where(spared, plain, 0), count + spared
    return Tally(lse_above(pos, side, floor=own), total, count, side.higher)


def lse_above(level: Tensor, side: SideStats, *, floor: bool = True) -> Tensor:
    """The log-sum-exp minus a level close to it, with more digits than the rounded log-sum-exp alone has.

    `floor`: the level is a term of the sum, or a mean of terms, so the difference is never negative.
    """
    assert side.total is not None
    above = side.total - level
    if side.slack is None:
        return lifted(above) if floor else above
    value = above.detach()  # shares memory: the correction is a constant, which needs no gradient
    value.sub_(side.slack.log2())
    if floor:
        value.clamp_min_(0)
    return above


def lifted(losses: Tensor) -> Tensor:
    """Replace losses that rounding made negative by 0; the gradient stays."""
    return losses - losses.detach().clamp(max=0)


def without_positives(tally: Tally) -> Tally:
    return tally._replace(total=torch.zeros_like(tally.above), number=torch.zeros_like(tally.above))


def class_losses(x: Inputs, spec: Spec, ring: Ring) -> tuple[Tensor, Tensor]:
    """Per query: log-sum-exp minus mean same-class score, in nats, and the number of such keys; 0 without any."""
    stats = pair_stats(ring, x, spec._replace(cols=False, sums="equal"))
    total, count = stats.row.sums, stats.row.counts
    assert total is not None and count is not None
    return stats.nats(torch.where(count > 0, lse_above(total / count.clamp(min=1), stats.row), 0)), count

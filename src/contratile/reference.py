"""The dense oracle: every public loss as its formula, materialising the N x M scores.

This file defines what correct means. It is differentiable by autograd, works in any float dtype (fp64 for the
tests), knows nothing of tiles or process groups, and is what `backend="dense"` runs.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)


class PairStats(NamedTuple):
    """Natural-log statistics of scores S = scale * Q K^T. What was not asked for is empty."""

    row_lse: Tensor  # [N]  log sum_j exp S_ij
    col_lse: Tensor  # [M]  log sum_i exp S_ij
    pos: Tensor  # [N]  S[i, labels_i]


def pair_stats(
    query: Tensor,
    key: Tensor | None,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    exclude_self: bool = False,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    rows: bool = True,
    cols: bool = True,
) -> PairStats:
    """Log-sum-exps over the pairs that count, and the positives. `key=None` stands for the queries themselves."""
    key = query if key is None else key
    scores = scale * (query @ key.T)
    none = scores.new_empty(0)
    pos = none if labels is None else scores.gather(1, labels.unsqueeze(1)).squeeze(1)
    left_out = torch.zeros_like(scores, dtype=torch.bool)
    if query_ids is not None and key_ids is not None:
        left_out |= query_ids.unsqueeze(1) == key_ids
        if labels is not None:
            left_out.scatter_(1, labels.unsqueeze(1), False)
    if exclude_self:
        left_out.fill_diagonal_(True)
    scores = scores.masked_fill(left_out, -torch.inf)
    return PairStats(scores.logsumexp(1) if rows else none, scores.logsumexp(0) if cols else none, pos)


def pair_lse(
    query: Tensor, key: Tensor | None, scale: Tensor | float = 1.0, *, rows: bool = True, cols: bool = True
) -> tuple[Tensor, Tensor]:
    """Row and column log-sum-exps of scale * Q K^T."""
    stats = pair_stats(query, key, scale, rows=rows, cols=cols)
    return stats.row_lse, stats.col_lse


def clip_loss(image: Tensor, text: Tensor, scale: Tensor | float = 1.0, *, reduction: Reduction = "mean") -> Tensor:
    """Half the cross-entropy of each image against all texts plus half that of each text against all images."""
    row_lse, col_lse, pos = pair_stats(image, text, scale, labels=torch.arange(len(image), device=image.device))
    return reduce((row_lse - pos + col_lse - pos) / 2, reduction)


def info_nce(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float = 1.0,
    *,
    labels: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross-entropy of each query against all keys; `labels` (default: 0, 1, 2, ...) index the positives."""
    labels = torch.arange(len(query), device=query.device) if labels is None else labels
    row_lse, _, pos = pair_stats(query, key, scale, labels=labels, cols=False)
    return reduce(row_lse - pos, reduction)


def reduce(per_row: Tensor, reduction: Reduction) -> Tensor:
    """Mean, sum, or one value per row."""
    return per_row if reduction == "none" else per_row.mean() if reduction == "mean" else per_row.sum()

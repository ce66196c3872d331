"""The loss of a training step, chosen by the configuration.

loss, stats, norms = batch_loss(LossConfig(loss="clip"), left, right, text_ids(texts), scale=scale)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contratile.losses import functional
from contratile.losses.normalized import typical_norms

if TYPE_CHECKING:
    from contratile.losses.batch_stats import BatchStats
    from contratile.train.config import LossConfig


def batch_loss(
    config: LossConfig, left: Tensor, right: Tensor, ids: Tensor, *, scale: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, BatchStats | None, Tensor | None]:
    """Compute the configured loss of a batch.

    Args:
        config: Which loss, and its options.
        left: Features of the left sides [n, D].
        right: Features of the right sides [n, D].
        ids: Text ids [n]: pairs of equal text are not negatives of each other, or one class (supcon).
        scale: The learned scale.
        bias: The learned bias; siglip only.

    Returns:
        The loss; the statistics of the batch, where the loss has them; typical norms of both sides, on the device.
    """
    how: dict[str, Any] = {"backend": config.backend, "cache_bytes": config.cache_mib << 20}
    ids = ids.to(left.device)
    norms = typical_norms((left, right)) if len(left) else None
    if config.loss == "ntxent":
        return functional.nt_xent(left, right, 1 / scale, **how), None, norms
    if config.loss == "supcon":
        return functional.sup_con(torch.cat([left, right]), torch.cat([ids, ids]), 1 / scale, **how), None, norms
    if config.loss == "siglip":
        assert bias is not None
        loss, stats = functional.siglip_loss(left, right, scale, bias, return_stats=True, **how)
        return loss, stats, norms
    how |= {"margin": config.margin, "label_smoothing": config.label_smoothing}
    how |= {"ids": ids if config.dedup else None}
    function = functional.clip_loss if config.loss == "clip" else functional.info_nce
    loss, stats = function(left, right, scale, return_stats=True, **how)
    return loss, stats, norms


def text_ids(texts: Sequence[str]) -> Tensor:
    """A number for each text: equal texts have equal numbers on every process."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.long)

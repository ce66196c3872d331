"""The loss of a training run by name, called with features, and the statistics of its batch.

objective = Objective(LossConfig(loss="clip"))
objective.texts = texts             # of this batch: pairs of equal text are no negatives of each other
loss = objective(left, right, scale=scale)
objective.stats                     # top-1 accuracy and ranks in the batch, where the loss has them
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from contratile.losses import functional
from contratile.losses.batch_stats import BatchStats
from contratile.losses.normalized import typical_norms
from contratile.train.config import LossConfig


class Objective(nn.Module):
    """Calls the function that the config names."""

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.config = config
        self.texts: list[str] = []
        self.stats: BatchStats | None = None
        self.norms: Tensor | None = None
        """Typical norms of both sides, for whoever reads numbers from the device next."""

    def forward(self, left: Tensor, right: Tensor, *, scale: Tensor, bias: Tensor | None = None) -> Tensor:
        config = self.config
        how: dict[str, Any] = {"backend": config.backend, "cache_bytes": config.cache_mib << 20}
        ids = torch.tensor([number_of(text) for text in self.texts], dtype=torch.long, device=left.device)
        self.stats, self.norms = None, typical_norms((left, right)) if len(left) else None
        if config.loss == "ntxent":
            return functional.nt_xent(left, right, 1 / scale, **how)  # type: ignore[no-any-return]  # how hides the overload
        if config.loss == "supcon":
            return functional.sup_con(torch.cat([left, right]), torch.cat([ids, ids]), 1 / scale, **how)
        if config.loss == "siglip":
            assert bias is not None
            loss: Tensor
            loss, self.stats = functional.siglip_loss(left, right, scale, bias, return_stats=True, **how)
            return loss
        how |= {"margin": config.margin, "label_smoothing": config.label_smoothing}
        how |= {"ids": ids if config.dedup else None}
        function = functional.clip_loss if config.loss == "clip" else functional.info_nce
        loss, self.stats = function(left, right, scale, return_stats=True, **how)
        return loss


def number_of(text: str) -> int:
    """Equal texts have equal numbers, on every rank."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)

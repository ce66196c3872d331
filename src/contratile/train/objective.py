"""The loss of a training step, chosen by the configuration.

loss, stats, norms = batch_loss(LossConfig(loss="clip"), left, right, pair_facts(chunk, "right"), scale=scale)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from contratile.losses import functional
from contratile.losses.normalized import typical_norms

if TYPE_CHECKING:
    from contratile.data.chunk_maker import Chunk
    from contratile.losses.batch_stats import BatchStats
    from contratile.train.config import LossConfig


def batch_loss(
    config: LossConfig,
    left: Tensor,
    right: Tensor,
    facts: Tensor,
    negatives: Tensor | None = None,
    *,
    scale: Tensor,
    bias: Tensor | None = None,
    swapped: bool = False,
) -> tuple[Tensor, BatchStats | None, Tensor | None]:
    """Compute the configured loss of a batch.

    Args:
        config: Which loss, and its options.
        left: Features of the left sides [n, D].
        right: Features of the right sides [n, D].
        facts: What else is known about the pairs, from `pair_facts`.
        negatives: Features of the hard negatives [n * count, D], empty places included.
        scale: The learned scale.
        bias: The learned bias; siglip only.
        swapped: The hard negatives are negatives of the right sides, so that the right sides are the queries (clip).

    Returns:
        The loss; the statistics of the batch, where the loss has them; typical norms of both sides, on the device.
    """
    how: dict[str, Any] = {"backend": config.backend, "cache_bytes": config.cache_mib << 20, "ring": config.ring}
    ids = facts[:, 0].to(left.device)
    norms = typical_norms((left, right)) if len(left) else None
    if config.loss == "ntxent":
        return functional.nt_xent(left, right, 1 / scale, **how), None, norms
    if config.loss == "supcon":
        return functional.sup_con(torch.cat([left, right]), torch.cat([ids, ids]), 1 / scale, **how), None, norms
    if config.same_id != "negative":
        how |= {"ids": ids, "same_id": config.same_id}
    nested = bool(config.matryoshka_dims)
    if nested:
        how |= {"matryoshka_dims": config.matryoshka_dims, "matryoshka_weights": config.matryoshka_weights or None}
    if config.loss == "siglip":
        assert bias is not None
        return *_with_stats(functional.siglip_loss, left, right, scale, bias, nested=nested, **how), norms
    how |= {"margin": config.margin, "label_smoothing": config.label_smoothing}
    if negatives is not None:
        how |= _negatives(config, negatives, facts)
    if config.loss == "infonce":
        how |= {name: value for name, value in config.more._asdict().items() if name != "share_hard_negatives"}
    function = functional.clip_loss if config.loss == "clip" else functional.info_nce
    query, key = (right, left) if swapped else (left, right)
    return *_with_stats(function, query, key, scale, nested=nested, **how), norms


def _with_stats(
    function: Callable[..., Any], *tensors: Tensor, nested: bool, **how: Any
) -> tuple[Tensor, BatchStats | None]:
    """The loss and its statistics, which a sum over dimensions has not."""
    if nested:
        return function(*tensors, **how), None
    loss, stats = function(*tensors, return_stats=True, **how)
    return loss, stats


def _negatives(config: LossConfig, negatives: Tensor, facts: Tensor) -> dict[str, Any]:
    """Keywords of the loss for hard negatives."""
    there, ids = facts[:, 1:].chunk(2, dim=1)
    if config.hard_negatives == "own":
        mask = there.bool().to(negatives.device)
        return {"hard_negatives": negatives.view(*there.shape, -1), "hard_mask": mask}
    places = there.flatten().nonzero().flatten()  # found where the facts are, on the CPU: a GPU would have to wait
    keys = negatives.index_select(0, places.to(negatives.device))
    if config.same_id == "negative" or config.ids != "right":  # ids of negatives are those of their texts
        return {"extra_keys": keys}
    return {"extra_keys": keys, "extra_ids": ids.flatten()[places].to(negatives.device)}


def pair_facts(chunk: Chunk, ids: Literal["auto", "left", "right"]) -> Tensor:
    """What a loss has to know about the pairs of a chunk beside their features, as one tensor [n, 1 + 2 * count].

    Each row holds the id of the pair; for each place of its hard negatives, whether it is taken; and the ids of these
    negatives.
    """
    own = text_ids(chunk.names if ids == "left" else chunk.texts).unsqueeze(1)
    if chunk.negatives is None:
        return own
    there = chunk.negatives.there
    return torch.cat([own, there.long(), text_ids(chunk.negatives.texts).view(there.shape)], dim=1)


def text_ids(texts: Sequence[str]) -> Tensor:
    """A number for each text: equal texts have equal numbers on every process."""
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests], dtype=torch.long)

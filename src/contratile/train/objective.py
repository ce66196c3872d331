"""The loss of a training step, chosen by the configuration.

found = batch_loss(LossConfig(loss="clip"), left, right, pair_facts(chunk, "right"), scale=scale)
found.loss, found.stats, found.norms, found.terms, found.dropped
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from contratile.losses import functional
from contratile.losses.beside import LossTerms
from contratile.losses.normalized import typical_norms
from contratile.reference import guide_limit

if TYPE_CHECKING:
    from contratile.data.chunk_maker import Chunk
    from contratile.losses.batch_stats import BatchStats
    from contratile.train.config import LossConfig


SAMPLED = 512
"""Rows from which the share of dropped pairs is estimated."""


class SecondFeatures(NamedTuple):
    """Features of the same pairs by the guide or the teacher."""

    left: Tensor
    right: Tensor
    negatives: Tensor | None
    """Features of the hard negatives, empty places included."""

    scale: float
    """The teacher's logit scale."""


class StepLoss(NamedTuple):
    """The loss of a step, and what is logged about it."""

    loss: Tensor
    stats: BatchStats | None
    """Statistics of the batch, where the loss has them."""

    norms: Tensor | None
    """Typical norms of both sides, on the device."""

    terms: LossTerms | None = None
    """The terms of a loss with a teacher."""

    dropped: Tensor | None = None
    """Share of pairs that the guide drops, among some pairs of this process."""


def step_loss(
    config: LossConfig,
    left: Tensor,
    right: Tensor,
    facts: Tensor,
    *more: Tensor,
    hard: bool,
    second_scale: float = 1.0,
    **options: Any,
) -> StepLoss:
    """Call `batch_loss` with what `GradCache` encoded, one after the other.

    Args:
        config: Which loss, and its options.
        left: Features of the left sides.
        right: Features of the right sides.
        facts: From `pair_facts`.
        more: Features of the hard negatives, if there are some; then those of a second model, if there is one: left,
            right, and hard negatives.
        hard: Whether there are hard negatives.
        second_scale: Scale of a teacher's cosines.
        options: Keywords of `batch_loss`.
    """
    negatives, rest = (more[0], more[1:]) if hard else (None, more)
    second = SecondFeatures(rest[0], rest[1], rest[2] if hard else None, second_scale) if rest else None
    return batch_loss(config, left, right, facts, negatives, second, **options)


def batch_loss(
    config: LossConfig,
    left: Tensor,
    right: Tensor,
    facts: Tensor,
    negatives: Tensor | None = None,
    second: SecondFeatures | None = None,
    *,
    scale: Tensor,
    bias: Tensor | None = None,
    swapped: bool = False,
) -> StepLoss:
    """Compute the configured loss of a batch.

    Args:
        config: Which loss, and its options.
        left: Features of the left sides [n, D].
        right: Features of the right sides [n, D].
        facts: What else is known about the pairs, from `pair_facts`.
        negatives: Features of the hard negatives [n * count, D], empty places included.
        second: What the guide or the teacher of the configuration made of the same pairs.
        scale: The learned scale.
        bias: The learned bias; siglip only.
        swapped: The hard negatives are negatives of the right sides, so that the right sides are the queries (clip).
    """
    how: dict[str, Any] = {"backend": config.backend, "cache_bytes": config.cache_mib << 20, "ring": config.ring}
    ids = facts[:, 0].to(left.device)
    norms = typical_norms((left, right)) if len(left) else None
    if config.loss == "ntxent":
        return StepLoss(functional.nt_xent(left, right, 1 / scale, **how), None, norms)
    if config.loss == "supcon":
        loss = functional.sup_con(torch.cat([left, right]), torch.cat([ids, ids]), 1 / scale, **how)
        return StepLoss(loss, None, norms)
    if config.same_id != "negative":
        how |= {"ids": ids, "same_id": config.same_id}
    nested = bool(config.matryoshka_dims)
    if nested:
        how |= {"matryoshka_dims": config.matryoshka_dims, "matryoshka_weights": config.matryoshka_weights or None}
    if config.loss == "siglip":
        assert bias is not None
        return _with_stats(functional.siglip_loss, left, right, scale, bias, norms=norms, nested=nested, **how)
    how |= {"margin": config.margin, "label_smoothing": config.label_smoothing}
    if negatives is not None:
        how |= _negatives(config, negatives, facts)
    if second is not None:
        how |= _second(config, second, facts, swapped=swapped)
    if config.loss == "infonce":
        how |= {name: value for name, value in config.more._asdict().items() if name != "share_hard_negatives"}
    function = functional.clip_loss if config.loss == "clip" else functional.info_nce
    query, key = (right, left) if swapped else (left, right)
    return _with_stats(function, query, key, scale, norms=norms, nested=nested, **how)


def _with_stats(
    function: Callable[..., Any], *tensors: Tensor, norms: Tensor | None, nested: bool, **how: Any
) -> StepLoss:
    """Compute the loss and its statistics; a sum over Matryoshka dimensions has none."""
    if nested:
        return StepLoss(function(*tensors, **how), None, norms)
    if "teacher" in how:
        loss, terms, stats = function(*tensors, return_stats=True, return_terms=True, **how)
        return StepLoss(loss, stats, norms, terms)
    loss, stats = function(*tensors, return_stats=True, **how)
    return StepLoss(loss, stats, norms, dropped=_dropped(**how) if "guide" in how else None)


def _negatives(config: LossConfig, negatives: Tensor, facts: Tensor) -> dict[str, Any]:
    """Keywords of the loss for hard negatives."""
    there, ids = facts[:, 1:].chunk(2, dim=1)
    if config.hard_negatives == "own":
        mask = there.bool().to(negatives.device)
        return {"hard_negatives": negatives.view(*there.shape, -1), "hard_mask": mask}
    places = _taken(there)
    keys = negatives.index_select(0, places.to(negatives.device))
    if config.same_id == "negative" or config.ids != "right":  # ids of negatives are those of their texts
        return {"extra_keys": keys}
    return {"extra_keys": keys, "extra_ids": ids.flatten()[places].to(negatives.device)}


def _second(config: LossConfig, second: SecondFeatures, facts: Tensor, *, swapped: bool) -> dict[str, Any]:
    """Keywords of the loss for a guide or a teacher."""
    sides = (second.right, second.left) if swapped else (second.left, second.right)
    if config.teacher:
        found: dict[str, Any] = {"teacher": (*sides, second.scale)}
        return found | {name: getattr(config, name) for name in ("teacher_weight", "teacher_temperature")}
    found = {"guide": sides, "guide_margin": config.guide_margin, "guide_margin_strategy": config.guide_margin_strategy}
    if second.negatives is None:
        return found
    there = facts[:, 1:].chunk(2, dim=1)[0]
    if config.hard_negatives == "own":
        return found | {"hard_guide": second.negatives.view(*there.shape, -1)}
    places = _taken(there).to(second.negatives.device)
    return found | {"extra_guide": second.negatives.index_select(0, places)}


@torch.no_grad()
def _dropped(
    guide: tuple[Tensor, Tensor], guide_margin: float, guide_margin_strategy: str, **others: Any
) -> Tensor | None:
    """The share of pairs that the guide drops, among the first rows; the loss itself does not count them."""
    query, key = (x[:SAMPLED].float() for x in guide)
    if len(query) < 2:
        return None
    with torch.autocast(query.device.type, enabled=False):
        similar = query @ key.T
    limit = guide_limit(similar.diagonal(), guide_margin, relative=guide_margin_strategy == "relative")
    above = (similar > limit.unsqueeze(1)).fill_diagonal_(False)
    return above.sum() / (len(query) * (len(query) - 1))


def _taken(there: Tensor) -> Tensor:
    """Indices of the places that are not empty, found on the CPU, where the facts are: a GPU would have to wait."""
    return there.flatten().nonzero().flatten()


def pair_facts(chunk: Chunk, ids: Literal["auto", "left", "right"]) -> Tensor:
    """What the loss needs to know about the pairs of a chunk besides their features, in one tensor [n, 1 + 2 * count].

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

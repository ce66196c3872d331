"""The keywords of the losses, for type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor

from contratile.engine.backends import Backend
from contratile.engine.backends.precision import Precision
from contratile.engine.spec import GuideMargin, SameId
from contratile.losses.beside import Guide, Teacher
from contratile.losses.directions import Direction, HardnessMode, PartitionMode
from contratile.losses.options import Ids
from contratile.reference import Reduction
from contratile.ring.nodes import RingKind
from contratile.ring.team import Group


class Keywords(TypedDict, total=False):
    """The keywords of every loss."""

    group: Group
    reduction: Reduction
    backend: Backend
    tile: int | None
    cache_bytes: int
    precision: Precision | None
    ring: RingKind


class SigLipKeywords(Keywords, total=False):
    """The keywords of `siglip_loss`."""

    ids: Ids | None
    same_id: SameId
    matryoshka_dims: Sequence[int] | None
    matryoshka_weights: Sequence[float] | None
    matryoshka_normalize: bool


class PairKeywords(Keywords, total=False):
    """The keywords of `clip_loss` and `info_nce`."""

    ids: Ids | None
    same_id: SameId
    extra_keys: Tensor | None
    extra_ids: Tensor | None
    hard_negatives: Tensor | None
    hard_mask: Tensor | None
    key_bias: Tensor | None
    extra_bias: Tensor | None
    hard_bias: Tensor | None
    margin: float | None
    label_smoothing: float
    weights: Tensor | None
    matryoshka_dims: Sequence[int] | None
    matryoshka_weights: Sequence[float] | None
    matryoshka_normalize: bool
    teacher: Teacher | None
    teacher_weight: float
    teacher_temperature: float
    guide: Guide | None
    guide_margin: float
    guide_margin_strategy: GuideMargin
    extra_guide: Tensor | None
    hard_guide: Tensor | None


class NegativeKeywords(PairKeywords, total=False):
    """The keywords of `info_nce` alone."""

    in_batch_negatives: bool
    hard_ids: Tensor | None
    share_hard_negatives: bool
    directions: tuple[Direction, ...]
    partition_mode: PartitionMode
    hardness_mode: HardnessMode | None
    hardness_strength: float

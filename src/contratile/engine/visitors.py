"""The blocks of keys that travel round the ring, and the scores of this rank's queries with a visiting block.

mine = key_block(x, spec, alpha)                                    # this rank's keys, as other ranks see them
scores = scores_of(ring, source, plan, x, visitor, spec, alpha, own)     # this rank's queries with a visitor's keys
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.backends.block import Beside, Scores
from contratile.engine.plan import TilePlan
from contratile.engine.prefixes import Prefixes, reciprocal_norms
from contratile.engine.rule import PairRule
from contratile.engine.spec import Inputs, Spec
from contratile.engine.stats import accumulation_dtype
from contratile.ring.ring import Ring


class KeyBlock(NamedTuple):
    """A rank's keys as they travel, with what other ranks need to know about them."""

    key: Tensor
    ids: Tensor | None = None
    classes: Tensor | None = None
    level: Tensor | None = None
    bias: Tensor | None = None
    """In the unit of the scores."""

    lse: Tensor | None = None
    grad: Tensor | None = None
    sums_grad: Tensor | None = None
    """Backward only: the keys' log-sum-exps, and the gradients of log-sum-exps and class sums."""

    factor: Tensor | None = None
    """[M, prefixes] reciprocal norms, see `Spec.normalize`."""
    teacher: Tensor | None = None
    centre: Tensor | None = None
    teacher_lse: Tensor | None = None
    teacher_grad: Tensor | None = None
    """The teacher's features; forward only: `stats.TeacherSide.centre`; backward only: as `lse` and `grad`."""

    guide: Tensor | None = None
    guide_level: Tensor | None = None


class KeyGrad(NamedTuple):
    """The gradients of a block of keys, of their biases and norms, as they travel back to their owner."""

    dk: Tensor | None
    dbias: Tensor | None = None
    dnorm: Tensor | None = None

    def merge_(self, other: KeyGrad) -> None:
        for mine, theirs in zip(self, other, strict=True):
            if mine is not None and theirs is not None:
                mine.add_(theirs)


class Own(NamedTuple):
    """Per query of this rank: numbers that a tile compares its products with, or multiplies them by."""

    level: Tensor | None = None
    """The positives' products."""

    centre: Tensor | None = None
    teacher_pos: Tensor | None = None
    guide_level: Tensor | None = None
    factor: Tensor | None = None
    """[N, prefixes] reciprocal norms."""


def key_block(x: Inputs, spec: Spec, alpha: Tensor, **of_pass: Tensor | None) -> KeyBlock:
    """This rank's keys as they travel in both passes, with the fields that only one pass sends (`of_pass`)."""
    bias = None if x.key_bias is None else x.key_bias.to(alpha.dtype) / spec.unit
    return KeyBlock(x.keys, x.key_ids, bias=bias, teacher=x.teacher_key, guide=x.guide_keys, **of_pass)


class Factors(NamedTuple):
    """Reciprocal norms of this rank's rows, by prefix."""

    query: Tensor | None = None
    key: Tensor | None = None


PLAIN = Factors()


def factors_of(x: Inputs, spec: Spec) -> Factors:
    if not spec.normalize:
        return PLAIN
    return Factors(reciprocal_norms(x.query, spec.prefixes), reciprocal_norms(x.keys, spec.prefixes))


def _hardness(alpha: Tensor, spec: Spec) -> Tensor | None:
    """The factor of negatives with hardness: NaN for a negative scale, which losses refuse where they can read it."""
    if not spec.hardness:
        return None
    return torch.where(alpha > 0, alpha + spec.hardness / spec.unit, torch.nan)


def scores_of(
    ring: Ring,
    source: int,
    plan: TilePlan,
    x: Inputs,
    visitor: KeyBlock,
    spec: Spec,
    alpha: Tensor,
    own: Own,
    cache: Tensor | None = None,
) -> Scores:
    """The scores of this rank's queries with the keys of `source`, cut into the tiles of `plan`."""
    home = source == ring.team.rank
    # Positives and self-pairs occur only in a rank's own block; ids are compared with every visitor's.
    rule = PairRule(
        labels=x.labels if home else None,
        paired=spec.paired,
        exclude_self=spec.exclude_self and home,
        query_ids=x.query_ids,
        key_ids=visitor.ids,
        same_id=spec.same_id,
        keys=ring.sizes[source],
    )
    key = None if x.key is None and home else visitor.key
    # With `key=None` two ranks compute the same tiles: as unscaled products, which come out the same on both.
    folded = not spec.compares and (home or x.key is not None)
    return Scores(
        *(x.query, key, alpha, x.bias, rule, plan, own.level, visitor.level, cache),
        query_classes=x.query_classes,
        key_classes=visitor.classes,
        folded=folded,
        col_bias=visitor.bias,
        prefixes=Prefixes.of(spec.prefixes, own.factor, visitor.factor),
        hardness=_hardness(alpha, spec),
        teacher=_teacher(x, visitor, spec, own, home=home),
        guide=_guide(x, visitor, alpha, own),
    )


def _teacher(x: Inputs, visitor: KeyBlock, spec: Spec, own: Own, *, home: bool) -> Beside | None:
    if x.teacher_query is None or visitor.teacher is None or x.teacher_scale is None:
        return None
    factor = alpha_of(x.teacher_scale, spec, accumulation_dtype(x.query.dtype))
    pos = own.teacher_pos if home else None
    return Beside(x.teacher_query, visitor.teacher, factor, own.centre, visitor.centre, pos)


def _guide(x: Inputs, visitor: KeyBlock, alpha: Tensor, own: Own) -> Beside | None:
    if x.guide_query is None or visitor.guide is None:
        return None
    return Beside(x.guide_query, visitor.guide, torch.ones_like(alpha), own.guide_level, visitor.guide_level)


def by_key(of_query: Tensor, x: Inputs, spec: Spec, *, otherwise: float) -> Tensor:
    """For each key: the highest value among the queries whose positive it is."""
    assert x.labels is not None
    if spec.paired and x.keys.shape[0] == of_query.shape[0]:
        return of_query
    found = of_query.new_full((x.keys.shape[0], *of_query.shape[1:]), otherwise)
    labels = x.labels if of_query.dim() == 1 else x.labels.unsqueeze(1).expand_as(of_query)
    return found.scatter_reduce_(0, labels, of_query, "amax", include_self=False)


def alpha_of(scale: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    """The factor from products to scores in the unit of the results.

    A scale of 0 is replaced by one too small to change any result, so that dscale stays computable.
    """
    tiny = 2.0**-70 if dtype == torch.float32 else 2.0**-200
    if scale.is_cpu:
        return torch.scalar_tensor(scale.item() / spec.unit or tiny, dtype=dtype)
    alpha = scale.to(dtype) / spec.unit
    return torch.where(alpha == 0, tiny, alpha)

"""The options `teacher` and `guide`: checks of the features that other models bring to a loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from contratile.engine.spec import GUIDE_MARGINS
from contratile.engine.stats import accumulation_dtype
from contratile.errors import bad_type, bad_value, check_choice, check_features, check_scale

if TYPE_CHECKING:
    from contratile.losses.options import PairOptions

Teacher = tuple[Tensor, Tensor, Tensor | float]
Guide = tuple[Tensor, Tensor]


class LossTerms(NamedTuple):
    """The terms of a loss with a teacher; the loss is their sum. Both are differentiable, and reduced like the loss."""

    contrastive: Tensor
    distill: Tensor
    """`teacher_weight` times the cross-entropy between the teacher's softmax and the student's."""


def features_of(options: PairOptions) -> list[Tensor]:
    """All tensors of the teacher and the guide."""
    pairs = (x for x in (options.teacher, options.guide) if isinstance(x, tuple | list))
    given = *(x for pair in pairs for x in pair), options.extra_guide, options.hard_guide
    return [x for x in given if isinstance(x, Tensor)]


def named_models(options: PairOptions) -> list[object]:
    """The options of the teacher and the guide that all ranks must agree on."""
    found: list[object] = []
    if options.teacher is not None:
        found += ["teacher", options.teacher_weight, options.teacher_temperature, options.return_terms]
    if options.guide is not None:
        found += ["guide", options.guide_margin, options.guide_margin_strategy]
    return found + [f"{x.dtype} x {x.shape[1]}" for x in features_of(options) if x.dim() == 2]


def check_teacher(options: PairOptions, query: Tensor, key: Tensor) -> None:
    """Refuse an unusable teacher, options that do not go with it, and its own options without it."""
    weight, temperature = options.teacher_weight, options.teacher_temperature
    _check_number("teacher_weight", weight, "It multiplies the distillation term.")
    _check_number("teacher_temperature", temperature, "It divides the teacher's scores.")
    if not temperature > 0:
        remedy = "It divides the teacher's scores; above 1 it softens them."
        bad_value("teacher_temperature", expected="a positive number", got=temperature, remedy=remedy)
    if options.teacher is None:
        _check_unused(
            "teacher=(query, key, scale)",
            teacher_weight=weight != 1,
            teacher_temperature=temperature != 1,
            return_terms=options.return_terms,
        )
        return
    if not isinstance(options.teacher, tuple | list) or len(options.teacher) != 3:
        remedy = "Pass its features of both sides and its logit scale."
        bad_value("teacher", expected="(query, key, scale)", got=_shape(options.teacher), remedy=remedy)
    _check_pair("teacher", options.teacher[:2], query, key)
    check_scale(options.teacher[2], "teacher[2]")
    _check_constant("teacher[2]", options.teacher[2])
    _check_alone(
        "teacher",
        options,
        "guide",
        extra_keys="The teacher's softmax runs over the keys.",
        hard_negatives="The teacher's softmax runs over the keys.",
        margin="It may drop keys that the teacher favours.",
        label_smoothing="The teacher's softmax already spreads the target over all keys.",
        same_id="The teacher's softmax already shows which keys are alike.",
        matryoshka_dims="A teacher's targets are defined for the full features only.",
        directions="A teacher's softmax covers one direction; clip_loss has both.",
        hardness_mode="Hardness changes the scores that are compared with the teacher's.",
    )


def check_guide(options: PairOptions, query: Tensor, key: Tensor) -> None:
    """Refuse an unusable guide, options that do not go with it, and its own options without it."""
    check_choice("guide_margin_strategy", options.guide_margin_strategy, GUIDE_MARGINS)
    _check_number("guide_margin", options.guide_margin, "It is subtracted from the guide's similarity of the positive.")
    if options.guide is None:
        _check_unused(
            "guide=(query, key)",
            guide_margin=options.guide_margin != 0,
            guide_margin_strategy=options.guide_margin_strategy != "absolute",
            extra_guide=options.extra_guide is not None,
            hard_guide=options.hard_guide is not None,
        )
        return
    if not isinstance(options.guide, tuple | list) or len(options.guide) != 2:
        remedy = "Pass the guide's features of both sides."
        bad_value("guide", expected="(query, key)", got=_shape(options.guide), remedy=remedy)
    _check_pair("guide", options.guide, query, key)
    for name, guide, of, keys in (
        ("extra_guide", options.extra_guide, "extra_keys", options.extra_keys),
        ("hard_guide", options.hard_guide, "hard_negatives", options.hard_negatives),
    ):
        _check_more(name, guide, of, keys, options.guide[0])
    _check_alone(
        "guide",
        options,
        margin="Both decide which keys count.",
        label_smoothing="Smoothing needs the set of keys before scores are known.",
        same_id="A guide drops pairs that may be positive.",
        matryoshka_dims="They are computed in different tiles.",
        directions="A guide's limits apply to queries against keys only.",
        hardness_mode="They are computed in different tiles.",
        share_hard_negatives="Pass them as extra_keys with extra_guide.",
    )


def _check_unused(needed: str, **changed: bool) -> None:
    """Raise a ValueError for the first option that was changed although what it needs is missing."""
    for name, is_changed in changed.items():
        if is_changed:
            expected = f"{needed.partition('=')[0]}= with it"
            bad_value(name, expected=expected, got="none", remedy=f"Pass {needed}, or drop {name}=.")


def _check_alone(what: str, options: PairOptions, *others: str, **reasons: str) -> None:
    given = {
        "guide": options.guide is not None,
        "extra_keys": options.extra_keys is not None,
        "hard_negatives": options.hard_negatives is not None,
        "margin": options.margin is not None,
        "label_smoothing": bool(options.label_smoothing),
        "same_id": options.several_positives,
        "matryoshka_dims": options.matryoshka_dims is not None,
        "directions": options.more.several,
        "hardness_mode": bool(options.more.hardness),
        "share_hard_negatives": options.more.share_hard_negatives,
    }
    for name in (*others, *reasons):
        if given[name]:
            shown = "same_id='positive'" if name == "same_id" else name
            remedy = " ".join(filter(None, (reasons.get(name), "Drop one of them.")))
            bad_value(f"{what} and {shown}", expected="one of them", got="both", remedy=remedy)


def _check_pair(name: str, pair: Any, query: Tensor, key: Tensor) -> None:
    """Check a model's features of both sides: constants, one row for each of ours."""
    check_features({f"{name}[0]": pair[0], f"{name}[1]": pair[1]}, empty=True)
    for at, (x, side, rows) in enumerate(((pair[0], "queries", query), (pair[1], "keys", key))):
        own = f"{name}[{at}]"
        if len(x) != len(rows):
            remedy = f"Give it one row for each of the {side}, in the same order."
            bad_value(own, expected=f"{len(rows)} rows", got=len(x), remedy=remedy)
        _check_like(own, x, rows)


def _check_more(name: str, guide: Tensor | None, of: str, keys: Tensor | None, like: Tensor) -> None:
    """Check the guide's features of extra keys or hard negatives."""
    if guide is None and keys is None:
        return
    if guide is None or keys is None:
        missing, there = (name, of) if guide is None else (of, name)
        bad_value(there, expected=f"{missing}= with it", got="none", remedy=f"Pass {missing}= too.")
    if not isinstance(guide, Tensor) or guide.shape != (*keys.shape[:-1], like.shape[1]):
        expected = f"shape {[*keys.shape[:-1], like.shape[1]]}"
        bad_value(name, expected=expected, got=_shape(guide), remedy=f"Give it one row for each of {of}.")
    if guide.dtype != like.dtype:
        remedy = f"Use {name}.to(guide[0])."
        bad_type(name, expected=like.dtype, got=guide.dtype, remedy=remedy)
    _check_like(name, guide, like)


def _check_like(name: str, x: Tensor, rows: Tensor) -> None:
    if x.device != rows.device:
        remedy = f"Move it with .to({str(rows.device)!r})."
        bad_type(name, expected=f"device {rows.device}", got=x.device, remedy=remedy)
    if accumulation_dtype(x.dtype) != accumulation_dtype(rows.dtype):
        expected = "float64" if rows.dtype == torch.float64 else "float32, float16 or bfloat16"
        bad_type(name, expected=f"{expected} with {rows.dtype}", got=x.dtype, remedy="Convert it with .to().")
    _check_constant(name, x)


def _check_constant(name: str, x: object) -> None:
    if isinstance(x, Tensor) and x.requires_grad:
        remedy = "It has no gradient: encode under torch.no_grad(), or pass it detached."
        bad_value(name, expected="a constant", got="a tensor that needs a gradient", remedy=remedy)


def _check_number(name: str, value: object, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        bad_type(name, expected="a number", got=type(value).__name__, remedy=remedy)
    if not -math.inf < value < math.inf:  # a compiler cannot trace math.isfinite
        bad_value(name, expected="a finite number", got=value, remedy=remedy)


def _shape(x: object) -> object:
    if isinstance(x, Tensor):
        return f"a tensor of shape {list(x.shape)}"
    return f"{len(x)} values" if isinstance(x, tuple | list) else type(x).__name__

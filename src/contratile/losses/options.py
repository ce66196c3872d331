"""What `clip_loss` and `info_nce` take beyond the features, with the checks of each option."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.spec import SAME_ID, GuideMargin, SameId, Spec
from contratile.errors import (
    bad_type,
    bad_value,
    check_choice,
    check_features,
    check_ids,
    check_storage,
    check_vector,
)
from contratile.losses.beside import Guide, Teacher, check_guide, check_teacher, named_models
from contratile.losses.directions import ONE_TYPE, Directions
from contratile.losses.matryoshka import Matryoshka, check_matryoshka

Ids = Tensor | tuple[Tensor, Tensor]


class PairOptions(NamedTuple):
    """What `clip_loss` and `info_nce` take beyond the features. Their docstrings explain each option."""

    ids: Ids | None = None
    same_id: SameId = "exclude"
    extra_keys: Tensor | None = None
    extra_ids: Tensor | None = None
    hard_negatives: Tensor | None = None
    hard_mask: Tensor | None = None
    margin: float | None = None
    label_smoothing: float = 0.0
    weights: Tensor | None = None
    return_stats: bool = False
    in_batch_negatives: bool = True
    key_bias: Tensor | None = None
    extra_bias: Tensor | None = None
    hard_bias: Tensor | None = None
    matryoshka_dims: Sequence[int] | None = None
    matryoshka_weights: Sequence[float] | None = None
    matryoshka_normalize: bool = True
    hard_ids: Tensor | None = None
    more: Directions = Directions()
    teacher: Teacher | None = None
    teacher_weight: float = 1.0
    teacher_temperature: float = 1.0
    return_terms: bool = False
    guide: Guide | None = None
    guide_margin: float = 0.0
    guide_margin_strategy: GuideMargin = "absolute"
    extra_guide: Tensor | None = None
    hard_guide: Tensor | None = None

    @property
    def matryoshka(self) -> Matryoshka | None:
        if self.matryoshka_dims is None:
            return None
        return Matryoshka.of(self.matryoshka_dims, self.matryoshka_weights, self.matryoshka_normalize)

    @property
    def plain(self) -> bool:
        """Whether all options have their defaults. Types are compared first, because False == 0."""
        return tuple(map(type, self)) == _TYPES and self == PLAIN

    @property
    def normalizes(self) -> bool:
        return self.matryoshka_dims is not None and self.matryoshka_normalize

    @property
    def several_sources(self) -> bool:
        """Whether queries get gradients from several calls."""
        same = "query_to_query" in self.more.names
        return self.extra_keys is not None or self.hard_negatives is not None or same

    @property
    def sums(self) -> bool:
        """Whether sums of scores are needed in addition to log-sum-exps."""
        return self.label_smoothing > 0 or self.return_stats or self.several_positives

    @property
    def several_positives(self) -> bool:
        return self.same_id == "positive"

    @property
    def pair_of_ids(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self.ids is None:
            return None, None
        query_ids, key_ids = (self.ids, self.ids) if isinstance(self.ids, Tensor) else self.ids
        return query_ids.long(), key_ids.long()

    def check(self, query: Tensor, key: Tensor, scale: Tensor | float, spec: Spec) -> None:
        """Refuse unusable values, and options that cannot be combined."""
        if self.plain:
            return
        self._check_ids(query, key)
        self._check_same_id()
        self._check_in_batch_negatives()
        self._check_extra_keys(query)
        self._check_hard_negatives(query)
        self._check_hard_ids(query)
        self._check_biases(query, key)
        if not self.more.plain:
            self._check_directions(query, key)
        if self.more.hardness:
            _check_positive(scale, "hardness_strength")
        self._check_margin(scale)
        self._check_label_smoothing()
        self._check_matryoshka(query.shape[1], spec)
        check_teacher(self, query, key)
        check_guide(self, query, key)
        if self.weights is not None:
            check_weights(self.weights, len(query), query.device)

    def _check_extra_keys(self, query: Tensor) -> None:
        if self.extra_keys is not None:
            check_features({"query": query, "extra_keys": self.extra_keys}, empty=True)
        if self.extra_ids is None:
            return
        if self.extra_keys is None or self.ids is None:
            needed = "extra_keys" if self.extra_keys is None else "ids"
            remedy = f"Pass {needed}= too, or drop extra_ids=."
            bad_value("extra_ids", expected=f"{needed}= with it", got="none", remedy=remedy)
        check_vector("extra_ids", self.extra_ids, length=len(self.extra_keys), device=query.device)

    def _check_margin(self, scale: Tensor | float) -> None:
        if self.margin is None:
            return
        if isinstance(self.margin, bool) or not isinstance(self.margin, int | float):
            remedy = "It is a difference of similarities, before the scale."
            bad_type("margin", expected="a number", got=type(self.margin).__name__, remedy=remedy)
        if not math.isfinite(self.margin):
            bad_value("margin", expected="a finite number", got=self.margin, remedy="Leave it out for no filter.")
        _check_positive(scale, "margin")
        if self.label_smoothing:
            remedy = (
                "Smoothing needs the set of keys before their scores are known; margin chooses it by scores. Drop one."
            )
            got = f"margin={self.margin}, label_smoothing={self.label_smoothing}"
            bad_value("margin and label_smoothing", expected="one of them", got=got, remedy=remedy)

    def _check_directions(self, query: Tensor, key: Tensor) -> None:
        self.more.check()
        several, smoothing = self.several_positives, bool(self.label_smoothing)
        if self.more.several:
            names = "key_bias", "extra_bias", "hard_bias"
            used = {name: getattr(self, name) is not None for name in names} | {"label_smoothing": smoothing}
            used |= {"same_id='positive'": several, "in_batch_negatives=False": not self.in_batch_negatives}
            used["margin"] = self.margin is not None and bool(set(ONE_TYPE) & self.more.names)
            remedy = "Several directions are defined for plain scores and one positive per query. Drop one of the two."
            _refuse_both("directions beyond 'query_to_doc'", used, remedy)
            if len(query) != len(key):
                remedy = "Document i is the positive of query i: pass further documents as extra_keys=."
                got = f"{len(query)} and {len(key)}"
                bad_value("query and key", expected="equally many rows with directions=", got=got, remedy=remedy)
        if self.more.share_hard_negatives:
            remedy = "Pass those that are there as extra_keys= instead: hard_negatives[hard_mask]."
            _refuse_both("share_hard_negatives", {"hard_mask": self.hard_mask is not None}, remedy)
            _refuse_both("share_hard_negatives", {"same_id='positive'": several}, "Pass them as extra_keys= instead.")
            if self.hard_negatives is None:
                remedy = "Pass hard_negatives= too, or drop share_hard_negatives=."
                bad_value("share_hard_negatives", expected="hard_negatives= with it", got="none", remedy=remedy)
        if self.more.hardness:
            used = {"margin": self.margin is not None, "label_smoothing": smoothing, "same_id='positive'": several}
            used["return_stats with shared hard_ids"] = self.return_stats and self.hard_ids is not None
            used["return_stats with shared hard_ids"] &= self.more.share_hard_negatives
            remedy = "Hardness weights negatives by their similarity, with one plain positive. Drop one of the two."
            _refuse_both("hardness_strength", used, remedy)

    def _check_matryoshka(self, width: int, spec: Spec) -> None:
        asked = self.matryoshka_dims, self.matryoshka_weights, self.matryoshka_normalize
        if asked == (None, None, True):
            return
        check_matryoshka(
            *(*asked, width),
            return_stats=self.return_stats,
            margin=self.margin is not None,
            label_smoothing=self.label_smoothing,
            cache_bytes=spec.cache_bytes,
            same_id=self.several_positives and spec.reduce == "lse",
            directions=bool(set(ONE_TYPE) & self.more.names),
            hardness_mode=bool(self.more.hardness),
        )

    def _check_label_smoothing(self) -> None:
        remedy = "It is the share of the target that is spread over all keys."
        if isinstance(self.label_smoothing, bool) or not isinstance(self.label_smoothing, int | float):
            bad_type("label_smoothing", expected="a number", got=type(self.label_smoothing).__name__, remedy=remedy)
        if not 0 <= self.label_smoothing < 1:
            bad_value("label_smoothing", expected="from 0 to below 1", got=self.label_smoothing, remedy=remedy)

    def _check_ids(self, query: Tensor, key: Tensor) -> None:
        if self.ids is None:
            return
        check_ids(self.ids)
        if isinstance(self.ids, tuple | list):
            check_vector("ids[0]", self.ids[0], length=len(query), device=query.device)
            check_vector("ids[1]", self.ids[1], length=len(key), device=query.device)
            return
        if len(query) != len(key):
            remedy = "Pass ids=(query_ids, key_ids)."
            bad_value(
                "ids",
                expected="a pair of vectors",
                got=f"one for {len(query)} queries and {len(key)} keys",
                remedy=remedy,
            )
        check_vector("ids", self.ids, length=len(query), device=query.device)

    def _check_same_id(self) -> None:
        check_choice("same_id", self.same_id, SAME_ID)
        if not self.several_positives:
            return
        if self.ids is None:
            remedy = "Pass ids= to say which pairs are positive, or drop same_id=."
            bad_value("same_id='positive'", expected="ids= with it", got="none", remedy=remedy)
        for name, given, why in (
            ("margin", self.margin is not None, "A margin is measured from one positive; there may be several."),
            ("label_smoothing", bool(self.label_smoothing), "The target is already shared by several keys."),
        ):
            if given:
                remedy = f"{why} Drop {name}=, or use same_id='exclude'."
                expected = f"{name}= or same_id='positive'"
                bad_value(f"same_id and {name}", expected=expected, got="both", remedy=remedy)

    def _check_in_batch_negatives(self) -> None:
        if not isinstance(self.in_batch_negatives, bool):
            got = type(self.in_batch_negatives).__name__
            bad_type("in_batch_negatives", expected="True or False", got=got, remedy="True uses the other keys.")
        if not self.in_batch_negatives and not self.several_sources:
            remedy = "Pass one of them: without any negatives, every loss would be 0."
            expected = "extra_keys= or hard_negatives= with it"
            bad_value("in_batch_negatives=False", expected=expected, got="neither", remedy=remedy)

    def _check_biases(self, query: Tensor, key: Tensor) -> None:
        extra, hard = self.extra_keys, self.hard_negatives
        for name, bias, of, shape in (
            ("key_bias", self.key_bias, "key", (len(key),)),
            ("extra_bias", self.extra_bias, "extra_keys", None if extra is None else (len(extra),)),
            ("hard_bias", self.hard_bias, "hard_negatives", None if hard is None else tuple(hard.shape[:2])),
        ):
            if bias is None:
                continue
            if shape is None:
                remedy = f"Pass {of}= too, or drop {name}=."
                bad_value(name, expected=f"{of}= with it", got="none", remedy=remedy)
            check_bias(name, bias, shape, query.device)
            for other, given in (("label_smoothing", self.label_smoothing), ("same_id", self.several_positives)):
                if given:
                    remedy = "A target shared by several keys is a mean of scores without biases. Drop one of the two."
                    bad_value(f"{name} and {other}", expected="one of them", got="both", remedy=remedy)

    def _check_hard_negatives(self, query: Tensor) -> None:
        hard = self.hard_negatives
        if hard is None:
            if self.hard_mask is not None:
                remedy = "Pass hard_negatives= too, or drop hard_mask=."
                bad_value("hard_mask", expected="hard_negatives= with it", got="none", remedy=remedy)
            return
        n, d = query.shape
        if not isinstance(hard, Tensor) or hard.dim() != 3 or hard.shape[0] != n or hard.shape[2] != d:
            got = list(hard.shape) if isinstance(hard, Tensor) else type(hard).__name__
            remedy = "Give each query its own H negatives; pad them and pass hard_mask= if their numbers differ."
            bad_value("hard_negatives", expected=f"shape [{n}, H, {d}]", got=got, remedy=remedy)
        check_storage("hard_negatives", hard)
        if hard.dtype != query.dtype or hard.device != query.device:
            expected, found = f"{query.dtype} on {query.device}", f"{hard.dtype} on {hard.device}"
            bad_type("hard_negatives", expected=expected, got=found, remedy="Use hard_negatives.to(query).")
        mask = self.hard_mask
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != hard.shape[:2]:
            found = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            expected = f"bool of shape {list(hard.shape[:2])}"
            bad_value("hard_mask", expected=expected, got=found, remedy="True marks a negative, False padding.")
        if mask.device != hard.device:
            remedy = "Use hard_mask.to(hard_negatives.device)."
            bad_type("hard_mask", expected=f"device {hard.device}", got=mask.device, remedy=remedy)

    def _check_hard_ids(self, query: Tensor) -> None:
        ids, hard = self.hard_ids, self.hard_negatives
        if ids is None:
            return
        for name, given in (("hard_negatives", hard), ("ids", self.ids)):
            if given is None:
                remedy = f"Pass {name}= too, or drop hard_ids=."
                bad_value("hard_ids", expected=f"{name}= with it", got="none", remedy=remedy)
        if self.several_positives:
            remedy = "A query's own hard negatives are never positives. Drop hard_ids=, or use same_id='exclude'."
            bad_value("hard_ids and same_id='positive'", expected="one of them", got="both", remedy=remedy)
        assert hard is not None
        if not isinstance(ids, Tensor) or ids.shape != hard.shape[:2]:
            got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            remedy = "Give each hard negative an id."
            bad_value("hard_ids", expected=f"shape {list(hard.shape[:2])}", got=got, remedy=remedy)
        check_vector("hard_ids", ids.reshape(-1), length=ids.numel(), device=query.device)

    def named(self) -> str:
        """The options that every rank must agree on."""
        names = "ids", "extra_keys", "extra_ids", "weights", "key_bias", "extra_bias"
        used = [name for name in names if getattr(self, name) is not None]
        values = self.same_id, self.in_batch_negatives, self.margin, self.label_smoothing, self.return_stats
        if self.more.share_hard_negatives and self.hard_negatives is not None:
            shared = "hard_ids" if self.hard_ids is not None else "", "hard_bias" if self.hard_bias is not None else ""
            used += [f"{self.hard_negatives.shape[1]} hard negatives", *shared]
        more: tuple[object, ...] = () if self.more.plain else (sorted(self.more.names), *self.more[1:])
        nested = () if self.matryoshka is None else self.matryoshka
        return " ".join([*used, *map(str, (*values, *more, *nested, *named_models(self)))])


PLAIN = PairOptions()
_TYPES = tuple(map(type, PLAIN))


def check_weights(weights: Tensor, n: int, device: torch.device) -> None:
    """One non-negative constant per pair."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or tuple(weights.shape) != (n,):
        got = (
            f"{weights.dtype} of shape {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        )
        bad_value("weights", expected=f"floats of shape [{n}]", got=got, remedy="Give one weight to each pair.")
    if weights.device != device:
        bad_type("weights", expected=f"device {device}", got=weights.device, remedy=f"Use weights.to({str(device)!r}).")
    if weights.requires_grad:
        bad_value(
            "weights", expected="constants", got="a tensor that needs a gradient", remedy="Pass weights.detach()."
        )
    if _readable(weights) and bool((weights < 0).any()):
        remedy = "Use weight 0 for pairs that should not count."
        bad_value("weights", expected="numbers from 0 up", got=float(weights.min()), remedy=remedy)


def check_bias(name: str, bias: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """One number per key, at least fp32: a bias such as -log q is added to scaled scores."""
    if not isinstance(bias, Tensor) or not bias.is_floating_point() or tuple(bias.shape) != shape:
        got = f"{bias.dtype} of shape {list(bias.shape)}" if isinstance(bias, Tensor) else type(bias).__name__
        bad_value(name, expected=f"floats of shape {list(shape)}", got=got, remedy="Give one number to each key.")
    if bias.device != device:
        bad_type(name, expected=f"device {device}", got=bias.device, remedy=f"Use {name}.to({str(device)!r}).")


def _refuse_both(what: str, used: dict[str, bool], remedy: str) -> None:
    """Raise a ValueError for the first other option that is used, too."""
    for name, given in used.items():
        if given:
            bad_value(f"{what} and {name}", expected="one of them", got="both", remedy=remedy)


def _check_positive(scale: Tensor | float, beside: str) -> None:
    """Raise a ValueError for a scale of 0 or less, if it can be read."""
    number = scale.item() if isinstance(scale, Tensor) and _readable(scale) else scale
    if not isinstance(number, Tensor) and not number > 0:
        remedy = f"With a scale of 0 or less, scores do not rank like similarities: drop {beside}=."
        bad_value("scale", expected=f"a positive number with {beside}=", got=number, remedy=remedy)


def _readable(x: Tensor) -> bool:
    """Whether values may be read: that would synchronise a GPU, and compilers and torch.func have no values."""
    return x.is_cpu and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()

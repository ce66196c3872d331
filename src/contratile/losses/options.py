"""The options of `clip_loss` and `info_nce`, and the checks of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from contratile.errors import bad_type, bad_value, check_features, check_ids, check_storage, check_vector

Ids = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PairOptions:
    """What `clip_loss` and `info_nce` take beyond the features. Their docstrings explain each option."""

    ids: Ids | None = None
    extra_keys: Tensor | None = None
    extra_ids: Tensor | None = None
    hard_negatives: Tensor | None = None
    hard_mask: Tensor | None = None
    margin: float | None = None
    label_smoothing: float = 0.0
    weights: Tensor | None = None
    return_stats: bool = False

    @property
    def several_sources(self) -> bool:
        return self.extra_keys is not None or self.hard_negatives is not None

    @property
    def sums(self) -> bool:
        """Whether sums of scores are needed beside log-sum-exps."""
        return self.label_smoothing > 0 or self.return_stats

    @property
    def pair_of_ids(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self.ids is None:
            return None, None
        query_ids, key_ids = (self.ids, self.ids) if isinstance(self.ids, Tensor) else self.ids
        return query_ids.long(), key_ids.long()

    def check(self, query: Tensor, key: Tensor, scale: Tensor | float) -> None:
        """Refuse what cannot be used, and combinations that mean nothing."""
        self._check_ids(query, key)
        self._check_extra_keys(query)
        self._check_hard_negatives(query)
        self._check_margin(scale)
        self._check_label_smoothing()
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
            bad_value("extra_ids", expected=f"{needed}= beside it", got="none", remedy=remedy)
        check_vector("extra_ids", self.extra_ids, length=len(self.extra_keys), device=query.device)

    def _check_margin(self, scale: Tensor | float) -> None:
        if self.margin is None:
            return
        if isinstance(self.margin, bool) or not isinstance(self.margin, int | float):
            remedy = "It is a difference of similarities, before the scale."
            bad_type("margin", expected="a number", got=type(self.margin).__name__, remedy=remedy)
        if not math.isfinite(self.margin):
            bad_value("margin", expected="a finite number", got=self.margin, remedy="Leave it out for no filter.")
        number = scale.item() if isinstance(scale, Tensor) and _readable(scale) else scale
        if not isinstance(number, Tensor) and not number > 0:
            remedy = "Scores of other scales are not in the order of the similarities: drop margin=."
            bad_value("scale", expected="a positive number beside margin=", got=number, remedy=remedy)
        if self.label_smoothing:
            remedy = "Smoothing is uniform over all keys that count, known before their scores: drop one of them."
            got = f"margin={self.margin}, label_smoothing={self.label_smoothing}"
            bad_value("margin and label_smoothing", expected="one of them", got=got, remedy=remedy)

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

    def _check_hard_negatives(self, query: Tensor) -> None:
        hard = self.hard_negatives
        if hard is None:
            if self.hard_mask is not None:
                remedy = "Pass hard_negatives= too, or drop hard_mask=."
                bad_value("hard_mask", expected="hard_negatives= beside it", got="none", remedy=remedy)
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

    def named(self) -> str:
        """The options that every rank must agree on."""
        used = [name for name in ("ids", "extra_keys", "extra_ids", "weights") if getattr(self, name) is not None]
        return f"{' '.join(used)} {self.margin} {self.label_smoothing} {self.return_stats}"


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


def _readable(x: Tensor) -> bool:
    """Whether values may be read: that would synchronise a GPU, and compilers and torch.func have no values."""
    return x.is_cpu and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()

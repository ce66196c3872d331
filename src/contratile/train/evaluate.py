"""Retrieval and zero-shot metrics of a trained pair of encoders.

found = encode(towers, source, chunk=256)              # models/encoding.py
retrieval(found)                                       # R@k and ranks in both directions
chance(found)                                          # what random guessing would reach
zero_shot(towers, found, class_names, templates)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile.errors import bad_value
from contratile.metrics import retrieval_metrics, zero_shot_metrics
from contratile.models.encoding import SourceFeatures, encode_texts, matches
from contratile.models.towers import Tower, Towers
from contratile.report.metric_text import PAIRWISE
from contratile.train.class_names import check_templates

TEMPLATES = ("{}", "a photo of a {}.", "a picture of {}.")
"""Prompts for zero-shot classification; `{}` stands for the class name."""

KS = (1, 5, 10)


def retrieval(found: SourceFeatures, ks: Sequence[int] = KS) -> dict[str, float]:
    """Compute retrieval metrics in both directions.

    Where images or texts repeat, the candidates are the distinct ones and a query counts as answered by the best of
    all that belong to it. The stricter metrics, which accept only the row's own other half, are added with the suffix
    `_pairwise`. Tied scores share their mean rank.

    Args:
        found: Features of a source, from `encode`.
        ks: The k of every R@k.

    Returns:
        `text_to_image_R@1`, `image_to_text_mean_rank` and so on. The names are those of image-text pairs whatever the
        data: `text_to_image` is from the right side to the left one.

    Examples:
        >>> found = encode(towers, open_source(config.data, "test"), chunk=256)    # doctest: +SKIP
        >>> retrieval(found)["text_to_image_R@10_pairwise"]                        # doctest: +SKIP
        0.319
    """
    groups = matches(found)
    if not groups.repeat(len(found.keys)):
        return retrieval_metrics(found.left, found.right, ks, ties="mean")
    left, right = found.left[groups.left], found.right[groups.right]
    metrics = retrieval_metrics(left, right, ks, pairs=groups.pairs, ties="mean")
    pairwise = retrieval_metrics(found.left, found.right, ks, ties="mean")
    return metrics | {f"{name}{PAIRWISE}": value for name, value in pairwise.items()}


def chance(found: SourceFeatures, ks: Sequence[int] = KS) -> dict[str, float]:
    """Compute what random guessing would reach, under the names that `retrieval` uses.

    Args:
        found: Features of a source, from `encode`; only its names and texts are used.
        ks: The k of every R@k.

    Examples:
        >>> found = encode(towers, open_source(config.data, "test"), chunk=256)    # doctest: +SKIP
        >>> chance(found)["text_to_image_R@10_pairwise"]                           # doctest: +SKIP
        0.0069
    """
    groups, n = matches(found), len(found.keys)
    levels: dict[str, float] = {}
    for way, query, total in (
        ("image_to_text", 0, len(groups.right)),
        ("text_to_image", 1, len(groups.left)),
    ):
        positives = groups.pairs[:, query].bincount()
        levels |= {f"{way}_R@{k}": _guessed(positives, total, k) for k in ks}
        if groups.repeat(n):
            levels |= {f"{way}_R@{k}{PAIRWISE}": min(1.0, k / n) for k in ks}
    return levels


def _guessed(positives: Tensor, total: int, k: int) -> float:
    """Mean probability that k of `total` random candidates include one of p positives.

    For one query it is 1 - C(total - p, k) / C(total, k).
    """
    missed = torch.ones(len(positives), dtype=torch.double)
    for drawn in range(min(k, total)):
        missed *= (total - drawn - positives).clamp_min(0) / (total - drawn)
    return 1 - missed.mean().item()


def neighbors(found: SourceFeatures, block: int = 1024) -> dict[str, float]:
    """How often the nearest other image has the same text, among images whose text occurs more than once.

    Args:
        found: Features of a source, from `encode`; the left side is used.
        block: Images that are compared at a time.

    Returns:
        `neighbor_top1`, and `neighbor_chance`, what a random neighbour would reach; empty if no text repeats.
    """
    known = {text: place for place, text in enumerate(dict.fromkeys(found.texts))}
    classes = torch.tensor([known[text] for text in found.texts])
    others = classes.bincount()[classes] - 1
    asked = torch.nonzero(others).flatten()
    if not len(asked):
        return {}
    right = 0
    for rows in asked.split(block):  # type: ignore[no-untyped-call]  # torch has no types
        scores = found.left[rows] @ found.left.T
        scores[torch.arange(len(rows)), rows] = -torch.inf
        right += int((classes[scores.argmax(1)] == classes[rows]).sum())
    chance = float((others[asked] / (len(classes) - 1)).mean())
    return {"neighbor_top1": right / len(asked), "neighbor_chance": chance}


def not_finite(found: SourceFeatures, kinds: tuple[str, str]) -> str:
    """Describe which tower produced NaN or infinite features, and in how many rows; "" if neither did."""
    sides = {"left": found.left, "right": found.right}
    bad = {side: int((~torch.isfinite(x)).any(1).sum()) for side, x in sides.items()}
    told = [
        f"the {side} ({kind}) tower, {bad[side]:,} of {len(found.keys):,} rows"
        for side, kind in zip(sides, kinds, strict=True)
        if bad[side]
    ]
    return f"features that are not finite: {' and '.join(told)}" if told else ""


@torch.no_grad()
def class_features(
    tower: Tower, names: Sequence[str], templates: Sequence[str] = TEMPLATES, *, chunk: int = 256
) -> Tensor:
    """Encode class names in evaluation mode: one unit feature per class, the mean over its prompts.

    Args:
        tower: The text tower, `towers.right`.
        names: The class names.
        templates: Prompts; every `{}` is replaced by the name.
        chunk: Prompts to encode at a time, about.

    Returns:
        Features [classes, D] on the CPU.

    Raises:
        ValueError: A template has no `{}`.

    Examples:
        >>> class_features(towers.right, ["cat", "dog"], ["a photo of a {}."]).shape[0]    # doctest: +SKIP
        2
    """
    check_templates(list(templates))
    features = [torch.empty(0, tower.width)]
    together = max(1, chunk // len(templates))  # classes whose prompts are encoded together
    for start in range(0, len(names), together):
        some = names[start : start + together]
        prompts = encode_texts(tower, [x.replace("{}", name) for name in some for x in templates], chunk)
        features.append(F.normalize(prompts.view(len(some), len(templates), -1).mean(1), dim=1))
    return torch.cat(features)


class Labelled(NamedTuple):
    """The samples of a source whose text is a class name."""

    rows: Tensor  # [n]: rows of the features
    targets: Tensor  # [n]: their classes


def labelled(texts: Sequence[str], names: Sequence[str]) -> Labelled:
    """Find the samples whose text is a class name, ignoring case.

    Raises:
        ValueError: No text is a class name.
    """
    place = {name.casefold(): index for index, name in enumerate(names)}
    found = [(row, place[text.casefold()]) for row, text in enumerate(texts) if text.casefold() in place]
    if not found:
        shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        remedy = f"A sample's class is its text; the first one here is {texts[0]!r}."
        bad_value("classes", expected="names that are texts of the data", got=shown, remedy=remedy)
    rows, targets = torch.tensor(found).unbind(1)
    return Labelled(rows, targets)


def zero_shot(
    towers: Towers, found: SourceFeatures, names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> dict[str, float]:
    """Classify the left sides by the nearest class name.

    A sample's class is its text; samples whose text is not a class name are left out.

    Args:
        towers: The pair of encoders.
        found: Features of a source, from `encode`.
        names: The class names.
        templates: Prompts; every `{}` is replaced by the name.

    Returns:
        `zero_shot_top1`, `zero_shot_top5` (if there are at least 5 classes) and `zero_shot_per_class`, the mean recall
        of the classes that occur.

    Raises:
        ValueError: No text is a class name, or a template has no `{}`.

    Examples:
        >>> found = encode(towers, open_source(config.data, "test"), chunk=256)    # doctest: +SKIP
        >>> zero_shot(towers, found, ["cat", "dog"])["zero_shot_top1"]       # doctest: +SKIP
    """
    rows, targets = labelled(found.texts, names)
    classes = class_features(towers.right, names, templates)
    return zero_shot_metrics(found.left[rows], classes, targets, tops(len(names)), ties="mean")


def tops(classes: int) -> tuple[int, ...]:
    """The k of top-k accuracy: 5 only if there are at least 5 classes."""
    return (1, 5) if classes >= 5 else (1,)


def zero_shot_chance(classes: int) -> dict[str, float]:
    """What random guessing would reach, under the names that `zero_shot` uses."""
    return {f"zero_shot_top{k}": k / classes for k in tops(classes)} | {"zero_shot_per_class": 1 / classes}

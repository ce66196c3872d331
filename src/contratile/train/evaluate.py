"""What a pair of towers is worth: features of a source, retrieval metrics, the nearest images of a text.

found = encode(towers, source, chunk=256)
retrieval(found)                       # R@k, ranks, both directions
zero_shot(towers, found, names, templates)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.data.loader import BROKEN_LIMIT, Loader
from contratile.data.sample import Indexed, Stream
from contratile.errors import bad_value
from contratile.metrics import retrieval_metrics, zero_shot_metrics
from contratile.models.towers import Tower, Towers
from contratile.report.wording import PAIRWISE

TEMPLATES = ("{}", "a photo of a {}.", "a picture of {}.")
KS = (1, 5, 10)


class Encoded(NamedTuple):
    """The features of a source, in its order, and the texts and names beside them."""

    left: Tensor  # [N, D] on the CPU
    right: Tensor
    places: Tensor  # [N] in the source; -1 in a stream
    keys: list[str]
    texts: list[str]
    names: list[str]
    """Of the left sides: equal ones are the same picture or text."""

    broken: int = 0
    """Samples that are not among them because they could not be used."""


@torch.no_grad()
def encode(
    towers: Towers,
    source: Indexed | Stream,
    *,
    chunk: int,
    limit: int = 0,
    broken_limit: float = BROKEN_LIMIT,
    notify: Callable[[int], object] = lambda done: None,
) -> Encoded:
    """Both sides of every sample, or of the first `limit`, in evaluation mode.

    Broken samples are left out and counted, up to `broken_limit` of them, by the rule of training.
    """
    prepare = towers.left.prepare, towers.right.prepare
    was_training = towers.training
    towers.eval()
    device = towers.log_scale.device
    left, right, index, keys, texts, names = [], [], [], [], [], []
    broken: Counter[str] = Counter()
    options: dict[str, Any] = {"chunk": chunk, "limit": limit, "broken_limit": broken_limit, "broken": broken}
    try:
        for part in Loader.ordered(source, prepare, **options):
            left.append(towers.left(to_device(part.left, device)).float().cpu())
            right.append(towers.right(to_device(part.right, device)).float().cpu())
            index.append(part.index)
            keys += part.keys
            texts += part.texts
            names += part.names
            notify(len(keys))
    finally:
        towers.train(was_training)
    if not keys:
        remedy = f"All {broken.total():,} of {source.name} are broken: {', '.join(broken)}."
        bad_value("data", expected="samples to evaluate on", got="none", remedy=remedy)
    return Encoded(torch.cat(left), torch.cat(right), torch.cat(index), keys, texts, names, broken.total())


class Matches(NamedTuple):
    """What repeats in encoded data, once: its distinct left sides and texts, and which belong together."""

    left: Tensor  # [U]: the row where each left side comes first
    right: Tensor  # [V]: the row where each text comes first
    pairs: Tensor  # [P, 2]: left side and text, as places in `left` and `right`

    def repeat(self, rows: int) -> bool:
        """Whether an image or a text occurs in more than one of the rows."""
        return not len(self.left) == len(self.right) == rows


def matches(found: Encoded) -> Matches:
    """The left sides of equal name and the equal texts of encoded data."""
    left: dict[str, tuple[int, int]] = {}  # of each name its place and its first row
    right: dict[str, tuple[int, int]] = {}
    pairs: dict[tuple[int, int], None] = {}
    for row, (name, text) in enumerate(zip(found.names, found.texts, strict=True)):
        left.setdefault(name, (len(left), row))
        right.setdefault(text, (len(right), row))
        pairs[left[name][0], right[text][0]] = None
    rows = [torch.tensor([row for _, row in side.values()]) for side in (left, right)]
    return Matches(rows[0], rows[1], torch.tensor(list(pairs)))


def retrieval(found: Encoded, ks: Sequence[int] = KS) -> dict[str, float]:
    """How texts find their own sample and the other way round.

    Where images or texts repeat, a query is found by the best of all that belong to it, among distinct ones; the
    metrics that count nothing but the pair's own other half are there too, as `..._pairwise`.
    """
    groups = matches(found)
    if not groups.repeat(len(found.keys)):
        return retrieval_metrics(found.left, found.right, ks, ties="mean")
    left, right = found.left[groups.left], found.right[groups.right]
    metrics = retrieval_metrics(left, right, ks, pairs=groups.pairs, ties="mean")
    pairwise = retrieval_metrics(found.left, found.right, ks, ties="mean")
    return metrics | {f"{name}{PAIRWISE}": value for name, value in pairwise.items()}


def chance(found: Encoded, ks: Sequence[int] = KS) -> dict[str, float]:
    """What guessing would reach, under the names of `retrieval`."""
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
    """The mean chance that k random ones of `total` hold one of a query's p: 1 - C(total - p, k) / C(total, k)."""
    missed = torch.ones(len(positives), dtype=torch.double)
    for drawn in range(min(k, total)):
        missed *= (total - drawn - positives).clamp_min(0) / (total - drawn)
    return 1 - missed.mean().item()


def not_finite(found: Encoded, kinds: tuple[str, str]) -> str:
    """Which tower gave features that are not finite, and how many; nothing if none did."""
    sides = {"left": found.left, "right": found.right}
    bad = {side: int((~torch.isfinite(x)).any(1).sum()) for side, x in sides.items()}
    told = [
        f"the {side} ({kind}) tower, {bad[side]:,} of {len(found.keys):,} rows"
        for side, kind in zip(sides, kinds, strict=True)
        if bad[side]
    ]
    return f"features that are not finite: {' and '.join(told)}" if told else ""


@torch.no_grad()
def class_features(tower: Tower, names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """One feature per class: the mean over prompts, of unit length."""
    for template in templates:
        if "{}" not in template:
            remedy = 'Write it like "a photo of a {}."'
            bad_value("template", expected="a prompt with {} for the name", got=repr(template), remedy=remedy)
    device = next(tower.parameters()).device
    features = []
    for name in names:
        prompts = tower(to_device(tower.prepare([template.replace("{}", name) for template in templates]), device))
        features.append(torch.nn.functional.normalize(prompts.float().mean(0), dim=0))
    return torch.stack(features).cpu()


class Labelled(NamedTuple):
    """The samples of a source that belong to given classes."""

    rows: Tensor  # [n] of the features
    targets: Tensor  # [n]: their classes


def labelled(texts: Sequence[str], names: Sequence[str]) -> Labelled:
    """Samples whose text is the name of a class, in whatever case; all others belong to none."""
    place = {name.casefold(): index for index, name in enumerate(names)}
    found = [(row, place[text.casefold()]) for row, text in enumerate(texts) if text.casefold() in place]
    if not found:
        shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        remedy = f"A sample's class is its text; the first one here is {texts[0]!r}."
        bad_value("classes", expected="names that are texts of the data", got=shown, remedy=remedy)
    rows, targets = torch.tensor(found).unbind(1)
    return Labelled(rows, targets)


def zero_shot(
    towers: Towers, found: Encoded, names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> dict[str, float]:
    """Classification by the nearest class name; a sample's class is its text, and others are left out."""
    rows, targets = labelled(found.texts, names)
    return zero_shot_metrics(found.left[rows], class_features(towers.right, names, templates), targets, ties="mean")


def best_device() -> torch.device:
    """An accelerator if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def to_device(inputs: Any, device: torch.device) -> Any:
    """Tensors in a dict, a tuple, or by themselves."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    if isinstance(inputs, dict):
        return {name: to_device(x, device) for name, x in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(to_device(x, device) for x in inputs)
    return inputs

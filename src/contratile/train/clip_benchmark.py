"""Metrics of a pair of encoders on data sets of CLIP_benchmark.

    data = open_set(Path("benchmark/wds_cifar10"))
    part = encode_part(towers, BenchmarkShards(data, part=rank, parts=world), chunk=256)
    classes = encode_classes(towers, data, chunk=256, part=rank, parts=world)
    set_metrics(data, merge([part, ...]), merge_classes([classes, ...]), broken_limit=0.01)

Every rank encodes its share of the samples and classes. The metrics are computed from all of them and do not depend on
how they were shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.data.clip_benchmark import BenchmarkSet, BenchmarkShards
from contratile.data.loader import too_many_broken
from contratile.errors import bad_value
from contratile.metrics import mean_average_precision, retrieval_metrics, zero_shot_metrics
from contratile.models.encoding import encode_left, encode_texts
from contratile.models.towers import Towers
from contratile.train.evaluate import class_features, tops

KS = (1, 5, 10)
"""The k of recall@k."""


class Part(NamedTuple):
    """Features and labels of some samples of a data set, on the CPU."""

    image: Tensor  # [n, D]
    labels: list[str]
    """One per image, as `BenchmarkShards` gives them."""

    text: Tensor  # [t, D]: captions, for retrieval
    image_of_text: Tensor  # [t]
    broken: Counter[str]
    """Samples that were left out, by reason."""


def encode_part(
    towers: Towers,
    source: BenchmarkShards,
    *,
    chunk: int,
    workers: int = 0,
    notify: Callable[[int], object] = lambda done: None,
) -> Part:
    """Encode the images of a source, and the captions of a retrieval data set.

    Args:
        towers: The pair of encoders.
        source: The samples, or one rank's share of them; it may be empty.
        chunk: Images, and captions, that go through an encoder at a time.
        workers: Processes that decode images; 0: this process does.
        notify: Called with the number of samples done after every chunk.

    Raises:
        ValueError: A tar cannot be read.
    """
    empty = torch.empty(0, towers.left.width)
    if next(source.records(seed=None, epoch=0, part=0, parts=1), None) is None:  # a loader wants at least one
        return Part(empty, [], empty, torch.empty(0, dtype=torch.long), Counter())
    # Broken samples are judged in `set_metrics`, over all ranks.
    found = encode_left(towers, source, chunk=chunk, broken_limit=inf, workers=workers, notify=notify)
    captions = [label.split("\n") for label in found.texts] if source.data.task == "retrieval" else []
    text = encode_texts(towers.right, [caption for some in captions for caption in some], chunk)
    owners = torch.tensor([row for row, some in enumerate(captions) for _ in some], dtype=torch.long)
    return Part(found.left, found.texts, text, owners, found.broken)


def encode_classes(towers: Towers, data: BenchmarkSet, *, chunk: int, part: int = 0, parts: int = 1) -> Tensor:
    """Features of a data set's classes, or of one rank's share of them: every `parts`-th one. [c, D] on the CPU."""
    return class_features(towers.right, data.classes[part::parts], data.templates or ("{}",), chunk=chunk)


def merge_classes(parts: Sequence[Tensor]) -> Tensor:
    """Put the class features of all ranks together, in the order of the classes."""
    found = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    for rank, features in enumerate(parts):
        found[rank :: len(parts)] = features
    return found


def merge(parts: Sequence[Part]) -> Part:
    """Put the parts of all ranks together."""
    labels: list[str] = []
    owners: list[Tensor] = []
    broken: Counter[str] = Counter()
    for part in parts:
        owners.append(part.image_of_text + len(labels))
        labels += part.labels
        broken += part.broken
    image, text = (torch.cat(x) for x in ([part.image for part in parts], [part.text for part in parts]))
    return Part(image, labels, text, torch.cat(owners), broken)


def set_metrics(data: BenchmarkSet, found: Part, classes: Tensor, *, broken_limit: float) -> dict[str, float]:
    """Compute the metrics of a data set under CLIP_benchmark's names.

    Args:
        data: The data set.
        found: All of its samples.
        classes: Features of its classes [C, D]; not used for retrieval.
        broken_limit: Broken samples that are tolerated: below 1 a share (10 are always tolerated), otherwise a number.

    Returns:
        Classification: `acc1`, `acc5` (if there are at least 5 classes), `mean_per_class_recall`. Multilabel:
        `mean_average_precision`. Retrieval: `image_retrieval_recall@k` (an image for a text) and
        `text_retrieval_recall@k`.

    Raises:
        ValueError: Too many samples are broken, or there are none.
        FloatingPointError: A feature is NaN or infinite.
    """
    _check_samples(data, found, broken_limit)
    for kind, features in (("image", found.image), ("text", found.text), ("class", classes)):
        bad = int((~features.isfinite()).any(1).sum())
        if bad:
            told = f"{bad:,} of {len(features):,} {kind} features are not finite"
            raise FloatingPointError(f"{data.name}: {told}. Evaluate another checkpoint.")
    if data.task == "classification":
        targets = torch.tensor([int(label) for label in found.labels])
        ks = tops(len(classes))
        metrics = zero_shot_metrics(found.image, classes, targets, ks, ties="mean")
        named = {f"acc{k}": metrics[f"zero_shot_top{k}"] for k in ks}
        return named | {"mean_per_class_recall": metrics["zero_shot_per_class"]}
    if data.task == "multilabel":
        truth = torch.zeros(len(found.labels), len(classes), dtype=torch.bool)
        for row, label in enumerate(found.labels):
            truth[row, [int(number) for number in label.split()]] = True
        return {"mean_average_precision": mean_average_precision(found.image, classes, truth)}
    pairs = torch.stack([found.image_of_text, torch.arange(len(found.text))], 1)
    metrics = retrieval_metrics(found.image, found.text, KS, pairs=pairs, ties="mean")
    ways = {"image_retrieval_recall": "text_to_image", "text_retrieval_recall": "image_to_text"}
    return {f"{name}@{k}": metrics[f"{way}_R@{k}"] for name, way in ways.items() for k in KS}


def _check_samples(data: BenchmarkSet, found: Part, limit: float) -> None:
    broken, seen = found.broken.total(), len(found.labels) + found.broken.total()
    reasons = "; ".join(f"{times} x {reason}" for reason, times in found.broken.most_common(5))
    if too_many_broken(broken, seen, limit):
        expected = f"at most {f'{limit:.2%}' if 0 < limit < 1 else f'{limit:g}'} broken"
        remedy = "Download it again, or raise --broken-limit."
        bad_value(f"samples of {data.name}", expected=expected, got=f"{broken} of {seen} ({reasons})", remedy=remedy)
    if not found.labels:
        got = f"none ({reasons})" if reasons else "none"
        bad_value(data.name, expected="samples", got=got, remedy="Download it again.")

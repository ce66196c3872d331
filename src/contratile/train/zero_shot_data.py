"""Zero-shot classification during training.

    zero_shot = open_zero_shot(config)                     # None if no data was named
    zero_shot.evaluate(towers, chunk=256)                  # {"zero_shot_top1": 0.31, ...}

The data is a source named as in --data whose texts are class names (a folder of class folders, for instance), or the
folder of a CLIP_benchmark data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from contratile.data.catalog import DataConfig, is_source, open_source
from contratile.data.clip_benchmark import BenchmarkSet, BenchmarkShards, is_set, open_set
from contratile.data.sample import Indexed, Stream
from contratile.errors import bad_value
from contratile.metrics import zero_shot_metrics
from contratile.models.encoding import encode_left
from contratile.models.towers import Towers
from contratile.train.class_names import load_classes, load_templates, of_wordnet_ids
from contratile.train.clip_benchmark import encode_classes, encode_part, set_metrics
from contratile.train.config import TrainConfig
from contratile.train.evaluate import TEMPLATES, class_features, labelled, tops, zero_shot_chance

NAMES = {
    "acc1": "zero_shot_top1",
    "acc5": "zero_shot_top5",
    "mean_per_class_recall": "zero_shot_per_class",
    "mean_average_precision": "zero_shot_mAP",
}
"""CLIP_benchmark's names of metrics, and what a run calls them."""

LEFT_OUT = "zero_shot_left_out"
"""Samples that were not classified: broken, or with a text that is not a class name. Recorded if there are any."""


class ZeroShot(Protocol):
    """Data to classify, and its classes."""

    @property
    def source(self) -> Indexed | Stream:
        """The samples."""

    chance: dict[str, float]
    """What guessing would reach, by metric; known after the first evaluation."""

    def evaluate(self, towers: Towers, *, chunk: int, broken_limit: float) -> dict[str, float]:
        """Classify all samples.

        Raises:
            ValueError: The data cannot be read.
            FloatingPointError: A feature is NaN or infinite.
        """


def open_zero_shot(config: TrainConfig) -> ZeroShot | None:
    """Open what `config.eval` names, and read class names and prompts.

    Raises:
        ValueError: The data, the class names or the prompts cannot be used.
        ImportError: A list of names needs open_clip, or the data a package that is missing.
    """
    asked = config.eval
    if not asked.zero_shot:
        return None
    templates = load_templates(asked.templates) if asked.templates else []
    folder = Path(asked.zero_shot)
    if asked.zero_shot != "icons" and folder.is_dir() and any(map(is_set, (folder, *folder.iterdir()))):
        if not is_set(folder):
            remedy = "A data set has classnames.txt and test/nshards.txt. Name one of those in the folder."
            bad_value("zero_shot", expected="one data set of CLIP_benchmark", got=asked.zero_shot, remedy=remedy)
        if asked.classes:
            remedy = "Drop --classes: the data set has its own classnames.txt."
            bad_value("classes", expected="none with the folder of a data set", got=asked.classes, remedy=remedy)
        data = open_set(folder, templates=templates)
        if data.task == "retrieval":
            remedy = "Evaluate it with `contratile eval RUN --benchmark FOLDER`."
            bad_value("zero_shot", expected="a data set with classes", got="one of retrieval", remedy=remedy)
        return _OfSet(data)
    if not is_source(asked.zero_shot):
        expected = "data as in --data, or the folder of a CLIP_benchmark data set"
        remedy = "Check the path." if "/" in asked.zero_shot else "See docs/evaluate.md."
        bad_value("zero_shot", expected=expected, got=repr(str(asked.zero_shot)), remedy=remedy)
    # As separate test data: its own test split, else all of it.
    streaming = config.data.streaming and asked.zero_shot.startswith("hf:")
    alone: dict[str, Any] = {"data_weights": (), "batching": "mixed", "negatives": (), "num_negatives": 0, "limit": 0}
    alone |= {"data": asked.zero_shot, "test_data": asked.zero_shot, "streaming": streaming}
    source = _open(config.data, alone)
    return _OfSource(source, asked.classes, templates or TEMPLATES)


def _open(config: DataConfig, changes: dict[str, Any]) -> Indexed | Stream:
    """Open the data; columns and folders that were named for the pairs need not be there."""
    try:
        return open_source(replace(config, **changes), "test")
    except ValueError:
        if not (config.left or config.right or config.root):
            raise
    return open_source(replace(config, **changes, left="", right="", root=None), "test")


class _OfSet:
    """A data set of CLIP_benchmark."""

    def __init__(self, data: BenchmarkSet) -> None:
        self.source = BenchmarkShards(data)
        self.chance = zero_shot_chance(len(data.classes)) if data.task == "classification" else {}

    def evaluate(self, towers: Towers, *, chunk: int, broken_limit: float) -> dict[str, float]:
        data = self.source.data
        found = encode_part(towers, self.source, chunk=chunk)
        classes = encode_classes(towers, data, chunk=chunk)
        metrics = set_metrics(data, found, classes, broken_limit=broken_limit)
        return {NAMES[name]: value for name, value in metrics.items()} | _left_out(found.broken.total())


class _OfSource:
    """A data source whose texts are class names. Without a list of names, the distinct texts are the classes."""

    def __init__(self, source: Indexed | Stream, classes: str, templates: Sequence[str]) -> None:
        self.source, self._classes, self._templates = source, classes, templates
        self._names = load_classes(classes) if classes else []
        self.chance: dict[str, float] = {}

    def evaluate(self, towers: Towers, *, chunk: int, broken_limit: float) -> dict[str, float]:
        found = encode_left(towers, self.source, chunk=chunk, broken_limit=broken_limit)
        if not found.texts:
            remedy = f"All {found.broken.total():,} of {self.source.name} are broken: {', '.join(found.broken)}."
            bad_value("zero_shot", expected="samples to classify", got="none", remedy=remedy)
        texts = of_wordnet_ids(found.texts, self._classes)
        names = self._names or sorted(set(texts))
        rows, targets = labelled(texts, names)
        classes = class_features(towers.right, names, self._templates, chunk=chunk)
        image = found.left[rows]
        for kind, features in (("samples", image), ("class names", classes)):
            bad = int((~features.isfinite()).any(1).sum())
            if bad:
                raise FloatingPointError(f"features that are not finite: {bad:,} of {len(features):,} {kind}")
        self.chance = zero_shot_chance(len(names))
        metrics = zero_shot_metrics(image, classes, targets, tops(len(names)), ties="mean")
        return metrics | _left_out(found.broken.total() + len(found.texts) - len(rows))


def _left_out(samples: int) -> dict[str, float]:
    return {LEFT_OUT: samples} if samples else {}

"""Checks and adjustments of a configuration that need the data or the processes of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from contratile.data.sample import Indexed, Source, traits_of
from contratile.errors import bad_value
from contratile.report.gallery import MOST
from contratile.train.config import TrainConfig

TOKENIZER_TEXTS = 200_000
"""Texts that a tokenizer is trained on at most."""


def check_sharding(config: TrainConfig, world: int) -> None:
    """Refuse options that FSDP cannot run with.

    Every process must run the same number of chunks, and the optimiser must update each weight by itself.
    """
    run, optimizer = config.run, config.optim.optimizer
    if run.batch % world:
        remedy = "All processes must run the same number of chunks."
        bad_value("batch", expected=f"a multiple of the {world} processes with --fsdp", got=run.batch, remedy=remedy)
    if run.precision == "fp16":
        remedy = "bf16 needs no gradient scaling."
        bad_value("precision", expected="fp32 or bf16 with --fsdp", got="fp16", remedy=remedy)
    if "adafactor" in optimizer.lower():
        remedy = "Use adamw; this one takes means over the rows and columns of whole matrices."
        bad_value("optimizer", expected="one that can update shards with --fsdp", got=optimizer, remedy=remedy)


def fit_batch(config: TrainConfig, source: Source, world: int) -> TrainConfig:
    """Limit the batch to the pairs that the data has, the same number for each process."""
    pairs = config.data.samples_per_epoch or (len(source) if isinstance(source, Indexed) else config.run.batch)
    if config.run.batch <= pairs:
        return config
    batch = pairs // world * world or pairs
    return replace(config, run=replace(config.run, batch=batch))


def check_prefixes(config: TrainConfig, features: int) -> None:
    """Refuse Matryoshka dimensions that the encoders do not have."""
    dims = config.loss.matryoshka_dims
    if dims and max(dims) > features:
        remedy = "Drop the larger ones, or train a wider model (--width, or --head linear with --dim)."
        bad_value("matryoshka_dims", expected=f"at most the {features} features of the model", got=dims, remedy=remedy)


def check_kinds(source: Source, kinds: tuple[str, str], *, views: bool = False) -> None:
    """Refuse towers that do not encode what the data holds; with `views`, images alone."""
    if views and source.kinds[0] != "image":
        remedy = "Views are random crops and colours of pictures."
        bad_value("views", expected="data with images", got=" and ".join(source.kinds), remedy=remedy)
    if not views and tuple(source.kinds) != kinds:
        remedy = "Choose towers for this data: `st:` for text pairs, the others for image-text pairs."
        bad_value(
            "towers", expected=f"encoders of {' and '.join(source.kinds)}", got=" and ".join(kinds), remedy=remedy
        )


def check_texts(source: Source, config: TrainConfig) -> None:
    """Refuse to learn from texts that say nothing: names of files."""
    views = config.augment.views == 2
    if not traits_of(source).labelled and not (views and config.loss.loss == "ntxent"):
        remedy = "Put the images into one folder per class, or pass --loss ntxent --views 2."
        bad_value("data", expected="texts or classes", got=f"{source.name}, images without", remedy=remedy)


def check_augmentation(source: Source, config: TrainConfig) -> None:
    """Refuse to augment texts."""
    if config.augment.on and source.kinds[0] != "image":
        remedy = "Drop --augment: it changes pictures."
        bad_value("augment", expected="data with images", got=" and ".join(source.kinds), remedy=remedy)


def check_kept_outputs(config: TrainConfig, source: Source) -> None:
    """Refuse augmentation of images whose features are computed only once."""
    lock = config.towers.lock in ("image", "left", "both")
    kept = lock and config.towers.keep_outputs and not config.towers.unlock and isinstance(source, Indexed)
    if config.augment.on and kept:
        expected = "images that are encoded in every epoch"
        got = f"--lock {config.towers.lock}, which computes their features once"
        remedy = "Drop --augment to keep the features, or pass --no-keep-outputs to augment and encode every epoch."
        bad_value("augment", expected=expected, got=got, remedy=remedy)


def negatives_of(config: TrainConfig, source: Source) -> int:
    """How many hard negatives of each sample are used: none with a loss that has no place for them."""
    traits, loss = traits_of(source), config.loss
    if loss.hardness_mode == "hard_negatives" and not traits.negatives_count:
        remedy = "Drop it, or pass --hardness-mode in_batch_negatives or all_negatives."
        bad_value("hardness_mode", expected="data with hard negatives", got=source.name, remedy=remedy)
    if traits.negatives is None or loss.loss not in ("clip", "infonce"):
        for option, given in (("num_negatives", config.data.num_negatives), ("hard_negatives", loss.hard_negatives)):
            if given not in (None, 0, "all"):
                expected = "data with hard negatives, and --loss clip or infonce"
                bad_value(option, expected=expected, got=f"{given} for {source.name}", remedy="Drop it.")
        return 0
    if loss.teacher and traits.negatives_count:
        remedy = "The teacher's softmax runs over the pairs of the batch: pass --num-negatives 0."
        bad_value("teacher", expected="data without hard negatives", got=source.name, remedy=remedy)
    if config.loss.loss == "infonce" and traits.negatives != source.kinds[1]:
        remedy = "Use --loss clip, which compares texts with images too, or --num-negatives 0."
        bad_value("negatives", expected=f"{source.kinds[1]}s with --loss infonce", got="images", remedy=remedy)
    own_apart = loss.hardness_mode in ("in_batch_negatives", "hard_negatives") or "doc_to_doc" in loss.directions
    if traits.negatives_count and loss.hard_negatives == "all" and own_apart:
        remedy = "Shared ones are not told apart by whose they are: pass --hard-negatives own, or --num-negatives 0."
        what = "doc_to_doc" if "doc_to_doc" in loss.directions else f"--hardness-mode {loss.hardness_mode}"
        bad_value("hard_negatives", expected=f"own with {what}", got="all", remedy=remedy)
    return traits.negatives_count


def tokenizer_texts(source: Source) -> Iterator[str]:
    """Texts to train a tokenizer on."""
    return islice(source.texts(), TOKENIZER_TEXTS)


def steps_of(epochs: float, steps_per_epoch: int | None) -> int:
    """The number of steps in some epochs.

    Raises:
        ValueError: The length of an epoch is not known.
    """
    if steps_per_epoch is None:
        remedy = "Pass --steps or --samples-per-epoch: shards and streams have no known length."
        bad_value("steps", expected="a number of steps", got="epochs", remedy=remedy)
    return max(1, round(epochs * steps_per_epoch))


def gallery_has_training(config: TrainConfig, source: Source, held_out: Source, steps: int) -> bool:
    """Whether the gallery holds the training pairs too.

    Raises:
        ValueError: `gallery = "all"` was asked for, but the data is a stream.
    """
    choice = config.run.gallery
    if choice == "held-out":
        return False
    if not isinstance(source, Indexed):
        if choice == "all":
            remedy = "Pass --gallery held-out."
            bad_value("gallery", expected="data with a length for --gallery all", got=source.name, remedy=remedy)
        return False
    pairs = len(source) + (len(held_out) if isinstance(held_out, Indexed) else 0)
    # Encoding once more is cheap next to at least one epoch of training.
    return choice == "all" or (pairs <= MOST and steps * config.run.batch >= len(source))

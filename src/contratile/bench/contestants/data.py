"""Contestants of `bench data`: loaders of image-text pairs, from JPEGs to batches of floats and tokens.

    for images, tokens in DATA_CONTESTANTS["contratile"].load(problem):        # endless
        ...

All read the same JPEGs and captions, crop at random, scale to a square, normalise and tokenize.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from contratile.bench.contestants import Contestant, packages_of, private_copy
from contratile.data import Loader
from contratile.data.augment import AugmentConfig
from contratile.data.images import CLIP_MEAN, CLIP_STD, Squares, normalise
from contratile.data.sample import Indexed, Stream
from contratile.data.shards import Shards
from contratile.data.tables import Table

Pair: TypeAlias = tuple[Tensor, Tensor]
LENGTH = 77
"""Tokens per caption, as for CLIP."""
BUFFER = 1000
"""Records that webdataset shuffles together; ours are 1,024."""


class DataProblem(NamedTuple):
    """What is to be loaded."""

    shards: str
    table: str

    edge: int
    batch: int
    workers: int
    samples: int
    """How many are read at least."""

    crop_scale: tuple[float, float]
    tokenizer: str
    """open_clip or bytes"""


class Bytes:
    """A tokenizer that needs no package: the bytes of a caption."""

    def __call__(self, texts: list[str] | str) -> Tensor:
        texts = [texts] if isinstance(texts, str) else texts
        found = torch.zeros(len(texts), LENGTH, dtype=torch.long)
        for row, text in zip(found, texts, strict=True):
            data = text.encode()[:LENGTH]
            row[: len(data)] = torch.tensor(list(data))
        return found


def tokenizer_of(name: str) -> Callable[[Any], Tensor]:
    """Return a tokenizer by its name."""
    if name == "bytes":
        return Bytes()
    found: Callable[[Any], Tensor] = import_module("open_clip").SimpleTokenizer()
    return found


def our_pairs(problem: DataProblem, source: Indexed | Stream) -> Iterator[Pair]:
    """`Loader`. Pixels arrive as bytes and become floats in the training process, as in `contratile train`."""
    augment = AugmentConfig(augment="clip", crop_scale=problem.crop_scale)
    loader = Loader(
        source,
        (Squares(problem.edge), tokenizer_of(problem.tokenizer)),
        batch=problem.batch,
        chunk=problem.batch,
        workers=problem.workers,
        augment=augment,
    )
    for batch in loader:
        for chunk in batch.chunks:
            yield normalise(chunk.left), chunk.right


def our_shards(problem: DataProblem) -> Iterator[Pair]:
    return our_pairs(problem, Shards(problem.shards, "train", test_share=None))


def our_table(problem: DataProblem) -> Iterator[Pair]:
    return our_pairs(problem, Table(Path(problem.table), "train", test_share=None))


def webdataset_pairs(problem: DataProblem) -> Iterator[Pair]:
    """webdataset's fluid interface with torchvision's transforms."""
    wds: Any = import_module("webdataset")
    transforms: Any = import_module("torchvision.transforms")
    way = transforms.InterpolationMode.BICUBIC
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(problem.edge, scale=problem.crop_scale, interpolation=way),
            transforms.ToTensor(),
            transforms.Normalize(CLIP_MEAN, CLIP_STD),
        ]
    )
    tokenizer = tokenizer_of(problem.tokenizer)
    data = wds.WebDataset(problem.shards, shardshuffle=100, empty_check=False).shuffle(BUFFER).decode("pilrgb")
    data = data.to_tuple("jpg", "txt").map_tuple(transform, lambda text: tokenizer(text)[0])
    loader = wds.WebLoader(data.batched(problem.batch).repeat(), batch_size=None, num_workers=problem.workers)
    found: Iterator[Pair] = iter(loader)
    return found


def open_clip_pairs(problem: DataProblem) -> Iterator[Pair]:
    """What open_clip's training script reads: `get_data` and its transform for training."""
    theirs = private_copy("open_clip_train.data")
    # webdataset 1.0 marks the end of a shard with an empty sample, which open_clip 3.3 does not expect.
    if "eof_value" in signature(theirs.tar_file_expander).parameters:
        theirs.tar_file_expander = partial(theirs.tar_file_expander, eof_value=None)
    make: Any = import_module("open_clip.transform")
    transform = make.image_transform(
        problem.edge, is_train=True, aug_cfg=make.AugmentationCfg(scale=problem.crop_scale)
    )
    options = Namespace(
        train_data=problem.shards,
        # Its epochs are cut into whole batches of each worker.
        train_num_samples=problem.samples + problem.batch * (1 + problem.workers),
        train_data_upsampling_factors=None,
        val_data=None,
        imagenet_val=None,
        imagenet_v2=None,
        dataset_type="webdataset",
        dataset_resampled=False,
        batch_size=problem.batch,
        workers=problem.workers,
        world_size=1,
        rank=0,
        distributed=False,
        seed=0,
    )
    data = theirs.get_data(options, (transform, transform), epoch=0, tokenizer=tokenizer_of(problem.tokenizer))
    found: Iterator[Pair] = iter(data["train"].dataloader)
    return found


@dataclass(frozen=True, kw_only=True)
class DataContestant(Contestant):
    """A loader."""

    load: Callable[[DataProblem], Iterator[Pair]]


_ALL = (
    DataContestant(name="contratile", load=our_shards, about="Loader on shards"),
    DataContestant(name="contratile_table", load=our_table, about="Loader on a CSV table of the same JPEGs as files"),
    DataContestant(
        name="webdataset",
        load=webdataset_pairs,
        about="WebDataset and WebLoader with torchvision's transforms, on the same shards",
        package="webdataset",
    ),
    DataContestant(
        name="open_clip",
        load=open_clip_pairs,
        about="open_clip_train.data.get_data with its transform for training, on the same shards",
        package="open_clip_torch",
    ),
)

DATA_CONTESTANTS = {contestant.name: contestant for contestant in _ALL}
DATA_PACKAGES = (*packages_of(_ALL), "torchvision", "pillow")

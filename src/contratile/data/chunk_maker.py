"""Turns samples into chunks of prepared inputs: the part of the loader that runs in workers.

maker = ChunkMaker(source, (image_prepare, text_prepare), Reading(seed=0))
chunk, broken, seen = maker[Items([4, 7, 1], rounds=[0, 0, 0])]        # samples 4, 7 and 1 of an indexed source
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from contratile.data.augment import Augment, AugmentConfig, Strengths
from contratile.data.frames import Frames, framed
from contratile.data.sample import Broken, Indexed, Sample, Source, Stream, left_name, random_numbers, traits_of

Prepare: TypeAlias = Callable[[list[Any]], Any]
"""Turns images or texts into the inputs of a tower. It is pickled for workers.

If a `prepare` for images has an attribute `edge` (as `images.Squares` has), the loader crops and scales each image to
a square of that size when it is decoded. Otherwise all images of a chunk are held in memory at full size.
"""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is done with samples beside preparing them. The fields are arguments of `Loader`."""

    seed: int = 0
    augment: AugmentConfig | None = None
    negatives: int = 0
    training: bool = True
    """Choose one of several texts for each epoch and augment. Otherwise the first text, and of two views the first is
    not augmented."""

    @property
    def views(self) -> int:
        return 1 if self.augment is None else self.augment.views

    @property
    def strengths(self) -> Strengths | None:
        """How images are augmented, if they are."""
        wanted = self.augment is not None and self.augment.on and (self.training or self.views > 1)
        return self.augment.strengths if wanted and self.augment is not None else None


class Negatives(NamedTuple):
    """Hard negatives of a chunk: `count` places for each sample, some of which may be empty."""

    inputs: Any
    """Prepared inputs of all places, sample by sample. An empty place repeats something else of the chunk."""

    there: Tensor
    """[n, count] bool: which places are not empty."""

    texts: list[str]
    """The negatives as texts, place by place; "" for pictures and empty places."""


class Chunk(NamedTuple):
    """Pairs that go through the towers together."""

    left: Any
    right: Any
    """Prepared inputs: tensors or dictionaries of tensors. With two views both are images."""

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which is not needed
    """Positions in an indexed source; -1 in a stream."""

    keys: list[str]
    texts: list[str]
    """The right sides as raw texts."""

    names: list[str]
    """Names of the left sides: equal names mean the same image or text."""

    negatives: Negatives | None = None


class Items(NamedTuple):
    """What a chunk is made of."""

    items: Sequence[Any]
    """Indices into an indexed source, or records of a stream."""

    rounds: Sequence[int]
    """How often each was read before."""


class ChunkMaker(Dataset[Any]):
    """Reads and prepares the samples of a chunk."""

    def __init__(self, source: Indexed | Stream, prepare: tuple[Prepare, Prepare], reading: Reading) -> None:
        self.prepare, self.stream, self.reading = prepare, isinstance(source, Stream), reading
        self.read = source.sample if isinstance(source, Stream) else source.__getitem__
        self.edge: int = getattr(prepare[0], "edge", 0)
        self.augment = None if reading.strengths is None else Augment(reading.strengths)
        self.negatives_prepare: Prepare | None = None
        if reading.negatives:
            self.negatives_prepare = prepare[negatives_side(source)]

    def __getitem__(self, asked: Items) -> tuple[Chunk | None, list[Broken], int]:
        """Make a chunk from indices of an indexed source, or records of a stream.

        Returns:
            The chunk, or None if all items are broken; the broken items; the number of items.
        """
        items, rounds = asked
        samples: list[Sample] = []
        views: list[tuple[Any, ...]] = []
        places: list[int] = []
        broken: list[Broken] = []
        for item, turn in zip(items, rounds, strict=True):
            try:
                sample, seen = self._sample(item, turn)
                samples.append(sample)
                views.append(seen)
                places.append(-1 if self.stream else item)
            except Broken as error:
                broken.append(error)
        if not samples:
            return None, broken, len(items)
        texts = [sample.right for sample in samples]
        left = self.prepare[0]([seen[0] for seen in views])
        right = self.prepare[1](texts if self.reading.views == 1 else [seen[1] for seen in views])
        keys, names = [sample.key for sample in samples], [left_name(sample) for sample in samples]
        chunk = Chunk(left, right, torch.tensor(places), keys, texts, names, self._negatives(samples))
        return chunk, broken, len(items)

    def _sample(self, item: Any, epoch: int) -> tuple[Sample, tuple[Any, ...]]:
        """Read a sample and the views of its left side.

        Images already have their final size: all images of a chunk are in memory together.
        """
        reading = self.reading
        frames = None
        if self.edge:
            frames = Frames(
                self.edge,
                augment=self.augment,
                seeds=(reading.seed, epoch),
                views=reading.views,
                plain_first=not reading.training,
            )
        with framed(frames):
            sample = self.read(item)
        if reading.training and sample.more:
            choices = sample.right, *sample.more
            chosen = random_numbers(reading.seed, epoch, sample.key, "text").choice(choices)
            sample = sample._replace(right=chosen)
        sample = sample._replace(negatives=self._chosen(sample, epoch, frames))
        if frames is None or isinstance(sample.left, str):
            return sample, (sample.left,) * reading.views
        views = frames.views_of(sample.left, sample.key)
        return sample._replace(left=views[0]), views

    def _chosen(self, sample: Sample, epoch: int, frames: Frames | None) -> tuple[Any, ...]:
        """The hard negatives of a sample that are used; pictures are read now."""
        count, found = self.reading.negatives, sample.negatives
        if len(found) > count:
            found = tuple(random_numbers(self.reading.seed, epoch, sample.key, "negatives").sample(found, count))
        read = []
        with framed(frames):
            for place, x in enumerate(found):
                made = x() if callable(x) else x
                if frames is not None and not isinstance(made, str):
                    made = frames.views_of(made, f"{sample.key}/{place}")[0]
                read.append(made)
        return tuple(read)

    def _negatives(self, samples: list[Sample]) -> Negatives | None:
        count = self.reading.negatives
        if self.negatives_prepare is None:
            return None
        there = torch.zeros(len(samples), count, dtype=torch.bool)
        found: list[Any] = []
        for row, sample in enumerate(samples):
            mine = sample.negatives
            there[row, : len(mine)] = True
            filler = sample.right if self.negatives_prepare is self.prepare[1] else sample.left
            found += [*mine, *[filler] * (count - len(mine))]
        texts = [x if here and isinstance(x, str) else "" for x, here in zip(found, there.flatten(), strict=True)]
        return Negatives(self.negatives_prepare(found), there, texts)


def negatives_side(source: Source) -> int:
    """Which tower encodes the hard negatives of a source: 1, the right one, unless they are pictures beside texts."""
    kind = traits_of(source).negatives
    return 0 if kind is not None and kind != source.kinds[1] and kind == source.kinds[0] else 1

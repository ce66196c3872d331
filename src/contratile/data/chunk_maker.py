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
    """What is done with samples besides preparing them. The fields are arguments of `Loader`."""

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


class SecondInputs(NamedTuple):
    """Inputs of a second model (a guide or a teacher) for the same pairs."""

    left: Any
    right: Any
    negatives: Any = None
    """Inputs of the hard negatives, empty places included, as in `Negatives`."""


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
    second: SecondInputs | None = None


class Items(NamedTuple):
    """What a chunk is made of."""

    items: Sequence[Any]
    """Indices into an indexed source, or records of a stream."""

    rounds: Sequence[int]
    """How often each item was read before."""


class _Read(NamedTuple):
    """A sample with the images at their final sizes."""

    sample: Sample
    left: tuple[Any, ...]
    """The views of its left side; the second model's view comes last, if there is one."""

    negatives: tuple[tuple[Any, ...], ...]
    """The views of its hard negatives, likewise."""


class ChunkMaker(Dataset[Any]):
    """Reads and prepares the samples of a chunk.

    Args:
        source: The samples.
        prepare: Turns left and right sides into inputs of the towers.
        reading: What else is done.
        second: The same for a second model, which encodes the same samples.
    """

    def __init__(
        self,
        source: Indexed | Stream,
        prepare: tuple[Prepare, Prepare],
        reading: Reading,
        second: tuple[Prepare, Prepare] | None = None,
    ) -> None:
        self.prepare, self.stream, self.reading = prepare, isinstance(source, Stream), reading
        self.second = second
        self.read = source.sample if isinstance(source, Stream) else source.__getitem__
        self.edge: int = getattr(prepare[0], "edge", 0)
        self.second_edge: int = 0 if second is None else getattr(second[0], "edge", 0)
        # Pixels of one size are prepared once: each model normalises them itself.
        self.same_pixels = bool(self.edge) and self.second_edge == self.edge
        self.augment = None if reading.strengths is None else Augment(reading.strengths)
        self.hard_side = negatives_side(source) if reading.negatives else None

    def __getitem__(self, asked: Items) -> tuple[Chunk | None, list[Broken], int]:
        """Make a chunk from indices of an indexed source, or records of a stream.

        Returns:
            The chunk, or None if all items are broken; the broken items; the number of items.
        """
        items, rounds = asked
        read: list[_Read] = []
        places: list[int] = []
        broken: list[Broken] = []
        for item, turn in zip(items, rounds, strict=True):
            try:
                read.append(self._read(item, turn))
                places.append(-1 if self.stream else item)
            except Broken as error:
                broken.append(error)
        if not read:
            return None, broken, len(items)
        samples = [one.sample for one in read]
        texts = [sample.right for sample in samples]
        left = self.prepare[0]([one.left[0] for one in read])
        right = self.prepare[1](texts if self.reading.views == 1 else [one.left[1] for one in read])
        keys, names = [sample.key for sample in samples], [left_name(sample) for sample in samples]
        negatives = self._negatives(read)
        chunk = Chunk(left, right, torch.tensor(places), keys, texts, names, negatives)
        return chunk._replace(second=self._second(chunk, read)), broken, len(items)

    def _read(self, item: Any, epoch: int) -> _Read:
        """Read a sample, the views of its left side and its hard negatives.

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
                second=self.second_edge,
            )
        with framed(frames):
            sample = self.read(item)
        if reading.training and sample.more:
            choices = sample.right, *sample.more
            chosen = random_numbers(reading.seed, epoch, sample.key, "text").choice(choices)
            sample = sample._replace(right=chosen)
        negatives = self._chosen(sample, epoch, frames)
        if frames is None or isinstance(sample.left, str):
            return _Read(sample, (sample.left,) * reading.views, negatives)
        views = frames.views_of(sample.left, sample.key)
        return _Read(sample._replace(left=views[0]), views, negatives)

    def _chosen(self, sample: Sample, epoch: int, frames: Frames | None) -> tuple[tuple[Any, ...], ...]:
        """The hard negatives of a sample that are used; pictures are read now."""
        count, found = self.reading.negatives, sample.negatives
        if len(found) > count:
            found = tuple(random_numbers(self.reading.seed, epoch, sample.key, "negatives").sample(found, count))
        read: list[tuple[Any, ...]] = []
        with framed(frames):
            for place, x in enumerate(found):
                made = x() if callable(x) else x
                views: tuple[Any, ...] = (made,)
                if frames is not None and not isinstance(made, str):
                    views = frames.views_of(made, f"{sample.key}/{place}")
                read.append(views)
        return tuple(read)

    def _negatives(self, read: list[_Read]) -> Negatives | None:
        count = self.reading.negatives
        if self.hard_side is None:
            return None
        there = torch.zeros(len(read), count, dtype=torch.bool)
        for row, one in enumerate(read):
            there[row, : len(one.negatives)] = True
        found = self._places(read, 0)
        texts = [x if here and isinstance(x, str) else "" for x, here in zip(found, there.flatten(), strict=True)]
        return Negatives(self.prepare[self.hard_side](found), there, texts)

    def _places(self, read: list[_Read], view: int) -> list[Any]:
        """One view of all hard negatives; empty places repeat something else of the chunk."""
        found: list[Any] = []
        for one in read:
            filler = one.sample.right if self.hard_side == 1 else one.left[view]
            mine = [views[view] for views in one.negatives]
            found += [*mine, *[filler] * (self.reading.negatives - len(mine))]
        return found

    def _second(self, chunk: Chunk, read: list[_Read]) -> SecondInputs | None:
        """Prepare the inputs of the second model, if there is one."""
        if self.second is None:
            return None
        left = chunk.left if self.same_pixels else self.second[0]([one.left[-1] for one in read])
        negatives = None
        if chunk.negatives is not None and self.hard_side is not None:
            pixels = self.same_pixels and self.hard_side == 0
            hard = None if pixels else self.second[self.hard_side](self._places(read, -1))
            negatives = chunk.negatives.inputs if pixels else hard
        return SecondInputs(left, self.second[1](chunk.texts), negatives)


def negatives_side(source: Source) -> int:
    """The tower that encodes the hard negatives of a source: 1, the right one; 0, the left one, if they are images."""
    kind = traits_of(source).negatives
    return 0 if kind is not None and kind != source.kinds[1] and kind == source.kinds[0] else 1

"""Turns samples into chunks of prepared inputs: the part of the loader that runs in workers.

maker = ChunkMaker(source, (image_prepare, text_prepare))
chunk, broken, seen = maker[[4, 7, 1]]             # samples 4, 7 and 1 of an indexed source
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from contratile.data.images import center_square, decode_to
from contratile.data.sample import Broken, Indexed, Sample, Stream, left_name

Prepare: TypeAlias = Callable[[list[Any]], Any]
"""Turns images or texts into the inputs of a tower. It is pickled for workers.

If a `prepare` for images has an attribute `edge` (as `images.Squares` has), the loader crops and scales each image to
a square of that size when it is decoded. Otherwise all images of a chunk are held in memory at full size.
"""


class Chunk(NamedTuple):
    """Pairs that go through the towers together."""

    left: Any
    right: Any
    """Prepared inputs: tensors or dictionaries of tensors."""

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which is not needed
    """Positions in an indexed source; -1 in a stream."""

    keys: list[str]
    texts: list[str]
    """The right sides as raw texts."""

    names: list[str]
    """Names of the left sides: equal names mean the same image or text."""


class ChunkMaker(Dataset[Any]):
    """Reads and prepares the samples of a chunk."""

    def __init__(self, source: Indexed | Stream, prepare: tuple[Prepare, Prepare]) -> None:
        self.prepare, self.stream = prepare, isinstance(source, Stream)
        self.read = source.sample if isinstance(source, Stream) else source.__getitem__
        self.edge: int = getattr(prepare[0], "edge", 0)

    def __getitem__(self, items: list[Any]) -> tuple[Chunk | None, list[Broken], int]:
        """Make a chunk from indices of an indexed source, or records of a stream.

        Returns:
            The chunk, or None if all items are broken; the broken items; the number of items.
        """
        samples: list[Sample] = []
        places: list[int] = []
        broken: list[Broken] = []
        for item in items:
            try:
                samples.append(self._sample(item))
                places.append(-1 if self.stream else item)
            except Broken as error:
                broken.append(error)
        if not samples:
            return None, broken, len(items)
        lefts, rights, keys, _ = (list(column) for column in zip(*samples, strict=True))
        left, right = self.prepare[0](lefts), self.prepare[1](rights)
        return (
            Chunk(left, right, torch.tensor(places), keys, rights, [left_name(x) for x in samples]),
            broken,
            len(items),
        )

    def _sample(self, item: Any) -> Sample:
        """Read a sample, with its image already at the final size: all images of a chunk are in memory together."""
        with decode_to(self.edge):
            sample = self.read(item)
        if self.edge and not isinstance(sample.left, str):  # a source may decode images in its own way
            sample = sample._replace(left=center_square(sample.left, self.edge))
        return sample

"""Some samples of an indexed source, in any order.

Subset(source, chosen(len(source), 1000))      # a thousand pairs, always the same ones
"""

from collections.abc import Iterator, Sequence

import torch

from contratile.data.sample import Broken, Indexed, Kinds, Sample, both_texts, generator, traits_of


class Subset:
    """An indexed source with the samples of `source` at `places`."""

    def __init__(self, source: Indexed, places: Sequence[int]) -> None:
        self.source, self.places = source, places
        self.name = f"{source.name}, {len(places)} of {len(source)}"
        self.traits = traits_of(source)

    @property
    def kinds(self) -> Kinds:
        return self.source.kinds

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        return self.source[self.places[index]]

    def texts(self) -> Iterator[str]:
        """The texts of the subset; those of the whole source if it holds images, to avoid decoding them."""
        if "image" in self.kinds:
            yield from self.source.texts()
            return
        for place in self.places:
            try:
                yield from both_texts(self.source[place])
            except Broken:
                continue  # the loader counts broken samples


def chosen(n: int, limit: int) -> list[int]:
    """A random choice of `limit` out of n rows, sorted; always the same."""
    picked: list[int] = torch.randperm(n, generator=generator(n))[:limit].sort().values.tolist()
    return picked

"""Some rows of an indexed source, in any order: a source again.

Subset(source, chosen(len(source), 1000))      # a thousand pairs, always the same ones
"""

from collections.abc import Iterator, Sequence

import torch

from contratile.data.sample import Broken, Indexed, Kinds, Sample, both_texts, generator


class Subset:
    """The rows of `source` at `places`."""

    def __init__(self, source: Indexed, places: Sequence[int]) -> None:
        self.source, self.places = source, places
        self.name = f"{source.name}, {len(places)} of {len(source)}"

    @property
    def kinds(self) -> Kinds:
        return self.source.kinds

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        return self.source[self.places[index]]

    def texts(self) -> Iterator[str]:
        """Of the whole source if its rows hold pictures, which need not be read for this."""
        if "image" in self.kinds:
            yield from self.source.texts()
            return
        for place in self.places:
            try:
                yield from both_texts(self.source[place])
            except Broken:
                continue  # the loader counts it


def chosen(n: int, limit: int) -> list[int]:
    """`limit` of n rows, a random choice that is always the same, in their order."""
    picked: list[int] = torch.randperm(n, generator=generator(n))[:limit].sort().values.tolist()
    return picked

"""Sources of numbers for the tests of the loader, in a module that workers import quickly."""

from collections.abc import Iterator

import torch

from contratile.data.sample import Broken, Cursor, Kinds, Sample, generator


class Numbers:
    """Sample i is the text i and its negative; some are broken."""

    kinds: Kinds = ("text", "text")
    name = "numbers"

    def __init__(self, n: int, broken: frozenset[int] = frozenset()) -> None:
        self.n, self.broken = n, broken

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Sample:
        if index in self.broken:
            raise Broken(f"number {index}", "odd" if index % 2 else "even")
        return Sample(str(index), str(-index), f"number {index}")

    def texts(self) -> Iterator[str]:
        return iter(())


class River:
    """A stream of numbers: part p of an epoch has lengths[p % len(lengths)] of them; cursors count."""

    kinds: Kinds = ("text", "text")
    name = "river"

    def __init__(self, lengths: tuple[int, ...], broken: frozenset[int] = frozenset()) -> None:
        self.lengths, self.broken = lengths, broken
        self.decoded = 0

    def records(
        self, *, seed: int | None, epoch: int, part: int, parts: int, start: Cursor = None
    ) -> Iterator[tuple[int, Cursor]]:
        n = self.lengths[part % len(self.lengths)]
        order = range(n) if seed is None else torch.randperm(n, generator=generator(seed, epoch, part)).tolist()
        for i in range(start or 0, n):
            yield epoch * 10_000 + part * 1000 + order[i], i + 1

    def sample(self, record: int) -> Sample:
        self.decoded += 1
        if record in self.broken:
            raise Broken(f"drop {record}", "muddy")
        return Sample(str(record), str(-record), f"drop {record}")

    def texts(self) -> Iterator[str]:
        return iter(())


def as_tensor(texts: list[str]) -> torch.Tensor:
    return torch.tensor([int(text) for text in texts])


PREPARE = (as_tensor, as_tensor)

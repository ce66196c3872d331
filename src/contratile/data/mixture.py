"""Several sources as one, with weights.

    Mixture([captions, products], weights=(2, 1), batching="mixed")     # two of three pairs are captions
    mixed([captions, shards], weights=(2, 1), batching="homogeneous")   # a Mixture, or a MixedStream if one is a stream

Weights are shares of the pairs that are trained on. Without weights, indexed sources are mixed as if they were one
table, and streams have equal shares. With `batching="homogeneous"` all pairs of a global batch come from one source,
so that negatives do too.

A small source with a large weight is repeated: each source is read in random orders, one after the other, and an epoch
takes the next rows of each.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from math import ceil
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from contratile.data.sample import (
    Broken,
    Cursor,
    Indexed,
    Kinds,
    Sample,
    Stream,
    Traits,
    generator,
    random_numbers,
    traits_of,
)
from contratile.errors import bad_value

Batching: TypeAlias = Literal["mixed", "homogeneous"]


def mixed(
    sources: Sequence[Indexed | Stream], *, weights: Sequence[float] = (), batching: Batching = "mixed"
) -> Indexed | Stream:
    """One source from several; the source itself if there is one."""
    if len(sources) == 1:
        return sources[0]
    for other in sources[1:]:
        if tuple(other.kinds) != tuple(sources[0].kinds):
            expected = f"pairs of {' and '.join(sources[0].kinds)}, as in {sources[0].name}"
            remedy = "One pair of towers encodes them all: mix sources of the same kind."
            bad_value(other.name, expected=expected, got=f"{' and '.join(other.kinds)}", remedy=remedy)
    indexed = [source for source in sources if isinstance(source, Indexed)]
    if len(indexed) == len(sources):
        return Mixture(indexed, weights=weights, batching=batching)
    streams = [IndexedStream(source) if isinstance(source, Indexed) else source for source in sources]
    return MixedStream(streams, weights=weights or [1.0] * len(sources), batching=batching)


class _Several:
    """What mixtures of indexed sources and of streams have in common."""

    def __init__(self, sources: Sequence[Indexed | Stream], weights: Sequence[float], batching: Batching) -> None:
        self.kinds: Kinds = sources[0].kinds
        self.weights, self.batching = tuple(map(float, weights)), batching
        shares = f" by {':'.join(f'{x!r}'.removesuffix('.0') for x in self.weights)}" if weights else ""
        labels = [source.name.partition(" (")[0] for source in sources]
        self._labels = [f"{x}#{i + 1}" if labels.count(x) > 1 else x for i, x in enumerate(labels)]
        self.name = f"{' + '.join(source.name for source in sources)}{shares}{', homogeneous' * (batching != 'mixed')}"
        traits = [traits_of(source) for source in sources]
        kinds = {each.negatives for each in traits} - {None}
        if len(kinds) > 1:
            remedy = "Name the columns of one kind with --negatives."
            bad_value("hard negatives", expected="texts or pictures in all sources", got="both", remedy=remedy)
        self.traits = Traits(
            several_texts=any(each.several_texts for each in traits),
            negatives=next(iter(kinds), None),
            negatives_count=max(each.negatives_count for each in traits),
            labelled=all(each.labelled for each in traits),
        )

    def _of(self, place: int, sample: Sample) -> Sample:
        """A sample of one of the sources. File names may occur in several sources, so the source's name is added."""
        label = self._labels[place]
        name = sample.name or ("" if isinstance(sample.left, str) else sample.key)
        return sample._replace(key=f"{label}/{sample.key}", name=name and f"{label}/{name}")


class Mixture(_Several):
    """An indexed source: the samples of several, one source after the other.

    Args:
        sources: Indexed sources of the same kinds.
        weights: Share of each in an epoch; empty: by their lengths.
        batching: "homogeneous": each global batch comes from one source.
    """

    def __init__(
        self, sources: Sequence[Indexed], *, weights: Sequence[float] = (), batching: Batching = "mixed"
    ) -> None:
        super().__init__(sources, weights, batching)
        self.sources = list(sources)
        self.lengths = tuple(len(source) for source in sources)
        self._ends = list(accumulate(self.lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        place = next(i for i, end in enumerate(self._ends) if index < end)
        return self._of(place, self.sources[place][index - self._ends[place] + self.lengths[place]])

    def texts(self) -> Iterator[str]:
        return chain.from_iterable(source.texts() for source in self.sources)


def drawn(lengths: Sequence[int], weights: Sequence[float], samples: int) -> list[int]:
    """How many samples an epoch of `samples` takes from each source: by weight, or by length; rounded fairly."""
    samples = samples or sum(lengths)
    shares = [float(x) for x in weights or lengths]
    exact = [samples * share / sum(shares) for share in shares]
    counts = [int(x) for x in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for place in by_rest[: samples - sum(counts)]:
        counts[place] += 1
    return counts


def epoch_order(source: Indexed, *, seed: int, epoch: int, samples: int, batch: int) -> tuple[Tensor, Tensor]:
    """The indices of an epoch in their order, and how often each was drawn before; global batches are slices of it.

    Args:
        source: An indexed source or a `Mixture`.
        seed: Determines the order, together with `epoch`.
        epoch: Number of the epoch.
        samples: Samples in the epoch; 0: as many as the source has.
        batch: Size of a global batch. Homogeneous batches are whole.
    """
    if not isinstance(source, Mixture):
        return _next_of(len(source), samples or len(source), (seed,), epoch)
    counts = drawn(source.lengths, source.weights, samples)
    starts = [0, *accumulate(source.lengths)]
    parts = []
    for place, (length, count) in enumerate(zip(source.lengths, counts, strict=True)):
        order, rounds = _next_of(length, count, (seed, place), epoch)
        parts.append(torch.stack([order + starts[place], rounds], dim=1))
    if source.batching == "mixed":
        whole = torch.cat(parts)
        shuffled = whole[torch.randperm(len(whole), generator=generator(seed, epoch, -1))]
    else:
        batches = [piece for part in parts for piece in torch.split(part, batch) if len(piece) == batch]
        turns = torch.randperm(len(batches), generator=generator(seed, epoch, -1)).tolist()
        shuffled = torch.cat([batches[i] for i in turns])
    return shuffled[:, 0], shuffled[:, 1]


def _next_of(length: int, count: int, seeds: tuple[int, ...], epoch: int) -> tuple[Tensor, Tensor]:
    """The samples of an epoch out of an endless sequence of random orders, `count` in each epoch; and which order."""
    first, last = epoch * count, (epoch + 1) * count
    rounds = range(first // length, ceil(last / length))
    orders = [torch.randperm(length, generator=generator(*seeds, number)) for number in rounds]
    start = first - rounds.start * length
    order = torch.cat([torch.empty(0, dtype=torch.long), *orders])[start : start + count]
    return order, torch.arange(first, last) // length


def steps_per_epoch(source: Indexed, *, samples: int, batch: int, drop_last: bool) -> int:
    """Global batches in an epoch."""
    if isinstance(source, Mixture) and source.batching == "homogeneous" and drop_last:
        return sum(count // batch for count in drawn(source.lengths, source.weights, samples))
    total = samples or len(source)
    return total // batch if drop_last else -(-total // batch)


# --- streams --------------------------------------------------------------------------------------------------------


class IndexedStream:
    """An indexed source as a stream, to be mixed with streams."""

    def __init__(self, source: Indexed) -> None:
        self.source, self.name, self.kinds = source, source.name, source.kinds
        self.traits = traits_of(source)

    def records(
        self, *, seed: int | None, epoch: int, part: int, parts: int, start: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        n = len(self.source)
        order = range(n) if seed is None else torch.randperm(n, generator=generator(seed, epoch)).tolist()
        mine = order[part::parts]
        for place in range(start or 0, len(mine)):
            yield mine[place], place + 1

    def sample(self, record: Any) -> Sample:
        return self.source[record]

    def texts(self) -> Iterator[str]:
        return self.source.texts()


class MixedStream(_Several):
    """A stream of records of several streams.

    Args:
        sources: Streams of the same kinds.
        weights: Share of each in the records.
        batching: "homogeneous": each global batch comes from one source.
    """

    def __init__(self, sources: Sequence[Stream], *, weights: Sequence[float], batching: Batching = "mixed") -> None:
        super().__init__(sources, weights, batching)
        self.sources = list(sources)

    def records(
        self, *, seed: int | None, epoch: int, part: int, parts: int, start: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        """All records of all sources, once: for evaluation. Training reads `endless`."""
        first, cursor = start or (0, None)
        for place in range(first, len(self.sources)):
            found = self.sources[place].records(seed=seed, epoch=epoch, part=part, parts=parts, start=cursor)
            yield from (((place, record), [place, after]) for record, after in found)
            cursor = None

    def endless(
        self, *, seed: int, part: int, parts: int, share: int, start: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        """Yield records forever, each source epoch after epoch.

        Args:
            seed: Determines the order and the choice of sources.
            part: Number of the reader; every rank is one.
            parts: Number of readers.
            share: This reader's records in a global batch. Of a homogeneous batch all readers choose the same source.
            start: A cursor that was yielded before.
        """
        done, epochs, cursors = start or (0, [0] * len(self.sources), [None] * len(self.sources))
        epochs, cursors = list(epochs), list(cursors)
        readers: list[Iterator[tuple[Any, Cursor]] | None] = [None] * len(self.sources)
        while True:
            seeds = (seed, "batch", done // share) if self.batching == "homogeneous" else (seed, "record", part, done)
            (place,) = random_numbers(*seeds).choices(range(len(self.sources)), self.weights)
            record, cursors[place] = self._next(place, readers, epochs, cursors, seed, part, parts)
            done += 1
            yield (place, record), [done, list(epochs), list(cursors)]

    def _next(
        self,
        place: int,
        readers: list[Iterator[tuple[Any, Cursor]] | None],
        epochs: list[int],
        cursors: list[Cursor],
        seed: int,
        part: int,
        parts: int,
    ) -> tuple[Any, Cursor]:
        """The next record of a source; at its end, the first of its next epoch."""
        source, began = self.sources[place], False
        while True:
            reader = readers[place]
            if reader is None:
                options = {"part": part, "parts": parts, "start": cursors[place]}
                reader = source.records(seed=seed, epoch=epochs[place], **options)
                readers[place], began = reader, cursors[place] is None
            found = next(reader, None)
            if found is not None:
                return found
            if began:
                remedy = "Check the name of the data, and that there are at least as many samples as ranks."
                bad_value(source.name, expected="at least one sample for each rank", got="none", remedy=remedy)
            epochs[place] += 1
            readers[place], cursors[place] = None, None

    def sample(self, record: Any) -> Sample:
        place, inner = record
        if isinstance(inner, Broken):
            raise Broken(*inner.args)
        return self._of(place, self.sources[place].sample(inner))

    def texts(self) -> Iterator[str]:
        return chain.from_iterable(source.texts() for source in self.sources)

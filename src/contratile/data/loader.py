"""The loader: global batches in chunks, in an order that depends only on the seed and can be resumed anywhere.

    loader = Loader(source, (image_prepare, text_prepare), batch=65536, chunk=256, seed=0, rank=rank, world=world)
    for batch in loader:                      # endless, epoch after epoch
        chunks = list(batch.chunks)           # this rank's share of the global batch
        ...
        state = loader.state_dict()           # position after this batch, for load_state_dict

`order` decides which samples make up a chunk; `chunk_maker` reads and prepares them, in worker processes if there are
any; the loader puts the chunks back in order.
"""

from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader

from contratile.data.augment import AugmentConfig
from contratile.data.chunk_maker import Chunk as Chunk
from contratile.data.chunk_maker import ChunkMaker, Items, Prepare, Reading
from contratile.data.mixture import MixedStream, Mixture, drawn
from contratile.data.order import BatchOrder, ChunkTask, first_items
from contratile.data.read_ahead import read_ahead
from contratile.data.sample import Broken, Indexed, Stream
from contratile.data.workers import DIED, follow, is_death, shielded
from contratile.errors import bad_value, check_count

T = TypeVar("T")
BROKEN_LIMIT = 0.01
ALWAYS_TOLERATED = 10
"""This many broken samples are tolerated whatever the share: a share of few samples means nothing."""


class Batch(NamedTuple):
    """This rank's share of one global batch."""

    epoch: int
    step: int
    """Number of the batch in its epoch."""

    chunks: Iterator[Chunk]
    """Read them before the next batch; chunks left over are skipped. May be empty."""


class Loader:
    """Iterates over global batches of a source, in chunks, for one of `world` ranks.

    Batches of an indexed source are the same for any number of ranks, chunks and workers; every rank of a stream reads
    its own part. Broken samples are left out, so their batch is smaller; they are counted, and too many end the run.

    Args:
        source: Pairs by index or as a stream.
        prepare: Turns the left and the right sides of a chunk into inputs of the towers. Pickled for workers.
        batch: Pairs in a global batch, over all ranks.
        chunk: Pairs that are prepared together, at most.
        seed: Determines the order.
        rank: Rank of this process.
        world: Number of ranks.
        workers: Processes that read and prepare chunks; 0: this process does.
        drop_last: Skip the last batch of an epoch if it is smaller. A stream's last batch is always yielded.
        shuffle: False keeps the order of the source.
        epochs: Stop after this many; None: never.
        broken_limit: Broken samples that are tolerated: below 1 a share of the samples read so far (10 are always
            tolerated), otherwise a number.
        augment: Random changes to images, the same for a seed, epoch and sample. With two views of an image, these
            are the left and the right side, and texts are only in `Chunk.texts`. Evaluation (`ordered`) leaves images
            as they are, except for the second view.
        negatives: Places for hard negatives of each sample. Of more, some are chosen for each epoch.
        samples_per_epoch: Samples in an epoch; 0: all of the source. A stream's epochs get a length by it.
        training: False takes the first of several texts, and augments nothing but the second of two views.
        second: Prepares the same samples for a second model too (`Chunk.second`); its images are the same crops, at
            its own size.

    Attributes:
        steps_per_epoch: Batches in an epoch; None for a stream without `samples_per_epoch`.
        seen: Samples read so far, including broken ones.
        broken: Number of broken samples by reason.

    Raises:
        ValueError: The source has fewer samples than a batch, or an argument is invalid. While iterating: too many
            samples are broken.

    Examples:
        >>> from contratile.data import Loader, Sample
        >>> class Numbers:
        ...     name, kinds = "numbers", ("text", "text")
        ...     def __len__(self): return 10
        ...     def __getitem__(self, index): return Sample(f"{index}", f"number {index}", key=f"{index}")
        ...     def texts(self): return iter(())
        >>> loader = Loader(Numbers(), (list, list), batch=4, chunk=3, shuffle=False, epochs=1)
        >>> [sum(len(chunk.left) for chunk in batch.chunks) for batch in loader]
        [4, 4]
    """

    def __init__(
        self,
        source: Indexed | Stream,
        prepare: tuple[Prepare, Prepare],
        *,
        batch: int,
        chunk: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        drop_last: bool = True,
        shuffle: bool = True,
        epochs: int | None = None,
        broken_limit: float = BROKEN_LIMIT,
        augment: AugmentConfig | None = None,
        negatives: int = 0,
        samples_per_epoch: int = 0,
        training: bool = True,
        second: tuple[Prepare, Prepare] | None = None,
    ) -> None:
        check_count("negatives", negatives, least=0)
        check_count("samples_per_epoch", samples_per_epoch, least=0)
        if augment is not None:
            _check_augment(augment, source, prepare, training)
        for name, value in {"batch": batch, "chunk": chunk, "world": world}.items():
            check_count(name, value, least=1)
        check_count("workers", workers, least=0)
        if not 0 <= rank < world:
            bad_value("rank", expected=f"0 to {world - 1}", got=rank, remedy="Pass this process's rank.")
        self.source, self.prepare, self.batch, self.workers = source, prepare, batch, workers
        self.order = BatchOrder(
            batch=batch,
            chunk=chunk,
            seed=seed,
            rank=rank,
            world=world,
            drop_last=drop_last,
            shuffle=shuffle,
            epochs=epochs,
            samples=samples_per_epoch,
        )
        self.reading = Reading(seed=seed, augment=augment, negatives=negatives, training=training)
        self.second = second
        self.broken_limit = broken_limit
        self.seen = 0
        self.broken: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._position: dict[str, Any] = {"epoch": 0, "step": 0}
        self.steps_per_epoch = self.order.steps_per_epoch(source)
        self._check_batch(shuffle=shuffle, samples_per_epoch=samples_per_epoch, world=world)

    def _check_batch(self, *, shuffle: bool, samples_per_epoch: int, world: int) -> None:
        """Raise a ValueError if the source cannot fill a batch, or a batch cannot serve all ranks."""
        source, batch = self.source, self.batch
        if isinstance(source, Mixture) and source.batching == "homogeneous" and shuffle:
            counts = drawn(source.lengths, source.weights, samples_per_epoch)
            for part, count in zip(source.sources, counts, strict=True):
                if count < batch:
                    expected = f"at most the {count} pairs of {part.name} in an epoch, with homogeneous batches"
                    bad_value("batch", expected=expected, got=batch, remedy="Lower it, or raise the source's weight.")
        if self.steps_per_epoch == 0:
            n = samples_per_epoch or len(source)  # type: ignore[arg-type]  # a stream has no 0 without samples_per_epoch
            remedy = f"Lower the batch to {n} or less." if n else "Check its name."
            bad_value("batch", expected=f"at most the {n} samples of {source.name}", got=batch, remedy=remedy)
        if isinstance(source, Stream) and batch < world:
            bad_value("batch", expected=f"at least {world}, one for each rank", got=batch, remedy="Raise the batch.")

    @classmethod
    def ordered(
        cls,
        source: Indexed | Stream,
        prepare: tuple[Prepare, Prepare],
        *,
        chunk: int,
        limit: int = 0,
        broken: Counter[str] | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Iterate once over a source in its own order, for evaluation.

        Args:
            source: Pairs by index or as a stream.
            prepare: As for the constructor.
            chunk: Pairs per chunk.
            limit: Stop after this many samples; 0: read all.
            broken: Counts broken samples by reason. They are left out, within `broken_limit` as in training.
            **options: Further arguments of the constructor.

        Returns:
            An iterator over chunks.
        """
        once: dict[str, Any] = {"shuffle": False, "epochs": 1, "drop_last": False, "training": False}
        loader = cls(source, prepare, batch=chunk, chunk=chunk, **once, **options)
        loader.broken = Counter() if broken is None else broken
        tasks = loader.order.tasks(source, loader._position)
        return (made for _, made in loader._made(first_items(tasks, limit) if limit else tasks) if made is not None)

    # --- position -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch whose chunks were all read, as JSON types.

        It is the same on every rank for an indexed source. For a stream each rank has its own: gather them in a list.
        """
        return {**self._identity(), **self._position}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state. Workers and chunk may differ; for an indexed source also the number of ranks.

        Args:
            state: What `state_dict` returned, or the list of all ranks' states.

        Raises:
            ValueError: The state was taken with other data or options.
        """
        if not isinstance(state, Mapping):
            if isinstance(self.source, Stream) and len(state) != self.order.world:
                remedy = "Resume a stream with the number of ranks that it was saved with."
                bad_value("state", expected=f"the states of {self.order.world} ranks", got=len(state), remedy=remedy)
            state = state[self.order.rank if isinstance(self.source, Stream) else 0]
        for name, mine in self._identity().items():
            if state.get(name, 0 if name == "samples_per_epoch" else None) != mine:  # new; earlier states lack it
                remedy = "Resume with the data and options that the run was started with, or start a new run."
                expected = f"{state.get(name)!r}, as in the checkpoint"
                bad_value(f"{name} of a resumed run", expected=expected, got=repr(mine), remedy=remedy)
        names = ("epoch", "step", "cursor") if isinstance(self.source, Stream) else ("epoch", "step")
        self._position = {name: state[name] for name in names if name in state}

    def _identity(self) -> dict[str, Any]:
        """What must be equal for a position to mean the same."""
        order = self.order
        same: dict[str, Any] = {"source": self.source.name, "seed": order.seed, "shuffle": order.shuffle}
        same["samples_per_epoch"] = order.samples
        if isinstance(self.source, Stream):
            ranks = {"rank": order.rank, "world": order.world}
            whole = isinstance(self.source, MixedStream) and self.source.batching == "homogeneous"
            return {**same, **ranks, **({"batch": order.batch} if whole else {})}
        return {**same, "length": len(self.source), "batch": order.batch, "drop_last": order.drop_last}

    # --- reading ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Batch, None, None]:
        made = self._made(self.order.tasks(self.source, self._position))
        for task, chunk in made:
            chunks = self._chunks(task, chunk, made)
            yield Batch(task.epoch, task.step, chunks)
            for _ in chunks:
                pass

    def _chunks(
        self, task: ChunkTask, chunk: Chunk | None, made: Iterator[tuple[ChunkTask, Chunk | None]]
    ) -> Iterator[Chunk]:
        """The chunks from this one to the last of its batch."""
        while True:
            if task.last:
                self._position = task.after
            if chunk is not None:
                yield chunk
            if task.last:
                return
            task, chunk = next(made)

    def _made(self, tasks: Iterator[ChunkTask]) -> Iterator[tuple[ChunkTask, Chunk | None]]:
        """Yield tasks with their chunks; None if all samples of a chunk are broken."""
        waiting, abandoned = deque[ChunkTask](), False
        if self.workers and isinstance(self.source, Stream):
            tasks = read_ahead(tasks, 2 * self.workers)

        def items() -> Iterator[Items]:
            for task in tasks:
                waiting.append(task)
                yield Items(task.items, task.rounds)
                if abandoned:
                    return

        loader: DataLoader[Any] = DataLoader(
            ChunkMaker(self.source, self.prepare, self.reading, self.second),
            sampler=items(),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=self.workers,
            multiprocessing_context="spawn" if self.workers else None,
            generator=torch.Generator(),  # otherwise it draws from the global random state
            worker_init_fn=follow,
        )
        with shielded() if self.workers else nullcontext():
            made = iter(loader)
        try:
            for chunk, broken, seen in made:
                self._count(broken, seen)
                yield waiting.popleft(), chunk
        except GeneratorExit:
            # Let the workers finish: one that is stopped while it hands over a tensor aborts with an error message.
            abandoned = True
            for _ in made:
                pass
            raise
        except RuntimeError as error:
            if is_death(error):
                raise ChildProcessError(DIED) from error
            raise

    def _count(self, broken: list[Broken], seen: int) -> None:
        """Count broken samples; raise a ValueError if there are too many."""
        self.seen += seen
        for error in broken:
            self.broken[error.reason] += 1
            self._examples.setdefault(error.reason, error.key)
        limit, total = self.broken_limit, self.broken.total()
        if too_many_broken(total, self.seen, limit):
            reasons = "; ".join(
                f"{times} x {reason}, first {self._examples[reason]}" for reason, times in self.broken.most_common(5)
            )
            bad_value(
                f"samples of {self.source.name}",
                expected=f"at most {f'{limit:.2%}' if 0 < limit < 1 else f'{limit:g}'} broken",
                got=f"{total} of {self.seen} ({reasons})",
                remedy="Repair or remove them, or raise the limit (--broken-limit, a share or a number).",
            )


def too_many_broken(broken: int, seen: int, limit: float) -> bool:
    """Whether more samples are broken than a limit tolerates: below 1 a share of those seen, otherwise a number."""
    return broken > (max(ALWAYS_TOLERATED, limit * seen) if 0 < limit < 1 else limit)


def _unchanged(made: T) -> T:
    return made


def _check_augment(
    augment: AugmentConfig, source: Indexed | Stream, prepare: tuple[Prepare, Prepare], training: bool
) -> None:
    """Raise a ValueError if the left sides cannot be augmented."""
    if augment.views == 2 and source.kinds[0] != "image":
        remedy = "Views are random crops and colours of pictures."
        bad_value("views", expected="images", got=f"{source.kinds[0]}s of {source.name}", remedy=remedy)
    if augment.on and training and not getattr(prepare[0], "edge", 0):
        remedy = "Use Squares(edge) of contratile.data.images, or an object with an attribute `edge`."
        bad_value("prepare", expected="one with a size in pixels, to augment images", got="none", remedy=remedy)

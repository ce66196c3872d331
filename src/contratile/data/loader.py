"""The loader: global batches in chunks, in an order that depends on nothing but the seed, and can be taken up anywhere.

    loader = Loader(source, (image_prepare, text_prepare), batch=65536, chunk=256, seed=0, rank=rank, world=world)
    for batch in loader:                      # endless, epoch after epoch
        chunks = list(batch.chunks)           # this rank's share of the global batch
        ...
        state = loader.state_dict()           # after the batch; load_state_dict goes on with the next one

Of an indexed source, epoch e is one random permutation, global batch b a slice of it, and rank r takes rows r,
r + world, ...: the global batch is the same for any number of ranks, chunks and workers. Of a stream, every rank reads
its own part and takes its share of each batch from there; at its end it begins its next epoch, so that ranks with fewer
records never make the others wait. Broken samples leave a batch smaller by as many; they are counted, and beyond a
limit they end the run.

Workers decode and prepare; the order is made before them and restored behind them.
"""

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import count, islice
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from contratile.data.images import fitted, fitting
from contratile.data.sample import Broken, Cursor, Indexed, Sample, Stream, generator, left_name
from contratile.data.workers import DIED, follow, is_death, shielded
from contratile.errors import bad_value, check_count

Prepare: TypeAlias = Callable[[list[Any]], Any]
"""Pictures or texts -> what a tower takes. It is pickled for workers.

One of pictures that has an `edge` (`images.Squares`) is given squares of that size: each picture is cut and scaled when
it is decoded. Without it, the pictures of a chunk are all held at their full size.
"""

T = TypeVar("T")
BROKEN_LIMIT = 0.01
FORGIVEN = 10
"""So many broken samples are within any share: a share of few samples says nothing."""


class Chunk(NamedTuple):
    """Pairs that go through the towers together."""

    left: Any
    right: Any
    """What `prepare` made of the samples: tensors, or dictionaries of them."""

    index: Tensor  # type: ignore[assignment]  # a tuple's own `index` is not missed
    """Their places in an indexed source; -1 in a stream."""

    keys: list[str]
    texts: list[str]
    """The right sides, as they were."""

    names: list[str]
    """Of the left sides: equal ones are the same picture or text."""


class Batch(NamedTuple):
    """This rank's share of one global batch."""

    epoch: int
    step: int
    """Its number in the epoch."""

    chunks: Iterator[Chunk]
    """To be read before the next batch; what is left is passed over. A share may be empty."""


class _Task(NamedTuple):
    """One chunk to make: for a worker the items, for the loader where they belong."""

    items: list[Any]
    epoch: int
    step: int
    last: bool
    """It ends the batch."""

    after: dict[str, Any]
    """The position behind it."""


class _Record(NamedTuple):
    """A record of a stream and the place behind it."""

    item: Any
    epoch: int
    cursor: Cursor


class Loader:
    """Batches of a source for one of `world` ranks, from the present position on.

    `epochs` ends the iteration after so many (None: never), `shuffle=False` keeps the source's order, `drop_last=False`
    gives an epoch's last, smaller batch too: together, one pass for evaluation. A stream's last batch is always given.
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
    ) -> None:
        for name, value in {"batch": batch, "chunk": chunk, "world": world}.items():
            check_count(name, value, least=1)
        check_count("workers", workers, least=0)
        if not 0 <= rank < world:
            bad_value("rank", expected=f"0 to {world - 1}", got=rank, remedy="Pass this process's rank.")
        self.source, self.prepare = source, prepare
        self.batch, self.chunk, self.seed, self.rank, self.world = batch, chunk, seed, rank, world
        self.workers, self.drop_last, self.shuffle, self.epochs = workers, drop_last, shuffle, epochs
        self.broken_limit = broken_limit
        self.seen = 0
        """Samples read so far, broken ones included."""

        self.broken: Counter[str] = Counter()
        """Reasons of the broken ones."""

        self._examples: dict[str, str] = {}
        self._position: dict[str, Any] = {"epoch": 0, "step": 0}
        self.steps_per_epoch: int | None = None
        if isinstance(source, Indexed):
            n = len(source)
            self.steps_per_epoch = n // batch if drop_last else -(-n // batch)
            if self.steps_per_epoch == 0:
                remedy = f"Lower the batch to {n} or less." if n else "Look at its name."
                bad_value("batch", expected=f"at most the {n} samples of {source.name}", got=batch, remedy=remedy)
        elif batch < world:
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
        """The chunks of one pass in the source's own order, over all samples or the first `limit`.

        Args:
            broken: Counts the samples that are left out, by reason; within the limit (`broken_limit`) they are forgiven
                as in training.
        """
        loader = cls(source, prepare, batch=chunk, chunk=chunk, shuffle=False, epochs=1, drop_last=False, **options)
        loader.broken = Counter() if broken is None else broken
        tasks = loader._tasks() if limit == 0 else _first(loader._tasks(), limit)
        return (made for _, made in loader._made(tasks) if made is not None)

    # --- position -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position behind the last batch whose chunks were all handed out; JSON can hold it.

        The same on every rank for an indexed source. Of a stream each rank has its own: gather them into a list.
        """
        return {**self._identity(), **self._position}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where a state was taken; of a list of all ranks' states, this rank's.

        Workers and chunk may differ from then; of an indexed source also the number of ranks.
        """
        if not isinstance(state, Mapping):
            if isinstance(self.source, Stream) and len(state) != self.world:
                remedy = "A stream is resumed by as many ranks as it was saved by."
                bad_value("state", expected=f"the states of {self.world} ranks", got=len(state), remedy=remedy)
            state = state[self.rank if isinstance(self.source, Stream) else 0]
        for name, mine in self._identity().items():
            if state.get(name) != mine:
                remedy = "Resume with the data and options that the run was started with, or start a new run."
                expected = f"{state.get(name)!r}, as in the checkpoint"
                bad_value(f"{name} of a resumed run", expected=expected, got=repr(mine), remedy=remedy)
        names = ("epoch", "step", "cursor") if isinstance(self.source, Stream) else ("epoch", "step")
        self._position = {name: state[name] for name in names if name in state}

    def _identity(self) -> dict[str, Any]:
        """What has to be the same for a position to mean the same."""
        same: dict[str, Any] = {"source": self.source.name, "seed": self.seed, "shuffle": self.shuffle}
        if isinstance(self.source, Stream):
            return {**same, "rank": self.rank, "world": self.world}
        return {**same, "length": len(self.source), "batch": self.batch, "drop_last": self.drop_last}

    # --- order ----------------------------------------------------------------------------------------------------

    def _tasks(self) -> Iterator[_Task]:
        return self._of_stream(self.source) if isinstance(self.source, Stream) else self._of_index(self.source)

    def _of_index(self, source: Indexed) -> Iterator[_Task]:
        n, steps, first = len(source), self.steps_per_epoch or 0, int(self._position["step"])
        for epoch in self._epochs():
            order = torch.randperm(n, generator=generator(self.seed, epoch)) if self.shuffle else torch.arange(n)
            for step in range(first, steps):
                rows = order[step * self.batch : (step + 1) * self.batch][self.rank :: self.world].tolist()
                after = {"epoch": epoch, "step": step + 1} if step + 1 < steps else {"epoch": epoch + 1, "step": 0}
                sizes = _sizes(len(rows), self.chunk)
                for i, size in enumerate(sizes):
                    items = rows[i * self.chunk : i * self.chunk + size]
                    yield _Task(items, epoch, step, i + 1 == len(sizes), after)
            first = 0

    def _of_stream(self, source: Stream) -> Iterator[_Task]:
        """Chunks of this rank's share. A batch may reach into the next epoch; it counts to that of its first record."""
        sizes = _sizes(len(range(self.rank, self.batch, self.world)), self.chunk)
        records, position = self._records(source), self._position
        while first := list(islice(records, sizes[0])):
            epoch = first[0].epoch
            step = position["step"] if position["epoch"] == epoch else 0
            for i, size in enumerate(sizes, 1):
                taken = first if i == 1 else list(islice(records, size))
                if taken:
                    end = taken[-1]
                    position = {"epoch": end.epoch, "step": step + 1 if end.epoch == epoch else 0, "cursor": end.cursor}
                last = i == len(sizes) or len(taken) < size
                yield _Task([record.item for record in taken], epoch, step, last, position)
                if last:
                    break

    def _records(self, source: Stream) -> Iterator[_Record]:
        start, seed = self._position.get("cursor"), self.seed if self.shuffle else None
        for epoch in self._epochs():
            found = start is not None
            part = source.records(seed=seed, epoch=epoch, part=self.rank, parts=self.world, start=start)
            for item, cursor in part:
                yield _Record(item, epoch, cursor)
                found = True
            if not found:
                remedy = "Look at the data's name, and that there are as many samples as ranks."
                bad_value(source.name, expected="at least one sample for each rank", got="none", remedy=remedy)
            start = None

    def _epochs(self) -> Iterator[int]:
        first = int(self._position["epoch"])
        return iter(count(first) if self.epochs is None else range(first, self.epochs))

    # --- reading --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Generator[Batch, None, None]:
        made = self._made(self._tasks())
        for task, chunk in made:
            chunks = self._chunks(task, chunk, made)
            yield Batch(task.epoch, task.step, chunks)
            for _ in chunks:
                pass

    def _chunks(self, task: _Task, chunk: Chunk | None, made: Iterator[tuple[_Task, Chunk | None]]) -> Iterator[Chunk]:
        """The chunks from this one to the last of its batch."""
        while True:
            if task.last:
                self._position = task.after
            if chunk is not None:
                yield chunk
            if task.last:
                return
            task, chunk = next(made)

    def _made(self, tasks: Iterator[_Task]) -> Iterator[tuple[_Task, Chunk | None]]:
        """Tasks, each with its chunk, or with None if none of its samples could be used."""
        waiting, abandoned = deque[_Task](), False
        if self.workers and isinstance(self.source, Stream):
            tasks = _ahead(tasks, 2 * self.workers)

        def items() -> Iterator[list[Any]]:
            for task in tasks:
                waiting.append(task)
                yield task.items
                if abandoned:
                    return

        loader: DataLoader[Any] = DataLoader(
            _Maker(self.source, self.prepare),
            sampler=items(),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=self.workers,
            multiprocessing_context="spawn" if self.workers else None,
            generator=torch.Generator(),  # else it would draw from the run's own random numbers
            worker_init_fn=follow,
        )
        with shielded() if self.workers else nullcontext():
            made = iter(loader)
        try:
            for chunk, broken, seen in made:
                self._count(broken, seen)
                yield waiting.popleft(), chunk
        except GeneratorExit:
            # Workers finish what they are at: one that ends while it hands over a tensor aborts, and says so.
            abandoned = True
            for _ in made:
                pass
            raise
        except RuntimeError as error:
            if is_death(error):
                raise ChildProcessError(DIED) from error
            raise

    def _count(self, broken: list[Broken], seen: int) -> None:
        self.seen += seen
        for error in broken:
            self.broken[error.reason] += 1
            self._examples.setdefault(error.reason, error.key)
        limit, total = self.broken_limit, self.broken.total()
        if total > (max(FORGIVEN, limit * self.seen) if 0 < limit < 1 else limit):
            reasons = "; ".join(
                f"{times} x {reason}, first {self._examples[reason]}" for reason, times in self.broken.most_common(5)
            )
            bad_value(
                f"samples of {self.source.name}",
                expected=f"at most {f'{limit:.2%}' if 0 < limit < 1 else f'{limit:g}'} broken",
                got=f"{total} of {self.seen} ({reasons})",
                remedy="Repair or remove them, or raise the limit (--broken-limit, a share or a number).",
            )


class _Maker(Dataset[Any]):
    """Makes a chunk of items: what workers do."""

    def __init__(self, source: Indexed | Stream, prepare: tuple[Prepare, Prepare]) -> None:
        self.prepare, self.stream = prepare, isinstance(source, Stream)
        self.read = source.sample if isinstance(source, Stream) else source.__getitem__
        self.edge: int = getattr(prepare[0], "edge", 0)

    def __getitem__(self, items: list[Any]) -> tuple[Chunk | None, list[Broken], int]:
        """The chunk, None if it would be empty; the broken among its items; how many items there were."""
        samples: list[Sample] = []
        places: list[int] = []
        broken: list[Broken] = []
        for item in items:
            try:
                samples.append(self._small(item))
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

    def _small(self, item: Any) -> Sample:
        """The sample, its picture no larger than it is needed: those of a chunk wait for each other."""
        with fitting(self.edge):
            sample = self.read(item)
        if self.edge and not isinstance(sample.left, str):  # of a source that has its own way to decode
            sample = sample._replace(left=fitted(sample.left, self.edge))
        return sample


def _unchanged(made: T) -> T:
    return made


def _sizes(rows: int, chunk: int) -> list[int]:
    """Rows cut into chunks; no rows are one empty chunk, so that every batch has a task."""
    return [min(chunk, rows - start) for start in range(0, rows, chunk)] or [0]


def _first(tasks: Iterator[_Task], limit: int) -> Iterator[_Task]:
    """The tasks of the first `limit` items."""
    for task in tasks:
        yield task._replace(items=task.items[:limit])
        limit -= len(task.items)
        if limit <= 0:
            return


def _ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items, read by a thread that is up to `depth` ahead: workers do not wait for a slow pipe."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    abandoned = threading.Event()

    def hand_over(item: T | None, error: BaseException | None) -> None:
        while not abandoned.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for item in items:
                hand_over(item, None)
                if abandoned.is_set():
                    return
            hand_over(None, StopIteration())
        except BaseException as error:  # whatever it is, it belongs to the one who waits
            hand_over(None, error)

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield cast(T, item)
    finally:
        abandoned.set()

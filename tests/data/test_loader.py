"""The loader: order, ranks, workers, positions, broken samples."""

import json
import pickle
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contratile.data import Broken, Indexed, Loader, Stream
from contratile.data.images import Squares, decode
from contratile.data.read_ahead import read_ahead
from contratile.data.sample import Kinds, Sample, held_out
from tests.data.files import encoded, picture
from tests.data.sources import PREPARE, Numbers, River


def rows(loader: Loader, batches: int | None = None) -> list[list[list[int]]]:
    """The numbers of each chunk of each batch; every chunk is checked to hold together."""
    found = []
    for batch in islice(loader, batches):
        chunks = list(batch.chunks)
        for chunk in chunks:
            assert torch.equal(chunk.left, -chunk.right) and chunk.texts == [str(-x) for x in chunk.left.tolist()]
            assert [int(key.split()[1]) for key in chunk.keys] == chunk.left.tolist()
            if isinstance(loader.source, Indexed):
                assert torch.equal(chunk.index, chunk.left)
            else:
                assert chunk.index.tolist() == [-1] * len(chunk.keys)
        found.append([chunk.left.tolist() for chunk in chunks])
    return found


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def flat(batches: list[list[list[int]]]) -> list[list[int]]:
    return [joined(batch) for batch in batches]


def test_sources_are_told_apart() -> None:
    assert isinstance(Numbers(3), Indexed) and not isinstance(Numbers(3), Stream)
    assert isinstance(River((3,)), Stream) and not isinstance(River((3,)), Indexed)


def test_an_epoch_is_a_permutation() -> None:
    loader = Loader(Numbers(23), PREPARE, batch=5, chunk=2, drop_last=False, seed=3)
    assert loader.steps_per_epoch == 5
    batches = rows(loader, 10)
    assert [[len(chunk) for chunk in batch] for batch in batches] == ([[2, 2, 1]] * 4 + [[2, 1]]) * 2
    first, second = (joined(flat(batches[i : i + 5])) for i in (0, 5))
    assert sorted(first) == sorted(second) == list(range(23)) and first != second
    assert rows(Loader(Numbers(23), PREPARE, batch=5, chunk=2, drop_last=False, seed=4), 5) != batches[:5]


def test_last_incomplete_batch_is_dropped() -> None:
    loader = Loader(Numbers(23), PREPARE, batch=5, chunk=5)
    assert loader.steps_per_epoch == 4
    got = [(batch.epoch, batch.step) for batch in islice(loader, 6)]
    assert got == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_one_pass_in_order() -> None:
    loader = Loader(Numbers(7), PREPARE, batch=4, chunk=3, shuffle=False, epochs=1, drop_last=False)
    assert rows(loader) == [[[0, 1, 2], [3]], [[4, 5, 6]]]


@pytest.mark.parametrize("source", [Numbers(10, frozenset({1})), River((10,), frozenset({1}))], ids=["index", "stream"])
def test_ordered(source: Numbers | River) -> None:
    for limit, expected in ((0, [[0, 2, 3], [4, 5, 6, 7], [8, 9]]), (6, [[0, 2, 3], [4, 5]]), (4, [[0, 2, 3]])):
        chunks = list(Loader.ordered(source, PREPARE, chunk=4, limit=limit))
        assert [chunk.left.tolist() for chunk in chunks] == expected


def test_torchs_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    rows(Loader(Numbers(23), PREPARE, batch=5, chunk=2), 6)
    assert torch.equal(before, torch.get_rng_state())


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 60),
    batch=st.integers(1, 30),
    chunk=st.integers(1, 12),
    world=st.integers(1, 5),
    position=st.integers(0, 12),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**40),
    resumed=st.tuples(st.integers(1, 12), st.integers(1, 5)),
)
def test_resumed_anywhere_as_if_never_stopped(
    n: int, batch: int, chunk: int, world: int, position: int, drop_last: bool, seed: int, resumed: tuple[int, int]
) -> None:
    """The global batch depends on neither ranks nor chunks, and a state of any of them resumes all others."""
    drop_last = drop_last and batch <= n
    options: dict[str, Any] = {"batch": batch, "drop_last": drop_last, "seed": seed}
    whole = flat(rows(Loader(Numbers(n), PREPARE, chunk=n, **options), position + 4))
    states = []
    for rank in range(world):
        loader = Loader(Numbers(n), PREPARE, chunk=chunk, rank=rank, world=world, **options)
        assert flat(rows(loader, position)) == [numbers[rank::world] for numbers in whole[:position]]
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert all(state == states[0] for state in states)
    chunk, world = resumed
    for rank in range(world):
        again = Loader(Numbers(n), PREPARE, chunk=chunk, rank=rank, world=world, **options)
        again.load_state_dict(states[0])
        got = rows(again, 4)
        assert flat(got) == [numbers[rank::world] for numbers in whole[position:]]
        assert all(len(chunks) <= chunk for batches in got for chunks in batches)


@settings(deadline=None, max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple),
    batch=st.integers(3, 30),
    chunk=st.integers(1, 12),
    world=st.integers(1, 3),
    position=st.integers(0, 12),
    resumed=st.integers(1, 12),
)
def test_streams_are_resumed_anywhere(
    lengths: tuple[int, ...], batch: int, chunk: int, world: int, position: int, resumed: int
) -> None:
    """Each rank goes on in its own part, whatever the chunks, and decodes nothing of what it passed."""
    for rank in range(world):
        options: dict[str, Any] = {"batch": batch, "rank": rank, "world": world}
        share, n = len(range(rank, batch, world)), lengths[rank % len(lengths)]
        whole = flat(rows(Loader(River(lengths), PREPARE, chunk=share, **options), position + 4))
        numbers = joined(whole)
        assert all(len(numbers) == share for numbers in whole)
        for start in range(0, len(numbers) - n + 1, n):
            first = start // n * 10_000 + rank * 1000
            assert sorted(numbers[start : start + n]) == list(range(first, first + n))
        loader = Loader(River(lengths), PREPARE, chunk=chunk, **options)
        assert flat(rows(loader, position)) == whole[:position]
        state = json.loads(json.dumps(loader.state_dict()))
        river = River(lengths)
        again = Loader(river, PREPARE, chunk=resumed, **options)
        again.load_state_dict([state if i == rank else {} for i in range(world)])
        seen = [(batch.epoch, batch.step, joined(c.left.tolist() for c in batch.chunks)) for batch in islice(again, 4)]
        assert [numbers for _, _, numbers in seen] == whole[position:]
        assert river.decoded == 4 * share
        every = Loader(River(lengths), PREPARE, chunk=share, **options)
        assert [(b.epoch, b.step) for b in islice(every, position + 4)][position:] == [x[:2] for x in seen]


def test_a_finite_stream_ends_with_what_is_left() -> None:
    for chunk, sizes in ((2, [[2, 2], [2, 2], [2]]), (3, [[3, 1], [3, 1], [2]])):
        loader = Loader(River((10,)), PREPARE, batch=4, chunk=chunk, shuffle=False, epochs=1)
        assert loader.steps_per_epoch is None
        got = rows(loader)
        assert [[len(c) for c in b] for b in got] == sizes and joined(flat(got)) == list(range(10))


@pytest.mark.parametrize(
    ("source", "workers"),
    [(Numbers(40, frozenset({3, 9})), 2), (River((17, 11), frozenset({1005})), 1)],
    ids=["index", "stream"],
)
def test_workers_change_nothing(source: Numbers | River, workers: int) -> None:
    """Neither the order, nor what is broken, nor the position: loaders with workers and without go on alike."""
    options: dict[str, Any] = {"batch": 8, "chunk": 3, "rank": 1, "world": 2}
    alone = Loader(source, PREPARE, **options)
    expected = rows(alone, 9)
    loader, again = Loader(source, PREPARE, workers=workers, **options), Loader(source, PREPARE, **options)
    assert rows(loader, 3) == expected[:3]  # in the middle of an epoch
    again.load_state_dict(loader.state_dict())
    assert rows(again, 3) == expected[3:6]
    onward = Loader(source, PREPARE, workers=workers, **options)
    onward.load_state_dict(again.state_dict())
    assert rows(onward, 3) == expected[6:]
    broken = loader.broken + again.broken + onward.broken
    assert broken == alone.broken and alone.broken.total() > 0


def test_reading_ahead_passes_items_and_errors_on_and_ends_when_left() -> None:
    def torn() -> Iterator[int]:
        yield 1
        raise OSError("torn")

    assert list(read_ahead(iter(range(50)), 3)) == list(range(50))
    items = read_ahead(torn(), 3)
    assert next(items) == 1
    with pytest.raises(OSError, match="torn"):
        next(items)
    before = set(threading.enumerate())  # the reader of the torn file may be among them for a moment
    endless = read_ahead(count(), 3)
    assert list(islice(endless, 10)) == list(range(10))
    (reader,) = set(threading.enumerate()) - before
    del endless
    reader.join(timeout=600)
    assert not reader.is_alive()


def test_what_was_not_read_is_passed_over() -> None:
    loader = Loader(Numbers(30), PREPARE, batch=10, chunk=2)
    expected = rows(Loader(Numbers(30), PREPARE, batch=10, chunk=2), 3)
    got = [next(batch.chunks).left.tolist() for batch in islice(loader, 3)]
    assert got == [batch[0] for batch in expected]


def test_the_position_moves_with_the_last_chunk() -> None:
    loader = Loader(Numbers(30), PREPARE, batch=10, chunk=5)
    batch = next(iter(loader))
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (0, 0)
    next(batch.chunks)
    assert loader.state_dict()["step"] == 0
    next(batch.chunks)
    assert loader.state_dict()["step"] == 1


def test_ranks_without_rows_have_empty_batches() -> None:
    loader = Loader(Numbers(6), PREPARE, batch=2, chunk=2, rank=2, world=3)
    assert rows(loader, 4) == [[], [], [], []] and loader.state_dict()["step"] == 1


# --- broken samples -----------------------------------------------------------------------------------------------


def test_broken_samples_leave_the_batch_smaller_and_are_counted() -> None:
    bad = frozenset({1, 2, 3})
    whole = flat(rows(Loader(Numbers(20), PREPARE, batch=20, chunk=20), 1))[0]
    loader = Loader(Numbers(20, bad), PREPARE, batch=20, chunk=6)
    assert flat(rows(loader, 1))[0] == [number for number in whole if number not in bad]
    assert loader.broken == {"odd": 2, "even": 1} and loader.seen == 20


def test_a_chunk_of_broken_samples_is_left_out() -> None:
    loader = Loader(Numbers(6, frozenset({0, 1})), PREPARE, batch=6, chunk=2, shuffle=False)
    assert rows(loader, 1) == [[[2, 3], [4, 5]]]


@pytest.mark.parametrize(
    ("limit", "bad", "stops"),
    [(0.01, 10, False), (0.01, 11, True), (0.2, 40, False), (0.2, 41, True), (5, 5, False), (5, 6, True), (0, 1, True)],
)
def test_broken_limit(limit: float, bad: int, stops: bool) -> None:
    source = Numbers(200, frozenset(range(bad)))
    loader = Loader(source, PREPARE, batch=200, chunk=200, broken_limit=limit)
    if not stops:
        assert len(flat(rows(loader, 1))[0]) == 200 - bad
        return
    with pytest.raises(ValueError) as caught:
        rows(loader, 1)
    text = str(caught.value)
    shown = f"at most {limit:.2%} broken" if 0 < limit < 1 else f"at most {limit} broken"
    assert text.startswith(f"samples of numbers: expected {shown}, got {bad} of 200 (")
    assert "x even, first number " in text and text.endswith("(--broken-limit, a share or a number).")


class Album:
    """Pictures that know how many of them there are at the moment."""

    kinds: Kinds = ("image", "text")
    name = "album"
    most = 0

    def __init__(self, form: str) -> None:
        self.form = form
        self.alive: set[int] = set()

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Sample:
        image = decode(encoded(picture(index, (40, 40))), "a") if self.form == "decoded" else picture(index, (40, 40))
        if image.width > 8:  # at its full size
            self.alive.add(index)
            self.most = max(self.most, len(self.alive))
            weakref.finalize(image, self.alive.discard, index)
        return Sample(image, f"{index}", f"{index}")

    def texts(self) -> Iterator[str]:
        return iter(())


@pytest.mark.parametrize(("form", "most"), [("decoded", 0), ("of its own", 2)])
def test_pictures_of_a_chunk_are_made_small_one_by_one(form: str, most: int) -> None:
    """Small files can hold large pictures: 24 of them at their full size took 6.7 GB."""
    source = Album(form)
    (chunk,) = Loader.ordered(source, (Squares(8), len), chunk=12)
    assert chunk.left.shape == (12, 3, 8, 8) and chunk.left[:, 0, 4, 4].tolist() == list(range(12))
    assert source.most <= most


def test_ordered_counts_what_it_leaves_out() -> None:
    broken: Counter[str] = Counter()
    source = Numbers(40, frozenset({1, 2, 9, 33}))
    chunks = list(Loader.ordered(source, PREPARE, chunk=7, broken=broken, broken_limit=4))
    assert broken == {"odd": 3, "even": 1}
    assert [n for chunk in chunks for n in chunk.index.tolist()] == [n for n in range(40) if n not in source.broken]
    assert all(chunk.left.tolist() == chunk.index.tolist() == [-int(text) for text in chunk.texts] for chunk in chunks)
    with pytest.raises(ValueError, match="expected at most 3 broken, got 4 of 35"):
        list(Loader.ordered(source, PREPARE, chunk=7, broken_limit=3))


def test_broken_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(Broken("a/b", "torn")))
    assert (error.key, error.reason, str(error)) == ("a/b", "torn", "a/b: torn")


# --- errors -------------------------------------------------------------------------------------------------------


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match=r"at most the 3 samples of numbers, got 4. Lower the batch to 3"):
        Loader(Numbers(3), PREPARE, batch=4, chunk=1)
    with pytest.raises(ValueError, match=r"batch: expected at least 4, one for each rank, got 3"):
        Loader(River((3,)), PREPARE, batch=3, chunk=1, world=4)
    with pytest.raises(ValueError, match=r"rank: expected 0 to 1, got 2"):
        Loader(Numbers(3), PREPARE, batch=1, chunk=1, rank=2, world=2)
    with pytest.raises(ValueError, match=r"river: expected at least one sample for each rank, got none"):
        rows(Loader(River((0,)), PREPARE, batch=1, chunk=1), 1)


@pytest.mark.parametrize(("option", "value"), [("batch", 4), ("seed", 1), ("shuffle", False), ("drop_last", False)])
def test_a_position_of_other_options_is_refused(option: str, value: Any) -> None:
    state = Loader(Numbers(9), PREPARE, batch=3, chunk=1).state_dict()
    other = Loader(Numbers(9), PREPARE, **{"batch": 3, "chunk": 1, option: value})
    with pytest.raises(ValueError, match=rf"{option} of a resumed run: expected .* Resume with the data and options"):
        other.load_state_dict(state)


def test_a_position_of_other_data_or_ranks_is_refused() -> None:
    state = Loader(Numbers(9), PREPARE, batch=3, chunk=1).state_dict()
    with pytest.raises(ValueError, match="length of a resumed run: expected 9, as in the checkpoint, got 8"):
        Loader(Numbers(8), PREPARE, batch=3, chunk=1).load_state_dict(state)
    states = [Loader(River((9,)), PREPARE, batch=3, chunk=1, rank=r, world=2).state_dict() for r in range(2)]
    with pytest.raises(ValueError, match="rank of a resumed run: expected 0, as in the checkpoint, got 1"):
        Loader(River((9,)), PREPARE, batch=3, chunk=1, rank=1, world=2).load_state_dict(states[0])
    with pytest.raises(ValueError, match=r"the states of 3 ranks, got 2. Resume a stream with the number of ranks"):
        Loader(River((9,)), PREPARE, batch=3, chunk=1, rank=1, world=3).load_state_dict(states)


# --- hashes -------------------------------------------------------------------------------------------------------


def test_held_out_is_a_share_and_never_changes() -> None:
    assert 850 < sum(held_out(f"name {i}", 0.1) for i in range(10_000)) < 1150
    assert not any(held_out(f"name {i}", 0.0) for i in range(100))
    assert [i for i in range(40) if held_out(f"name {i}", 0.1)] == [9, 12, 29, 32, 38]

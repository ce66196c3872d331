"""Several sources as one: shares, order, batches of one source, positions, streams."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contratile.data import Indexed, Loader, Stream
from contratile.data.mixture import MixedStream, drawn, epoch_order, mixed
from contratile.data.sample import Sample, Traits, generator, traits_of
from tests.data.sources import PREPARE, Numbers, River


class Shifted(Numbers):
    """Numbers from `first` on."""

    def __init__(self, n: int, first: int) -> None:
        super().__init__(n)
        self.first, self.name = first, f"numbers from {first}"

    def __getitem__(self, index: int) -> Sample:
        return (
            super()
            .__getitem__(index)
            ._replace(left=str(index + self.first), right=str(-index - self.first), key=f"number {index + self.first}")
        )


def pair(weights: tuple[float, ...] = (), batching: Any = "mixed", sizes: tuple[int, int] = (30, 12)) -> Indexed:
    found = mixed([Numbers(sizes[0]), Shifted(sizes[1], 1000)], weights=weights, batching=batching)
    assert isinstance(found, Indexed)
    return found


def batches(source: Indexed | Stream, count: int, **options: Any) -> list[list[int]]:
    """The numbers of each batch."""
    loader = Loader(source, PREPARE, **{"batch": 6, "chunk": 4, "seed": 5, **options})
    found = []
    for batch in islice(loader, count):
        found.append([x for chunk in batch.chunks for x in chunk.left.tolist()])
    return found


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.data(),
    st.integers(0, 200),
)
def test_shares_are_fair(lengths: list[int], data: Any, samples: int) -> None:
    weighted = data.draw(st.booleans())
    weights = data.draw(st.lists(st.floats(0.1, 9), min_size=len(lengths), max_size=len(lengths))) if weighted else []
    counts = drawn(lengths, weights, samples)
    total, shares = samples or sum(lengths), weights or lengths
    assert sum(counts) == total
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - total * share / sum(shares)) < 1
    if not weights and not samples:
        assert counts == lengths


@pytest.mark.parametrize("samples", [0, 7, 30, 100])
def test_one_source_has_the_order_it_always_had(samples: int) -> None:
    """Epochs of the source's own length are those of earlier versions, or old runs could not be resumed."""
    source = Numbers(30)
    found = [epoch_order(source, seed=3, epoch=epoch, samples=samples, batch=4) for epoch in range(4)]
    rounds = torch.cat([turns for _, turns in found])
    assert rounds.tolist() == [i // 30 for i in range(len(rounds))], "the second time it is another round"
    orders = torch.cat([torch.randperm(30, generator=generator(3, epoch)) for epoch in range(14)])
    n = samples or 30
    assert [x.tolist() for x, _ in found] == [orders[i * n : (i + 1) * n].tolist() for i in range(4)]


def test_without_weights_an_epoch_is_a_permutation_of_all() -> None:
    source = pair()
    assert len(source) == 42 and [source[i].left for i in (0, 29, 30, 41)] == ["0", "29", "1000", "1011"]
    first, second = (epoch_order(source, seed=1, epoch=epoch, samples=0, batch=4)[0] for epoch in (0, 1))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(42)) and not torch.equal(first, second)
    halves = [sum(i < 30 for i in half) for half in (first[:21].tolist(), first[21:].tolist())]
    assert all(10 <= half <= 20 for half in halves), "mixed, not one after the other"


def test_weights_are_shares_and_small_sources_are_repeated_evenly() -> None:
    source = pair(weights=(1, 2))
    seen: Counter[int] = Counter()
    for epoch in range(6):
        indices, rounds = epoch_order(source, seed=1, epoch=epoch, samples=0, batch=4)
        order = indices.tolist()
        assert len(set(zip(order, rounds.tolist(), strict=True))) == len(order), "never the same twice"
        assert len(order) == 42 and sum(i < 30 for i in order) == 14
        seen.update(order)
    large, small = [seen[i] for i in range(30)], [seen[i] for i in range(30, 42)]
    assert sum(large) == 84 and set(large) <= {2, 3} and sum(small) == 168 and set(small) == {14}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.integers(1, 8), st.sampled_from([(), (1.0, 3.0)]))
def test_homogeneous_batches_come_from_one_source(seed: int, batch: int, weights: tuple[float, ...]) -> None:
    source = pair(weights, "homogeneous")
    order, _ = epoch_order(source, seed=seed, epoch=2, samples=0, batch=batch)
    assert len(order) % batch == 0
    for piece in order.split(batch):
        assert len({int(i) < 30 for i in piece}) == 1
    kinds = [int(piece[0]) < 30 for piece in order.split(batch)]
    counts = drawn((30, 12), weights, 0)
    assert (sum(kinds), len(kinds) - sum(kinds)) == (counts[0] // batch, counts[1] // batch)


@pytest.mark.parametrize("batching", ["mixed", "homogeneous"])
@pytest.mark.parametrize("weights", [(), (1.0, 2.0)])
def test_ranks_chunks_and_workers_share_the_same_batches(batching: str, weights: tuple[float, ...]) -> None:
    source = pair(weights, batching)
    alone = batches(source, 9)
    for world in (2, 3):
        ranks = [batches(source, 9, rank=rank, world=world, chunk=1) for rank in range(world)]
        for step, whole in enumerate(alone):
            assert [
                x
                for position in range(6)
                for x in ranks[position % world][step][position // world : position // world + 1]
            ] == whole
    assert batches(source, 9, workers=1) == alone
    if batching == "homogeneous":
        assert all(len({x >= 1000 for x in batch}) == 1 for batch in alone) and len({x[0] >= 1000 for x in alone}) == 2


STREAMS = {
    "indexed": lambda batching: pair((1.0, 2.0), batching),
    "streams": lambda batching: mixed([River((20, 13)), Shifted(9, 5_000_000)], weights=(1, 2), batching=batching),
}


@pytest.mark.parametrize("batching", ["mixed", "homogeneous"])
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("samples", [0, 24])
def test_a_position_resumes_anywhere(kind: str, batching: str, samples: int) -> None:
    def made(rank: int) -> Loader:
        options = {"batch": 6, "chunk": 2, "seed": 5, "rank": rank, "world": 2, "samples_per_epoch": samples}
        return Loader(STREAMS[kind](batching), PREPARE, **options)  # type: ignore[arg-type]

    for rank in (0, 1):
        whole, states = [], []
        loader = made(rank)
        for batch in islice(loader, 20):
            whole.append([x for chunk in batch.chunks for x in chunk.left.tolist()])
            states.append(loader.state_dict())
        for at in (0, 6, 13):
            again = made(rank)
            again.load_state_dict(states[at])
            rest = [[x for chunk in batch.chunks for x in chunk.left.tolist()] for batch in islice(again, 19 - at)]
            assert rest == whole[at + 1 :]


def test_streams_are_mixed_by_weight_and_start_again() -> None:
    source = mixed([River((7,)), Shifted(5, 5_000_000)], weights=(1, 3))
    assert isinstance(source, MixedStream) and isinstance(source, Stream)
    numbers = [x for batch in batches(source, 200) for x in batch]
    share = sum(x >= 5_000_000 for x in numbers) / len(numbers)
    assert 0.7 < share < 0.8 and len(numbers) == 1200
    epochs = {x // 10_000 for x in numbers if x < 5_000_000}
    assert {0, 1, 2} <= epochs, "a stream that ends begins its next epoch"
    seen = Counter(x for x in numbers if x >= 5_000_000)
    assert len(seen) == 5 and max(seen.values()) - min(seen.values()) <= 1


def test_ranks_choose_the_same_stream_for_a_homogeneous_batch() -> None:
    ranks = []
    for rank in range(3):
        source = mixed([River((7, 5, 6)), Shifted(9, 5_000_000)], weights=(1, 1), batching="homogeneous")
        ranks.append([{x >= 5_000_000 for x in batch} for batch in batches(source, 30, rank=rank, world=3)])
    assert ranks[0] == ranks[1] == ranks[2] and all(len(kinds) == 1 for kinds in ranks[0])
    assert {True} in ranks[0] and {False} in ranks[0]


def test_names_of_different_sources_are_different() -> None:
    """Two folders may hold files of the same name; two equal texts are the same text."""

    class Files(Numbers):
        name = "files (train)"

        def __getitem__(self, index: int) -> Sample:
            return super().__getitem__(index)._replace(name=f"{index}.png")

    source = mixed([Files(2), Files(2), Numbers(2)])
    assert isinstance(source, Indexed)
    samples = [source[i] for i in range(6)]
    assert [x.name for x in samples] == ["files#1/0.png", "files#1/1.png", "files#2/0.png", "files#2/1.png", "", ""]
    assert len({x.key for x in samples}) == 6 and samples[5].key == "numbers/number 1"


def test_a_sample_that_is_read_again_has_another_round() -> None:
    """On which crops, texts and hard negatives depend: a small source with a large weight is not always the same."""
    streams = mixed([River((50,)), Shifted(4, 5_000_000)], weights=(1, 9))
    for source in (pair((1, 9), sizes=(50, 4)), streams):
        loader = Loader(source, PREPARE, batch=20, chunk=20, seed=1)
        seen: Counter[tuple[Any, int]] = Counter()
        for task in islice(loader.order.tasks(source, {"epoch": 0, "step": 0}), 30):
            seen.update(zip(map(str, task.items), task.rounds, strict=True))
        assert max(seen.values()) == 1 and max(turn for _, turn in seen) > 20


def test_homogeneous_streams_need_the_same_batch_to_resume() -> None:
    source = mixed([River((20,)), Shifted(9, 5_000_000)], weights=(1, 1), batching="homogeneous")
    loader = Loader(source, PREPARE, batch=8, chunk=4)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ValueError, match="batch of a resumed run: expected 8, as in the checkpoint, got 6"):
        Loader(source, PREPARE, batch=6, chunk=4).load_state_dict(state)
    with pytest.raises(ValueError, match="samples_per_epoch of a resumed run: expected 0, as in the check"):
        Loader(source, PREPARE, batch=8, chunk=4, samples_per_epoch=40).load_state_dict(state)
    del state["samples_per_epoch"]  # as earlier versions wrote it
    Loader(source, PREPARE, batch=8, chunk=4).load_state_dict(state)


def test_evaluation_reads_all_sources_once() -> None:
    streams = mixed([River((4,)), Shifted(3, 1000)])
    whole, few = [*range(30), *range(1000, 1012)], [*range(4), *range(1000, 1003)]
    for source, numbers in ((pair((1, 2)), whole), (pair((), "homogeneous"), whole), (streams, few)):
        found = [x for chunk in Loader.ordered(source, PREPARE, chunk=5) for x in chunk.left.tolist()]
        assert found == numbers


def test_a_stream_has_epochs_if_they_have_a_length() -> None:
    assert Loader(River((9,)), PREPARE, batch=4, chunk=4).steps_per_epoch is None
    assert Loader(River((9,)), PREPARE, batch=4, chunk=4, samples_per_epoch=21).steps_per_epoch == 5
    with pytest.raises(ValueError, match="batch: expected at most the 3 samples of river, got 4"):
        Loader(River((9,)), PREPARE, batch=4, chunk=4, samples_per_epoch=3)


def test_mistakes() -> None:
    class Pictures(Numbers):
        kinds = ("image", "text")

    with pytest.raises(
        ValueError, match=r"numbers: expected pairs of text and text, as in numbers, got image and text"
    ):
        mixed([Numbers(3), Pictures(3)])
    one, other = Numbers(3), Numbers(3)
    one.traits, other.traits = Traits(negatives="text"), Traits(negatives="image")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="hard negatives: expected texts or pictures in all sources, got both"):
        mixed([one, other])
    with pytest.raises(
        ValueError,
        match="batch: expected at most the 12 pairs of numbers from 1000 in an epoch",
    ):
        Loader(pair((), "homogeneous"), PREPARE, batch=13, chunk=4)


def test_traits_are_those_of_all() -> None:
    one, other = Numbers(3), Numbers(3)
    one.traits = Traits(several_texts=True, negatives="text", negatives_count=2)  # type: ignore[attr-defined]
    other.traits = Traits(labelled=False)  # type: ignore[attr-defined]
    assert traits_of(mixed([one, other])) == Traits(True, "text", 2, False)
    assert mixed([one]) is one

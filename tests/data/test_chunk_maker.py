"""What a chunk is made of: one of several texts, hard negatives, views."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from PIL import Image

from contratile.data import Loader
from contratile.data.augment import AugmentConfig
from contratile.data.chunk_maker import Chunk, ChunkMaker, Items, Reading
from contratile.data.images import Squares
from contratile.data.sample import Kinds, Sample, Traits
from tests.data.files import picture


class Pairs:
    """Sample i: text i with three captions, and i % 4 hard negatives."""

    name = "pairs"
    kinds: Kinds = ("text", "text")
    traits = Traits(several_texts=True, negatives="text", negatives_count=2)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Sample:
        captions = [f"{index}{letter}" for letter in "abc"]
        hard = tuple(f"not {index} {place}" for place in range(index % 4))
        return Sample(str(index), captions[0], f"key {index}", more=tuple(captions[1:]), negatives=hard)

    def texts(self) -> Iterator[str]:
        return iter(())


class Pictures(Pairs):
    """Sample i: a noisy picture, and pictures as hard negatives."""

    kinds: Kinds = ("image", "text")
    traits = Traits(negatives="image", negatives_count=1)

    def __getitem__(self, index: int) -> Sample:
        noise = torch.randint(256, (20, 24, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
        return Sample(
            Image.fromarray(noise.numpy()), f"name {index}", f"key {index}", negatives=(picture(index),) * (index % 2)
        )


def made(source: Any, items: list[int], epoch: int = 0, prepare: Any = (list, list), **options: Any) -> Chunk:
    chunk, broken, seen = ChunkMaker(source, prepare, Reading(**options))[Items(items, [epoch] * len(items))]
    assert chunk is not None and not broken and seen == len(items)
    return chunk


def test_one_of_several_texts_is_chosen_for_each_epoch() -> None:
    items = list(range(40))
    epochs = [made(Pairs(), items, epoch, seed=3).right for epoch in range(30)]
    assert epochs[4] == made(Pairs(), items, 4, seed=3).right, "always the same"
    assert epochs[4] == [made(Pairs(), [i], 4, seed=3).right[0] for i in items], "in any chunk"
    assert epochs[4] != made(Pairs(), items, 4, seed=4).right
    letters = Counter(text[-1] for epoch in epochs for text in epoch)
    assert letters.keys() == set("abc") and min(letters.values()) > 300
    assert made(Pairs(), items, 4, seed=3).texts == epochs[4], "ids are of the chosen ones"


def test_negatives_that_are_not_used_are_not_read() -> None:
    read = []

    class Lazy(Pictures):
        def __getitem__(self, index: int) -> Sample:
            def one(place: int) -> Image.Image:
                read.append(place)
                return picture(place)

            return super().__getitem__(index)._replace(negatives=tuple(partial(one, place) for place in range(9)))

    made(Lazy(), [0, 1], prepare=(Squares(8), list))
    assert not read
    chunk = made(Lazy(), [0, 1], negatives=2, prepare=(Squares(8), list))
    assert len(read) == 4 and chunk.negatives is not None and bool(chunk.negatives.there.all())


def test_evaluation_takes_the_first_text() -> None:
    for epoch in range(3):
        assert made(Pairs(), [0, 7], epoch, training=False).right == ["0a", "7a"]
    assert [chunk.right for chunk in Loader.ordered(Pairs(), (list, list), chunk=40)] == [[f"{i}a" for i in range(40)]]


def test_hard_negatives_have_places() -> None:
    chunk = made(Pairs(), [0, 1, 2, 3], negatives=2, training=False)
    assert chunk.negatives is not None
    inputs, there, texts = chunk.negatives
    assert there.tolist() == [[False, False], [True, False], [True, True], [True, True]]
    assert inputs[:6] == ["0a", "0a", "not 1 0", "1a", "not 2 0", "not 2 1"] and len(inputs) == 8
    assert texts[:6] == ["", "", "not 1 0", "", "not 2 0", "not 2 1"] and len(texts) == 8
    assert made(Pairs(), [3]).negatives is None


def test_of_more_negatives_some_are_chosen_for_each_epoch() -> None:
    seen: set[tuple[str, ...]] = set()
    for epoch in range(20):
        hard = made(Pairs(), [3], epoch, negatives=2).negatives
        again = made(Pairs(), [2, 3], epoch, negatives=2).negatives
        assert hard is not None and again is not None and hard.texts == again.texts[2:]
        assert len(set(hard.texts)) == 2
        seen.add(tuple(sorted(hard.texts)))
    assert len(seen) == 3


@pytest.mark.parametrize("augment", [None, AugmentConfig(augment="simclr")])
@pytest.mark.parametrize("edge", [8, 12])
def test_a_second_model_is_given_the_same_crops_at_its_own_size(edge: int, augment: AugmentConfig | None) -> None:
    options: dict[str, Any] = {"negatives": 1, "augment": augment, "seed": 3}
    reading, items = Reading(**options), Items([0, 1, 3], [5] * 3)
    second = (Squares(edge), lambda texts: [text.upper() for text in texts])
    chunk, _, _ = ChunkMaker(Pictures(), (Squares(8), list), reading, second)[items]
    assert chunk is not None and chunk.second is not None and chunk.negatives is not None
    own = made(Pictures(), [0, 1, 3], 5, prepare=second, **options)
    assert own.negatives is not None
    assert torch.equal(chunk.second.left, own.left)
    assert torch.equal(chunk.second.negatives[1:], own.negatives.inputs[1:])
    assert torch.equal(chunk.second.negatives[0], own.left[0]), "an empty place"
    assert chunk.second.right == ["NAME 0", "NAME 1", "NAME 3"]
    assert (chunk.second.left is chunk.left) == (edge == 8)
    plain = made(Pictures(), [0, 1, 3], 5, prepare=(Squares(8), list), **options)
    assert plain.second is None and plain.negatives is not None
    assert torch.equal(chunk.left, plain.left) and torch.equal(chunk.negatives.inputs, plain.negatives.inputs)


def test_hard_negatives_of_texts_go_to_both_models() -> None:
    reading = Reading(negatives=2, training=False)
    chunk, _, _ = ChunkMaker(Pairs(), (list, list), reading, (tuple, tuple))[Items([1, 3], [0, 0])]
    assert chunk is not None and chunk.second is not None and chunk.negatives is not None
    assert list(chunk.second.negatives) == chunk.negatives.inputs
    assert chunk.second.left == ("1", "3") and chunk.second.right == tuple(chunk.texts)


def test_pictures_as_hard_negatives_go_to_the_image_tower() -> None:
    chunk = made(Pictures(), [0, 1], negatives=1, prepare=(Squares(8), list))
    assert chunk.negatives is not None and chunk.negatives.inputs.shape == (2, 3, 8, 8)
    assert chunk.negatives.there.tolist() == [[False], [True]] and chunk.negatives.texts == ["", ""]
    assert chunk.negatives.inputs[1, :, 0, 0].tolist() == [1, 0, 77]
    assert torch.equal(chunk.negatives.inputs[0], chunk.left[0]), "an empty place repeats the sample's own"


@pytest.mark.parametrize("workers", [0, 1])
def test_two_views_are_two_pictures_of_one(workers: int) -> None:
    config, prepare = AugmentConfig(views=2), (Squares(8), Squares(8))
    loader = Loader(Pictures(), prepare, batch=20, chunk=7, augment=config, seed=1, workers=workers)
    first = [chunk for _, batch in zip(range(2), loader, strict=False) for chunk in batch.chunks]
    assert all(chunk.left.shape == chunk.right.shape and not torch.equal(chunk.left, chunk.right) for chunk in first)
    second = [chunk for _, batch in zip(range(2), loader, strict=False) for chunk in batch.chunks]  # another epoch
    by_key = [
        {key: chunk.left[row] for chunk in epoch for row, key in enumerate(chunk.keys)} for epoch in (first, second)
    ]
    assert by_key[0].keys() == by_key[1].keys()
    assert sum(torch.equal(by_key[0][key], by_key[1][key]) for key in by_key[0]) == 0
    again = made(Pictures(), [int(first[0].keys[0].split()[1])], prepare=prepare, augment=config, seed=1)
    assert torch.equal(again.left[0], first[0].left[0]) and torch.equal(again.right[0], first[0].right[0])


def test_evaluation_of_views_compares_with_the_picture_as_it_is() -> None:
    prepare = (Squares(8), Squares(8))
    (plain,) = Loader.ordered(Pictures(), (Squares(8), list), chunk=40)
    (seen,) = Loader.ordered(Pictures(), prepare, chunk=40, augment=AugmentConfig(views=2))
    assert torch.equal(seen.left, plain.left) and not torch.equal(seen.right, plain.left)
    (augmented,) = Loader.ordered(Pictures(), (Squares(8), list), chunk=40, augment=AugmentConfig(augment="simclr"))
    assert torch.equal(augmented.left, plain.left), "evaluation is not augmented"


def test_views_need_pictures() -> None:
    with pytest.raises(ValueError, match="views: expected images, got texts of pairs"):
        Loader(Pairs(), (list, list), batch=4, chunk=4, augment=AugmentConfig(views=2))

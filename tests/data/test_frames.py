"""Views of images while they are decoded: the same in any process, from reduced JPEGs as from whole ones."""

from collections.abc import Iterator
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from contratile.data import Loader
from contratile.data.augment import PRESETS, Augment, AugmentConfig, Strengths
from contratile.data.frames import Frames, framed
from contratile.data.images import Squares, decode
from contratile.data.resize import center_square, resized
from contratile.data.sample import Broken, Kinds, Sample, random_numbers
from contratile.data.shards import Shards
from tests.data.files import encoded, write_tar
from tests.data.photos import gap, jpeg, photo, rms

CLIP, SIMCLR = Augment(PRESETS["clip"]), Augment(PRESETS["simclr"])


def view(data: bytes | Image.Image, key: str = "a", **options: Any) -> Image.Image:
    with framed(Frames(options.pop("edge", 32), **options)):
        return decode(data, key)


# --- random and repeatable ----------------------------------------------------------------------------------------


def test_a_view_depends_on_seeds_key_and_number_alone() -> None:
    data = jpeg(photo((90, 70)))
    first = view(data, augment=SIMCLR, seeds=(0, 0))
    view(jpeg(photo((50, 50))), augment=SIMCLR, seeds=(0, 0))  # something else in between
    assert gap(view(data, augment=SIMCLR, seeds=(0, 0)), first) == 0
    for seeds, key in (((1, 0), "a"), ((0, 1), "a"), ((0, 0), "b")):
        assert gap(view(data, key, augment=SIMCLR, seeds=seeds), first) > 0


def test_views_differ_and_the_first_is_the_single_one() -> None:
    data, several = jpeg(photo((90, 70))), Frames(32, augment=SIMCLR, seeds=(3, 1), views=2)
    with framed(several):
        first = decode(data, "a")
    one, two = several.views_of(first, "a")
    assert one is first and gap(one, two) > 0 and gap(view(data, augment=SIMCLR, seeds=(3, 1)), one) == 0


def test_the_first_view_can_be_left_as_it_is() -> None:
    data, both = encoded(photo((90, 70))), Frames(32, augment=SIMCLR, seeds=(3, 1), views=2, plain_first=True)
    with framed(both):
        plain = decode(data, "a")
    assert gap(plain, center_square(photo((90, 70)), 32)) == 0
    assert gap(both.views_of(plain, "a")[1], plain) > 0


def test_pictures_that_a_source_made_itself_get_views_too() -> None:
    image, own = photo((90, 70)), Frames(32, augment=SIMCLR, seeds=(3, 1), views=2)
    views = own.views_of(image, "a")
    assert [x.size for x in views] == [(32, 32)] * 2 and gap(views[0], view(image, augment=SIMCLR, seeds=(3, 1))) == 0
    grey = own.views_of(image.convert("L"), "b")
    assert grey[0].mode == "RGB"


def test_without_augmentation_they_are_center_squares() -> None:
    assert gap(view(encoded(photo((90, 70)))), center_square(photo((90, 70)), 32)) == 0
    exact = photo((32, 32))
    assert gap(view(encoded(exact)), exact) == 0
    made = Frames(32).frame(exact, "a")
    assert made is not exact, "a copy: the picture belongs to its source"


# --- reduced decoding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "edge", "scale", "factor"),
    [
        ((1500, 1125), 224, (0.9, 1.0), 2),
        ((1501, 1127), 128, (0.9, 1.0), 4),
        ((1501, 1127), 64, (0.9, 1.0), 8),
        ((1125, 1500), 64, (0.3, 0.4), 4),
        ((341, 256), 224, (0.9, 1.0), 1),
        ((341, 256), 224, (0.08, 1.0), 1),
    ],
)
def test_reduced_pictures_show_the_same_region(
    size: tuple[int, int], edge: int, scale: tuple[float, float], factor: int
) -> None:
    """Against decoding whole and cutting out the same place: as close as two ways of scaling are to each other.

    A region that is half a pixel of the result off would be several times as far away.
    """
    data, augment = jpeg(photo(size)), Augment(Strengths(crop_scale=scale))
    seen = []
    for key in map(str, range(4)):
        made = Frames(edge, augment=augment, seeds=(1, 2))
        with Image.open(BytesIO(data)) as image:
            assert made.draft(image, key) == factor
            (changes,) = made._drawn
            assert changes is not None
            reduced = made.frame(image.convert("RGB"), key, drafted=True)
            assert (changes.box[2] <= image.width) and (changes.box[3] <= image.height)
        box = tuple(min(x * factor, side) for x, side in zip(changes.box, size * 2, strict=True))
        exact = resized(decode(data, key), box, edge)  # type: ignore[arg-type]
        drawn = made._draw(size, key)[0]
        assert drawn is not None and max(abs(a - b) for a, b in zip(box, drawn.box, strict=True)) <= factor / 2
        step = max(1, round((box[2] - box[0]) / edge / 2))
        moved = (box[0] - step, box[1], box[2] - step, box[3])
        seen.append((rms(reduced, exact), rms(resized(decode(data, key), moved, edge), exact)))
    near, far = np.array(seen).T
    assert near.max() < 1.5 and (factor == 1 or near.mean() < 0.5 * far.mean())
    assert factor > 1 or near.max() == 0


@pytest.mark.parametrize("size", [(2000, 1500), (2001, 1503), (1037, 2111)])
def test_reduced_center_squares_are_close_to_whole_ones(size: tuple[int, int]) -> None:
    """A side that is no multiple of the factor is stretched by less than a pixel of the reduced picture."""
    data = jpeg(photo(size))
    assert rms(view(data, edge=64), center_square(decode(data, "a"), 64)) < 1.3


def test_nearest_takes_pixels_of_the_whole_picture() -> None:
    data = jpeg(photo((1600, 1200)))
    nearest = Augment(Strengths(interpolation="nearest", crop_scale=(1.0, 1.0), crop_ratio=(4 / 3, 4 / 3)))
    expected = decode(data, "a").resize((32, 32), Image.Resampling.NEAREST)
    assert gap(view(data, augment=nearest, seeds=(0, 0)), expected) == 0


def test_all_views_have_enough_pixels() -> None:
    """The smallest crop decides at which size a picture with two views is decoded."""
    data = jpeg(photo((1600, 1200)))
    factors = []
    for views in (1, 2, 6):
        made = Frames(100, augment=SIMCLR, seeds=(0, 4), views=views)
        with Image.open(BytesIO(data)) as image:
            factors.append(made.draft(image, "a"))
            for changes in made._drawn:
                assert changes is not None
                short = min(changes.box[2] - changes.box[0], changes.box[3] - changes.box[1])
                assert factors[-1] == 1 or short >= 2 * 100 - 1
    assert factors[0] >= factors[1] >= factors[2] and factors[0] > factors[2]


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 40), st.integers(0, 99))
@settings(deadline=None, max_examples=60)
def test_any_jpeg_gives_a_square(width: int, height: int, edge: int, seed: int) -> None:
    data = jpeg(Image.new("RGB", (width, height), (200, 30, 90)))
    for augment in (CLIP, SIMCLR, None):
        found = view(data, augment=augment, seeds=(seed, 0), edge=edge)
        assert found.size == (edge, edge) and found.mode == "RGB"
    assert gap(view(data, augment=CLIP, seeds=(seed, 0), edge=edge), Image.new("RGB", (edge, edge), (200, 30, 90))) < 6


# --- odd pictures -------------------------------------------------------------------------------------------------


def _odd() -> dict[str, bytes]:
    base = photo((90, 70))
    palette = base.convert("P")
    clear = base.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(clear.size))
    see_through = base.convert("P")
    see_through.info["transparency"] = 3
    return {
        "one pixel": encoded(photo((1, 1))),
        "wide": encoded(photo((5000, 1))),
        "tall": jpeg(photo((1, 5000))),
        "long jpeg": jpeg(photo((5000, 40))),
        "palette": encoded(palette),
        "clear palette": encoded(see_through),
        "clear": encoded(clear),
        "grey": jpeg(base.convert("L")),
        "grey, 16 bit": encoded(Image.fromarray(np.arange(6300, dtype=np.uint16).reshape(70, 90) * 10)),
        "bits": encoded(base.convert("1")),
        "cmyk": jpeg(base.convert("CMYK")),
        "large cmyk": jpeg(photo((900, 700)).convert("CMYK")),
        "large grey": jpeg(photo((900, 700)).convert("L")),
        "progressive": _progressive(photo((900, 700))),
        "animation": encoded(base.convert("P"), "GIF"),
    }


def _progressive(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "JPEG", progressive=True, quality=90)
    return file.getvalue()


ODD = _odd()


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("augment", [None, CLIP, SIMCLR], ids=["plain", "clip", "simclr"])
def test_odd_pictures(name: str, augment: Augment | None) -> None:
    """What is seen is the picture that `decode` gives alone: its mean colour, unless colours were changed."""
    data = ODD[name]
    found = view(data, augment=augment, seeds=(0, 0))
    assert found.size == (32, 32) and found.mode == "RGB"
    if augment is CLIP:
        whole = decode(data, "a")
        changes = CLIP.draw(whole.size, random_numbers(0, 0, "a", 0))
        part = np.asarray(whole.crop(changes.box)).mean((0, 1))
        assert np.abs(np.asarray(found).mean((0, 1)) - part).max() < 4


@pytest.mark.parametrize("augment", [None, CLIP], ids=["plain", "clip"])
@pytest.mark.parametrize("size", [(90, 70), (1600, 1200)])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_truncated_jpegs_are_broken(size: tuple[int, int], share: float, augment: Augment | None) -> None:
    """Also those that are decoded at a fraction of their size, and when the crop does not reach what is missing."""
    data = jpeg(photo(size))
    with pytest.raises(Broken, match="truncated image"):
        view(data[: int(share * len(data))], augment=augment, seeds=(0, 0))


# --- in the loader ------------------------------------------------------------------------------------------------


class Photos:
    """Twelve JPEGs by index, and a caption each. Half of them are large."""

    kinds: Kinds = ("image", "text")
    name = "photos"

    def __init__(self) -> None:
        self.data = [jpeg(photo((300, 240) if i % 2 else (60, 48), seed=i)) for i in range(12)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Sample:
        key = f"photo {index}"
        return Sample(decode(self.data[index], key), f"caption {index}", key)

    def texts(self) -> Iterator[str]:
        return iter(())


def pictures(loader: Loader, batches: int) -> dict[tuple[int, str], bytes]:
    """Pixels by epoch and key."""
    found = {}
    for batch in islice(loader, batches):
        for chunk in batch.chunks:
            for key, pixels in zip(chunk.keys, chunk.left, strict=True):
                found[batch.epoch, key] = pixels.numpy().tobytes()
    return found


def loader_of(source: Any, **options: Any) -> Loader:
    config = AugmentConfig(augment="simclr", crop_scale=(0.3, 1.0))
    options = {"batch": 6, "chunk": 4, "seed": 5, "augment": config, **options}
    return Loader(source, (Squares(24), list), **options)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, str], bytes]:
    return pictures(loader_of(Photos()), 4)


def test_epochs_and_seeds_differ(expected: dict[tuple[int, str], bytes]) -> None:
    assert len(expected) == 24 and len(set(expected.values())) == 24
    other = pictures(loader_of(Photos(), seed=6), 4)
    assert set(other) == set(expected) and not set(other.values()) & set(expected.values())


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2, "chunk": 1}, {"batch": 4}, {"chunk": 6}], ids=str)
def test_pictures_do_not_depend_on_workers_chunks_and_batches(
    options: dict[str, int], expected: dict[tuple[int, str], bytes]
) -> None:
    found = pictures(loader_of(Photos(), **options), 24 // options.get("batch", 6))
    assert found == expected


def test_ranks_together_see_what_one_process_sees(expected: dict[tuple[int, str], bytes]) -> None:
    found: dict[tuple[int, str], bytes] = {}
    for rank in range(3):
        found |= pictures(loader_of(Photos(), rank=rank, world=3), 4)
    assert found == expected


def test_a_resumed_run_sees_the_same_pictures(expected: dict[tuple[int, str], bytes]) -> None:
    first, second = loader_of(Photos()), loader_of(Photos(), chunk=2, workers=1)
    for batch in islice(first, 3):
        list(batch.chunks)
    second.load_state_dict(first.state_dict())
    rest = pictures(second, 1)
    assert len(rest) == 6 and {place: expected[place] for place in rest} == rest


def test_evaluation_is_not_augmented() -> None:
    source = Photos()
    config = AugmentConfig(augment="simclr")
    chunks = list(Loader.ordered(source, (Squares(24), list), chunk=5, augment=config))
    plain = list(Loader.ordered(source, (Squares(24), list), chunk=5))
    assert all(torch.equal(a.left, b.left) for a, b in zip(chunks, plain, strict=True))
    expected = center_square(decode(source.data[0], "a"), 24)
    assert np.array_equal(chunks[0].left[0].permute(1, 2, 0).numpy(), np.asarray(expected))


def test_shards_are_augmented_by_key(tmp_path: Path) -> None:
    """Two epochs of a stream: other pictures of the same samples, the same in workers."""
    source = Photos()
    members = [
        member
        for i, data in enumerate(source.data)
        for member in ((f"{i:04d}.jpg", data), (f"{i:04d}.txt", f"caption {i}".encode()))
    ]
    write_tar(tmp_path / "00000.tar", members)
    shards = Shards(str(tmp_path / "00000.tar"), "train", test_share=None)
    alone, with_workers = (pictures(loader_of(shards, workers=n), 4) for n in (0, 2))
    assert alone == with_workers and len(set(alone.values())) == 24

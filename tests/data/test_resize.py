"""Crops scaled to squares: against Pillow, torchvision and open_clip."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from contratile.data import resize
from contratile.data.resize import FILTERS, Interpolation, center_square, decoded_smaller, resized, shrunk_box
from tests.data.photos import gap, jpeg, photo, rms
from tests.torchvision_repair import repair_torchvision


@pytest.mark.parametrize("interpolation", FILTERS)
@pytest.mark.parametrize("edge", [1, 7, 32, 224])
@pytest.mark.parametrize("size", [(1, 1), (300, 1), (1, 300), (31, 32), (32, 32), (341, 256), (900, 640)])
def test_the_whole_picture_is_scaled_as_pillow_does(
    size: tuple[int, int], edge: int, interpolation: Interpolation
) -> None:
    image = photo(size)
    expected = image.resize((edge, edge), FILTERS[interpolation])
    found = resized(image, (0, 0, *size), edge, interpolation)
    allowed = 0 if interpolation == "nearest" else 1 if edge <= min(size) else 2
    assert found is not image and gap(found, expected) <= allowed


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_any_box_is_cropped_and_then_scaled(data: st.DataObject) -> None:
    """Pixels outside the box have no influence, as with torchvision."""
    width, height = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 90))
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = (left, top, data.draw(st.integers(left + 1, width)), data.draw(st.integers(top + 1, height)))
    image = photo((width, height), seed=width)
    for interpolation in ("bicubic", "bilinear"):
        expected = image.crop(box).resize((16, 16), FILTERS[interpolation])
        assert gap(resized(image, box, 16, interpolation), expected) <= 2


def test_large_parts_are_averaged_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's own way, with about the same result; no copy is made."""
    image = photo((500, 400))
    exact = resized(image, (0, 0, 500, 400), 40)
    monkeypatch.setattr(resize, "COPIED", 1000)
    monkeypatch.delattr("torch.frombuffer")
    assert 0 < rms(resized(image, (0, 0, 500, 400), 40), exact) < 1
    assert rms(resized(image, (0, 0, 500, 400), 40, gap=1.0), exact) > rms(resized(image, (0, 0, 500, 400), 40), exact)


@pytest.mark.parametrize("size", [(341, 256), (256, 341), (224, 300), (200, 150), (225, 224), (449, 224)])
@pytest.mark.peers
def test_center_squares_are_those_of_open_clip(size: tuple[int, int]) -> None:
    """Where an odd number of pixels is cut off, torchvision may start one pixel further on; we do as transformers."""
    repair_torchvision()
    transforms: Any = pytest.importorskip("torchvision.transforms")
    way = transforms.InterpolationMode.BICUBIC
    theirs = transforms.Compose([transforms.Resize(224, way), transforms.CenterCrop(224)])
    assert gap(center_square(photo(size), 224), theirs(photo(size))) == 0


@pytest.mark.parametrize("size", [(5000, 1), (1, 5000), (900, 100), (41, 20), (1, 1)])
def test_centers_of_panoramas(size: tuple[int, int]) -> None:
    """Only the part that is kept is scaled: the same as scaling all of it."""
    image = photo(size)
    found = center_square(image, 8)
    width, height = (side * 8 // min(size) for side in size)
    left, top = round((width - 8) / 2), round((height - 8) / 2)
    whole = image.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + 8, top + 8))
    assert found.size == (8, 8) and gap(found, whole) <= 3


def test_other_modes_stay_what_they_are() -> None:
    grey = photo((50, 40)).convert("L")
    assert center_square(grey, 8).mode == "L" and center_square(photo((50, 40)).convert("RGBA"), 8).mode == "RGBA"


@given(st.data())
@settings(deadline=None)
def test_shrunk_boxes_have_pixels_and_stay_inside(data: st.DataObject) -> None:
    factor = data.draw(st.sampled_from((2, 4, 8)))
    width, height = data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 5000))
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    box = (left, top, data.draw(st.integers(left + 1, width)), data.draw(st.integers(top + 1, height)))
    size = -(-width // factor), -(-height // factor)
    found = shrunk_box(box, factor, size)
    assert 0 <= found[0] < found[2] <= size[0] and 0 <= found[1] < found[3] <= size[1]
    assert all(isinstance(x, int) for x in found)
    assert max(abs(a - b / factor) for a, b in zip(found, box, strict=True)) < 1.5
    if min(box[2] - box[0], box[3] - box[1]) >= 2 * factor:
        assert max(abs(a - b / factor) for a, b in zip(found, box, strict=True)) <= 0.5


@pytest.mark.parametrize(("most", "factor"), [(0.3, 1), (1.99, 1), (2, 2), (3.9, 2), (4, 4), (8, 8), (100, 8)])
def test_jpegs_are_shrunk_by_their_decoder(most: float, factor: int, tmp_path: Any) -> None:
    for size in ((1001, 803), (64, 48), (47, 1000)):
        file = tmp_path / "a.jpg"
        file.write_bytes(jpeg(photo(size)))
        with Image.open(file) as image:
            assert decoded_smaller(image, most) == factor
            image.load()
            assert image.size == (-(-size[0] // factor), -(-size[1] // factor))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_other_formats_are_decoded_whole(kind: str, tmp_path: Any) -> None:
    photo((100, 80)).save(tmp_path / "a", kind)
    with Image.open(tmp_path / "a") as image:
        assert decoded_smaller(image, 8) == 1
        image.load()
        assert image.size == (100, 80)


def test_a_jpeg_smaller_than_the_factor_is_decoded_whole(tmp_path: Any) -> None:
    (tmp_path / "a").write_bytes(jpeg(photo((5, 900))))
    with Image.open(tmp_path / "a") as image:
        assert decoded_smaller(image, 100) == 1 and np.asarray(image).shape == (900, 5, 3)

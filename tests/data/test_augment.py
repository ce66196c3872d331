"""Augmentation: what is drawn, and the pixels, against torchvision."""

import math
import os
import subprocess
import sys
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from contratile.data.augment import COLORS, PRESETS, Augment, AugmentConfig, Changes, Strengths, random_crop
from contratile.data.sample import random_numbers
from tests.data.photos import gap, photo, rms
from tests.torchvision_repair import repair_torchvision

RATIO = (3 / 4, 4 / 3)
PLAIN = Strengths(crop_scale=(1.0, 1.0))


@pytest.fixture
def theirs() -> Any:
    """torchvision.transforms.functional"""
    repair_torchvision()
    return pytest.importorskip("torchvision.transforms.functional")


# --- crops --------------------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 6000), st.integers(1, 6000)),
    st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(sorted),
    st.tuples(st.floats(0.01, 50), st.floats(0.01, 50)).map(sorted),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=300)
def test_boxes_lie_inside_the_picture(size: Any, scale: Any, ratio: Any, seed: int) -> None:
    left, top, right, bottom = random_crop(size, scale, ratio, Random(seed))
    assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
    assert all(isinstance(x, int) for x in (left, top, right, bottom))


@pytest.mark.peers
@pytest.mark.parametrize("size", [(341, 256), (500, 100), (37, 300), (224, 224)])
@pytest.mark.parametrize("scale", [(0.9, 1.0), (0.08, 1.0)])
def test_boxes_have_the_distribution_of_torchvision(
    size: tuple[int, int], scale: tuple[float, float], theirs: Any
) -> None:
    """Mean and spread of each coordinate, of the area and of the ratio, within 4.5 standard errors."""
    n = 4000
    get_params = pytest.importorskip("torchvision.transforms").RandomResizedCrop.get_params
    image, random = Image.new("L", size), Random(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        params = np.array([get_params(image, list(scale), list(RATIO)) for _ in range(n)], float)
    top, left, height, width = params.T
    ours = np.array([random_crop(size, scale, RATIO, random) for _ in range(n)], float).T
    for a, b in zip(_facts(left, top, left + width, top + height), _facts(*ours), strict=True):
        error = math.sqrt((a.var() + b.var()) / n)
        assert abs(a.mean() - b.mean()) <= 4.5 * error + 1e-9
        assert abs(a.std() - b.std()) <= 4.5 * error + 1e-9


def _facts(left: Any, top: Any, right: Any, bottom: Any) -> tuple[Any, ...]:
    width, height = right - left, bottom - top
    return left, top, width, height, width * height, np.log(width / height)


@pytest.mark.peers
@pytest.mark.parametrize("size", [(5000, 1), (1, 5000), (3000, 40), (1, 1)])
def test_very_long_pictures_are_cut_in_their_middle_as_by_torchvision(size: tuple[int, int], theirs: Any) -> None:
    get_params = pytest.importorskip("torchvision.transforms").RandomResizedCrop.get_params
    top, left, height, width = get_params(Image.new("L", size), [0.9, 1.0], list(RATIO))
    found = random_crop(size, (0.9, 1.0), RATIO, Random(1))
    assert found[2] - found[0] == pytest.approx(width, abs=1) and found[3] - found[1] == pytest.approx(height, abs=1)
    assert found[0] == pytest.approx(left, abs=1) and found[1] == pytest.approx(top, abs=1)


# --- pixels -------------------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
def test_crops_have_the_pixels_of_torchvision(interpolation: Any, theirs: Any) -> None:
    image, box = photo((341, 256)), (30, 20, 301, 222)
    ours = Augment(PLAIN._replace(interpolation=interpolation)).apply(image, Changes(box), 224)
    way = theirs.InterpolationMode(interpolation)
    expected = theirs.resized_crop(image, box[1], box[0], box[3] - box[1], box[2] - box[0], [224, 224], way)
    assert gap(ours, expected) <= (0 if interpolation == "nearest" else 1)


@pytest.mark.peers
@pytest.mark.parametrize("name", COLORS)
@pytest.mark.parametrize("share", [-1.0, -0.77, -0.3, -0.001, 0.0, 0.002, 0.45, 1.0])
def test_colours_have_the_pixels_of_torchvision(name: str, share: float, theirs: Any) -> None:
    image = photo((64, 64))
    strength = 0.5 * share if name == "hue" else 1 + share
    ours = Augment(PLAIN).apply(image, Changes((0, 0, 64, 64), colors=((name, strength),)), 64)
    expected = getattr(theirs, f"adjust_{name}")(image, strength)
    assert gap(ours, expected) == 0
    if abs(share) > 0.2:
        assert gap(ours, image) > 5


@pytest.mark.peers
def test_grey_and_flipped_pictures_are_those_of_torchvision(theirs: Any) -> None:
    image = photo((64, 64))
    whole = (0, 0, 64, 64)
    assert gap(Augment(PLAIN).apply(image, Changes(whole, gray=True), 64), theirs.rgb_to_grayscale(image, 3)) == 0
    assert gap(Augment(PLAIN).apply(image, Changes(whole, flip=True), 64), theirs.hflip(image)) == 0


@pytest.mark.peers
@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_blur_is_gaussian(sigma: float, theirs: Any) -> None:
    """Pillow's, as in implementations of SimCLR, which is close to a Gaussian of that standard deviation."""
    image = photo((96, 96))
    ours = Augment(PLAIN).apply(image, Changes((0, 0, 96, 96), blur=sigma), 96)
    assert gap(ours, image.filter(ImageFilter.GaussianBlur(sigma))) == 0
    inside = (8, 8, 88, 88)
    exact = theirs.gaussian_blur(image, [15, 15], [sigma, sigma])
    assert rms(ours.crop(inside), exact.crop(inside)) < 0.4 * rms(image.crop(inside), exact.crop(inside))


def test_operations_follow_each_other() -> None:
    """Crop, flip, colours in their order, grey, blur."""
    image, augment = photo((80, 60)), Augment(PLAIN)
    colors = (("contrast", 1.7), ("brightness", 0.4), ("hue", 0.2))
    all_at_once = augment.apply(image, Changes((5, 6, 60, 50), True, colors, True, 1.2), 32)
    step, whole = augment.apply(image, Changes((5, 6, 60, 50)), 32), (0, 0, 32, 32)
    for changes in (
        Changes(whole, flip=True),
        *(Changes(whole, colors=(color,)) for color in colors),
        Changes(whole, gray=True),
        Changes(whole, blur=1.2),
    ):
        step = augment.apply(step, changes, 32)
    assert gap(all_at_once, step) == 0
    other = augment.apply(image, Changes((5, 6, 60, 50), True, colors[::-1], True, 1.2), 32)
    assert gap(all_at_once, other) > 0, "the order of colours matters"


# --- what is drawn ------------------------------------------------------------------------------------------------


def test_strengths_are_the_odds_and_ranges() -> None:
    strengths = Strengths(
        crop_scale=(0.3, 0.6),
        flip=0.25,
        color_jitter=(0.4, 0.3, 1.5, 0.1),
        color_jitter_prob=0.6,
        grayscale=0.1,
        blur=0.7,
        blur_sigma=(0.5, 1.5),
    )
    n = 4000
    random, augment = Random(5), Augment(strengths)
    drawn = [augment.draw((300, 300), random) for _ in range(n)]
    for found, odds in (
        (sum(x.flip for x in drawn), 0.25),
        (sum(bool(x.colors) for x in drawn), 0.6),
        (sum(x.gray for x in drawn), 0.1),
        (sum(x.blur > 0 for x in drawn), 0.7),
    ):
        assert abs(found / n - odds) < 4.5 * math.sqrt(odds * (1 - odds) / n)
    radii = [x.blur for x in drawn if x.blur]
    assert 0.5 <= min(radii) < 0.52 and 1.48 < max(radii) <= 1.5
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0.7, 1.3),
        ("saturation", 0.0, 2.5),
        ("hue", -0.1, 0.1),
    ):
        found_strengths = [strength for x in drawn for color, strength in x.colors if color == name]
        near = (high - low) / 50
        assert low <= min(found_strengths) < low + near and high - near < max(found_strengths) <= high
    orders = Counter(tuple(name for name, _ in x.colors) for x in drawn if x.colors)
    assert len(orders) == 24 and min(orders.values()) > 50


def test_colours_without_strength_are_not_touched() -> None:
    augment = Augment(PLAIN._replace(color_jitter=(0.0, 0.5, 0.0, 0.0)))
    assert all([name for name, _ in augment.draw((9, 9), Random(i)).colors] == ["contrast"] for i in range(20))
    assert augment.draw((9, 9), Random(0))._replace(colors=()) == Changes((0, 0, 9, 9))


def test_options_do_not_change_what_others_draw() -> None:
    """A run with a flip has the crops of the same run without it."""
    bare, rich = Augment(PRESETS["clip"]), Augment(PRESETS["simclr"]._replace(crop_scale=(0.9, 1.0)))
    for seed in range(20):
        assert bare.draw((50, 40), Random(seed)).box == rich.draw((50, 40), Random(seed)).box
    half, more = (Augment(PRESETS["simclr"]._replace(flip=flip, color_jitter_prob=flip)) for flip in (0.0, 1.0))
    for seed in range(20):
        assert half.draw((50, 40), Random(seed)).blur == more.draw((50, 40), Random(seed)).blur


def test_a_fixed_draw() -> None:
    """These numbers may not change with the version: a run that is resumed would go on with other pictures."""
    strengths = PRESETS["simclr"]._replace(blur=1.0)
    drawn = Augment(strengths).draw((341, 256), random_numbers(7, 3, "00000.tar/000012", 1))
    assert drawn.box == (65, 0, 336, 254) and drawn.flip and not drawn.gray
    assert [name for name, _ in drawn.colors] == ["hue", "saturation", "contrast", "brightness"]
    assert drawn.colors[0][1] == pytest.approx(-0.11244950684710445, abs=1e-12)
    assert drawn.blur == pytest.approx(1.723976729039473, abs=1e-12)


def test_draws_are_the_same_in_another_process() -> None:
    code = (
        "from contratile.data.augment import PRESETS, Augment; from contratile.data.sample import random_numbers;"
        "print([Augment(PRESETS['simclr']).draw((90, 70), random_numbers(1, 2, 'kéy', v)) for v in range(3)])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env={**os.environ, "PYTHONHASHSEED": "77"}
    )
    mine = [Augment(PRESETS["simclr"]).draw((90, 70), random_numbers(1, 2, "kéy", v)) for v in range(3)]
    assert said.stdout.decode().strip() == str(mine)


def test_every_seed_matters() -> None:
    augment = Augment(PRESETS["clip"])
    seeds: list[tuple[int | str, ...]] = [
        (0, 0, "a", 0),
        (1, 0, "a", 0),
        (0, 1, "a", 0),
        (0, 0, "b", 0),
        (0, 0, "a", 1),
    ]
    seeds += [(0, 0, "a/0", 0), (0, 0, "0/a", 0), (0, 0, "0/0", 0)]
    assert len({augment.draw((1000, 1000), random_numbers(*seed)).box for seed in seeds}) == len(seeds)


# --- options ------------------------------------------------------------------------------------------------------


def test_presets() -> None:
    assert not AugmentConfig().on and AugmentConfig(augment="clip").on and AugmentConfig(views=2).on
    assert AugmentConfig(augment="clip").strengths == Strengths() == PRESETS["clip"]
    assert AugmentConfig(views=2).strengths == AugmentConfig(augment="simclr").strengths == PRESETS["simclr"]
    assert AugmentConfig(augment="clip", views=2).strengths == PRESETS["clip"]
    given_strengths = AugmentConfig(augment="simclr", flip=0.0, crop_scale=(0.5, 1.0)).strengths
    assert given_strengths == PRESETS["simclr"]._replace(flip=0.0, crop_scale=(0.5, 1.0))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_the_defaults_are_those_of_open_clip() -> None:
    repair_torchvision()
    open_clip: Any = pytest.importorskip("open_clip.transform")
    theirs = open_clip.AugmentationCfg()
    ours = AugmentConfig(augment="clip").strengths
    assert ours.crop_scale == theirs.scale and ours.interpolation == "bicubic" and ours.crop_ratio == RATIO
    assert theirs.color_jitter is None and theirs.color_jitter_prob is None and theirs.gray_scale_prob is None
    assert not any((*ours.color_jitter, ours.grayscale, ours.flip, ours.blur))


CHANGED: dict[str, Any] = {
    "crop_scale": (0.1, 0.2),
    "crop_ratio": (0.2, 0.3),
    "interpolation": "nearest",
    "flip": 1.0,
    "color_jitter": (0.9, 0.9, 0.9, 0.5),
    "color_jitter_prob": 0.0,
    "grayscale": 1.0,
    "blur": 0.0,
    "blur_sigma": (5.0, 6.0),
}


@pytest.mark.parametrize("name", Strengths._fields)
def test_every_option_has_an_effect(name: str) -> None:
    image, base = photo((90, 70)), {"augment": "clip", "color_jitter": (0.4, 0.4, 0.4, 0.2), "blur": 1.0}
    pictures = []
    for options in (base, {**base, name: CHANGED[name]}):
        augment = Augment(AugmentConfig(**options).strengths)
        pictures.append(augment.apply(image, augment.draw(image.size, Random(2)), 40))
    assert gap(*pictures) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_scale": (0.9, 0.1)}, "crop_scale: expected two numbers in ascending order"),
        ({"crop_scale": (0.0, 1.0)}, "crop_scale"),
        ({"crop_scale": (0.5, 1.5)}, "crop_scale.*at most 1"),
        ({"crop_ratio": (math.nan, 1.0)}, "crop_ratio"),
        ({"blur_sigma": (-1.0, 1.0)}, "blur_sigma"),
        ({"flip": 1.5}, "flip: expected a probability"),
        ({"grayscale": -0.1}, "grayscale"),
        ({"blur": math.nan}, "blur"),
        ({"color_jitter_prob": 2.0}, "color_jitter_prob"),
        ({"color_jitter": (0.1, 0.1, 0.1, 0.6)}, "color_jitter.*hue at most 0.5"),
        ({"color_jitter": (-0.1, 0.1, 0.1, 0.1)}, "color_jitter"),
        ({"color_jitter": (math.inf, 0.1, 0.1, 0.1)}, "color_jitter"),
        ({"interpolation": "lanczos"}, "interpolation"),
        ({"augment": "strong"}, "augment"),
        ({"views": 3}, "views: expected 1 or 2"),
        ({"augment": "none", "flip": 0.5}, "flip: expected --augment with it"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AugmentConfig(**{"augment": "clip", **options})

"""Random crops, flips, colours and blur for training images, without torchvision.

    augment = Augment(AugmentConfig(augment="clip", crop_scale=(0.08, 1.0), flip=0.5).strengths)
    changes = augment.draw(image.size, random.Random(7))      # all that is random about this image
    augment.apply(image, changes, edge=224)                   # a square of 224 x 224

The changes of an image depend on the generator alone, and the loader seeds that with the run's seed, the epoch and the
sample's key: a resumed run, another number of workers or of ranks gets the same pixels.

Operations and their distributions are those of torchvision's transforms on Pillow images (`RandomResizedCrop`,
`RandomHorizontalFlip`, `ColorJitter`, `RandomGrayscale`, `GaussianBlur` as SimCLR uses it), in that order.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from contratile.data.resize import FILTERS, Box, Interpolation, resized
from contratile.errors import bad_value, check_choice

COLORS = ("brightness", "contrast", "saturation", "hue")
TRIES = 10
"""Attempts at a crop that lies inside the image, as in torchvision."""


class Strengths(NamedTuple):
    """How strong the random changes are."""

    crop_scale: tuple[float, float] = (0.9, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bicubic"
    flip: float = 0.0
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    color_jitter_prob: float = 1.0
    grayscale: float = 0.0
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)


PRESETS = {
    "clip": Strengths(),
    "simclr": Strengths(
        crop_scale=(0.08, 1.0),
        flip=0.5,
        color_jitter=(0.8, 0.8, 0.8, 0.2),
        color_jitter_prob=0.8,
        grayscale=0.2,
        blur=0.5,
    ),
}
"""open_clip's defaults, and those of the SimCLR paper."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random changes to training images; off unless asked for. In a recipe, an [augment] section turns them on."""

    augment: Literal["none", "clip", "simclr"] = "none"
    """Augment training images: clip has open_clip's defaults, simclr those of SimCLR. The options below change them."""

    views: int = 1
    """2: train on two random views of each image instead of pairs (ntxent, supcon); augments as simclr by default."""

    crop_scale: tuple[float, float] | None = None
    """Share of an image's area that a random crop covers, from and to (clip: 0.9 1; Inf-CL's scripts: 0.08 1)."""

    crop_ratio: tuple[float, float] | None = None
    """Width over height of a random crop, from and to (0.75 1.333)."""

    interpolation: Interpolation | None = None
    """How crops are scaled (bicubic)."""

    flip: float | None = None
    """Probability of a horizontal flip (clip: 0, simclr: 0.5)."""

    color_jitter: tuple[float, float, float, float] | None = None
    """Largest change of brightness, contrast, saturation and hue (clip: none, simclr: 0.8 0.8 0.8 0.2)."""

    color_jitter_prob: float | None = None
    """Probability that colours are changed (clip: 1, simclr: 0.8)."""

    grayscale: float | None = None
    """Probability that an image loses its colours (clip: 0, simclr: 0.2)."""

    blur: float | None = None
    """Probability of a Gaussian blur (clip: 0, simclr: 0.5)."""

    blur_sigma: tuple[float, float] | None = None
    """Radius of the blur in pixels, from and to (0.1 2)."""

    def __post_init__(self) -> None:
        check_choice("augment", self.augment, ("none", *PRESETS))
        if self.views not in (1, 2):
            bad_value("views", expected="1 or 2", got=self.views, remedy="Two views of an image are one pair.")
        given = [name for name in Strengths._fields if getattr(self, name) is not None]
        if given and not self.on:
            remedy = "Pass --augment clip (or simclr) too, or drop it."
            bad_value(given[0], expected="--augment with it", got=getattr(self, given[0]), remedy=remedy)
        strengths = self.strengths
        check_choice("interpolation", strengths.interpolation, tuple(FILTERS))
        for name in ("crop_scale", "crop_ratio", "blur_sigma"):
            low, high = getattr(strengths, name)
            most = 1.0 if name == "crop_scale" else 1e6
            if not 0 < low <= high <= most:
                expected = f"two numbers in ascending order, above 0 and at most {most:g}"
                bad_value(name, expected=expected, got=f"{low:g} {high:g}", remedy="Swap or change them.")
        for name in ("flip", "color_jitter_prob", "grayscale", "blur"):
            if not 0 <= getattr(strengths, name) <= 1:
                got = getattr(strengths, name)
                bad_value(name, expected="a probability from 0 to 1", got=got, remedy="0 is never.")
        *factors, hue = strengths.color_jitter
        if not (all(0 <= x < math.inf for x in factors) and 0 <= hue <= 0.5):
            remedy = "They are brightness, contrast, saturation and hue."
            got = strengths.color_jitter
            bad_value("color_jitter", expected="numbers from 0 up, hue at most 0.5", got=got, remedy=remedy)

    @property
    def on(self) -> bool:
        """Whether training images are augmented."""
        return self.augment != "none" or self.views == 2

    @property
    def strengths(self) -> Strengths:
        """The numbers of the preset, with those that were given instead of them."""
        preset = PRESETS[
            "simclr" if self.augment == "none" and self.views == 2 else self.augment.replace("none", "clip")
        ]
        given = {name: getattr(self, name) for name in Strengths._fields if getattr(self, name) is not None}
        return preset._replace(**given)


class Changes(NamedTuple):
    """All that is random about one view of one image."""

    box: Box
    """The crop, in pixels of the image: left, top, right, bottom."""

    flip: bool = False
    colors: tuple[tuple[str, float], ...] = ()
    """Changes of colour in their order, with their strength."""

    gray: bool = False
    blur: float = 0.0
    """Radius; 0: none."""


class Augment:
    """Draws and applies random changes."""

    def __init__(self, strengths: Strengths) -> None:
        self.strengths = strengths

    def draw(self, size: tuple[int, int], random: Random) -> Changes:
        """Draw the changes of an image of this size. Options that are off draw too, so others do not depend on them."""
        config = self.strengths
        box = random_crop(size, config.crop_scale, config.crop_ratio, random)
        flip = random.random() < config.flip
        colors = self._colors(random)
        gray = random.random() < config.grayscale
        blurred, radius = random.random() < config.blur, random.uniform(*config.blur_sigma)
        return Changes(box, flip, colors, gray, radius if blurred else 0.0)

    def _colors(self, random: Random) -> tuple[tuple[str, float], ...]:
        chosen = random.random() < self.strengths.color_jitter_prob
        found = []
        for name, most in zip(COLORS, self.strengths.color_jitter, strict=True):
            low, high = (-most, most) if name == "hue" else (max(0.0, 1 - most), 1 + most)
            found.append((name, random.uniform(low, high), most))
        random.shuffle(found)
        return tuple((name, strength) for name, strength, most in found if chosen and most)

    def apply(self, image: Image.Image, changes: Changes, edge: int) -> Image.Image:
        """The square of `edge` pixels that these changes make of an RGB image."""
        found = resized(image, changes.box, edge, self.strengths.interpolation)
        if changes.flip:
            found = found.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for name, strength in changes.colors:
            found = _recolored(found, name, strength)
        if changes.gray:
            found = found.convert("L").convert("RGB")
        if changes.blur:
            found = found.filter(ImageFilter.GaussianBlur(changes.blur))
        return found


def random_crop(size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], random: Random) -> Box:
    """A random box inside an image of this size: whole pixels, by torchvision's rule for `RandomResizedCrop`."""
    width, height = size
    area, logs = width * height, (math.log(ratio[0]), math.log(ratio[1]))
    for _ in range(TRIES):
        target, shape = area * random.uniform(*scale), math.exp(random.uniform(*logs))
        w, h = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    # All attempts failed, as for very long images: take the largest central box with an allowed ratio.
    w, h = width, height
    if width / height < ratio[0]:
        h = min(height, max(1, round(width / ratio[0])))
    elif width / height > ratio[1]:
        w = min(width, max(1, round(height * ratio[1])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _recolored(image: Image.Image, name: str, strength: float) -> Image.Image:
    if name == "brightness":
        return ImageEnhance.Brightness(image).enhance(strength)
    if name == "contrast":
        return ImageEnhance.Contrast(image).enhance(strength)
    if name == "saturation":
        return ImageEnhance.Color(image).enhance(strength)
    hue, *rest = image.convert("HSV").split()
    turned = np.asarray(hue) + np.uint8(int(strength * 255) % 256)  # wraps around
    return Image.merge("HSV", (Image.fromarray(turned), *rest)).convert("RGB")

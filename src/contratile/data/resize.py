"""Crops and scales images to squares, several times as fast as Pillow alone.

    square = resized(image, (20, 10, 320, 250), 224)       # that part of the image, 224 x 224
    square = center_square(image, 224)

Random views are scaled by `torch.nn.functional.interpolate`, whose kernels for bytes are Pillow's algorithm with vector
instructions: 4 to 8 times as fast on AVX2, and equal up to two levels of 255 (one when they shrink). Center squares,
which evaluation sees, are left to Pillow: other packages compute their features from the same pixels.
"""

import warnings
from typing import Literal, TypeAlias

import torch
from PIL import Image
from torch.nn import functional as F

Interpolation: TypeAlias = Literal["bicubic", "bilinear", "nearest"]
Box: TypeAlias = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels."""

FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}

GAP = 2.0
PLAIN_GAP = 3.0
"""Images may be shrunk cheaply (by the JPEG decoder, or by averaging squares of pixels) before they are scaled to their
final size, if they stay at least this many times as large: GAP for random views, PLAIN_GAP for center squares.

Root mean square difference from scaling at once, in levels of 255, on four photographs of 640 and 720 pixels: 0.6 to
0.9 at 3, 0.8 to 2.0 at 2, 1.3 to 3.4 at 1.5. Bilinear instead of bicubic makes a difference of 2.0 to 4.6.
"""

WIDEST = 4
"""Up to this ratio of its sides, an image is scaled whole to take its center."""

COPIED = 1 << 22
"""Larger parts are left to Pillow: torch needs a copy."""


def resized(
    image: Image.Image, box: Box, edge: int, interpolation: Interpolation = "bicubic", gap: float = GAP
) -> Image.Image:
    """Crop a box of whole pixels and scale it to a square.

    Args:
        image: The image.
        box: The part.
        edge: Height and width of the square.
        interpolation: The filter, which averages when it shrinks (except for nearest).
        gap: See `GAP`.

    Returns:
        A new image: `image.crop(box).resize((edge, edge), filter)`, up to two levels.
    """
    part = image if box == (0, 0, *image.size) else image.crop(box)
    return _scaled(part, (edge, edge), interpolation, gap)


def _scaled(image: Image.Image, size: tuple[int, int], interpolation: Interpolation, gap: float) -> Image.Image:
    width, height = image.size
    if interpolation == "nearest" or image.mode != "RGB" or width * height > COPIED or image.size == size:
        return image.resize(size, FILTERS[interpolation], reducing_gap=gap)
    # Pillow stores four bytes per pixel, so this is a plain copy, and the kernel for four channels is the fastest.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read-only, and never written to
        pixels = torch.frombuffer(image.tobytes("raw", "RGBX"), dtype=torch.uint8).view(1, height, width, 4)
    scaled = F.interpolate(pixels.permute(0, 3, 1, 2), size[::-1], mode=interpolation, antialias=True)
    data = scaled.permute(0, 2, 3, 1).contiguous().numpy()
    return Image.frombytes("RGB", size, data.tobytes(), "raw", "RGBX")


def center_square(image: Image.Image, size: int, whole: tuple[int, int] | None = None) -> Image.Image:
    """Scale the shorter side of an image to `size` and crop the center, bitwise as transformers does with Pillow.

    Args:
        image: The image. It is returned as it is if it has that size.
        size: Height and width of the square.
        whole: Size of the image in its file, if it was decoded smaller: sizes are rounded as for the whole image.
    """
    if image.size == (size, size):
        return image
    sides = whole or image.size
    width, height = (side * size // min(sides) for side in sides)
    left, top = (width - size) // 2, (height - size) // 2
    kept = (left, top, left + size, top + size)
    if max(width, height) <= WIDEST * size:
        scaled = image.resize((width, height), FILTERS["bicubic"])
        return scaled.crop(kept) if width != height else scaled
    # Scale only the part that is kept: a whole panorama that is scaled up could take gigabytes.
    box = tuple(x * side / scaled for x, side, scaled in zip(kept, image.size * 2, (width, height) * 2, strict=True))
    return image.resize((size, size), FILTERS["bicubic"], box=box)  # type: ignore[arg-type]


def shrunk_box(box: Box, factor: int, size: tuple[int, int]) -> Box:
    """The nearest box of whole pixels, at least one, in an image that was shrunk by a factor to this size."""
    left, top = (min(round(x / factor), side - 1) for x, side in zip(box[:2], size, strict=True))
    ends = zip(box[2:], (left, top), size, strict=True)
    right, bottom = (min(max(round(x / factor), first + 1), side) for x, first, side in ends)
    return left, top, right, bottom


def decoded_smaller(image: Image.Image, most: float) -> int:
    """Before an image is decoded: ask its decoder to shrink it by up to `most`. JPEG decoders can, by 2, 4 and 8.

    Returns:
        The factor; 1 if the image is decoded as it is.
    """
    width, height = image.size
    factor = max((x for x in (2, 4, 8) if x <= most), default=1)
    if factor == 1 or min(width, height) < factor:
        return 1
    found = image.draft(None, (width // factor, height // factor))
    return 1 if found is None else round(width / found[1][2])

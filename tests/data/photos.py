"""Pictures with the detail of photographs, for the tests of crops and colours."""

import io
from functools import cache

import numpy as np
from PIL import Image


@cache
def photo(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Smooth areas of colour, edges and a little noise."""
    random = np.random.default_rng(seed)
    found = np.zeros((size[1], size[0], 3))
    for cells, strength in ((3, 0.5), (9, 0.3), (27, 0.2)):
        grid = random.integers(0, 255, (cells, cells, 3), dtype=np.uint8)
        found += strength * np.asarray(Image.fromarray(grid).resize(size, Image.Resampling.BICUBIC))
    found += random.normal(0, 2, found.shape)
    return Image.fromarray(np.clip(found, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, quality: int = 92) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def gap(a: Image.Image, b: Image.Image) -> int:
    """The largest difference of two pictures, in levels."""
    assert a.size == b.size and a.mode == b.mode, (a, b)
    return int(np.abs(np.asarray(a).astype(int) - np.asarray(b)).max())


def rms(a: Image.Image, b: Image.Image) -> float:
    """Root mean square difference of two pictures, in levels."""
    return float(np.sqrt(np.square(np.asarray(a).astype(float) - np.asarray(b)).mean()))

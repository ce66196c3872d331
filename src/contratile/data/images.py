"""Pictures from anywhere, decoded with distrust, and stacked into tensors without torchvision.

    picture = decode(path_or_bytes, key="cats/3.jpg")      # RGB, or Broken
    pixels = stack([picture, ...], size=224)               # uint8 [n, 3, 224, 224]
    inputs = normalise(pixels)                             # float, as CLIP expects

Pixels stay uint8 until they are used: a batch of 65,536 pictures of 224 x 224 takes 9.8 GB that way, 39 GB as floats.
"""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from contratile.data.sample import Broken

MAX_PIXELS = 1 << 26
"""Larger pictures are refused before they are decoded: 67 megapixels take 200 MB, a decompression bomb far more."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Others are refused: some of the library's decoders start programs."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def decode(data: Path | bytes | Image.Image, key: str) -> Image.Image:
    """The picture in RGB, transparent parts on white. Of an animation, the first frame."""
    if isinstance(data, Image.Image):
        return _rgb(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the library's hints on odd files; its own bomb warning is the check below
            with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                return _rgb(image)
    except FileNotFoundError:
        raise Broken(key, "no such file") from None
    except UnidentifiedImageError:
        raise Broken(key, f"not a picture in a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise Broken(key, f"picture of more than {MAX_PIXELS // 10**6} megapixels") from None
    except Exception as error:  # decoders of damaged files raise whatever they stumble over
        what = "truncated" if "truncated" in str(error) else "damaged or unreadable"
        raise Broken(key, f"{what} picture ({type(error).__name__})") from None


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def stack(images: Sequence[Image.Image], size: int) -> Tensor:
    """Pixels [n, 3, size, size] as uint8: the shorter side is scaled to `size`, the middle is cut out, as CLIP does."""
    pixels = np.empty((len(images), size, size, 3), dtype=np.uint8)
    for place, image in zip(pixels, images, strict=True):
        fitted = _fitted(image, size)
        place[:] = np.asarray(fitted if fitted.mode == "RGB" else fitted.convert("RGB"))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _fitted(image: Image.Image, size: int) -> Image.Image:
    if image.size == (size, size):
        return image
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    # Resizing only the part that stays: one row of a panorama must not become gigabytes.
    box = (left / width, top / height, (left + size) / width, (top + size) / height)
    part = tuple(share * image.size[i % 2] for i, share in enumerate(box))
    return image.resize((size, size), Image.Resampling.BICUBIC, box=part)  # type: ignore[arg-type]


def normalise(pixels: Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """Float pixels in the units that a tower was trained with; on whatever device the pixels are."""
    shift, factor = (torch.tensor(x, device=pixels.device).view(3, 1, 1) for x in (mean, std))
    return (pixels.float() / 255 - shift) / factor

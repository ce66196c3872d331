"""Decodes untrusted images and stacks them into tensors, without torchvision.

    image = decode(path_or_bytes, key="cats/3.jpg")        # RGB; raises Broken
    pixels = stack([image, ...], size=224)                 # uint8 [n, 3, 224, 224]
    inputs = normalise(pixels)                             # float, as CLIP expects

Pixels stay uint8 until they are used: a batch of 65,536 images of 224 x 224 takes 9.8 GB that way, 39 GB as floats.
A file of 80 KB can hold an image of 270 MB, so the loader decodes inside `framed(Frames(224))`: each image is cropped
and scaled as soon as it is decoded, and only one at a time is in memory at full size.
"""

import io
import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from contratile.data.frames import Frames, current_frames
from contratile.data.resize import center_square
from contratile.data.sample import Broken

MAX_PIXELS = 1 << 26
"""Larger images are refused before decoding: 67 megapixels take 270 MB, a decompression bomb far more."""

MAX_BYTES = 1 << 28
"""Larger files are refused before reading: some decoders read the whole file into memory."""

STRIP = 1 << 20
"""Pixels of a transparent image that are composed with white at a time."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Other formats are refused: some of Pillow's decoders start programs."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def decode(data: Path | bytes | Image.Image, key: str) -> Image.Image:
    """Decode an image to RGB, with transparent parts on white. Of an animation, the first frame.

    Args:
        data: A file, its contents, or a decoded image.
        key: Name of the sample, for messages.

    Raises:
        Broken: The file cannot be read or decoded, or is too large.
    """
    frames = current_frames()
    if isinstance(data, Image.Image):
        return _own(data, key, frames)
    file = io.BytesIO(data) if isinstance(data, bytes) else _opened(data, key)
    try:
        with warnings.catch_warnings(), file:
            warnings.simplefilter("ignore")  # Pillow's warnings about odd files; large images are checked below
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise Image.DecompressionBombError
                if frames is not None:
                    frames.draft(image, key)
                return _own(image, key, frames, drafted=True)
    except UnidentifiedImageError:
        raise Broken(key, f"not an image in a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        raise Broken(key, f"image of more than {MAX_PIXELS // 10**6} megapixels") from None
    except Broken:
        raise
    except Exception as error:  # decoders raise anything for damaged files
        what = "truncated" if "truncated" in str(error) else "damaged or unreadable"
        raise Broken(key, f"{what} image ({type(error).__name__})") from None


def _opened(path: Path, key: str) -> BinaryIO:
    """Open a regular file. O_NONBLOCK, because a pipe that replaces it after the check would block."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise Broken(key, "not a file but a folder, a pipe or a device")
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        file = os.fdopen(handle, "rb")
    except (FileNotFoundError, NotADirectoryError):
        raise Broken(key, "no such file") from None
    except OSError as error:  # no permission, name too long, loop of links
        raise Broken(key, f"file cannot be opened ({error.strerror})") from None
    except ValueError:  # NUL or a lone surrogate
        raise Broken(key, "path with characters that are not allowed in file names") from None
    if os.fstat(handle).st_size > MAX_BYTES:
        file.close()
        raise Broken(key, f"file of more than {MAX_BYTES >> 20} MiB")
    return file


def _own(image: Image.Image, key: str, frames: Frames | None, *, drafted: bool = False) -> Image.Image:
    """An RGB copy that does not depend on the file, brought to its size by `frames`."""
    if 0 in image.size:
        raise Broken(key, f"image of {image.width} x {image.height} pixels")
    found = _rgb(image)
    if frames is not None:
        return frames.frame(found, key, drafted=drafted)
    return found.copy() if found is image else found


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if "A" in image.getbands() or "transparency" in image.info:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Compose with white in strips: the four copies of a large image would take a gigabyte."""
    found = Image.new("RGB", image.size)
    rows = max(1, STRIP // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(image.height, top + rows))
        strip = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, "white")
        found.paste(Image.alpha_composite(white, strip).convert("RGB"), box)
    return found


class Squares:
    """A `prepare` for images: `stack` at a fixed size.

    The loader reads `edge` and decodes images directly to that size (`frames`).

    Args:
        edge: Height and width in pixels.
    """

    def __init__(self, edge: int) -> None:
        self.edge = edge

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        return stack(images, self.edge)


def stack(images: Sequence[Image.Image], size: int) -> Tensor:
    """Stack images to uint8 pixels [n, 3, size, size], scaled and center-cropped as CLIP does."""
    pixels = np.empty((len(images), size, size, 3), dtype=np.uint8)
    for place, image in zip(pixels, images, strict=True):
        square = center_square(image, size)
        place[:] = np.asarray(square if square.mode == "RGB" else square.convert("RGB"))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def normalise(pixels: Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """Scale uint8 pixels to [0, 1], subtract the mean and divide by the standard deviation, per channel."""
    plain = type(pixels) is Tensor and not torch.compiler.is_compiling()
    if pixels.device.type == "cpu" and pixels.dtype == torch.uint8 and plain:
        return _normalised(pixels, mean, std)
    shift, spread = (torch.tensor(x, device=pixels.device).view(3, 1, 1) for x in (mean, std))
    return pixels.float() * (1 / (255 * spread)) - shift / spread


def _normalised(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """`normalise` on a CPU: image by image, so that each stays in the cache, and with numpy, which starts no threads.

    Beside workers that keep the cores busy, torch's threads wait for each other: 7 instead of 0.5 ms per image.
    """
    shift, spread = (np.array(x, dtype=np.float32).reshape(3, 1, 1) for x in (mean, std))
    factor, offset = 1 / (255 * spread), shift / spread
    found = torch.empty(pixels.shape)
    for place, image in zip(found.numpy(), pixels.numpy(), strict=True):
        np.multiply(image, factor, out=place, dtype=np.float32)
        np.subtract(place, offset, out=place)
    return found

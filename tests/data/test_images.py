"""Pictures: what is decoded, what is refused, and the pixels that come out."""

import io
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from contratile.data import images, resize
from contratile.data.frames import Frames, framed
from contratile.data.resize import center_square
from contratile.data.sample import Broken
from tests.data.files import encoded, picture


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be huge."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(b"\0" * 1000)) + part(b"IEND", b"")


def noise() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", images.FORMATS)
def test_formats(kind: str) -> None:
    image = images.decode(encoded(picture(200), kind), "a")
    assert image.mode == "RGB" and image.size == (9, 7)
    assert np.abs(np.asarray(image).astype(int) - np.asarray(picture(200))).max() < 12


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(noise(), "JPEG")[:3000], "truncated image (OSError)"),
        (encoded(picture(3, (64, 64)))[:-30], "truncated image (OSError)"),
        (b"", "not an image in a known format"),
        (b"<html>not found</html>", "not an image in a known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image in a known format"),
        (bomb(20_000, 20_000), "image of more than 67 megapixels"),
        (bomb(10_000, 9_000), "image of more than 67 megapixels"),
        (bomb(8_000, 8_000), "truncated image (OSError)"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "not an image in a known format"),
        (encoded(noise()).replace(b"IDAT", b"IDAT\xff\xff"), "damaged or unreadable image (OSError)"),
    ],
    ids=["jpeg", "png", "empty", "page", "postscript", "bomb", "small bomb", "allowed size", "zeros", "damaged"],
)
def test_damaged_pictures_are_broken(data: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "picture"
    file.write_bytes(data)
    for form in (data, file):
        with pytest.raises(Broken) as caught:
            images.decode(form, "key 7")
        assert caught.value.reason.startswith(reason) and caught.value.key == "key 7"
        assert "0x" not in caught.value.reason and str(tmp_path) not in caught.value.reason


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(Broken, match="a: no such file"):
        images.decode(tmp_path / "none.png", "a")
    with pytest.raises(Broken, match="not a file but a folder, a pipe or a device"):
        images.decode(tmp_path, "a")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes, devices and links of Unix")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe, loop, locked = tmp_path / "pipe.png", tmp_path / "loop.png", tmp_path / "locked.png"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    locked.write_bytes(encoded(picture(1)))
    locked.chmod(0)
    no_file = "not a file but a folder, a pipe or a device"
    reasons = {
        pipe: no_file,
        Path("/dev/zero"): no_file,
        loop: "file cannot be opened (Too many levels of symbolic links)",
        tmp_path / ("x" * 300): "file cannot be opened (File name too long)",
        tmp_path / "pipe.png" / "below.png": "no such file",
        tmp_path / "nul\0.png": "path with characters that are not allowed in file names",
        tmp_path / "half\ud800.png": "path with characters that are not allowed in file names",
    }
    if os.geteuid():  # root may read everything
        reasons[locked] = "file cannot be opened (Permission denied)"
    for path, reason in reasons.items():
        with pytest.raises(Broken) as caught:
            images.decode(path, "a")
        assert caught.value.reason == reason


def test_large_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(encoded(picture(1)))
    assert images.decode(file, "a").size == (9, 7)
    monkeypatch.setattr(images, "MAX_BYTES", 40)
    with pytest.raises(Broken, match="file of more than 0 MiB"):
        images.decode(file, "a")


def test_transparent_parts_are_white() -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    assert images.decode(encoded(clear), "a").getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([9, 9, 9] * 256)
    palette.info["transparency"] = 0
    assert images.decode(palette, "a").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_strips_of_transparent_pictures_make_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (40, 30, 4), dtype=np.uint8)).convert(mode)
    if mode == "P":
        image.info["transparency"] = bytes(range(256))
    whole = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    monkeypatch.setattr(images, "STRIP", 100)
    assert images.decode(image, "a").tobytes() == whole.tobytes()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16"])
@pytest.mark.parametrize("size", [(40, 40), (64, 40), (9, 200), (8, 8), (3, 5)])
def test_pictures_are_cut_to_size_when_they_are_decoded(mode: str, size: tuple[int, int]) -> None:
    """The result is that of `stack`, bit for bit."""
    pixels = np.random.default_rng(0).integers(0, 255, (*size, 4), dtype=np.uint8)
    image = Image.fromarray(pixels[..., 0].astype(np.uint16)) if mode == "I;16" else Image.fromarray(pixels)
    data = encoded(image if mode == "I;16" else image.convert(mode))
    whole = images.stack([images.decode(data, "a")], 8)
    with framed(Frames(8)):
        small = images.decode(data, "a")
    assert small.size == (8, 8) and small.mode == "RGB" and torch.equal(images.Squares(8)([small]), whole)
    assert images.decode(data, "a").size == size[::-1], "outside again as it is"


def test_large_jpegs_are_decoded_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times less on each side, with the same picture in the end; those of ordinary size are decoded whole."""
    y, x = np.mgrid[0:1600, 0:2000] / 2000
    waves = np.stack([np.sin(9 * x), np.cos(7 * y * x), np.sin(5 * x + 8 * y)], -1)
    image = Image.fromarray((127 + 120 * waves).astype(np.uint8))
    decoded: list[tuple[int, int]] = []
    rgb = images._rgb

    def noted(image: Image.Image) -> Image.Image:
        decoded.append(image.size)
        return rgb(image)

    monkeypatch.setattr(images, "_rgb", noted)
    for size, read in (((2000, 1600), (250, 200)), ((200, 160), (100, 80)), ((180, 140), (180, 140))):
        file = io.BytesIO()
        image.resize(size).save(file, "JPEG", quality=95)
        whole = images.stack([images.decode(file.getvalue(), "a")], 24)
        with framed(Frames(24)):
            part = images.stack([images.decode(file.getvalue(), "a")], 24)
        assert decoded[-2:] == [size, read]
        assert (whole.int() - part.int()).abs().max() <= (4 if read != size else 0)


def test_sixteen_bit_grey_keeps_its_shades() -> None:
    deep = Image.fromarray(np.array([[0, 32768, 65535]], dtype=np.uint16))
    assert [images.decode(encoded(deep), "a").getpixel((x, 0)) for x in range(3)] == [(v, v, v) for v in (0, 128, 255)]


def test_stack_shapes_and_order() -> None:
    tall, wide = picture(5, (8, 40)), picture(300, (40, 8))
    pixels = images.stack([tall, wide], 8)
    assert pixels.shape == (2, 3, 8, 8) and pixels.dtype == torch.uint8 and pixels.is_contiguous()
    assert pixels[0, :, 3, 3].tolist() == [5, 0, 77] and pixels[1, :, 3, 3].tolist() == [44, 1, 77]
    assert images.stack([], 8).shape == (0, 3, 8, 8)


def test_stack_is_resize_then_crop() -> None:
    """The part that is resized is the middle one: as CLIP's resize and crop, up to half a pixel at the cut."""
    ramp = Image.fromarray(np.tile(np.arange(0, 240, 2, dtype=np.uint8), (60, 1)))
    whole = ramp.resize((40, 20), Image.Resampling.BICUBIC).crop((10, 0, 30, 20)).convert("RGB")
    ours = images.stack([ramp.convert("RGB")], 20)[0].permute(1, 2, 0).numpy()
    assert np.abs(ours.astype(int) - np.asarray(whole)).max() <= 3


def test_normalise() -> None:
    pixels = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    got = images.normalise(pixels)[0, :, 0, 0]
    torch.testing.assert_close(got, (1 - torch.tensor(images.CLIP_MEAN)) / torch.tensor(images.CLIP_STD))
    assert images.normalise(pixels, (0, 0, 0), (1, 1, 1)).max() == 1.0


@pytest.mark.parametrize("size", [(40, 30), (301, 407), (64, 17), (10, 14)])
def test_squares_are_cut_as_clip_cuts_them(size: tuple[int, int]) -> None:
    """Resized as a whole, the longer side rounded down, then cropped: transformers' pixels to the bit."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))
    width, height = (int(32 * side / min(size)) for side in size)
    left, top = (width - 32) // 2, (height - 32) // 2
    expected = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))[top : top + 32, left : left + 32]
    assert np.array_equal(np.asarray(center_square(image, 32)), expected)


def test_only_the_center_of_a_panorama_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pixels within rounding, without an image of 224 times its length."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (3, 1000, 3), dtype=np.uint8))
    cut = np.asarray(center_square(image, 32)).astype(int)
    monkeypatch.setattr(resize, "WIDEST", 1000)
    assert np.abs(cut - np.asarray(center_square(image, 32))).max() <= 2


def test_normalised_bytes_are_those_of_torch() -> None:
    """CPUs have a way of their own for bytes, also for views that are not contiguous and for no image at all."""
    pixels = torch.randint(0, 256, (5, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for few in (pixels, pixels[::2], pixels.permute(0, 1, 3, 2), pixels[:0]):
        torch.testing.assert_close(images.normalise(few), images.normalise(few.float()), rtol=0, atol=1e-6)

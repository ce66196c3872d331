"""Small data files for the tests, intact and damaged."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from PIL import Image


def picture(shade: int = 0, size: tuple[int, int] = (9, 7)) -> Image.Image:
    return Image.new("RGB", size, (shade % 256, shade // 256 % 256, 77))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def shade(image: Image.Image | str) -> int:
    """The number a picture was made with."""
    assert not isinstance(image, str)
    red, green, _ = image.getpixel((0, 0))  # type: ignore[misc]
    return int(red) + 256 * int(green)


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            facts = tarfile.TarInfo(name)
            facts.size = len(data)
            tar.addfile(facts, io.BytesIO(data))
    return path


def shard_members(numbers: Iterable[int]) -> list[tuple[str, bytes]]:
    """Samples in img2dataset's layout: number n is a picture of shade n with the caption "number n"."""
    return [
        member
        for n in numbers
        for member in (
            (f"{n:09d}.png", encoded(picture(n))),
            (f"{n:09d}.txt", f"number {n}".encode()),
            (f"{n:09d}.json", b'{"status": "success"}'),
        )
    ]

"""Makes the images and captions that `contratile bench data` reads: as shards, and as a table of files.

files = make_files(Path(folder), pixels=256, images=512)
files.shards, files.table
"""

import csv
import io
import random
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from contratile.bench.memory import MiB

SHARDS = 4
"""Tar files. Peers give each worker whole shards, so they need at least as many as workers."""
QUALITY = 90
WORDS = (
    "a",
    "the",
    "photo",
    "of",
    "red",
    "old",
    "small",
    "two",
    "dog",
    "river",
    "house",
    "street",
    "near",
    "with",
    "sky",
)


class Files(NamedTuple):
    """Where the data are."""

    shards: str
    """A pattern with a range in braces, as webdataset expands it."""

    table: Path
    kib: float
    """Mean size of a JPEG."""


def make_files(folder: Path, *, pixels: int, images: int) -> Files:
    """Write pictures of `pixels` x `pixels` with captions to an empty folder.

    Args:
        folder: Where they are written.
        pixels: Height and width.
        images: How many, in SHARDS shards.

    Returns:
        The shards and the table, which hold the same pairs.
    """
    (folder / "images").mkdir(parents=True)
    table, size = folder / "pairs.csv", 0
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("image", "caption"))
        for shard in range(SHARDS):
            with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
                for number in range(shard, images, SHARDS):
                    data, caption = jpeg(pixels, number), caption_of(number)
                    size += len(data)
                    (folder / "images" / f"{number:06d}.jpg").write_bytes(data)
                    writer.writerow((f"images/{number:06d}.jpg", caption))
                    _add(tar, f"{number:06d}.jpg", data)
                    _add(tar, f"{number:06d}.txt", caption.encode())
    return Files(f"{folder}/{{00000..{SHARDS - 1:05d}}}.tar", table, size / images / 1024)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    facts = tarfile.TarInfo(name)
    facts.size = len(data)
    tar.addfile(facts, io.BytesIO(data))


def jpeg(pixels: int, number: int) -> bytes:
    """A picture with as much detail as a photograph: areas of colour at three scales, and noise."""
    generator = np.random.default_rng(number)
    size = (pixels, pixels)
    found = np.zeros((pixels, pixels, 3), dtype=np.float32)
    for cells, strength in ((6, 0.55), (30, 0.25), (max(2, pixels // 8), 0.2)):
        grid = Image.fromarray(generator.integers(0, 255, (cells, cells, 3), dtype=np.uint8))
        found += strength * np.asarray(grid.resize(size, Image.Resampling.BILINEAR))
    found += generator.normal(0, 5, (pixels, pixels, 1))
    file = io.BytesIO()
    Image.fromarray(found.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def caption_of(number: int) -> str:
    """A caption of 6 to 16 words."""
    chosen = random.Random(number)
    return " ".join(chosen.choices(WORDS, k=chosen.randint(6, 16)))


def decoding_bytes(pixels: int, batch: int, workers: int) -> float:
    """Roughly the memory of a contestant: batches of floats in flight, a shuffled window and a decoded image."""
    return 400 * MiB * (1 + workers) + 12.0 * 224 * 224 * batch * (2 + 2 * workers) + 8.0 * pixels * pixels

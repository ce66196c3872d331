"""`contratile bench data`: samples per second of the loader against those of webdataset and open_clip.

    recording = run(BENCH, DataBenchConfig(pixels=(256,), workers=(0, 2)), command="...")

Every contestant has a process of its own for its turns, so that none pays for the imports and the memory of others.
The limit is the time that Pillow needs to decode the JPEGs whole, in as many processes as there are workers.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from contratile.bench.clock import wall_time
from contratile.bench.config import TimedConfig
from contratile.bench.contestants.data import DATA_CONTESTANTS, DATA_PACKAGES, tokenizer_of
from contratile.bench.data_files import SHARDS, Files, decoding_bytes, jpeg, make_files
from contratile.bench.data_point import DataPoint, Turn, Unable
from contratile.bench.harness import quiet
from contratile.bench.runner import OURS, Benchmark, Measured, Series
from contratile.errors import bad_value, check_count

SMALL = 256
"""Images of this many pixels are read as often as `--samples` says; larger ones less often, in proportion."""
DECODED = 32
"""Images that are decoded for the limit."""


@dataclass(frozen=True, kw_only=True)
class DataBenchConfig(TimedConfig):
    """Samples per second of the loader (JPEGs decoded, cropped at random, scaled, normalised; captions tokenized)
    against webdataset and open_clip on the same shards."""

    pixels: tuple[int, ...] = (256, 1500)
    """Heights and widths of the JPEGs that are made for the benchmark."""

    workers: tuple[int, ...] = (0, 1, 2)
    """Numbers of worker processes."""

    samples: int = 2048
    """Samples per turn, for JPEGs of 256 pixels; of larger ones fewer, in proportion."""

    images: int = 1024
    """Number of different JPEGs of 256 pixels; of larger ones fewer, in proportion."""

    batch: int = 64
    """Samples per batch."""

    crop_scale: tuple[float, float] = (0.9, 1.0)
    """Share of an image's area that a random crop covers, from and to."""

    dims: tuple[int, ...] = (224,)
    """Heights and widths that images are scaled to."""

    contestants: tuple[str, ...] = tuple(DATA_CONTESTANTS)
    """Which loaders to compare. One whose package is not installed gets a row that says so."""

    rounds: int = 5
    """How often each contestant is timed; the best and the median are reported."""

    threads: int = 1
    """Number of torch threads of the training process. Beside a GPU it has little to do, and workers need the cores."""

    patience: float = 300.0
    """Give up on a contestant whose turn takes longer than this many seconds, starting up included."""

    out: Path = Path("bench-data")
    """Folder for data.csv, data.json and data.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("samples", "images", "batch"):
            check_count(name, getattr(self, name), least=1)
        for name, least in (("pixels", 8), ("workers", 0)):
            if not getattr(self, name):
                bad_value(name, expected="at least one", got="none", remedy="Leave it out for the default.")
            for value in getattr(self, name):
                check_count(name, value, least=least)
        if max(self.workers) > SHARDS:
            remedy = f"The data are {SHARDS} shards, and open_clip and webdataset give each worker its own."
            bad_value("workers", expected=f"at most {SHARDS}", got=max(self.workers), remedy=remedy)
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            expected, got = "two numbers in ascending order, above 0 and at most 1", f"{low:g} {high:g}"
            bad_value("crop_scale", expected=expected, got=got, remedy="open_clip's default is 0.9 1.")

    @property
    def all_sizes(self) -> list[int]:
        """Numbers of workers, ascending."""
        return sorted(set(self.workers))

    def scaled(self, count: int, pixels: int) -> int:
        """The number of samples or images of this size: whole batches, at least one for each shard."""
        batches = round(count * min(1.0, SMALL / pixels) / self.batch)
        return self.batch * max(SHARDS, batches)


class DataSeries(Series):
    """The contestants at one size of images."""

    def __init__(self, config: DataBenchConfig, pixels: int, edge: int) -> None:
        super().__init__(config, f"{pixels} pixels to {edge}", config.contestants, DATA_CONTESTANTS)
        self.config, self.pixels, self.edge = config, pixels, edge
        self.samples = config.scaled(config.samples, pixels)

    def predicted_bytes(self, name: str, n: int) -> float:
        return decoding_bytes(self.pixels, self.config.batch, n)

    def start(self) -> None:
        """Choose the tokenizer, make the files and start the processes."""
        try:
            with quiet():
                tokenizer_of("open_clip")
            self.tokenizer = "open_clip"
        except Exception:  # not installed, or one of the packages it needs is not
            self.tokenizer = "bytes"
        self.resources = ExitStack()
        folder = self.resources.enter_context(tempfile.TemporaryDirectory(prefix="contratile-bench-"))
        self.notify(f"making images of {self.pixels} pixels")
        images = self.config.scaled(self.config.images, self.pixels)
        self.files: Files = make_files(Path(folder), pixels=self.pixels, images=images)
        self.jpegs = [jpeg(self.pixels, number) for number in range(DECODED)]
        self.points: dict[str, DataPoint] = {}
        for name in self.names:
            if name not in self.failed:
                point = DataPoint(name, threads=self.config.threads, silence=self.config.patience)
                self.points[name] = self.resources.enter_context(point)

    def rows(self, n: int) -> Iterator[dict[str, Any]]:
        last = n == self.config.all_sizes[-1]
        try:
            found, turns = self.measure(n)
        except BaseException:
            last = True
            raise
        finally:
            if last:
                self.resources.close()
        for name, measured in found.items():
            best, middle = measured.seconds_best, measured.seconds_median
            memory = [turn.workers_mib for turn in turns.get(name, ()) if turn.workers_mib is not None]
            yield {
                "contestant": name,
                "n": self.samples,
                "d": self.edge,
                "dtype": "float32" if name in DATA_CONTESTANTS else "",
                **measured.columns(found.get(OURS)),
                "workers": n,
                "pixels": self.pixels,
                "batch": self.config.batch,
                "jpeg_kib": round(self.files.kib, 1),
                "tokenizer": self.tokenizer,
                "samples_per_second": self.samples / best if best else None,
                "samples_per_second_median": self.samples / middle if middle else None,
                "workers_mib": max(memory) if n and memory else None,
            }

    def measure(self, workers: int) -> tuple[dict[str, Measured], dict[str, list[Turn]]]:
        """Take turns in rounds."""
        turns: dict[str, list[Turn]] = {}
        limits = [self.limit(workers)]
        for number in range(1, self.config.rounds + 1):
            for name in self.names:
                if self.obstacle(name, workers):
                    continue
                self.notify(f"{name}, round {number} of {self.config.rounds}, {workers} workers")
                limits.append(self.limit(workers))
                try:
                    turns.setdefault(name, []).append(self.points[name].turn(self.problem(workers), self.samples))
                except Unable as error:
                    self.failed[name] = str(error)
        found = {}
        for name in self.names:
            measured = found[name] = Measured(status=self.obstacle(name, workers) or "ok")
            seconds = [turn.seconds for turn in turns.get(name, ())]
            if seconds:
                measured.seconds_best, measured.seconds_median = min(seconds), median(seconds)
                measured.limit_seconds = min(limits)
                peaks = [turn.peak_mib for turn in turns[name] if turn.peak_mib is not None]
                measured.peak_extra_mib = max(peaks, default=None)
        return found, turns

    def problem(self, workers: int) -> dict[str, Any]:
        config = self.config
        return {
            "shards": self.files.shards,
            "table": str(self.files.table),
            "edge": self.edge,
            "batch": config.batch,
            "workers": workers,
            "crop_scale": config.crop_scale,
            "tokenizer": self.tokenizer,
        }

    def limit(self, workers: int) -> float:
        """Seconds to decode all samples, if the workers share the work and each has a core."""
        processes = max(1, min(workers, os.cpu_count() or 1))
        return wall_time(partial(_decode, self.jpegs)) * self.samples / len(self.jpegs) / processes


def _decode(jpegs: Sequence[bytes]) -> None:
    for data in jpegs:
        with Image.open(BytesIO(data)) as image:
            image.load()


BENCH = Benchmark(
    kind="data",
    default=DataBenchConfig(),
    quick=DataBenchConfig(samples=512, images=256, workers=(0, 2), rounds=2, quick=True),
    series=lambda config: [DataSeries(config, pixels, edge) for edge in config.dims for pixels in config.pixels],
    packages=DATA_PACKAGES,
)

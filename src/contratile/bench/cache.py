"""`contratile bench cache`: time and memory of a training step in chunks against other gradient caches.

    recording = run(BENCH, CacheBenchConfig(sizes=(256, 1024)), command="...")

The limit is the time of the encoders alone when every chunk of texts sorted by length is encoded twice; steps that keep
graphs can be faster.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contratile.bench.clock import Step
from contratile.bench.config import LocalConfig
from contratile.bench.contestants.cache import (
    CACHE_CONTESTANTS,
    CACHE_PACKAGES,
    CacheProblem,
    EncoderLimit,
    TrainingStep,
)
from contratile.bench.contestants.cache_model import LAYERS, TOKENS
from contratile.bench.contestants.cache_texts import LENGTHS, Lengths
from contratile.bench.runner import Benchmark, LocalSeries, Measured
from contratile.errors import check_choice, check_count


@dataclass(frozen=True, kw_only=True)
class CacheBenchConfig(LocalConfig):
    """Time and memory of training steps of a transformer with dropout, in chunks, against other ways to do them."""

    sizes: tuple[int, ...] = (256, 1024, 4096)
    """Batch sizes N to time."""

    memory_sizes: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Batch sizes N to measure peak memory at; may be larger than those that are timed."""

    chunk: int = 64
    """How many rows are encoded at a time."""

    dims: tuple[int, ...] = (128,)
    """Widths of the transformer, which are also its feature sizes D."""

    layers: int = LAYERS
    """Number of transformer layers."""

    lengths: Lengths = "equal"
    """Tokens of the texts: 32 each, as many as WordNet's definitions have, or synthetic lengths with a long tail."""

    contestants: tuple[str, ...] = ("contratile", "plain", "grad_cache", "sentence_transformers")
    """Which implementations to compare; also contratile_columns, _tokens, _kept and _unsorted. One whose package is not
    installed gets a row that says so."""

    rounds: int = 3
    """How often each contestant is timed at each size; the best and the median are reported."""

    threads: int = torch.get_num_threads()
    """Number of torch threads."""

    patience: float = 120.0
    """Skip steps that are expected, from smaller sizes, to take longer than this many seconds."""

    out: Path = Path("bench-cache")
    """Folder for cache.csv, cache.json and cache.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("chunk", self.chunk, least=1)
        check_count("layers", self.layers, least=1)
        check_choice("lengths", self.lengths, LENGTHS)


class CacheSeries(LocalSeries[CacheProblem]):
    """The contestants at one width."""

    growth = 1  # encoders dominate

    def __init__(self, config: CacheBenchConfig, d: int) -> None:
        super().__init__(config, f"width {d}", config.contestants, CACHE_CONTESTANTS)
        self.config, self.d = config, d
        self.steps: dict[str, TrainingStep] = {}

    def predicted_bytes(self, name: str, n: int) -> float:
        return CACHE_CONTESTANTS[name].predicted_bytes(n, width=self.d, layers=self.config.layers)

    def shared(self, n: int) -> CacheProblem:
        config = self.config
        return CacheProblem(n, config.chunk, width=self.d, layers=config.layers, lengths=config.lengths)

    def step(self, name: str, n: int, shared: CacheProblem) -> Step:
        load = CACHE_CONTESTANTS[name].load
        load(self.shared(min(n, 2 * self.config.chunk)))()
        self.steps[name] = load(shared)
        return self.steps[name]

    def limit(self, n: int, shared: CacheProblem) -> Step:
        return EncoderLimit(shared)

    def memory_words(self, name: str, n: int) -> list[str]:
        config = self.config
        what = f"cache --contestant {name} --n {n} --d {self.d} --chunk {config.chunk}"
        return f"{what} --layers {config.layers} --lengths {config.lengths} --threads {config.threads}".split()

    def columns(self, name: str, n: int, measured: Measured) -> dict[str, Any]:
        config, step, best = self.config, self.steps.get(name), measured.seconds_best
        loss_seconds = step.loss_seconds if step else float("inf")
        return {
            "d": self.d,
            "dtype": "float32",
            "chunk": config.chunk,
            "layers": config.layers,
            "tokens": TOKENS if config.lengths == "equal" else 0,
            "lengths": config.lengths,
            "padding": step.padding if step else None,
            "cpu_seconds": step.cpu_seconds if step and best else None,
            "kept": step.kept if step else None,
            "loss_percent": 100 * loss_seconds / best if best and loss_seconds < float("inf") else None,
        }


BENCH = Benchmark(
    kind="cache",
    default=CacheBenchConfig(),
    quick=CacheBenchConfig(sizes=(64, 256), memory_sizes=(64, 256, 1024), chunk=32, layers=2, rounds=2, quick=True),
    series=lambda config: [CacheSeries(config, d) for d in config.dims],
    packages=CACHE_PACKAGES,
)

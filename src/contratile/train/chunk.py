"""`--chunk auto`: the largest chunk that fits into memory, found by trial before the first step.

    chunk, taken = find_chunk(config, towers, source, accelerator)       # 512 pairs, 1.2 GiB

The towers run forward and backward on real samples, in chunks that double until memory would not suffice. Weights,
buffers, gradients and random state are as before. All processes get the smallest number that any of them found.
Towers are tried before they are sharded or compiled, which needs at most as much memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contratile.data.loader import Loader
from contratile.data.rows import Subset, chosen
from contratile.data.sample import Indexed, Stream
from contratile.errors import bad_value
from contratile.grad_cache.auto import START, Trial, largest_chunk
from contratile.grad_cache.chunks import Nest, tensors_of
from contratile.grad_cache.encoded import EncoderSide
from contratile.host_memory import available_bytes, peak_growth
from contratile.models.towers import Towers
from contratile.planner.loss_memory import dense_loss_bytes, tiled_loss_bytes
from contratile.report.tracking import binary_size
from contratile.train.config import TrainConfig
from contratile.train.config_file import CONFIG, load_config
from contratile.train.launch import gather_objects
from contratile.train.random_state import random_state, set_random_state
from contratile.train.resume import run_of

LARGEST = 4096
"""Maximum number of pairs to try: larger chunks are not faster."""

SAMPLES = 256
"""Pairs to read for the trials; larger chunks repeat them."""

OPTION = "chunk"
REMEDY = "Pass a number to --chunk, or --checkpointing."


class FoundChunk(NamedTuple):
    """A chunk that fits."""

    chunk: int
    taken: float
    """Bytes that it takes on this process; 0 if the device does not say."""


def choose_chunk(
    config: TrainConfig,
    towers: Towers,
    source: Indexed | Stream,
    accelerator: Any,
    *,
    second: Towers | None = None,
    resumed: Path | None,
    notify: Callable[[str], object],
) -> tuple[int, str]:
    """The chunk of a run, and a message if it was found by trial. Collective.

    Args:
        config: The options of the run.
        towers: The encoders, on their device and in training mode.
        source: The training data.
        accelerator: accelerate's `Accelerator`.
        resumed: Checkpoint that the run resumes from. It keeps its chunk, for bitwise equal results.
        notify: Called with a status text before a search.
    """
    chunk = config.run.chunk
    if chunk != "auto":
        return chunk, ""
    known = saved_chunk(resumed)
    if known is not None:
        return known, ""
    notify("finding the largest chunk that fits into memory")
    found = find_chunk(config, towers, source, accelerator, second=second)
    return found.chunk, f"chunk {found.chunk:,} (auto)" + (f": {binary_size(found.taken)}" if found.taken else "")


def saved_chunk(resumed: Path | None) -> int | None:
    """The chunk of the run that is resumed; None for a new run."""
    before = run_of(resumed) / CONFIG if resumed is not None else None
    saved = load_config(before).run.chunk if before is not None and before.exists() else None
    return saved if isinstance(saved, int) else None


def find_chunk(
    config: TrainConfig,
    towers: Towers,
    source: Indexed | Stream,
    accelerator: Any,
    *,
    second: Towers | None = None,
) -> FoundChunk:
    """Find the largest chunk that both towers can train on. Collective.

    Args:
        config: The options of the run.
        towers: The encoders, on their device and in training mode.
        source: The training data.
        accelerator: accelerate's `Accelerator`.
        second: The guide or the teacher, whose forward pass must fit too.

    Returns:
        The chunk, the same on all processes, and the memory that it takes.

    Raises:
        ValueError: There is no room for one pair, or memory cannot be measured on this system. All processes raise it.
    """
    before = random_state()
    blocks, limit, found, fault = None, 0.0, FoundChunk(0, 0.0), ""
    trials: list[Trial] = []
    try:
        blocks = sample_inputs(config, towers, source)
        limit = _limit(config, towers, blocks, accelerator, second)
        trials = _trials(towers, blocks)
        if second is not None:
            trials += _trials(second, sample_inputs(config, second, source))
    except ValueError as error:
        fault = str(error)
    accelerator.wait_for_everyone()  # all have measured what is free before any of them takes some of it
    try:
        if blocks is not None and not fault:
            found = _largest(config, trials, limit, accelerator)
    except ValueError as error:
        fault = str(error)
    set_random_state(before)
    everywhere: list[tuple[int, str]] = gather_objects((found.chunk, fault))
    for _, text in everywhere:
        if text:
            raise ValueError(text)
    return found._replace(chunk=min(chunk for chunk, _ in everywhere))


def _trials(towers: Towers, blocks: tuple[Nest, Nest]) -> list[Trial]:
    pairs = zip((towers.left, towers.right), blocks, strict=True)
    return [Trial(EncoderSide(0, tower, None, tower, [], None), block) for tower, block in pairs]


def _largest(config: TrainConfig, trials: list[Trial], limit: float, accelerator: Any) -> FoundChunk:
    taken: dict[int, float] = {}

    def cost(size: int) -> float:
        with accelerator.autocast():
            taken[size] = max(trial.cost(size) for trial in trials)
        return taken[size]

    share = -(-config.run.batch // accelerator.num_processes)
    most = min(share, LARGEST)
    cost(min(START, most))  # what is allocated once only, by the first call, does not count
    chunk = largest_chunk(cost, most=most, limit=limit, option="chunk = auto", remedy=REMEDY)
    return FoundChunk(chunk, taken[chunk])


def sample_inputs(config: TrainConfig, towers: Towers, source: Indexed | Stream) -> tuple[Nest, Nest]:
    """Inputs of both towers for some random samples."""
    rows = min(SAMPLES, config.run.batch, LARGEST)
    prepare = towers.left.prepare, towers.right.prepare
    if isinstance(source, Indexed):
        source = Subset(source, chosen(len(source), rows))
    # Broken samples are counted when the run reads them.
    options: dict[str, Any] = {"drop_last": False, "epochs": 1, "broken_limit": math.inf}
    options["augment"] = config.augment
    loader = Loader(source, prepare, batch=rows, chunk=rows, seed=config.run.seed, **options)
    with closing(iter(loader)) as batches:
        for batch in batches:
            for chunk in batch.chunks:
                return (chunk.left,), (chunk.right,)
    remedy = f"All of the samples are broken: {', '.join(loader.broken)}."
    bad_value(source.name, expected="samples to train on", got="none", remedy=remedy)


def _limit(
    config: TrainConfig, towers: Towers, blocks: tuple[Nest, Nest], accelerator: Any, second: Towers | None = None
) -> float:
    """Bytes that a chunk may take: half of what is free on a CPU and 80 % on an accelerator, less what else is held."""
    device: torch.device = accelerator.device
    held = _held_bytes(config, towers, blocks, accelerator.num_processes, second)
    if device.type == "cpu":
        if peak_growth(lambda: None) is None:
            bad_value(OPTION, expected="a number: auto on a CPU needs Linux", got="auto", remedy="Pass --chunk 256.")
        return (available_bytes() / processes_here(accelerator.num_processes) - held) / 2
    memory = torch.get_device_module(device)
    if not hasattr(memory, "mem_get_info"):
        return 1.0  # chunks that fit cost 0 there
    memory.empty_cache()
    free: int = memory.mem_get_info(device)[0]
    return 0.8 * (free - held)


def _held_bytes(
    config: TrainConfig, towers: Towers, blocks: tuple[Nest, Nest], processes: int, second: Towers | None
) -> int:
    """Bytes that a step holds besides a chunk: gradients, optimiser state, the batch's inputs and features, loss."""
    run, loss = config.run, config.loss
    trained = sum(p.numel() * p.element_size() for p in towers.parameters() if p.requires_grad)
    tiled = tiled_loss_bytes(
        run.batch,
        towers.left.width,
        processes=processes,
        views=loss.rows_per_pair,
        cache_bytes=loss.cache_mib << 20,
        second=0 if second is None else second.left.width,
    )
    held = 3 * trained + (dense_loss_bytes(run.batch, views=loss.rows_per_pair) if loss.backend == "dense" else tiled)
    pair = 4.0 * 4 * towers.left.width  # features of both sides and their gradients, in fp32
    if second is not None:
        pair += 4.0 * (second.left.width + second.right.width)  # its features; its weights are there already
    if run.offload == "none" or (run.offload == "host" and towers.log_scale.is_cpu):
        pair += sum(x.nbytes / len(x) for block in blocks for x in tensors_of(block) if x.dim())
    return held + int(pair * run.batch / processes)


def processes_here(processes: int) -> int:
    """Processes that share the memory of this machine; all of them, if the launcher does not say."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() and int(told) else processes

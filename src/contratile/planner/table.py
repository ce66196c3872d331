"""Predictions as a Markdown table, for documentation and reports, with the range that doubtful inputs allow.

>>> print(step_table(["H100"], n=32768, d=512).splitlines()[0])
| GPU (prediction) | kernels | forward | gradient | library | step | range | of peak |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product

import torch

from contratile.planner.candidates import FIRST_GENERATION, SECOND_GENERATION, Costs
from contratile.planner.gpus import Gpu, find
from contratile.planner.kernel_time import KernelTime
from contratile.planner.step_time import Prediction, predict
from contratile.planner.tile_time import Assumptions

GENERATIONS: Mapping[str, Costs] = {"first": FIRST_GENERATION, "second": SECOND_GENERATION}

OVERLAPS, PIPE_OVERLAPS, LATENCIES = (0.5, 0.9), (0.0, 1.0), (400, 900)
L2_FACTORS, SUSTAINED_FACTORS = (0.7, 1.3), (0.9, 1.0)


def spread(
    gpu: Gpu | str,
    n: int,
    d: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    precision: str | None = None,
    costs: Costs = SECOND_GENERATION,
) -> tuple[float, float]:
    """The least and most seconds of a step that the doubtful inputs allow together.

    Overlap from 0.5 to 0.9, pipe overlap from 0 to 1, latency from 400 to 900 clocks, the L2 bandwidth 30 % up or down,
    and products up to 10 % slower. This is not a confidence interval: the counts and the model itself may be wrong.

    Args:
        gpu: A GPU or its name.
        n: Pairs.
        d: Features.
        dtype: Dtype of the features.
        precision: How fp32 features are multiplied.
        costs: A generation of kernels.

    Returns:
        Two predictions, in seconds.

    Example:
        >>> low, high = spread("A100", 32768, 512)
        >>> low < predict("A100", 32768, 512).seconds < high
        True
    """
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    seconds = []
    for l2, share in product(L2_FACTORS, SUSTAINED_FACTORS):
        other = replace(gpu, l2_bandwidth=gpu.l2_bandwidth * l2, sustained=gpu.sustained * share)
        for overlap, pipes, latency in product(OVERLAPS, PIPE_OVERLAPS, LATENCIES):
            assumed = Assumptions(overlap=overlap, pipe_overlap=pipes, latency_clocks=latency)
            step = predict(other, n, d, dtype, precision=precision, costs=costs, assumptions=assumed)
            seconds.append(step.seconds)
    return min(seconds), max(seconds)


def step_table(
    gpus: Iterable[Gpu | str],
    *,
    n: int,
    d: int,
    dtype: torch.dtype = torch.bfloat16,
    precision: str | None = None,
    generations: Mapping[str, Costs] = GENERATIONS,
) -> str:
    """A row per GPU and generation of kernels: milliseconds of each part of a step.

    Args:
        gpus: GPUs or their names.
        n: Pairs.
        d: Features.
        dtype: Dtype of the features.
        precision: How fp32 features are multiplied.
        generations: Costs by name.

    Returns:
        The table, without a final line break.
    """
    lines = [
        "| GPU (prediction) | kernels | forward | gradient | library | step | range | of peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for gpu in gpus:
        for name, costs in generations.items():
            step = predict(gpu, n, d, dtype, precision=precision, costs=costs)
            low, high = spread(gpu, n, d, dtype, precision=precision, costs=costs)
            lines.append(f"| {step.gpu.name} | {name} | {_cells(step)} | {_ms(low)} to {_ms(high)} | {_share(step)} |")
    return "\n".join(lines)


def term_table(gpus: Iterable[Gpu | str], *, n: int, d: int, generations: Mapping[str, Costs] = GENERATIONS) -> str:
    """A row per GPU, generation and kernel: milliseconds that each unit is busy, in bf16. They overlap in part.

    >>> "| H100-SXM | first | forward |" in term_table(["H100"], n=32768, d=512)
    True
    """
    lines = [
        "| GPU (prediction) | kernels | kernel | product | exp2 | shuffles | issue | L2 | DRAM "
        "| tile, warps, blocks per SM | all |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for gpu in gpus:
        for name, costs in generations.items():
            step = predict(gpu, n, d, costs=costs)
            for time in (step.forward, step.gradient):
                lines.append(f"| {step.gpu.name} | {name} | {time.cost.kernel} | {_terms(time)} |")
    return "\n".join(lines)


def _cells(step: Prediction) -> str:
    parts = (step.forward_seconds, step.gradient.seconds, step.products.seconds, step.seconds)
    return " | ".join(_ms(seconds) for seconds in parts)


def _terms(time: KernelTime) -> str:
    terms = (time.product, time.exp2, time.shuffles, time.issue, time.l2, time.dram)
    shape = f"{time.cost.m}x{time.cost.n}, {time.cost.warps}, {time.blocks}"
    return " | ".join([*map(_ms, terms), shape, _ms(time.seconds)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds >= 0.01 else 2}f}"


def _share(step: Prediction) -> str:
    return f"{step.share_of_peak:.0%}"

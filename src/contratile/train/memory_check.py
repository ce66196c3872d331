"""Whether a run fits into memory, before its first step.

A run is refused only if it cannot fit: its predicted memory exceeds the available memory by more than the error of
predictions (`MARGIN`). A run that may not fit starts with a notice. Runs that are far from any limit are not counted,
since counting takes a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from contratile.data.sample import Indexed, Stream
from contratile.errors import bad_value
from contratile.host_memory import available_bytes
from contratile.models.towers import Tower, Towers
from contratile.planner.devices import RESERVE, Devices
from contratile.planner.plan_text import decimal_size
from contratile.planner.run_plan import Plan
from contratile.planner.tower_inputs import tower_definitions
from contratile.train.chunk import processes_here, sample_inputs
from contratile.train.config import TrainConfig
from contratile.train.planning import plan_config

MARGIN = 1.3
"""Predicted over available memory above which a run is refused. Predictions are meant to be within a quarter; those of
docs/plan.md are within 13 %."""
NEAR = 0.9
"""Share of the available memory above which a notice says that a run may not fit."""
FAR = 0.5
"""Share of the available memory below which a rough bound is enough."""
BYTES_PER_TOKEN = 0.08
"""Upper bound of activations: bytes per parameter, row and token (counted: 0.01 to 0.04 for usual widths)."""
NARROW = 16.0
"""The same times the width: narrow encoders have more activations per parameter."""


def check_memory(
    config: TrainConfig,
    towers: Towers,
    source: Indexed | Stream,
    accelerator: Any,
    *,
    second: Towers | None = None,
    negatives: int = 0,
    notify: Callable[[str], object] = lambda text: None,
) -> str:
    """A notice if a run may not fit into memory.

    Args:
        config: The options of the run, with a chunk.
        towers: Its encoders, on their device.
        source: The training data.
        accelerator: accelerate's `Accelerator`.
        second: The guide or the teacher, on the same device.
        negatives: Hard negatives of each pair.
        notify: Called with a line about progress.

    Returns:
        The notice; empty if the run fits.

    Raises:
        ValueError: The run cannot fit. The message names the smallest change that would.
    """
    devices = devices_here(towers, accelerator, second)
    if devices is None or rough_bound(config, towers, devices.count, second) < FAR * devices.usable:
        return ""
    try:
        (left,), (right,) = sample_inputs(config, towers, source)
        found = plan_config(
            config,
            devices,
            towers=towers,
            inputs=(left, right),
            second=second,
            negatives=negatives,
            notify=notify,
        )
    except ValueError:  # encoders that cannot run on fake tensors, or data that cannot be read: training says more
        return ""
    need, there = found.memory.peak, found.memory.available
    if need > MARGIN * there:
        change = _change(config, found, second)
        remedy = f"Smallest change that fits: {change}." if change else "Not even a chunk of one pair fits."
        bad_value(
            "memory",
            expected=f"at most {decimal_size(there)} per process",
            got=f"about {decimal_size(need)}",
            remedy=remedy,
        )
    return (
        f"memory: about {decimal_size(need)} of {decimal_size(there)} per process (predicted)"
        if need > NEAR * there
        else ""
    )


def _change(config: TrainConfig, found: Plan, second: Towers | None) -> str:
    """The smallest change; checkpointing is tried only if smaller chunks do not help."""
    if found.change is not None and "--batch" not in found.change.options:
        return found.change.options
    if not config.towers.checkpointing:
        again = replace(config, towers=replace(config.towers, checkpointing=True))
        towers = tower_definitions(again.towers, bias=config.loss.loss == "siglip", views=config.augment.views == 2)
        other = plan_config(again, found.devices, towers=towers, second=second)
        if other.fits:
            return "--checkpointing"
        if other.change is not None and "--batch" not in other.change.options:
            return f"--checkpointing {other.change.options}"
    return found.change.options if found.change is not None else ""


def devices_here(towers: Towers, accelerator: Any, second: Towers | None = None) -> Devices | None:
    """The memory of this process's device; None if it is not known. Rates are not needed, and not measured."""
    world, device = accelerator.num_processes, accelerator.device
    here = processes_here(world)
    common: dict[str, Any] = {"nodes": max(1, world // here), "per_node": here, "flops": dict.fromkeys(_RATES, 1e12)}
    common |= {"bandwidth": 1e12, "link": 1e10, "name": str(device)}
    if device.type == "cpu":
        free = available_bytes()
        if not free:
            return None  # not Linux
        both = [towers] if second is None else [towers, second]
        held = sum(x.nbytes for each in both for x in each.parameters())  # counted by the plan, and taken already
        return Devices(memory=free / here + held, host_memory=free, on_cpu=True, **common)
    if device.type != "cuda":
        return None
    memory = float(torch.cuda.get_device_properties(device).total_memory)
    return Devices(memory=memory, reserve=RESERVE, host_memory=float(available_bytes()) or float("inf"), **common)


_RATES = ("fp32", "bf16", "fp16")


def rough_bound(config: TrainConfig, towers: Towers, world: int, second: Towers | None = None) -> float:
    """More than a run takes, without counting: weights, gradients, state, features, inputs, one chunk."""
    run = config.run
    weights = 6 * sum(x.nbytes for x in towers.parameters())
    share, chunk = -(-run.batch // world), run.chunk if isinstance(run.chunk, int) else 1
    sides = [tower for each in (towers, second) if each is not None for tower in (each.left, each.right)]
    chunks = [
        _parameters(tower) * chunk * _tokens(tower) * max(BYTES_PER_TOKEN, NARROW / tower.width) for tower in sides
    ]
    inputs = sum(_row_bytes(tower) for tower in (towers.left, towers.right))
    features = 16.0 * 4 * max(tower.width for tower in sides)  # both sides, gradients, ring buffers
    if second is not None:
        weights += sum(x.nbytes for x in second.parameters())
        features *= 2
    dense = 16.0 * run.batch**2 if config.loss.backend == "dense" else 0.0
    return weights + share * (inputs + features) + sum(chunks) + dense + (100 << 20) + (config.loss.cache_mib << 20)


def _parameters(tower: Tower) -> int:
    return sum(x.numel() for x in tower.parameters())


def _tokens(tower: Tower) -> int:
    """Most tokens of a text; of an image, patches of 8 x 8 pixels."""
    prepare: Any = tower.prepare
    if tower.kind == "image":
        return max(1, (int(prepare.edge) // 8) ** 2)
    return int(getattr(prepare, "length", 0) or getattr(prepare, "context_length", 0) or 512)


def _row_bytes(tower: Tower) -> float:
    prepare: Any = tower.prepare
    return 3.0 * prepare.edge**2 if tower.kind == "image" else 24.0 * _tokens(tower)

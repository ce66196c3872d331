"""The plan of a training configuration.

found = plan_config(config, "8xA800-80G")           # the encoders by definition, no data
found = plan_run(config)                            # this machine, with samples of the run's own data
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from contratile.data.catalog import open_source
from contratile.data.sample import Indexed, Stream
from contratile.errors import bad_value
from contratile.grad_cache.chunks import Nest
from contratile.models.definition import definitions
from contratile.models.towers import Towers, build_towers
from contratile.planner.devices import Devices, parse_devices
from contratile.planner.run_plan import Plan, plan
from contratile.planner.tower_inputs import encoder_sides, tower_definitions
from contratile.planner.workload import LossFacts
from contratile.train.chunk import processes_here, sample_inputs
from contratile.train.config import TrainConfig
from contratile.train.config_file import CONFIG
from contratile.train.effects import check_effects
from contratile.train.launch import processes_started
from contratile.train.optim import make_optimizer
from contratile.train.second_model import second_definition
from contratile.train.setup import check_prefixes, fit_batch, negatives_of, tokenizer_texts

Notify = Callable[[str], object]


def plan_config(
    config: TrainConfig,
    devices: str | Devices,
    *,
    towers: Towers | None = None,
    inputs: tuple[Nest, Nest] | None = None,
    second: Towers | None = None,
    second_inputs: tuple[Nest, Nest] | None = None,
    samples: int = 0,
    negatives: int | None = None,
    tokens: int = 0,
    calibrate: bool = False,
    notify: Notify = lambda text: None,
) -> Plan:
    """Plan a training configuration.

    Args:
        config: The options of the run.
        devices: Where it would run.
        towers: Its encoders, if they exist; otherwise they are built without weights.
        inputs: Inputs of both encoders, if there are any; otherwise examples are made.
        second: Its guide or teacher, if that exists; otherwise it is built without weights, if there is one.
        second_inputs: Inputs of it; otherwise examples are made.
        samples: Pairs of the data, if known.
        negatives: Hard negatives of each pair; by default those of the options.
        tokens: Tokens of a text, if there are no inputs; 0: as many as the model takes.
        calibrate: Run two small chunks on this machine first.
        notify: Called with a line about progress.

    Raises:
        ValueError: The options cannot be planned.
    """
    run, locked = config.run, config.towers
    where = parse_devices(devices) if isinstance(devices, str) else devices
    if towers is None:
        notify(f"building {locked.towers} without weights")
        towers = tower_definitions(locked, bias=config.loss.loss == "siglip", views=config.augment.views == 2)
    check_prefixes(config, towers.left.width)
    role = config.loss.second.role if config.loss.second else ""
    if role and second is None:
        notify(f"building the {role} without weights")
        second = second_definition(config)
    kept = tuple(tower.locked and locked.keep_outputs for tower in (towers.left, towers.right))
    samples = config.data.samples_per_epoch or samples
    return plan(
        towers,
        batch=run.batch,
        devices=where,
        chunk=run.chunk,
        sample_inputs=inputs,
        tokens=tokens,
        precision=run.precision,
        fsdp=run.fsdp,
        offload=run.offload,
        optimizer=_optimizer(config),
        loss=loss_facts(config, config.data.num_negatives or 0 if negatives is None else negatives),
        samples_per_epoch=samples,
        steps=run.steps,
        epochs=run.epochs,
        calibrate=calibrate,
        host_bytes=4.0 * samples * sum(tower.width for tower, keep in zip(_both(towers), kept, strict=True) if keep),
        kept=(bool(kept[0]), bool(kept[1])),
        second=None if second is None else (role, encoder_sides(second, tokens=tokens, inputs=second_inputs)),
        name=locked.towers,
        optimizer_name=config.optim.optimizer,
        notify=notify,
    )


def _both(towers: Towers) -> tuple[Any, Any]:
    return towers.left, towers.right


def loss_facts(config: TrainConfig, negatives: int) -> LossFacts:
    """What the loss of a configuration compares."""
    loss = config.loss
    return LossFacts(
        views=loss.rows_per_pair,
        negatives=negatives,
        shared_negatives=loss.hard_negatives == "all",
        cache_bytes=loss.cache_mib << 20,
        dense=loss.backend == "dense",
        ring=loss.ring,
        directions=loss.directions,
        prefixes=len(loss.matryoshka_dims),
    )


def _optimizer(config: TrainConfig) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Parameter groups do not change what is held, so that there is one rate for all."""
    options = replace(config.optim, backbone_lr=None, layer_decay=1.0)
    return lambda model: make_optimizer(model, options)


def plan_run(config: TrainConfig, notify: Notify = lambda text: None) -> Plan:
    """Plan a run on this machine, with samples of its own data.

    Args:
        config: The options of the run.
        notify: Called with a line about progress.

    Raises:
        ValueError: The options do not fit the data, or the machine's GPU is not in the table.
    """
    if not (config.run.out / CONFIG).exists():  # as a new run would
        check_effects(config)
    notify("reading samples of the data")
    source = open_source(config.data, "train")
    world = processes_started()
    config = fit_batch(config, source, world)
    with definitions():
        towers = build_towers(
            config.towers,
            texts=tokenizer_texts(source),
            bias=config.loss.loss == "siglip",
            views=config.augment.views == 2,
        ).train()
    second = second_definition(config)
    second_inputs = None
    with torch.device("cpu"):
        (left,), (right,) = sample_inputs(config, towers, source)
        if second is not None:
            (second_left,), (second_right,) = sample_inputs(config, second, source)
            second_inputs = second_left, second_right
    return plan_config(
        config,
        run_devices(config, world),
        towers=towers,
        inputs=(left, right),
        second=second,
        second_inputs=second_inputs,
        samples=pairs_of(source),
        negatives=negatives_of(config, source),
        notify=notify,
    )


def pairs_of(source: Indexed | Stream) -> int:
    """Pairs of the data; 0 for a stream."""
    return len(source) if isinstance(source, Indexed) else 0


def run_devices(config: TrainConfig, world: int) -> Devices:
    """The devices that a run on this machine uses."""
    here = processes_here(world)
    nodes = max(1, world // here)
    counts = f"{nodes}x{here}" if nodes > 1 else str(here)
    if config.run.cpu or not torch.accelerator.is_available():
        return parse_devices(f"{counts}xcpu")
    if not torch.cuda.is_available():
        remedy = "Describe it: contratile plan --devices 1 --device-memory GB --device-flops TFLOPS."
        bad_value("plan", expected="a CPU or a GPU of CUDA or ROCm", got="another accelerator", remedy=remedy)
    memory = float(torch.cuda.get_device_properties(0).total_memory)
    return parse_devices(f"{counts}x{torch.cuda.get_device_name()}", memory=memory)

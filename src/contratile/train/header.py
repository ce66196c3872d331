"""A summary of a run before its first step: pairs, columns, encoders, device, steps, learning rates, folder.

print("\\n".join(header(trainer)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from contratile.data.sample import Indexed, Source, traits_of
from contratile.report.metric_text import columns_of

if TYPE_CHECKING:
    from contratile.models.towers import Tower
    from contratile.train.loop import Trainer


def header(trainer: Trainer) -> list[str]:
    """Summarise a run, one line per topic.

    Args:
        trainer: The run.

    Returns:
        Aligned lines, each with a title.
    """
    run, optim = trainer.config.run, trainer.config.optim
    rates = f"{optim.rate:g}"
    if optim.backbone_lr is not None:
        rates += f"; pretrained backbones {optim.backbone_lr:g}"
    if optim.layer_decay < 1:
        rates += f"; times {optim.layer_decay:g} per block"
    schedule = f"{optim.schedule}, {optim.warmup} steps of warm-up"
    if optim.cooldown:
        schedule += f", {optim.cooldown} of cooldown"
    per_epoch = trainer.loader.steps_per_epoch
    samples = trainer.config.data.samples_per_epoch
    length = f" of {samples:,} pairs" if samples else ""
    epochs = f" (epochs{length}: {trainer.steps / per_epoch:.3g})" if per_epoch else ""
    told = [
        ("pairs", f"{_counted(trainer.source)}; held out: {_counted(trainer.held_out)}"),
        *_columns(trainer),
        *_augment(trainer),
        *([("zero-shot", _counted(trainer.zero_shot.source))] if trainer.zero_shot is not None else []),
        ("towers", _towers(trainer)),
        ("device", f"{_device(trainer)}, {run.precision}"),
        ("steps", f"{trainer.steps:,} of {trainer.loader.batch:,} pairs in chunks of {trainer.chunk:,}{epochs}"),
        ("loss", trainer.config.loss.loss),
        *_second(trainer),
        ("learning rate", f"{rates} ({optim.optimizer}, {schedule})"),
        *([("trackers", ", ".join(run.track))] if run.track else []),
        ("writes to", str(run.out)),
    ]
    width = max(len(title) for title, _ in told)
    return [f"{title:<{width}}  {text}" for title, text in told]


def _device(trainer: Trainer) -> str:
    """The device and the number of processes; on a CPU also of threads: with more than free cores, steps are slow."""
    device, world = trainer.accelerator.device, trainer.accelerator.num_processes
    told = f"{device}, {world} process{'es' * (world > 1)}"
    if device.type != "cpu":
        return told
    threads = torch.get_num_threads()
    return f"{told}{' of' if world > 1 else ','} {threads} thread{'s' * (threads > 1)}{' each' * (world > 1)}"


def _counted(source: Source) -> str:
    return f"{len(source):,} of {source.name}" if isinstance(source, Indexed) else f"a stream of {source.name}"


def _columns(trainer: Trainer) -> list[tuple[str, str]]:
    """The columns that form the pairs of each source, and the unused ones: the user may have meant one of them."""
    told: list[tuple[str, str]] = []
    for source in getattr(trainer.source, "sources", [trainer.source]):
        told += _columns_of(source, negatives=trainer.negatives > 0)
    if trainer.negatives:
        whose = "all pairs" if trainer.config.loss.hard_negatives == "all" else "their own pair"
        told.append(("hard negatives", f"up to {trainer.negatives} of each pair, compared with {whose}"))
    if traits_of(trainer.source).several_texts:
        loss = trainer.config.loss
        shared = "" if loss.same_id == "negative" else f"; pairs with the same {loss.ids} side share an id"
        told.append(("texts", f"one of several in each epoch{shared}"))
    return told


def _columns_of(source: Source, *, negatives: bool) -> list[tuple[str, str]]:
    columns = columns_of(source)
    if columns is None:
        return []
    told = [("columns", f"{columns.left} ({columns.kinds[0]}) and {columns.right} ({columns.kinds[1]})")]
    unused = columns.unused
    if columns.negatives and negatives:
        told.append(("negatives", f"{', '.join(columns.negatives)} ({columns.traits.negatives})"))
    elif columns.negatives:
        unused = (*((name, columns.traits.negatives) for name in columns.negatives), *unused)
    if unused:
        listed = ", ".join(f"{name} ({kind})" if kind else name for name, kind in unused)
        hint = "; --left, --right and --negatives choose others" if any(kind for _, kind in unused) else ""
        told.append(("not used", f"{listed}{hint}"))
    return told


def _augment(trainer: Trainer) -> list[tuple[str, str]]:
    """How training images are changed; options that do nothing are left out."""
    config = trainer.config.augment
    if not config.on:
        return []
    strengths = config.strengths
    told = [f"random crops of {strengths.crop_scale[0]:.0%} to {strengths.crop_scale[1]:.0%} of the area"]
    told += [
        f"{name} {getattr(strengths, name):g}" for name in ("flip", "grayscale", "blur") if getattr(strengths, name)
    ]
    if any(strengths.color_jitter):
        told.append(f"colours {' '.join(f'{x:g}' for x in strengths.color_jitter)}")
    views = "two views: " if config.views == 2 else ""
    return [("augment", views + ", ".join(told))]


def _towers(trainer: Trainer) -> str:
    towers = trainer.towers
    if towers.left is towers.right:
        sides = [f"{towers.left.kind} and {towers.right.kind} {_size(towers.left)}, one encoder for both"]
    else:
        sides = [f"{tower.kind} {_size(tower)}" for tower in (towers.left, towers.right)]
    return f"{trainer.config.towers.towers}: {'; '.join(sides)}"


def _second(trainer: Trainer) -> list[tuple[str, str]]:
    """The guide or the teacher, and what it does."""
    second, loss = trainer.second, trainer.config.loss
    if second is None:
        return []
    step = "" if second.step is None else f" at step {second.step}"
    if second.role == "teacher":
        told = f"weight {loss.teacher_weight:g}, temperature {loss.teacher_temperature:g}, scale {second.scale:.3g}"
    else:
        told = f"drops pairs above its own pair's similarity, {loss.guide_margin_strategy} margin {loss.guide_margin:g}"
    towers = dict.fromkeys((second.towers.left, second.towers.right))
    every = sum(p.numel() for tower in towers for p in tower.parameters())
    return [(second.role, f"{second.name}{step}: {every:,} parameters, frozen; {told}")]


def _size(tower: Tower) -> str:
    """Number of parameters, and how many of them are trained if not all."""
    every = sum(p.numel() for p in tower.parameters())
    trained = sum(p.numel() for p in tower.parameters() if p.requires_grad)
    start = "pretrained" if tower.pretrained else "from scratch"
    return f"{every:,} parameters {start}" + ("" if trained == every else f", {trained:,} of them trained")

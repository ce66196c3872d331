"""The learning rate of each step.

    config = in_steps(config, steps_per_epoch=184, steps=7360)      # warm-up and cooldown given in epochs
    learning_rate(config, step, steps=7360)

The rate depends on the step alone, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from contratile.errors import bad_value

if TYPE_CHECKING:
    from contratile.train.optim import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of a step, as in open_clip's cosine_lr, const_lr and const_lr_cooldown.

    Args:
        config: Rate, warm-up, schedule and cooldown, in steps.
        step: The step, from 0.
        steps: Steps of the whole run.
    """
    base, end = config.rate, config.min_lr
    if step < config.warmup:
        return base * (step + 1) / config.warmup
    if config.schedule == "cosine":
        length = max(1, steps - config.warmup)
        done = min(step - config.warmup, length)
        return end + 0.5 * (1 + math.cos(math.pi * done / length)) * (base - end)
    start = steps - config.cooldown
    if config.schedule == "constant" or step < start:
        return base
    done = min(step - start, config.cooldown)
    return float((1 - done / config.cooldown) ** config.cooldown_power * (base - end) + end)


def in_steps(config: OptimConfig, steps_per_epoch: int | None, steps: int) -> OptimConfig:
    """Convert `warmup_epochs` and `cooldown_epochs` to steps.

    Args:
        config: The options; those in steps stay as they are, so that a converted configuration is not changed again.
        steps_per_epoch: Steps in an epoch; None if the length of the data is not known.
        steps: Steps of the whole run.

    Returns:
        The options with `warmup` and `cooldown` in steps.

    Raises:
        ValueError: The length of an epoch is not known, or the cooldown is longer than the run.
    """
    for name in ("warmup", "cooldown"):
        epochs = getattr(config, f"{name}_epochs")
        if not epochs:
            continue
        if steps_per_epoch is None:
            remedy = f"Pass --samples-per-epoch, or --{name} in steps: shards and streams have no known length."
            bad_value(f"{name}_epochs", expected="data with a known length", got=f"{epochs:g}", remedy=remedy)
        config = replace(config, **{name: max(1, round(epochs * steps_per_epoch)), f"{name}_epochs": 0.0})
    if config.cooldown > steps:
        remedy = "Shorten it, or train longer."
        bad_value("cooldown", expected=f"at most the {steps:,} steps of the run", got=config.cooldown, remedy=remedy)
    return config

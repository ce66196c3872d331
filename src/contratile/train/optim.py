"""The options of the optimiser, optimisers by name, and parameter groups.

    optimizer = make_optimizer(towers, OptimConfig(optimizer="adamw", lr=1e-3))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step, steps) * group.get("lr_scale", 1)

`learning_rate` is in `contratile.train.schedule`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from contratile.errors import bad_value, check_choice, check_count
from contratile.models.blocks import need_blocks
from contratile.models.towers import Tower
from contratile.packages import find_spec_safely, why_not

ScheduleName = Literal["cosine", "constant", "constant-cooldown"]
SCRATCH, PRETRAINED = 1e-3, 2e-5
"""Default learning rates of random weights and of pretrained backbones."""

MAX_SCALE = 100.0
"""Largest scale that CLIP lets its model learn."""

# They need a closure or sparse gradients.
_UNFIT = ("LBFGS", "SparseAdam")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its schedule."""

    optimizer: str = "adamw"
    """A class of torch.optim, case ignored (adamw, sgd, adagrad ...), or timm:<name> (timm:lion, timm:lamb ...)."""

    lr: float | None = None
    """Learning rate after the warm-up, for everything. Not given: 1e-3, and 2e-5 for pretrained backbones."""

    backbone_lr: float | None = None
    """Learning rate of pretrained backbones, if different from lr."""

    weight_decay: float = 0.1
    """Weight decay of matrices; gains, biases and the scale have none."""

    betas: tuple[float, float] | None = None
    """Decay rates of the running averages; None: the optimiser's default. timm:adafactorbv: the second is a cap."""

    eps: float | None = None
    """Term added to the denominator; None: the optimiser's default."""

    momentum: float | None = None
    """Momentum; None: the optimiser's default."""

    layer_decay: float = 1.0
    """Factor on the learning rate per block of a backbone, from the last block down to the embeddings; 1: none."""

    schedule: ScheduleName = "cosine"
    """cosine: falls to `min_lr` at the last step; constant: stays at lr; constant-cooldown: falls at the end only."""

    warmup: int = 0
    """Steps of linear warm-up."""

    warmup_epochs: float = 0.0
    """Linear warm-up in epochs, instead of `warmup`."""

    cooldown: int = 0
    """constant-cooldown: last steps of the run, in which the rate falls to `min_lr`."""

    cooldown_epochs: float = 0.0
    """constant-cooldown: the same in epochs, instead of `cooldown`."""

    cooldown_power: float = 1.0
    """constant-cooldown: the rate falls as (1 - t) ** power; 1: linear."""

    min_lr: float = 0.0
    """Learning rate at the end of the cosine or of the cooldown."""

    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, get_args(ScheduleName))
        check_count("warmup", self.warmup, least=0)
        check_count("cooldown", self.cooldown, least=0)
        for name in ("lr", "backbone_lr", "weight_decay", "min_lr", "clip_grad", "warmup_epochs", "cooldown_epochs"):
            value = getattr(self, name)
            if value is not None and not (0 <= value < math.inf):
                bad_value(name, expected="a finite number, 0 or more", got=value, remedy="Check its sign.")
        if self.backbone_lr and self.lr == 0:
            remedy = "To train nothing but the backbones, set both to the rate of the backbones."
            bad_value("lr", expected="more than 0 with a backbone_lr", got=self.lr, remedy=remedy)
        if self.min_lr > self.rate:
            remedy = "The rate falls from lr to min_lr."
            bad_value("min_lr", expected=f"at most lr = {self.rate}", got=self.min_lr, remedy=remedy)
        if not 0 < self.layer_decay <= 1:
            remedy = "0.75 is common for fine-tuning; 1 gives all blocks the same rate."
            bad_value("layer_decay", expected="more than 0, at most 1", got=self.layer_decay, remedy=remedy)
        self._check_schedule()

    def _check_schedule(self) -> None:
        for name in ("warmup", "cooldown"):
            steps, epochs = getattr(self, name), getattr(self, f"{name}_epochs")
            if steps and epochs:
                remedy = f"Set --{name} or --{name}-epochs to 0."
                bad_value(name, expected="steps or epochs", got=f"{steps} steps and {epochs:g} epochs", remedy=remedy)
        cooled = self.schedule == "constant-cooldown"
        if cooled and not (self.cooldown or self.cooldown_epochs):
            remedy = "Pass --cooldown STEPS or --cooldown-epochs."
            bad_value("cooldown", expected="a length with --schedule constant-cooldown", got=0, remedy=remedy)
        if not cooled:
            for name, default in {"cooldown": 0, "cooldown_epochs": 0, "cooldown_power": 1}.items():
                if getattr(self, name) != default:
                    expected, remedy = f"none with --schedule {self.schedule}", "Pass --schedule constant-cooldown."
                    bad_value(name, expected=expected, got=getattr(self, name), remedy=remedy)
        if self.schedule == "constant" and self.min_lr:
            remedy = "Drop it, or choose a schedule that falls."
            bad_value("min_lr", expected="none with --schedule constant", got=self.min_lr, remedy=remedy)
        if not 0 < self.cooldown_power < math.inf:
            bad_value("cooldown_power", expected="more than 0", got=self.cooldown_power, remedy="1 is linear.")

    @property
    def rate(self) -> float:
        """Learning rate of everything that is trained from scratch."""
        return SCRATCH if self.lr is None else self.lr


def resolved(config: OptimConfig, model: nn.Module, before: OptimConfig | None = None) -> OptimConfig:
    """Fill in the learning rates that were not given.

    They are those of the run that is resumed. In a new run everything that starts from scratch (towers, heads, the
    scale) gets 1e-3 and pretrained backbones 2e-5, since 1e-3 would destroy them within a few steps. If `lr` alone is
    given, it applies to everything.

    Args:
        config: The options.
        model: The towers.
        before: The options of the run that is resumed.

    Raises:
        ValueError: `backbone_lr` is given, but there is no pretrained backbone to train, or the resumed run had none;
            or only one of the two runs has a `layer_decay`.
    """
    lr, backbone = config.lr, config.backbone_lr
    if before is not None and (before.layer_decay == 1) != (config.layer_decay == 1):
        remedy = f"Pass --layer-decay {before.layer_decay:g}, or start a new run with another --out."
        expected = "a factor below 1" if before.layer_decay < 1 else "1"
        expected += ", as in the run that is resumed"
        bad_value("layer_decay", expected=expected, got=config.layer_decay, remedy=remedy)
    trained = any(pretrained_parameters(model))
    if backbone is not None and not trained:
        remedy = "Drop it: no pretrained backbone is trained here."
        bad_value("backbone_lr", expected="a pretrained backbone that is not locked", got=backbone, remedy=remedy)
    if before is not None and (before.backbone_lr is None) != (backbone is None):
        if backbone is not None:
            remedy = "Pass --lr alone, or start a new run with another --out."
            bad_value("backbone_lr", expected="none, as in the run that is resumed", got=backbone, remedy=remedy)
        # Parameter groups stay as in the checkpoint; a single rate then applies to both.
        backbone = before.backbone_lr if lr is None else lr
    elif before is None and lr is None and backbone is None and trained:
        backbone = PRETRAINED
    if lr is None:
        lr = SCRATCH if before is None else before.rate
    return replace(config, lr=lr, backbone_lr=backbone)


def pretrained_parameters(model: nn.Module) -> Iterator[str]:
    """Names of the trainable parameters of pretrained backbones."""
    for prefix, module in model.named_modules():
        if getattr(module, "pretrained", False) is True and isinstance(getattr(module, "backbone", None), nn.Module):
            unused = set(unused_parameters(model))
            for name, parameter in module.backbone.named_parameters(prefix=f"{prefix}.backbone".lstrip(".")):
                if parameter.requires_grad or name in unused:
                    yield name


def unused_parameters(model: nn.Module) -> Iterator[str]:
    """Names of frozen parameters that stay in the optimiser's groups, as in checkpoints of 0.1: unused text poolers."""
    for prefix, tower in model.named_modules():
        if isinstance(tower, Tower) and not tower.locked and not tower.frozen:
            for inner, module in tower.backbone.named_modules(prefix=f"{prefix}.backbone".lstrip(".")):
                if getattr(module, "unused", False) is True:
                    yield from (name for name, _ in module.named_parameters(prefix=inner))


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to a parameter, by open_clip's rule: not to gains, biases and the scale."""
    return parameter.ndim >= 2 and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], weight_decay: float, unused: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Parameter groups without and with weight decay. Frozen parameters are left out, except `unused`."""
    without: list[nn.Parameter] = []
    with_decay: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad or name in unused:
            (with_decay if decays(name, parameter) else without).append(parameter)
    groups = [{"params": without, "weight_decay": 0.0}, {"params": with_decay, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


def groups_of(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Parameter groups of a model.

    Pretrained backbones (with `backbone_lr`) and blocks (with `layer_decay`) get groups with an `lr_scale`.
    """
    theirs = set() if config.backbone_lr is None else set(pretrained_parameters(model))
    below = blocks_below_the_top(model) if config.layer_decay < 1 else {}
    if config.layer_decay < 1 and not below:
        remedy = "Drop it: all backbones are locked."
        bad_value("layer_decay", expected="a backbone to train", got=config.layer_decay, remedy=remedy)
    unused = set(unused_parameters(model))
    parts: dict[tuple[bool, int], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault((name in theirs, below.get(name, 0)), []).append((name, parameter))
    groups = []
    for backbone, depth in sorted(parts):
        found = parameter_groups(parts[backbone, depth], config.weight_decay, unused)
        scale = config.layer_decay**depth
        if backbone and config.backbone_lr is not None and config.rate:
            scale *= config.backbone_lr / config.rate
        groups += [{**group, "lr_scale": scale} for group in found] if backbone or depth else found
    return groups


def blocks_below_the_top(model: nn.Module) -> dict[str, int]:
    """How far the trainable parameters of all backbones are from the output, in blocks, for `layer_decay`.

    As in BEiT and EVA-CLIP: 0 for whatever follows the blocks (final norm, projection), 1 for the last block, and one
    more than there are blocks for the embeddings. timm counts the final norm to the last block.

    Raises:
        ValueError: The blocks of a backbone cannot be identified.
    """
    found = {}
    for prefix, tower in model.named_modules():
        if isinstance(tower, Tower) and any(p.requires_grad for p in tower.backbone.parameters()):
            blocks = need_blocks(tower.backbone, "layer_decay", kind=tower.kind)
            inside = f"{prefix}.backbone".lstrip(".")
            for name, depth in blocks.depth.items():
                found[f"{inside}.{name}"] = len(blocks.modules) + 1 - depth
    return found


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """Make the configured optimiser for the trainable parameters of a model.

    Raises:
        ValueError: The optimiser is unknown, does not take an option, or there is nothing to train.
    """
    groups = groups_of(model, config)
    if not groups:
        remedy = "Unlock a tower or give it a head."
        bad_value("optimizer", expected="parameters to train", got="none", remedy=remedy)
    asked = {name: getattr(config, name) for name in ("betas", "eps", "momentum") if getattr(config, name) is not None}
    package, _, name = config.optimizer.rpartition(":")
    check_choice("package of the optimizer", package, ("", "timm"))
    make = _of_timm if package else _of_torch
    try:
        return make(name, groups, lr=config.rate, weight_decay=config.weight_decay, **asked)
    except (TypeError, ValueError, AssertionError) as error:
        # Pass on what the optimiser says about an option or a parameter that it does not support.
        raise ValueError(f"optimizer {config.optimizer}: {error}") from error


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict` without its rounding of fp32 state to the dtype of 16-bit parameters."""
    optimizer.load_state_dict(state)
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in state["state"].get(name, {}).items():
            kept = optimizer.state[parameter]
            if isinstance(value, torch.Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device, copy=True)


@torch.no_grad()
def clamp_scale(log_scale: torch.Tensor, most: float = MAX_SCALE) -> None:
    """Clamp a learned scale, given as its logarithm, between 1 and `most`, as open_clip does."""
    log_scale.clamp_(0, math.log(most))


def _of_torch(name: str, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    known = {
        cls.__name__.lower(): cls
        for cls in vars(torch.optim).values()
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer and cls.__name__ not in _UNFIT
    }
    _check_known(name, list(known))
    made = known[name.lower()]
    if not options["weight_decay"]:
        del options["weight_decay"]
    takes = inspect.signature(made).parameters
    for option in options:
        if option not in takes:
            remedy = f"Set {option} to 0." if option == "weight_decay" else "Leave it out."
            bad_value(option, expected=f"none, as {made.__name__} has no {option}", got=options[option], remedy=remedy)
    return made(groups, **options)


def _of_timm(name: str, groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    try:
        optim: Any = importlib.import_module("timm.optim")
    except Exception as error:  # also errors of packages that timm imports
        reason = why_not("timm", error) if find_spec_safely("timm") else "pip install timm."
        raise ValueError(f"timm is needed. {reason} Or name one of torch.optim.") from error
    _check_known(name, optim.list_optimizers())
    if name.lower().startswith("adafactorbv") and "betas" in options:
        options["momentum"], options["beta2_cap"] = options.pop("betas")  # its names for them
    found = optim.create_optimizer_v2(groups, opt=name.lower(), **options)
    assert isinstance(found, Optimizer)
    for group in found.param_groups if "momentum" in options else ():
        if "momentum" not in group:
            expected = f"none, as {type(found).__name__} has no momentum"
            bad_value("momentum", expected=expected, got=options["momentum"], remedy="Leave it out.")
        group["momentum"] = options["momentum"]  # timm passes it on to some optimisers only
    return found


def _check_known(name: str, known: list[str]) -> None:
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0)
        remedy = f"Did you mean {near[0]}?"
        bad_value("name", expected=f"one of {', '.join(sorted(known))}", got=repr(name), remedy=remedy)

"""The optimiser by name, its parameter groups, and the learning rate as a function of the step.

    optimizer = make_optimizer(towers, OptimConfig(optimizer="adamw", lr=1e-3))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step, steps) * group.get("lr_scale", 1)

A rate that depends on nothing but the step needs no state: a resumed run has it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from contratile.errors import bad_value, check_choice, check_count
from contratile.packages import find_spec_safely, why_not

Schedule = Literal["cosine", "constant"]
SCRATCH, PRETRAINED = 1e-3, 2e-5
"""Learning rates of what starts from random weights and of backbones that were trained before."""

MAX_SCALE = 100.0
"""The largest factor on the cosines that CLIP lets its model learn."""

# They want a closure, or sparse gradients.
_UNFIT = ("LBFGS", "SparseAdam")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its schedule."""

    optimizer: str = "adamw"
    """A class of torch.optim in any case (adamw, sgd, adagrad ...), or timm:<name> (timm:lion, timm:lamb ...)."""

    lr: float | None = None
    """Learning rate after the warm-up, of all that is trained; none: 1e-3, and 2e-5 for pretrained backbones."""

    backbone_lr: float | None = None
    """Learning rate of pretrained backbones, if it is not that of the rest."""

    weight_decay: float = 0.1
    """Of matrices; gains, biases and the scale have none."""

    betas: tuple[float, float] | None = None
    """Decay of the running averages, where the optimiser has them; None: its own default."""

    eps: float | None = None
    """Added to the denominator, where the optimiser has one; None: its own default."""

    momentum: float | None = None
    """Where the optimiser has one; None: its own default."""

    schedule: Schedule = "cosine"
    """cosine: down to `min_lr` at the last step; constant."""

    warmup: int = 0
    """Steps over which the rate rises in a line."""

    min_lr: float = 0.0
    """Where the cosine ends."""

    clip_grad: float = 1.0
    """Largest norm of the gradient of all parameters together; 0: no clipping."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, ("cosine", "constant"))
        check_count("warmup", self.warmup, least=0)
        for name in ("lr", "backbone_lr", "weight_decay", "min_lr", "clip_grad"):
            value = getattr(self, name)
            if value is not None and not (0 <= value < math.inf):
                bad_value(name, expected="a finite number, 0 or more", got=value, remedy="Check its sign.")
        if self.backbone_lr and self.lr == 0:
            remedy = "To train nothing but the backbones, give both the rate of the backbones."
            bad_value("lr", expected="more than 0 beside a backbone_lr", got=self.lr, remedy=remedy)
        if self.min_lr > self.rate:
            remedy = "The cosine falls from lr to min_lr."
            bad_value("min_lr", expected=f"at most lr = {self.rate}", got=self.min_lr, remedy=remedy)

    @property
    def rate(self) -> float:
        """The learning rate of what is trained from scratch."""
        return SCRATCH if self.lr is None else self.lr


def resolved(config: OptimConfig, model: nn.Module, before: OptimConfig | None = None) -> OptimConfig:
    """The config with the rates that it leaves open: those of the run that goes on (`before`), else as the towers need.

    What starts from scratch (towers, heads, the scale) learns at 1e-3. The same rate would destroy in a few steps what
    a pretrained backbone has learned: it gets 2e-5. One rate that is given is that of everything.
    """
    lr, backbone = config.lr, config.backbone_lr
    trained = any(pretrained_parameters(model))
    if backbone is not None and not trained:
        remedy = "Drop it: nothing that was trained before is trained here."
        bad_value("backbone_lr", expected="a pretrained backbone that is not locked", got=backbone, remedy=remedy)
    if before is not None and (before.backbone_lr is None) != (backbone is None):
        if backbone is not None:
            remedy = "Pass --lr alone, or start a new run with another --out."
            bad_value("backbone_lr", expected="none, as in the run that goes on", got=backbone, remedy=remedy)
        # Groups of parameters stay as they are in the checkpoint; one rate is then given to both.
        backbone = before.backbone_lr if lr is None else lr
    elif before is None and lr is None and backbone is None and trained:
        backbone = PRETRAINED
    if lr is None:
        lr = SCRATCH if before is None else before.rate
    return replace(config, lr=lr, backbone_lr=backbone)


def pretrained_parameters(model: nn.Module) -> Iterator[str]:
    """The names of the trainable parameters of pretrained backbones."""
    for prefix, module in model.named_modules():
        if getattr(module, "pretrained", False) is True and isinstance(getattr(module, "backbone", None), nn.Module):
            for name, parameter in module.backbone.named_parameters(prefix=f"{prefix}.backbone".lstrip(".")):
                if parameter.requires_grad:
                    yield name


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`; as open_clip's cosine_lr and const_lr."""
    if step < config.warmup:
        return config.rate * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.rate
    length = max(1, steps - config.warmup)
    done = min(step - config.warmup, length)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * done / length)) * (config.rate - config.min_lr)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay is for this parameter: open_clip's rule. Gains, biases and the scale go without."""
    return parameter.ndim >= 2 and not any(part in name for part in ("bn", "ln", "bias", "logit_scale"))


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters without weight decay, then those with it; frozen ones are left out, and groups without any."""
    without: list[nn.Parameter] = []
    with_decay: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad:
            (with_decay if decays(name, parameter) else without).append(parameter)
    groups = [{"params": without, "weight_decay": 0.0}, {"params": with_decay, "weight_decay": weight_decay}]
    return [group for group in groups if group["params"]]


def groups_of(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """The groups of a model; with a rate of their own, pretrained backbones have groups with `lr_scale` beside `lr`."""
    named = list(model.named_parameters())
    if config.backbone_lr is None:
        return parameter_groups(named, config.weight_decay)
    theirs = set(pretrained_parameters(model))
    rest = parameter_groups(((name, p) for name, p in named if name not in theirs), config.weight_decay)
    backbones = parameter_groups(((name, p) for name, p in named if name in theirs), config.weight_decay)
    scale = config.backbone_lr / config.rate if config.rate else 1.0
    return rest + [{**group, "lr_scale": scale} for group in backbones]


def make_optimizer(model: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimiser that `config` names, for the trainable parameters of a model."""
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
        # The optimiser's own word about an option it has not, or a parameter it cannot train.
        raise ValueError(f"optimizer {config.optimizer}: {error}") from error


@torch.no_grad()
def clamp_scale(log_scale: torch.Tensor, most: float = MAX_SCALE) -> None:
    """Keep a learned scale, given as its logarithm, between 1 and `most`, as open_clip does."""
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
    except Exception as error:  # also packages that timm imports and that are broken
        reason = why_not("timm", error) if find_spec_safely("timm") else "pip install timm."
        raise ValueError(f"timm is needed. {reason} Or name one of torch.optim.") from error
    _check_known(name, optim.list_optimizers())
    found = optim.create_optimizer_v2(groups, opt=name.lower(), **options)
    assert isinstance(found, Optimizer)
    return found


def _check_known(name: str, known: list[str]) -> None:
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0)
        remedy = f"Did you mean {near[0]}?"
        bad_value("name", expected=f"one of {', '.join(sorted(known))}", got=repr(name), remedy=remedy)

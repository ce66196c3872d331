"""The guide or the teacher of a run: a second, frozen model that also encodes each batch.

    second = load_second(config)               # None if the run has neither
    second.prepare, second.encoders            # how samples become its inputs, and what encodes them
    second.scale, second.weights               # of a teacher's cosines; a checksum

It has its own tokenizer, image size and normalisation. It is not trained, not saved and not evaluated.
"""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.data.chunk_maker import Prepare
from contratile.data.sample import Source
from contratile.errors import bad_value
from contratile.models.definition import definitions
from contratile.models.towers import TowerConfig, Towers, build_towers
from contratile.train import checkpoint
from contratile.train.config import TrainConfig
from contratile.train.config_file import CONFIG, load_config
from contratile.train.load import load_run
from contratile.train.paths import missing_towers
from contratile.train.random_state import random_state, set_random_state
from contratile.train.second_options import EXPECTED, Role, is_pretrained

MUCH = 0.9
"""Share of dropped pairs above which a run is warned."""


class SecondModel(NamedTuple):
    """A frozen model beside the one that is trained."""

    role: Role
    name: str
    towers: Towers
    """In evaluation mode, without gradients."""

    step: int | None
    """Step of its checkpoint; None for pretrained towers."""

    scale: float
    """The logit scale of a teacher."""

    weights: str
    """Checksum of its weights."""

    @property
    def prepare(self) -> tuple[Prepare, Prepare]:
        """Functions that turn left and right sides into its inputs."""
        return self.towers.left.prepare, self.towers.right.prepare

    @property
    def facts(self) -> dict[str, str]:
        """What a checkpoint records about it."""
        return {"role": self.role, "name": self.name, "weights": self.weights}

    def check_kinds(self, source: Source) -> None:
        """Refuse a model that cannot encode the samples of the run."""
        if tuple(source.kinds) != self.towers.kinds:
            expected = f"a model of {' and '.join(source.kinds)}, as the data is"
            got = f"{self.name}, of {' and '.join(self.towers.kinds)}"
            remedy = "It encodes the same pairs: name a model for such data."
            bad_value(self.role, expected=expected, got=got, remedy=remedy)

    def changed(self, facts: Any) -> str:
        """A notice if the weights are not those that the run had when a checkpoint was written; else ""."""
        before = facts.get("second") if isinstance(facts, dict) else None
        if not isinstance(before, dict) or before.get("weights") == self.weights:
            return ""
        hint = "" if self.step is None else ". To fix them, name a checkpoint: RUN/checkpoints/step-..."
        name = str(before.get("name"))
        was = "when the run was stopped" if name == self.name else f"{name}, which the run had before"
        return f"{self.role}: {self.name} has other weights than {was}{hint}"


def check_there(config: TrainConfig) -> None:
    """Refuse a guide or a teacher that does not exist. Needs no data and loads nothing.

    Raises:
        ValueError: There is no such folder, it is no run, it has no checkpoint, or it is that of this run.
    """
    if config.loss.second is None:
        return
    role, name = config.loss.second
    remedy = f"Put it back, or pass its new path: --{role} PATH."
    if is_pretrained(name):
        gone = missing_towers(name)
        if gone:
            bad_value(role, expected=f"a model at {gone}", got="nothing", remedy=remedy)
        return
    run, weights = _run_and_weights(name)
    if not run.is_dir():
        bad_value(role, expected=EXPECTED, got=f"{name}, where nothing is", remedy=remedy)
    if run.resolve() == config.run.out.resolve():
        bad_value(role, expected="another run", got="that of --out", remedy="Its weights change while it trains.")
    if not (run / CONFIG).is_file():
        remedy = "Give the folder that `contratile train --out` wrote, or one of its checkpoints."
        bad_value(role, expected=EXPECTED, got=f"{name}, without {CONFIG}", remedy=remedy)
    there = [step.name for step in checkpoint.steps(run)]
    if not there or (weights != "best" and weights not in there):
        got = f"{name}: the run has {', '.join(there) or 'none'}"
        bad_value(role, expected="a checkpoint", got=got, remedy="Train it further, or name another one.")


def load_second(config: TrainConfig) -> SecondModel | None:
    """Load the guide or the teacher of a run, if it has one. The random state is not affected.

    Raises:
        ValueError: It cannot be loaded; the message names the option.
        ImportError: A package that it comes from is missing or broken.
    """
    if config.loss.second is None:
        return None
    check_there(config)
    role, name = config.loss.second
    before = random_state()
    try:
        if is_pretrained(name):
            towers, step = build_towers(TowerConfig(towers=name)), None
            scale = config.loss.teacher_scale
        else:
            run, weights = _run_and_weights(name)
            towers, _, step = load_run(run, weights, choose=False)
            scale = config.loss.teacher_scale or towers.log_scale.detach().exp().item()
    except ValueError as error:
        raise ValueError(f"{role} {name}: {error}") from error
    finally:
        set_random_state(before)
    towers.eval().requires_grad_(False)
    return SecondModel(role, name, towers, step, scale, _checksum(towers))


def second_definition(config: TrainConfig) -> Towers | None:
    """Build the towers of a guide or a teacher without weights, for plans."""
    if config.loss.second is None:
        return None
    check_there(config)
    name = config.loss.second.name
    with definitions():
        if is_pretrained(name):
            towers = build_towers(TowerConfig(towers=name))
        else:
            run, _ = _run_and_weights(name)
            its = load_config(run / CONFIG)
            towers = build_towers(its.towers, folder=run, views=its.augment.views == 2)
    return towers.eval().requires_grad_(False)


def warn_of_much(dropped: float) -> None:
    """Warn if a guide drops nearly all pairs."""
    if dropped > MUCH:
        told = f"the guide drops {dropped:.0%} of the pairs of the first batch, which leaves little to learn from."
        warnings.warn(f"{told} Lower --guide-margin, or name a guide that knows the data better.", stacklevel=2)


def _run_and_weights(name: str) -> tuple[Path, str]:
    """The run's folder and the checkpoint that a name stands for: the best one, unless it names a checkpoint."""
    path = Path(name)
    if checkpoint.step_of(path) is not None and path.parent.name == "checkpoints":
        return path.parent.parent, path.name
    return path, "best"


def _checksum(towers: Towers) -> str:
    found = 0
    for name, x in sorted(towers.state_dict().items()):
        found = zlib.crc32(_bytes(x), zlib.crc32(name.encode(), found))
    return f"{found:08x}"


def _bytes(x: Tensor) -> Any:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

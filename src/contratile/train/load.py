"""Load a trained pair of encoders from the folder of a run.

towers, config, step = load_run(Path("runs/icons"))                # weights of the best checkpoint
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.errors import bad_value
from contratile.models.towers import Towers, build_towers, check_recipe, load_weights
from contratile.train import checkpoint
from contratile.train.config import TrainConfig
from contratile.train.config_file import CONFIG, load_config
from contratile.train.paths import missing_towers


class Run(NamedTuple):
    """The encoders of a run with the weights of one of its checkpoints."""

    towers: Towers
    """Both encoders, in evaluation mode."""

    config: TrainConfig
    """The options of the run."""

    step: int
    """Step of the checkpoint."""


def load_run(run: Path, weights: str = "best", *, allow_pipe: bool = False, choose: bool = True) -> Run:
    """Load the encoders of a run.

    The folder may come from anyone: no code in it is executed.

    Args:
        run: Folder of the run.
        weights: Which checkpoint: "best", "last" or a step such as "step-00000100". A run that was never evaluated has
            no best one; its last one is loaded then.
        allow_pipe: Allow the data named in the run's configuration to start programs (`pipe:COMMAND`).
        choose: Whether the caller can choose other weights, which messages then suggest.

    Returns:
        Towers, configuration and step.

    Raises:
        ValueError: There is no such run or checkpoint, it is damaged, or its weights are NaN or infinite.

    Examples:
        >>> towers, config, step = load_run(Path("runs/icons"))                    # doctest: +SKIP
        >>> features = towers.right(towers.right.prepare(["battery charging"]))    # doctest: +SKIP
    """
    if not (run / CONFIG).exists():
        remedy = "Give the folder that `contratile train --out` wrote."
        bad_value("run", expected=f"a folder with {CONFIG}", got=run, remedy=remedy)
    config = load_config(run / CONFIG, allow_pipe=allow_pipe)
    plain = isinstance(weights, str) and weights != "" and Path(weights).name == weights
    named = plain and checkpoint.step_of(Path(weights)) is not None
    if weights not in ("best", "last") and not named:
        bad_value(
            "weights", expected="best, last or step-...", got=repr(weights), remedy="They are in RUN/checkpoints."
        )
    folder: Path | None = run / "checkpoints" / weights
    if weights in ("best", "last"):
        folder = (checkpoint.best(run) if weights == "best" else None) or checkpoint.latest(run)
    if folder is None:
        damaged = checkpoint.steps(run)
        if damaged:
            folder = damaged[-1]  # loading it says what is wrong
        else:
            bad_value("run", expected="a checkpoint", got=run, remedy="It has none yet: train it further.")
    if weights not in ("best", "last") and not folder.exists():
        there = ", ".join(step.name for step in checkpoint.steps(run)) or "none"
        remedy = f"The run has {there}: choose one of them with --weights, or best or last."
        bad_value(f"checkpoint {folder}", expected="a folder", got="nothing there", remedy=remedy)
    gone = missing_towers(config.towers.towers)
    if gone:
        remedy = f"Put it back, or write its new path into {run / CONFIG}: towers = ..."
        bad_value("towers of the run", expected=f"a model at {gone}", got="nothing", remedy=remedy)
    try:
        state, facts = checkpoint.load(folder)
    except checkpoint.Damaged as damage:
        raise ValueError(f"{damage.fault}. {_instead_of_damaged(run, folder, choose)}") from damage
    check_recipe(facts, run)
    views = config.augment.views == 2
    towers = build_towers(config.towers, folder=run, bias=config.loss.loss == "siglip", views=views)
    load_weights(towers, state, folder)
    _check_finite(towers, run, folder, choose)
    return Run(towers.eval(), config, facts["step"])


def _instead_of_damaged(run: Path, folder: Path, choose: bool) -> str:
    """What to do about a damaged checkpoint."""
    others = [step.name for step in _others(run, folder) if checkpoint.is_sound(step)]
    restore = "Copy the file again from where the run was trained, or from a backup"
    if choose and others:
        return f"The file is damaged. {restore}, or choose another checkpoint with --weights: {_listed(others)}."
    alone = "" if others else ", and the run has no other checkpoint"
    return f"The file is damaged{alone}. {restore}, or train the run again."


def _check_finite(towers: Towers, run: Path, folder: Path, choose: bool) -> None:
    """Refuse weights whose features would all be NaN.

    Raises:
        ValueError: A parameter, or a running statistic of a normalisation, is NaN or infinite.
    """
    # Other buffers may hold infinite numbers: masks do.
    running = {name: x for name, x in towers.named_buffers() if "running_" in name}
    weights = {**dict(towers.named_parameters()), **running}
    wrong = _not_finite(weights)
    if not wrong:
        return
    others: list[Path] = []
    for step in _others(run, folder) if choose else ():
        if checkpoint.is_sound(step):
            saved = checkpoint.load(step)[0]["model"]
            others += [] if _not_finite({name: saved[name] for name in weights if name in saved}) else [step]
    best, last = checkpoint.best(run), checkpoint.latest(run)
    names = ["best" if step == best else "last" if step == last else step.name for step in others]
    remedy = "Training has diverged: train the run again with a lower learning rate"
    remedy += f", or choose weights that are finite with --weights: {_listed(names)}." if names else "."
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    got = f"NaN or infinity in {wrong[0]}{more}"
    bad_value(f"weights of {folder}", expected="finite numbers", got=got, remedy=remedy)


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, x in tensors.items() if x.is_floating_point() and not bool(torch.isfinite(x).all())]


def _others(run: Path, folder: Path) -> list[Path]:
    """The checkpoints of a run but one, the newest first."""
    return [step for step in reversed(checkpoint.steps(run)) if step.resolve() != folder.resolve()]


def _listed(names: list[str]) -> str:
    return " or ".join(names[:3])

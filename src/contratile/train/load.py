"""Load a trained pair of encoders from the folder of a run.

towers, config, step = load_run(Path("runs/icons"))                # weights of the best checkpoint
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

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


def load_run(run: Path, weights: str = "best", *, allow_pipe: bool = False) -> Run:
    """Load the encoders of a run.

    The folder may come from anyone: no code in it is executed.

    Args:
        run: Folder of the run.
        weights: Which checkpoint: "best", "last" or a step such as "step-00000100". A run that was never evaluated has
            no best one; its last one is loaded then.
        allow_pipe: Allow the data named in the run's configuration to start programs (`pipe:COMMAND`).

    Returns:
        Towers, configuration and step.

    Raises:
        ValueError: There is no such run or checkpoint, or it is damaged.

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
        bad_value("run", expected="a checkpoint", got=run, remedy="It has none yet: train it further.")
    if weights not in ("best", "last") and not folder.exists():
        there = ", ".join(step.name for step in checkpoint.steps(run)) or "none"
        remedy = f"The run has {there}. It removes older ones as it trains and writes its gallery again at its end."
        bad_value(f"checkpoint {folder}", expected="a folder", got="nothing there", remedy=remedy)
    gone = missing_towers(config.towers.towers)
    if gone:
        remedy = f"Put it back, or write its new path into {run / CONFIG}: towers = ..."
        bad_value("towers of the run", expected=f"a model at {gone}", got="nothing", remedy=remedy)
    state, facts = checkpoint.load(folder)
    check_recipe(facts, run)
    views = config.augment.views == 2
    towers = build_towers(config.towers, folder=run, bias=config.loss.loss == "siglip", views=views)
    load_weights(towers, state, folder)
    return Run(towers.eval(), config, facts["step"])

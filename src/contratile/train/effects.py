"""Refuses options that would have no effect, before a run starts, so that they do not mislead.

    check_effects(config)

Only a new run is checked. One that is resumed, or loaded, may be of an earlier version, which accepted them.
"""

from __future__ import annotations

from contratile.errors import bad_value
from contratile.models.towers import TowerConfig
from contratile.train.config import LossConfig, TrainConfig


def check_effects(config: TrainConfig) -> None:
    """Refuse options that have no effect with the other options.

    Raises:
        ValueError: There is such an option; the message names it, and what it needs.
    """
    loss, towers = config.loss, config.towers
    usual_loss, usual_towers = LossConfig(), TowerConfig()
    for option, needs, idle in (
        ("partition_mode", "--directions beyond query_to_doc", not loss.more.several),
        ("hardness_mode", "--hardness-strength above 0", not loss.hardness_strength),
        ("guide_margin_strategy", "--guide-margin other than 0", not loss.guide_margin),
        ("cache_mib", "--backend auto, torch or triton", loss.backend == "dense"),
        ("max_scale", "a scale that is learned", not towers.learn_scale),
    ):
        if idle and getattr(loss, option) != getattr(usual_loss, option):
            _refuse(option, needs, getattr(loss, option))
    for option, needs, idle in (
        ("keep_outputs", "--lock image, text or both", towers.lock == "none"),
        ("init_bias", "--loss siglip", loss.loss != "siglip"),
    ):
        if idle and getattr(towers, option) != getattr(usual_towers, option):
            _refuse(option, needs, getattr(towers, option))
    if any(not query.strip() for query in config.run.queries):
        bad_value("queries", expected="texts to search for", got="an empty one", remedy="Drop it.")


def check_ids_compared(loss: LossConfig, usual: str) -> None:
    """Refuse to choose ids that nothing is compared with. The usual ones pass, as runs write them to their files."""
    if loss.same_id == "negative" and loss.ids not in ("auto", usual):
        _refuse("ids", "--same-id exclude or positive", loss.ids)


def _refuse(option: str, needs: str, got: object) -> None:
    bad_value(option, expected=f"{needs}, without which it has no effect", got=got, remedy="Drop it, or pass that too.")

"""Checks of the options `guide` and `teacher` of `[loss]` against each other, before anything is loaded.

    check_second(LossConfig(guide="runs/first", guide_margin=0.05))

Both name a frozen model in the same way; `second_model.py` loads it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from contratile.errors import bad_value
from contratile.models.backbones import MAKERS

if TYPE_CHECKING:
    from contratile.train.config import LossConfig

Role = Literal["guide", "teacher"]
EXPECTED = "the folder of a run, or pretrained hf:<model>, open_clip:<model>:<pretrained> or st:<model>"


class Second(NamedTuple):
    """The frozen model that the options name."""

    role: Role
    name: str


def is_pretrained(name: str) -> bool:
    """Whether a name stands for pretrained towers; otherwise it is the folder of a run."""
    return name.partition(":")[0] in MAKERS and (":" in name or name == "tiny")


def check_second(loss: LossConfig) -> None:
    """Refuse an unusable guide or teacher, and options of one that is not there."""
    for name in ("guide_margin", "teacher_weight", "teacher_temperature", "teacher_scale"):
        if not math.isfinite(getattr(loss, name)):
            bad_value(name, expected="a finite number", got=getattr(loss, name), remedy="Choose another one.")
    if not loss.teacher_temperature > 0:
        remedy = "It divides the teacher's scores; above 1 it softens them."
        bad_value("teacher_temperature", expected="a positive number", got=loss.teacher_temperature, remedy=remedy)
    if loss.teacher_weight < 0 or loss.teacher_scale < 0:
        name = "teacher_weight" if loss.teacher_weight < 0 else "teacher_scale"
        bad_value(name, expected="at least 0", got=getattr(loss, name), remedy="Its default is a good start.")
    for role, options in (
        ("guide", (("guide_margin", 0.0), ("guide_margin_strategy", "absolute"))),
        ("teacher", (("teacher_weight", 1.0), ("teacher_temperature", 1.0), ("teacher_scale", 0.0))),
    ):
        for option, default in options:
            if not getattr(loss, role) and getattr(loss, option) != default:
                remedy = f"Pass --{role} too, or drop it."
                bad_value(option, expected=f"--{role} with it", got=getattr(loss, option), remedy=remedy)
    if loss.second is not None:
        _check_name(*loss.second)
        _check_alone(loss, loss.second.role)
    if loss.teacher and is_pretrained(loss.teacher) and not loss.teacher_scale:
        remedy = "Pass it: 100 for models of OpenAI and open_clip, or what its authors say."
        bad_value("teacher_scale", expected="the scale of a pretrained teacher's cosines", got="none", remedy=remedy)


def _check_name(role: Role, name: str) -> None:
    """Refuse towers without weights."""
    if not is_pretrained(name):
        return
    maker, _, model = name.partition(":")
    remedy = "Train such towers first, and name the folder of that run."
    if maker == "tiny" or not model:
        bad_value(role, expected=EXPECTED, got=f"{name}, which has no weights", remedy=remedy)
    if maker == "open_clip" and not model.partition(":")[2]:
        remedy = f"Name its weights: open_clip:{model}:laion2b_s34b_b79k, for example."
        bad_value(role, expected="pretrained weights", got=f"{name}, without", remedy=remedy)
    if maker == "hf" and "+" in model and not Path(model).is_dir():
        bad_value(role, expected=EXPECTED, got=f"{name}, two models without a common space", remedy=remedy)


def _check_alone(loss: LossConfig, role: Role) -> None:
    """Refuse what the losses refuse together with a guide or a teacher, by the names of the options."""
    guide = role == "guide"
    for option, given, why in (
        (f"--loss {loss.loss}", loss.loss not in ("clip", "infonce"), "Use --loss clip or infonce."),
        ("--teacher", guide and bool(loss.teacher), "Train with one, then with the other."),
        ("--margin", loss.margin is not None, "Both say which pairs count." if guide else "It drops pairs."),
        ("--label-smoothing", bool(loss.label_smoothing), "Both change the targets."),
        ("--same-id positive", loss.same_id == "positive", f"The {role} already tells which pairs are alike."),
        ("--matryoshka-dims", bool(loss.matryoshka_dims), "They are computed in different tiles."),
        ("--hardness-mode", bool(loss.more.hardness), "Hardness is computed in tiles of its own."),
        ("--directions beyond query_to_doc", loss.more.several, "It compares queries with documents."),
        ("--backend triton", loss.backend == "triton", "Kernels do not cover it: use --backend auto."),
    ):
        if given:
            remedy = f"{why} Drop one of the two." if not why.startswith("Use") else why
            bad_value(role, expected=f"none with {option}", got=getattr(loss, role), remedy=remedy)

"""Where a run goes on: the checkpoint, and whether it belongs to the options that were given.

folder = find_checkpoint("auto", run)           # its newest, None if there is none
state, facts = checkpoint.load(folder)
check_options(facts["config"], config)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from contratile.errors import bad_value
from contratile.train import checkpoint
from contratile.train.config import TrainConfig, to_dict
from contratile.train.places import located_towers

# Options of the towers that change neither the weights nor what they mean.
_FREE = ("checkpointing", "compile", "init_scale", "init_bias")


def find_checkpoint(resume: str, run: Path) -> Path | None:
    """The checkpoint to go on from, every byte of which has been checked. One process of a run may call it.

    auto: the newest that is sound; newer ones that are damaged are set aside, with a warning. A checkpoint that is
    named is the newest of `run`, or begins a new run there.

    Raises:
        ValueError: There is no such checkpoint, it is damaged, or it must not be used in `run`.
    """
    found = checkpoint.steps(run)
    if resume == "auto":
        return _newest_sound(found)
    if resume == "never":
        if found:
            remedy = "Pass --resume auto to continue it, or another --out."
            bad_value("out", expected="a folder without a run", got=run, remedy=remedy)
        return None
    folder = Path(resume).resolve()
    if not folder.is_dir():
        expected = "auto, never or the folder of a checkpoint"
        remedy = "They are RUN/checkpoints/step-... and RUN/best."
        bad_value("resume", expected=expected, got=resume, remedy=remedy)
    if found and found[-1].resolve() != folder:
        # Its newer checkpoints would be found again by the next `auto`, and mixed with those of this run.
        remedy = "Pass --resume auto to continue from there, or another --out to start a new run from your checkpoint."
        bad_value("resume", expected=f"{found[-1]}, the newest in --out", got=folder, remedy=remedy)
    checkpoint.verify(folder)
    return folder


def _newest_sound(found: list[Path]) -> Path | None:
    damaged: list[tuple[Path, str]] = []
    for folder in reversed(found):
        try:
            checkpoint.verify(folder)
        except checkpoint.Damaged as damage:
            damaged.append((folder, damage.fault))
            continue
        for bad, fault in damaged:
            aside = checkpoint.set_aside(bad)
            told = f"It is damaged: it was set aside as {aside.name}, and the run goes on from {folder.name}."
            warnings.warn(f"{fault}. {told}", stacklevel=3)
        return folder
    if damaged:
        remedy = f"Restore one of them from a copy, or remove {found[0].parent} to start anew."
        bad_value("resume", expected="a checkpoint that is not damaged", got=damaged[0][1], remedy=remedy)
    return None


def run_of(folder: Path) -> Path:
    """The run that a checkpoint belongs to, with the tokenizer of its towers."""
    return folder.parent.parent


def check_options(saved: Mapping[str, Mapping[str, Any]], config: TrainConfig) -> None:
    """Refuse options with which the weights and the optimiser of a checkpoint could not be used."""
    for name, before, now in _must_agree(saved, to_dict(config)):
        if before != now:
            remedy = (
                f"Pass --{name.replace('_', '-')} {before} to continue the run, or --resume never and another --out."
            )
            bad_value(name, expected=f"{before}, as in the checkpoint", got=now, remedy=remedy)


def _must_agree(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(option, its value in the checkpoint, its value now)"""
    for name, before in saved["towers"].items():
        if name == "towers":
            yield name, located_towers(before), located_towers(now["towers"][name])
        elif name not in _FREE:
            yield name, before, now["towers"].get(name)
    yield "optimizer", saved["optim"]["optimizer"], now["optim"]["optimizer"]
    before, after = saved["loss"]["loss"], now["loss"]["loss"]
    if "siglip" in (before, after):  # it alone has a bias to learn
        yield "loss", before, after

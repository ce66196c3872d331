"""Which checkpoint a run resumes from, and whether it fits the options.

folder = find_checkpoint("auto", run)           # the newest one, None if there is none
state, facts = checkpoint.load(folder)
check_resumable(facts["config"], config)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from contratile.errors import bad_value
from contratile.train import checkpoint
from contratile.train.claim import Claim, create_and_claim, remove_unused
from contratile.train.config import RunConfig, TrainConfig
from contratile.train.config_file import to_dict
from contratile.train.paths import absolute_towers

# Options of the towers that do not affect the weights of a checkpoint.
_FREE = ("checkpointing", "compile", "init_scale", "init_bias", "keep_outputs", "patch_dropout")

# Options of the loss that do not affect its value.
_SAME_LOSS = ("backend", "cache_mib", "ring")


def claim_and_find_checkpoint(run: RunConfig, main: bool) -> tuple[Path | None, Claim | None, list[Path]]:
    """Claim the run's folder and find the checkpoint to resume from. Collective; the main process does the work.

    Its errors are raised on all processes, so that none waits for the others.

    Returns:
        The checkpoint, None for a new run; and on the main process the claim, to be kept as long as the run lives, and
        the folders that were created for it.
    """
    from accelerate.utils import broadcast_object_list

    held: Claim | None = None
    created: list[Path] = []
    told: list[Any] = [None, None]
    if main:
        try:
            held, created = create_and_claim(run.out)
            checkpoint.check_best(run.out)
            told = [find_checkpoint(run.resume, run.out), None]
        except (ValueError, OSError) as error:
            remove_unused(held, created, ())
            told = [None, error]
    found, refusal = broadcast_object_list(told)
    if refusal is not None:
        raise refusal
    return found, held, created


def find_checkpoint(resume: str, run: Path) -> Path | None:
    """Find the checkpoint to resume from and verify its checksums. Only one process of a run may call it.

    Args:
        resume: "auto": the newest intact checkpoint of `run`; newer damaged ones are renamed, with a warning. "never":
            none, and `run` must not have any. Otherwise the folder of a checkpoint, which must be the newest of `run`
            or start a new run there.
        run: Folder of the run.

    Returns:
        The checkpoint's folder; None for a new run.

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
        # The next `auto` would find the newer checkpoints and mix both runs.
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
            told = f"It is damaged and was set aside as {aside.name}; resuming from {folder.name}."
            warnings.warn(f"{fault}. {told}", stacklevel=3)
        return folder
    if damaged:
        remedy = f"Restore one of them from a copy, or remove {found[0].parent} to start again."
        bad_value("resume", expected="a checkpoint that is not damaged", got=damaged[0][1], remedy=remedy)
    return None


def run_of(folder: Path) -> Path:
    """The folder of the run that a checkpoint belongs to."""
    return folder.parent.parent


def check_resumable(saved: Mapping[str, Mapping[str, Any]], config: TrainConfig) -> None:
    """Refuse options that do not fit the weights and the optimiser of a checkpoint.

    Args:
        saved: The options in the checkpoint, by section.
        config: The options of this run.
    """
    for name, before, now in _must_agree(saved, to_dict(config)):
        if before != now:
            remedy = (
                f"Pass --{name.replace('_', '-')} {before} to continue the run, or --resume never and another --out."
            )
            bad_value(name, expected=f"{before}, as in the checkpoint", got=now, remedy=remedy)


def changed_loss(saved: Mapping[str, Mapping[str, Any]], config: TrainConfig) -> str:
    """A notice if the loss is another one than in the checkpoint, as after a forgotten --guide; else ""."""
    before, now, usual = saved["loss"], to_dict(config)["loss"], to_dict(TrainConfig())["loss"]
    found = []
    for option in fields(config.loss):
        name = option.name
        if name in _SAME_LOSS or (name not in before and name in usual):  # the latter: of an earlier version
            continue
        then, value = (list(x) if isinstance(x, tuple) else x for x in (before.get(name), now.get(name)))
        moved = name in ("guide", "teacher") and then and value  # whether its weights are others is checked elsewhere
        if then != value and not moved:
            found.append(f"{name} was {then!r}, is {value!r}")
    return f"the loss changes at this step: {'; '.join(found)}" if found else ""


def _must_agree(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (option, value in the checkpoint, value now) for options that must be equal."""
    for name, before in saved["towers"].items():
        if name == "towers":
            yield name, absolute_towers(before), absolute_towers(now["towers"][name])
        elif name not in _FREE:
            yield name, before, now["towers"].get(name)
    yield "optimizer", saved["optim"]["optimizer"], now["optim"]["optimizer"]
    # Checkpoints of earlier versions have no such section, and their runs had one view.
    yield "views", saved.get("augment", {}).get("views", 1), now["augment"]["views"]
    before, after = saved["loss"]["loss"], now["loss"]["loss"]
    if "siglip" in (before, after):  # only siglip has a learned bias
        yield "loss", before, after

"""Losses, gradients and weights that are NaN or infinite: detection, and a message that helps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contratile.train import checkpoint
from contratile.train.sharding import is_shard

if TYPE_CHECKING:
    from contratile.models.towers import Towers


def finite(x: Tensor) -> bool:
    """Whether all values are finite. Collective if the tensor is sharded."""
    return bool(torch.isfinite(x.full_tensor() if is_shard(x) else x).all())  # type: ignore[attr-defined]  # of shards


def diverged(what: str, towers: Towers, run: Path, *, step: int, lr: float, resumed: bool) -> FloatingPointError:
    """Build the error for a value that is not finite. Collective if the towers are sharded.

    Args:
        what: What was found, for example "the loss of step 5 is nan".
        towers: The encoders, with their gradients.
        run: Folder of the run.
        step: The current step.
        lr: The current learning rate.
        resumed: Whether the run was resumed from a checkpoint.
    """
    named = list(towers.named_parameters())
    weights = [name for name, p in named if not finite(p)]
    grads = [name for name, p in named if p.grad is not None and not finite(p.grad)]
    last = checkpoint.latest(run)
    facts = [
        f"weights that are not finite: {', '.join(weights[:5]) or 'none'}",
        f"gradients that are not finite: {', '.join(grads[:5]) or 'none'}",
        f"scale {towers.log_scale.detach().exp().item():.4g}, learning rate {lr:.3g}",
        f"last checkpoint: {last or 'none'}",
    ]
    remedy = (
        "Lower the learning rate, lengthen the warm-up, clip gradients (--clip-grad 1), or use --precision bf16 "
        "instead of fp16, then resume from the last checkpoint."
    )
    if last is not None and last.name == checkpoint.step_name(step) and resumed:
        remedy += f" If this happens again at once, remove {last} to resume from the one before it."
    return FloatingPointError(f"{what}: expected finite numbers. {'; '.join(facts)}. {remedy}")


def set_aside_diverged(run: Path, step: int) -> None:
    """Rename the checkpoint of a step, so that nothing resumes from it. The best checkpoint keeps its name."""
    folder = run / "checkpoints" / checkpoint.step_name(step)
    if folder.is_dir() and (run / "best").resolve() != folder.resolve():
        aside = folder.with_name(f"diverged-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)

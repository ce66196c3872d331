"""One warning for features that somebody forgot to normalise: losses of 50,000 come in silence otherwise.

    look_once("clip_loss", (image, text), {"scale": 100.0})     # by every loss, on its first call with CPU features
    warn_not_normalized(call, norms, scale)                     # by a trainer, where it reads numbers anyway

The losses take features as they are, and plain products of features (a scale of 1) may be large. What is surely wrong
is a scale that is made for cosines with features whose norms are far above 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LEAST_SCALE = 2.0
LEAST_NORMS = 4.0
LEAST_SCORE = 200.0
"""A scale made for cosines; a product of norms far above 1; a score that no scale in use gives to cosines."""

ROWS = 16
"""Rows of each side that are looked at."""

_looked: set[str] = set()
"""Losses that were called before; `EVERY` once the warning was given."""

EVERY = "every loss"


class NotNormalizedWarning(UserWarning):
    """Features are far from norm 1 and the scale is one for cosines.

    Turn it off with `warnings.filterwarnings("ignore", category=contratile.NotNormalizedWarning)`.
    """


def look_once(call: str, features: Sequence[Tensor], numbers: Mapping[str, Tensor | float]) -> None:
    """Look at a few rows at the first call of a loss, if that makes no accelerator wait.

    `numbers` are those of the call: a scale or a temperature.
    """
    if torch.compiler.is_compiling() or call in _looked or EVERY in _looked:
        return
    if torch._C._are_functorch_transforms_active():
        return
    name = "scale" if "scale" in numbers else "temperature"
    if not all(x.is_cpu for x in (*features, numbers[name]) if isinstance(x, Tensor)) or not all(map(len, features)):
        return
    _looked.add(call)
    value = numbers[name]
    number = float(value.detach()) if isinstance(value, Tensor) else value
    scale = number if name == "scale" else 1 / number if number else math.inf
    warn_not_normalized(call, typical_norms(features).tolist(), scale, stacklevel=7)


@torch.no_grad()
def typical_norms(features: Sequence[Tensor]) -> Tensor:
    """The median norm of a few rows of each side, on their device."""
    return torch.stack([x[:ROWS].float().norm(dim=1).median() for x in features])


def warn_not_normalized(call: str, norms: Sequence[float], scale: float, *, stacklevel: int = 2) -> None:
    """Warn, once in a process, if features of these norms were not meant for this scale."""
    product = norms[0] * norms[-1]
    score = abs(scale) * product
    if EVERY in _looked or not (abs(scale) >= LEAST_SCALE and product >= LEAST_NORMS and score >= LEAST_SCORE):
        return
    _looked.add(EVERY)
    warnings.warn(
        f"{call}: expected features of norm 1 for a scale of {scale:.4g} (a temperature of {1 / scale:.4g}), got norms "
        f"around {' and '.join(f'{x:.4g}' for x in norms)}, that is scores up to {score:,.0f}. Pass "
        "torch.nn.functional.normalize(x, dim=1), or a smaller scale. If this is meant, turn the warning off with "
        "warnings.filterwarnings('ignore', category=contratile.NotNormalizedWarning).",
        NotNormalizedWarning,
        stacklevel=stacklevel,
    )

"""One warning for features that were probably meant to be normalised.

    look_once("clip_loss", (image, text), {"scale": 100.0})     # by every loss, on its first call with CPU features
    warn_not_normalized(call, norms, scale)                     # by a trainer, where it reads numbers anyway

The losses do not normalise, and with a scale of 1 large products may be intended. But a scale meant for cosines,
together with features of norms far above 1, is almost certainly a mistake.
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
"""Thresholds: a scale made for cosines, a product of norms far above 1, a score out of reach of cosines."""

ROWS = 16
"""Rows of each side that are checked."""

_looked: set[str] = set()
"""Losses that were checked already; `EVERY` after the warning."""

EVERY = "every loss"


class NotNormalizedWarning(UserWarning):
    """Features have norms far from 1, but the scale is one for cosines.

    Turn it off with `warnings.filterwarnings("ignore", category=contratile.NotNormalizedWarning)`.
    """


def look_once(call: str, features: Sequence[Tensor], numbers: Mapping[str, Tensor | float]) -> None:
    """Check a few rows at the first call of a loss with CPU features (reading others would synchronise).

    `numbers` holds the call's scale or temperature.
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
    """Warn, once per process, if these norms do not fit the scale."""
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

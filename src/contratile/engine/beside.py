"""What the passes compute for a teacher before and after the tiles (`backends/torch_teacher.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine.backends.block import SideGrad
from contratile.engine.spec import Inputs, SideStats
from contratile.engine.stats import take

ROWS = 1024
"""Positives per chunk."""


def centres(x: Inputs, alpha: Tensor) -> Tensor | None:
    """For each query a number close to its positive's score: the same product, summed in another order."""
    if x.teacher_query is None:
        return None
    assert x.labels is not None and x.key is not None, "a teacher needs positives"
    found = torch.empty_like(x.labels, dtype=alpha.dtype)
    for start in range(0, len(found), ROWS):
        at = slice(start, start + ROWS)
        positives = take(x.key, x.labels[at]).to(alpha.dtype)
        torch.sum(positives.mul_(x.query[at]), 1, out=found[at])
    return found.mul_(alpha)


def teacher_grad(side: SideStats, grad: SideStats) -> SideGrad | None:
    """Inputs of the backward pass for one side; None if nothing was built on its cross statistics."""
    if grad.cross is None:
        return None
    assert side.teacher_slack is not None
    return SideGrad(side.teacher, grad.cross * side.teacher_slack, None)

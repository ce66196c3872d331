"""The errors that the documentation quotes are those of the kernels with their default tiles.

What TF32 and 16 bit round is the same on every machine, and so is the error that it makes: it is quoted as a number.
What is left of the others comes from the order of fp32 sums, which is the machine's: they have a bound, and one that
rounding can keep. A sum of N terms is off by about sqrt(N) roundings.
"""

from tests.engine.kernels.interpreted.battery import KINDS, numbers, precision_of  # isort: skip  # first: it sets the mode

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct

DOCS = Path(__file__).parents[4] / "docs/kernels.md"
N, D, SCALE = 256, 512, 14.3


def outcome(q: Tensor, k: Tensor, scale: Tensor, **how: Any) -> list[Tensor]:
    """Log-sum-exps, and the gradients of a loss."""
    leaves = [x.clone().requires_grad_() for x in (q, k, scale)]
    lse = torch.cat(ct.pair_lse(q, k, scale, group=None, **how))
    return [lse, *torch.autograd.grad(ct.clip_loss(*leaves, group=None, **how), leaves)]


def errors(kind: str) -> tuple[list[float], list[float]]:
    """The largest of each; of gradients, relative to the largest gradient. And what rounding alone may make of it."""
    given = "ieee" if precision_of(kind) else kind
    q, k = (numbers(N, D, seed=seed, kind=given) for seed in (1, 2))
    scale = torch.tensor(SCALE)
    found = outcome(q, k, scale, backend="triton", precision=precision_of(kind))
    true = outcome(q.double(), k.double(), scale.double(), backend="dense")
    worst = [float((a.double() - b).abs().max()) for a, b in zip(found, true, strict=True)]
    rounding = N**0.5 * torch.finfo(torch.float32).eps / 2
    relative = [error / float(x.abs().max()) for error, x in zip(worst[1:], true[1:], strict=True)]
    return [worst[0], *relative], [rounding * float(true[0].abs().max()), *[rounding] * len(relative)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_documentation(kind: str) -> None:
    name = f"fp32, `{kind}`" if precision_of(kind) else kind
    (row,) = (line for line in DOCS.read_text().splitlines() if line.startswith(f"| {name} |"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    found, rounding = errors(kind)
    print(f"| {name} | {' | '.join(f'{error:.1e}' for error in found)} |")
    for cell, error, least in zip(cells, found, rounding, strict=True):
        said = float(cell.removeprefix("<"))
        if cell.startswith("<"):
            assert error < said and said >= least, (found, cells)
        else:
            assert error <= 2 * said + least, (found, cells)
            assert said < 1e-4 or error >= said / 2, (found, cells)  # smaller ones may be chance

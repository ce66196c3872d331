"""The errors that the documentation quotes are those of the kernels with their default tiles."""

from tests.kernels.interpreted.battery import KINDS, numbers, precision_of  # isort: skip  # first: it sets the mode

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct

DOCS = Path(__file__).parents[3] / "docs/kernels.md"
N, D, SCALE = 256, 512, 14.3


def outcome(q: Tensor, k: Tensor, scale: Tensor, **how: Any) -> list[Tensor]:
    """Log-sum-exps, and the gradients of a loss."""
    leaves = [x.clone().requires_grad_() for x in (q, k, scale)]
    lse = torch.cat(ct.pair_lse(q, k, scale, group=None, **how))
    return [lse, *torch.autograd.grad(ct.clip_loss(*leaves, group=None, **how), leaves)]


def errors(kind: str) -> list[float]:
    """The largest of each; of gradients, relative to the largest gradient."""
    given = "ieee" if precision_of(kind) else kind
    q, k = (numbers(N, D, seed=seed, kind=given) for seed in (1, 2))
    scale = torch.tensor(SCALE)
    found = outcome(q, k, scale, backend="triton", precision=precision_of(kind))
    true = outcome(q.double(), k.double(), scale.double(), backend="dense")
    worst = [float((a.double() - b).abs().max()) for a, b in zip(found, true, strict=True)]
    return [worst[0], *(error / float(x.abs().max()) for error, x in zip(worst[1:], true[1:], strict=True))]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_documentation(kind: str) -> None:
    name = f"fp32, `{kind}`" if precision_of(kind) else kind
    (row,) = (line for line in DOCS.read_text().splitlines() if line.startswith(f"| {name} |"))
    quoted = [float(cell) for cell in row.split("|")[2:-1]]
    found = errors(kind)
    print(f"| {name} | {' | '.join(f'{error:.1e}' for error in found)} |")
    for error, said in zip(found, quoted, strict=True):
        assert error <= 2 * said, (found, quoted)
        assert said < 1e-4 or error >= said / 2, (found, quoted)  # smaller ones may be chance

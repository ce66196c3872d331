"""What a backend is given and gives back: the scores of this rank's queries with one visiting block of keys.

    rows, cols = backend.forward(scores, task, levels, pos)      # statistics, ready to be merged with other blocks'
    backend.backward(scores, task, given, into)                  # adds the block's share to the gradients

One process has one block, a ring one for each rank; a backend does not know the difference.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from contratile.pairs import PairRule
from contratile.task import Task
from contratile.tiles import Tile, TilePlan

Tensors = tuple[Tensor, ...]


class Scores(NamedTuple):
    """What the scores of a block are made of, and how they are cut."""

    q: Tensor
    k: Tensor | None
    """None stands for the queries: the scores are symmetric, and only the upper triangle of tiles is computed."""

    alpha: Tensor
    bias: Tensor | None
    rule: PairRule
    plan: TilePlan
    """The tiles of the torch backend."""

    cache: Tensor
    """Keeps, from forward to backward, the score tiles that fit into it."""

    @property
    def key(self) -> Tensor:
        return self.q if self.k is None else self.k

    def cached(self, tile: Tile) -> Tensor | None:
        return self.cache[tile.offset : tile.end].view(tile.shape) if tile.end <= len(self.cache) else None

    def compute(self, q_RD: Tensor, k_CD: Tensor, out: Tensor) -> Tensor:
        torch.mm(q_RD, k_CD.t(), out=out)
        return out if self.bias is None else out.add_(self.bias)


class Levels(NamedTuple):
    """The positives' scores that tiles are compared with, if the task does so."""

    row: Tensor | None
    col: Tensor | None


class Side(NamedTuple):
    """What the backward pass knows of the rows, or of the columns."""

    lse: Tensor | None
    """Their log-sum-exps; None of sums of softplus."""

    grad: Tensor
    level: Tensor | None


class Given(NamedTuple):
    """What the gradients of a block are made from. Of symmetric scores the rows are the columns too."""

    row: Side | None
    col: Side | None
    pos: Tensor | None
    """The positives' scores as the forward pass read them."""

    pos_grad: Tensor | None


class Gradients(NamedTuple):
    """Where `backward` adds to. What is None is not wanted."""

    dq: Tensor | None
    """[N, D], in the queries' dtype or the accumulation dtype."""

    dk: Tensor | None
    """[M, D], in the accumulation dtype, as every row block adds to it; 0 before. Of symmetric scores it is `dq`
    itself, which is then 0 before as well."""

    dalpha: Tensor | None
    dbias: Tensor | None
    once: bool = False
    """Nothing else adds to `dq`: it is written, and need not be zero before."""


class KernelError(RuntimeError):
    """A kernel cannot be built for this device, with this compiler."""


class Tiles(Protocol):
    """A backend, as the passes see it."""

    def forward(self, scores: Scores, task: Task, levels: Levels, pos: Tensor | None) -> tuple[Tensors, Tensors]:
        """What the rows and the columns gather from the block: of log-sum-exps `Stats`, of softplus sums, then what
        else the task asks for. Each row's positive score is written to `pos`."""

    def backward(self, scores: Scores, task: Task, given: Given, into: Gradients) -> None:
        """Add the block's share to the gradients."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 computes in fp64, everything else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

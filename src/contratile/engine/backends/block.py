"""What a backend is given and gives back: the scores of this rank's queries with one visiting block of keys.

    rows, cols = backend.forward(scores, task, levels, pos)      # statistics, ready to be merged with other blocks'
    backend.backward(scores, task, given, into)                  # adds the block's share to the gradients

One process has one block, a ring one for each rank; a backend does not know the difference.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from contratile.engine.plan import Tile, TilePlan
from contratile.engine.rule import PairRule
from contratile.engine.spec import Task

Tensors = tuple[Tensor, ...]


class Scores(NamedTuple):
    """What the scores of a block are made of, and how they are cut."""

    q: Tensor
    k: Tensor | None
    """None stands for the queries: the scores are symmetric, and only the upper triangle of tiles is computed."""

    alpha: Tensor
    """Scores are alpha <q, k> + bias. Without `folded` the products are known by themselves: see `Task`."""

    bias: Tensor | None
    rule: PairRule
    plan: TilePlan
    """The tiles of the torch backend."""

    cache: Tensor
    """Keeps, from forward to backward, the score tiles that fit into it."""

    folded: bool = True
    """Alpha is multiplied into the queries, not into each tile of products."""

    @property
    def key(self) -> Tensor:
        return self.q if self.k is None else self.k

    def cached(self, tile: Tile) -> Tensor | None:
        return as_tile(self.cache[tile.offset : tile.end], tile, self.plan) if tile.end <= len(self.cache) else None

    @property
    def on_queries(self) -> Tensor:
        """What is multiplied into the queries: alpha, or its sign, so that a higher product is a higher score."""
        return self.alpha if self.folded else torch.where(self.alpha < 0, -1, 1).to(self.alpha.dtype)

    def products(self, q_RD: Tensor, k_CD: Tensor, tile: Tile, out: Tensor, spare: Tensor) -> Tensor:
        """The products of a tile. Those of one set are made symmetric to the last bit."""
        if self.plan.flipped:
            torch.mm(k_CD, q_RD.t(), out=out.t())
        else:
            torch.mm(q_RD, k_CD.t(), out=out)
        if self.k is None and tile.rows == tile.cols:
            torch.maximum(out, spare.copy_(out.t()), out=out)  # of two roundings of one number
        return out

    def score_(self, products: Tensor, *, bias: bool = True) -> Tensor:
        """Turn products into scores, in place."""
        if not self.folded:
            products.mul_(self.alpha.abs())
        return products if self.bias is None or not bias else products.add_(self.bias)


class Levels(NamedTuple):
    """The positives' products that tiles are compared with, if the task does so."""

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


def as_tile(memory: Tensor, tile: Tile, plan: TilePlan) -> Tensor:
    """Memory of a tile's size as the tile [R, C]."""
    rows, cols = tile.shape
    return memory.view(cols, rows).t() if plan.flipped else memory.view(rows, cols)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 computes in fp64, everything else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

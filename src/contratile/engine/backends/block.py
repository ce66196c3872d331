"""What a tiled backend is given and gives back: the scores of this rank's queries with one visiting block of keys.

    rows, cols = backend.forward(scores, spec, levels, pos)      # statistics, ready to be merged with other blocks'
    backend.backward(scores, spec, given, into)                  # adds the block's share to the gradients

One process has one block, a ring one for each rank; a backend does not know the difference.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from contratile.engine.plan import Tile, TilePlan
from contratile.engine.rule import PairRule
from contratile.engine.spec import SideStats, Spec
from contratile.engine.stats import Stats


class Scores(NamedTuple):
    """What the scores of a block are made of, and how they are cut into tiles."""

    q: Tensor
    k: Tensor | None
    """None: the keys are the queries. Scores are symmetric, and only the upper triangle of tiles is computed."""

    alpha: Tensor
    """Scores are alpha <q, k> + bias."""

    bias: Tensor | None
    rule: PairRule
    plan: TilePlan
    """The tiles of the torch backend."""

    cache: Tensor
    """Keeps the score tiles that fit into it from forward to backward."""

    folded: bool = True
    """Multiply alpha into the queries. Otherwise it is multiplied into each tile, after products were compared."""

    @property
    def key(self) -> Tensor:
        return self.q if self.k is None else self.k

    def cached(self, tile: Tile) -> Tensor | None:
        room = self.cache.shape[0]
        return as_tile(self.cache[tile.offset : tile.end], tile, self.plan) if tile.end <= room else None

    @property
    def query_factor(self) -> Tensor:
        """The factor of the queries: alpha, or its sign, so that a higher product is a higher score."""
        return self.alpha if self.folded else torch.where(self.alpha < 0, -1, 1).to(self.alpha.dtype)

    def products(self, q_RD: Tensor, k_CD: Tensor, tile: Tile, out: Tensor, spare: Tensor) -> Tensor:
        """The products of a tile. On the diagonal of symmetric scores they are made symmetric to the last bit."""
        if self.plan.flipped:
            torch.mm(k_CD, q_RD.t(), out=out.t())
        else:
            torch.mm(q_RD, k_CD.t(), out=out)
        if self.k is None and tile.rows == tile.cols:
            torch.maximum(out, spare.copy_(out.t()), out=out)  # <a, b> and <b, a> may round differently
        return out

    def score_(self, products: Tensor, *, bias: bool = True) -> Tensor:
        """Turn products into scores, in place."""
        if not self.folded:
            products.mul_(self.alpha.abs())
        return products if self.bias is None or not bias else products.add_(self.bias)


class SideParts(NamedTuple):
    """Running statistics of the rows, or of the columns, over the blocks seen so far. None: not asked for."""

    level: Tensor | None = None
    total: Tensor | None = None
    """Log-sum-exps as in `Stats`; sums of softplus have no level."""

    higher: Tensor | None = None
    equal: Tensor | None = None
    sums: Tensor | None = None
    counts: Tensor | None = None

    def merge_(self, other: SideParts) -> None:
        """Add what another block gave."""
        mine, theirs = self, other
        if self.level is not None and self.total is not None and other.level is not None and other.total is not None:
            Stats(self.level, self.total).merge_(other.level, other.total)
            mine, theirs = self._replace(level=None, total=None), other._replace(level=None, total=None)
        for x, y in zip(mine, theirs, strict=True):
            if x is not None and y is not None:
                x.add_(y)

    def finish(self, term: Tensor | None) -> SideStats:
        """The statistics after the last block. `term` is a summed logit of each entry: see `Stats.finish`."""
        total, slack = self.total, None
        if self.level is not None and self.total is not None:
            total, slack = Stats(self.level, self.total).finish(term)
        return SideStats(total, slack, self.sums, self.counts, self.higher, self.equal)


class Levels(NamedTuple):
    """The positives' products, which tiles are compared with if the spec asks for it."""

    row: Tensor | None
    col: Tensor | None


class SideGrad(NamedTuple):
    """What the backward pass knows of the rows, or of the columns."""

    lse: Tensor | None
    """Their log-sum-exps; None for sums of softplus."""

    grad: Tensor
    level: Tensor | None


class Given(NamedTuple):
    """What the gradients of a block are made from. Rows of symmetric scores are columns too."""

    row: SideGrad | None
    col: SideGrad | None
    pos: Tensor | None
    """The positives' scores as the forward pass read them."""

    pos_grad: Tensor | None


class Gradients(NamedTuple):
    """Where `backward` adds to; None: not wanted."""

    dq: Tensor | None
    """[N, D], in the queries' dtype or the accumulation dtype."""

    dk: Tensor | None
    """[M, D], in the accumulation dtype, as every row block adds to it; must be zero-initialised. For symmetric scores
    it is `dq` itself, which must then be zero-initialised too."""

    dalpha: Tensor | None
    dbias: Tensor | None
    once: bool = False
    """Nothing else adds to `dq`: it is overwritten and need not be initialised."""


class KernelError(RuntimeError):
    """A kernel cannot be built for this device, with this compiler."""


class Tiles(Protocol):
    """A tiled backend, as the passes see it."""

    def forward(self, scores: Scores, spec: Spec, levels: Levels, pos: Tensor | None) -> tuple[SideParts, SideParts]:
        """What the rows and the columns gather from the block. Each row's positive score is written to `pos`."""

    def backward(self, scores: Scores, spec: Spec, given: Given, into: Gradients) -> None:
        """Add the block's share to the gradients."""


def as_tile(memory: Tensor, tile: Tile, plan: TilePlan) -> Tensor:
    """Memory of a tile's size as the tile [R, C]."""
    rows, cols = tile.shape
    return memory.view(cols, rows).t() if plan.flipped else memory.view(rows, cols)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 computes in fp64, everything else in fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

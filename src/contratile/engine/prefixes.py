"""Scores of the first 64, 128, ... features, all from one product (Matryoshka).

A tile's product is built up over blocks of features. After each block it is the product of a prefix:

    P_m = P_{m-1} + Q_b K_b^T           b: the features between two dimensions
    S_m = P_m r_m c_m                   r, c: reciprocal norms of the truncated rows, if they are normalised

The gradient of a block sums the weights of all prefixes that contain it, added up from the last prefix to the first. So
the products are those of one score matrix. Norms only need sums over rows and columns:

    W_m = G_m r_m c_m + W_{m+1},    dQ_b += W_m K_b,    dQ_b -= Q_b sum over m >= b of r_m^2 rowsum(G_m S_m)

A call without Matryoshka has one prefix: all features, no norms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.plan import Tile
from contratile.engine.stats import accumulation_dtype, part

SMALLEST_NORM = 1e-12
"""Smallest norm that rows are divided by, as in `torch.nn.functional.normalize`."""

STEP = 1024
"""Rows per chunk where features are converted."""


class Prefixes(NamedTuple):
    """How a tile's product is built up."""

    blocks: tuple[slice | None, ...] = (None,)
    """The features between two dimensions; None: all of them."""

    row: Tensor | None = None  # [prefixes, N] factors of the rows
    col: Tensor | None = None  # [prefixes, M] factors of the columns

    @classmethod
    def of(cls, dims: tuple[int, ...], row: Tensor | None, col: Tensor | None) -> Prefixes:
        """Build from dimensions in ascending order and factors [N, prefixes] and [M, prefixes]."""
        if not dims:
            return WHOLE
        row, col = (None if x is None else x.t().contiguous() for x in (row, col))
        return cls(blocks_of(dims), row, col)

    @property
    def asked(self) -> bool:
        """Whether prefixes were requested: scores and products are then different tiles."""
        return self.blocks != (None,)

    def factor(self, at: int, tile: Tile, out: Tensor) -> Tensor | None:
        """The factors [R, C] of a prefix's products; None: no factors."""
        if self.row is None or self.col is None:
            return None
        return torch.mul(part(self.row[at], tile.rows).unsqueeze(1), part(self.col[at], tile.cols), out=out)


WHOLE = Prefixes()
"""All features."""


def blocks_of(dims: tuple[int, ...]) -> tuple[slice, ...]:
    """The slices of features between consecutive dimensions."""
    return tuple(slice(low, high) for low, high in zip((0, *dims[:-1]), dims, strict=True))


def features(x: Tensor, block: slice | None) -> Tensor:
    """The features of a block: a view."""
    return x if block is None else x[:, block]


def _slices(x: Tensor) -> list[slice]:
    return [slice(start, start + STEP) for start in range(0, len(x), STEP)]


def reciprocal_norms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """1 / norm of the truncated rows [N, prefixes]."""
    dtype = accumulation_dtype(x.dtype)
    squares = torch.empty(len(x), len(dims), dtype=dtype, device=x.device)
    for rows in _slices(x):
        for at, block in enumerate(blocks_of(dims)):
            squares[rows, at] = x[rows, block].to(dtype).square().sum(1)
    return squares.cumsum(1).sqrt_().clamp_(min=SMALLEST_NORM).reciprocal_()


def add_norm_grads_(
    dx: Tensor | None, x: Tensor, dims: tuple[int, ...], factor: Tensor | None, sums: Tensor | None
) -> None:
    """Add the gradients of the norms to those of the features.

    `sums` [N, prefixes]: for each row the sum of score times gradient.
    """
    if dx is None or factor is None or sums is None:
        return
    share = torch.where(factor < 0.999 / SMALLEST_NORM, factor.square() * sums, 0)
    share = share.flip(1).cumsum(1).flip(1)  # sum over all prefixes that contain a block
    for rows in _slices(x):
        for at, block in enumerate(blocks_of(dims)):
            dx[rows, block].addcmul_(x[rows, block].to(dx.dtype), share[rows, at].unsqueeze(1), value=-1)

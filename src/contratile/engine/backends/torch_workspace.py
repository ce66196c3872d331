"""The buffers of the torch backend: tiles, blocks of queries and their gradient, blocks of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine.plan import Tile, TilePlan
from contratile.engine.stats import accumulation_dtype, part


def as_tile(memory: Tensor, tile: Tile, plan: TilePlan) -> Tensor:
    """Memory of a tile's size as the tile [R, C]."""
    rows, cols = tile.shape
    return memory.view(cols, rows).t() if plan.flipped else memory.view(rows, cols)


class Workspace:
    """Buffers that all tiles of a pass share, made when they are first asked for."""

    def __init__(self, plan: TilePlan, q: Tensor, k: Tensor) -> None:
        dtype = accumulation_dtype(q.dtype)
        self._plan = plan
        self._tiles: dict[int, Tensor] = {}
        self._views: dict[int, Tensor] = {}
        self._query = torch.empty(plan.rows, plan.d, dtype=dtype, device=q.device)
        self._scaled_query: Tensor | None = None
        self._query_grad: Tensor | None = None
        as_is = k.dtype == dtype and k.stride(1) == 1 and k.stride(0) >= k.shape[1]
        self._key = None if as_is else torch.empty(plan.cols, plan.d, dtype=dtype, device=k.device)

    def tile(self, index: int, tile: Tile) -> Tensor:
        view = self._views.get(index)
        if view is None or view.shape != tile.shape:  # most tiles have the same shape as the previous one
            memory = self._tiles.get(index)
            if memory is None:
                memory = self._tiles[index] = self._query.new_empty(self._plan.rows * self._plan.cols)
            view = self._views[index] = as_tile(part(memory, slice(0, tile.end - tile.offset)), tile, self._plan)
        return view

    def query(self, q: Tensor, rows: slice, factor: Tensor) -> Tensor:
        """A block of queries in the accumulation dtype, times a factor."""
        return _times(part(q, rows), factor, self._query)

    def scaled_query(self, q: Tensor, rows: slice, alpha: Tensor) -> Tensor:
        """The same with another factor, in a second buffer."""
        if self._scaled_query is None:
            self._scaled_query = torch.empty_like(self._query)
        return _times(part(q, rows), alpha, self._scaled_query)

    def query_grad(self, rows: slice) -> Tensor:
        """A buffer for the gradient of a block of queries."""
        if self._query_grad is None:
            make = torch.empty_like if self._plan.prefixes == 0 else torch.zeros_like  # prefixes may not cover all
            self._query_grad = make(self._query)
        return part(self._query_grad, slice(0, rows.stop - rows.start))

    def key(self, k: Tensor, cols: slice) -> Tensor:
        """A block of keys as BLAS needs it: a view if the layout allows, otherwise a copy."""
        block = part(k, cols)
        return block if self._key is None else self._key[: block.shape[0]].copy_(block)


def _times(block: Tensor, factor: Tensor, buffer: Tensor) -> Tensor:
    out = part(buffer, slice(0, block.shape[0]))
    return torch.mul(block, factor, out=out) if block.dtype == out.dtype else out.copy_(block).mul_(factor)

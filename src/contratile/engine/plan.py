"""The tile plan: how an N x M score matrix is cut into tiles, in pure integers.

    >>> print(plan_tiles(8192, 8192, 512))
    8192 x 8192 x 512 in 32 tiles of 2048 x 1024, workspace 34.0 MiB

A tile has to be small enough that its passes (maximum, exp2, sums) run from cache and large enough that its
matrix products run at full speed. The plan depends on its arguments only, so forward and backward cut the same tiles.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, isqrt
from pathlib import Path
from typing import NamedTuple

KiB, MiB = 1 << 10, 1 << 20
WORKSPACE_LIMIT = 40 * MiB
"""Upper limit on the scratch memory of an automatic plan, for any N, M and D."""

LISTED = 16
"""Plans of up to about this many tiles cache their list, which would dominate the time of a small step."""

_TILES = 3
"""Tiles alive at once: scores, gradient and scratch; with prefixes product, factors and scratch, plus theirs."""

_BESIDE = 2
"""Further tiles with a teacher or a guide: its products and scratch."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that a plan is for: cores, and the bytes of their shared last-level cache."""

    cores: int
    shared_cache: int


class Tile(NamedTuple):
    """One block of scores: queries `rows` against keys `cols`."""

    rows: slice
    cols: slice
    shape: tuple[int, int]
    offset: int
    """Number of scores in the tiles before it: where it starts if tiles are stored one after the other."""

    end: int
    """Number of scores up to its last one."""

    mirrored: bool
    """Off-diagonal tile of symmetric scores: it also counts as its own transpose."""


@dataclass(frozen=True, kw_only=True)
class TilePlan:
    """Tiles of at most `rows` x `cols` scores over N queries and M keys of D features."""

    n: int
    m: int
    d: int
    rows: int
    cols: int
    itemsize: int = 4
    """Bytes of the accumulation dtype."""

    symmetric: bool = False
    """Queries and keys are the same: only tiles of the upper triangle are computed."""

    flipped: bool = False
    """Compute and store tiles transposed. Another rank computes the same tiles untransposed, and BLAS may round a
    product and its transpose differently; this way both get the same bits."""

    diagonal: int = 0
    """Height of tiles on the diagonal of symmetric scores: half of each diagonal tile is wasted, so they are small."""

    prefixes: int = 0
    """Additional tiles alive at once, one for each prefix of the features."""

    beside: int = 0
    """Features of a teacher or a guide, whose products are computed too; 0: there is none."""

    def __post_init__(self) -> None:
        assert not self.symmetric or (self.n == self.m and self.rows == self.cols), "symmetric tiles are square"

    def transposed(self) -> "TilePlan":
        """The same tiles from the point of view of the rank that holds the keys."""
        return replace(self, n=self.m, m=self.n, rows=self.cols, cols=self.rows, flipped=not self.flipped)

    def blocks(self) -> Iterable[tuple[slice, list[Tile]]]:
        """Row blocks in order of computation, each with its tiles from left to right."""
        return self._listed if self.n * self.m <= LISTED * self.rows * self.cols else self._blocks()

    @cached_property
    def _listed(self) -> list[tuple[slice, list[Tile]]]:
        return list(self._blocks())

    def _blocks(self) -> Iterator[tuple[slice, list[Tile]]]:
        offset = 0
        for rows, spans in self._spans():
            tiles = []
            for cols in spans:
                shape = rows.stop - rows.start, cols.stop - cols.start
                end = offset + shape[0] * shape[1]
                tiles.append(Tile(rows, cols, shape, offset, end, self.symmetric and cols.start > rows.start))
                offset = end
            yield rows, tiles

    def _spans(self) -> Iterator[tuple[slice, list[slice]]]:
        if not self.symmetric:
            spans = _slices(self.m, self.cols)
            for rows in _slices(self.n, self.rows):
                yield rows, spans
            return
        for rows in _slices(self.n, self.rows):
            for part in _slices(rows.stop, self.diagonal or self.rows, rows.start):  # steps along the diagonal
                yield part, [part, slice(part.stop, rows.stop)] if part.stop < rows.stop else [part]
            if rows.stop < self.m:
                yield rows, _slices(self.m, self.cols, rows.stop)

    def tiles(self) -> Iterator[Tile]:
        """All tiles in the order of computation."""
        for _, tiles in self.blocks():
            yield from tiles

    def cached_items(self, cache_bytes: int) -> int:
        """Scores in the first tiles that fit into `cache_bytes`."""
        limit, items = cache_bytes // self.itemsize, 0
        if not self.symmetric and self.n * self.m <= limit:
            return self.n * self.m
        for tile in self.tiles():
            if tile.end > limit:
                break
            items = tile.end
        return items

    @property
    def workspace_bytes(self) -> int:
        """Peak scratch memory: the tiles, a query block and its gradient, a key block."""
        tiles = (_TILES + self.prefixes + (_BESIDE if self.beside else 0)) * self.rows * self.cols
        return (tiles + (2 * self.rows + self.cols) * (self.d + self.beside)) * self.itemsize

    def __str__(self) -> str:
        return (
            f"{self.n} x {self.m} x {self.d} in {sum(1 for _ in self.tiles())} tiles of {self.rows} x {self.cols}, "
            f"workspace {self.workspace_bytes / MiB:.1f} MiB"
        )


def plan_tiles(
    n: int,
    m: int,
    d: int,
    *,
    tile: int | None = None,
    itemsize: int = 4,
    symmetric: bool = False,
    machine: Machine | None = None,
    shape: tuple[int, int] | None = None,
    prefixes: int = 0,
    beside: int = 0,
) -> TilePlan:
    """Choose the tiles for N queries, M keys and D features.

    The rule was found by measuring: a tile takes a quarter of the shared cache (an eighth for small D, where passes
    over the tile cost more than its products), but at least 512 KiB per core. It is taller than wide, because every row
    block passes over all key gradients once. Tiles shrink if long features would exceed the workspace, and with
    several prefixes or another model, whose tiles are alive at once.

    Args:
        n: Number of queries.
        m: Number of keys.
        d: Number of features.
        tile: Force the height and width of a tile.
        itemsize: Bytes of the accumulation dtype.
        symmetric: Queries and keys are the same set.
        machine: Cores and caches to plan for. None: this machine.
        shape: Height and width to start from instead of this rule, as measured by `contratile doctor --tune`. Unlike
            `tile`, they still shrink to fit the workspace. Not for symmetric scores.
        prefixes: Prefixes of the features with scores of their own, see `matryoshka_dims` of `clip_loss`.
        beside: Features of a teacher or guide, see `teacher` and `guide` of `clip_loss`.

    Returns:
        The `TilePlan`; printing it shows the tiles and their workspace.

    Examples:
        >>> import contratile as ct
        >>> print(ct.plan_tiles(100, 70, 8, tile=32))
        100 x 70 x 8 in 12 tiles of 32 x 32, workspace 0.0 MiB
    """
    if tile is not None:
        rows, cols = max(1, min(tile, n)), max(1, min(tile, m))
    else:
        several = prefixes > 1 or beside > 0
        if shape is None or symmetric:
            machine = machine or this_machine()
            share = machine.shared_cache // (4 if d >= 256 else 8)
            area = max(share, machine.cores * 512 * KiB) // itemsize // (4 if several else 1)
            height = isqrt(area if symmetric else max(area, machine.shared_cache // 2 // itemsize))
            if several:  # tiles are read more often than key gradients
                height = isqrt(area)
            rows = max(16, min(n, height))
            cols = rows if symmetric else max(16, min(m, area // rows))
        else:
            rows, cols = max(16, min(n, shape[0])), max(16, min(m, shape[1]))
        alive, width = _TILES + prefixes + (_BESIDE if beside else 0), d + beside
        while (alive * rows * cols + (2 * rows + cols) * width) * itemsize > WORKSPACE_LIMIT and max(rows, cols) > 16:
            if symmetric or rows >= cols:
                rows = max(16, rows * 7 // 8)
            if symmetric or cols > rows:
                cols = max(16, cols * 7 // 8)
        rows, cols = _even(n, rows), _even(m, cols)
    diagonal = ceil(rows / 2 / 16) * 16 if symmetric and tile is None else 0
    return TilePlan(
        n=n,
        m=m,
        d=d,
        rows=rows,
        cols=cols,
        itemsize=itemsize,
        symmetric=symmetric,
        diagonal=diagonal,
        prefixes=prefixes,
        beside=beside,
    )


def _slices(length: int, step: int, first: int = 0) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(first, length, step)]


def _even(length: int, step: int) -> int:
    """The largest step up to `step` that cuts `length` into equal pieces, in multiples of 16 for alignment."""
    if length <= step:
        return max(1, length)
    pieces = ceil(length / (step // 16 * 16))
    return ceil(length / pieces / 16) * 16


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """Cores available to this process and the size of their last-level cache (16 MiB if unknown)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            level, size = (index / "level").read_text(), (index / "size").read_text().strip()
            sizes.append((int(level), int(size.removesuffix("K")) * KiB))
        except (OSError, ValueError):
            continue  # a kernel without this entry, or one that reports it in another unit
    return Machine(cores=cores, shared_cache=max(sizes, default=(3, 16 * MiB))[1])

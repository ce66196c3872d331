"""Bytes that a step of `clip_loss` moves between L2 and the multiprocessors, by formula.

For kernels a test compares the formula with the bytes that the interpreter counts. Library products are counted as
tiles of 128 x 128; libraries reach that or better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from contratile.engine.backends.triton_configs import Config, cut_backward, cut_forward

LIBRARY_TILE = 128


class Traffic(NamedTuple):
    loaded: int
    stored: int

    @property
    def total(self) -> int:
        return self.loaded + self.stored


def _sum(*parts: Traffic) -> Traffic:
    return Traffic(sum(part.loaded for part in parts), sum(part.stored for part in parts))


class Tiling(NamedTuple):
    """The tiles of n x n scores whose positives lie on the diagonal."""

    n: int
    config: Config
    lowest: int

    @property
    def low(self) -> int:
        """Rows of a careful tile."""
        return min(self.config.m, self.lowest)

    @property
    def row_blocks(self) -> int:
        return -(-self.n // self.config.m)

    @property
    def col_blocks(self) -> int:
        return -(-self.n // self.config.n)

    @property
    def tiles(self) -> int:
        return self.row_blocks * self.col_blocks

    @property
    def low_tiles(self) -> int:
        """All tiles, as careful launches cut them."""
        return -(-self.n // self.low) * self.col_blocks

    def _rows(self) -> Iterator[tuple[int, int, int]]:
        """For each row block: its rows, its tiles with positives, and its tiles that are left to the careful launch."""
        m, n = self.config.m, self.config.n
        inside = self.n // n
        for top in range(0, self.n, m):
            rows = min(m, self.n - top)
            first, last = top // n, (top + rows - 1) // n
            special = self.col_blocks if rows < m else last - first + 1 + (inside < self.col_blocks and last < inside)
            yield rows, last - first + 1, special

    @property
    def diagonal(self) -> int:
        """Tiles with positives."""
        return sum(holding for _, holding, _ in self._rows())

    @property
    def interior(self) -> int:
        return self.tiles - sum(special for _, _, special in self._rows())

    @property
    def careful(self) -> int:
        """Tiles of the careful launch."""
        return sum(-(-rows // self.low) * special for rows, _, special in self._rows())

    @property
    def careful_rows(self) -> int:
        return sum(rows * special for rows, _, special in self._rows())


class StepTraffic(NamedTuple):
    """N pairs of D features of `itemsize` bytes each. Nearly all scores are within range of their program's shift."""

    n: int
    d: int
    itemsize: int
    config: Config
    processors: int
    workspace: int
    gradient_config: Config | None = None
    """Configuration of the gradient's tiles, if it differs."""

    low: int = 32
    """Rows of a careful tile: `careful_config`."""

    @property
    def col_blocks(self) -> int:
        """Programs of the forward pass, but for splits."""
        return -(-self.n // self.config.n)

    @property
    def tiles(self) -> int:
        return Tiling(self.n, self.config, self.low).tiles

    def interior(self, kernel: str) -> int:
        """What one tile of a fast launch moves."""
        m, n = self.config.m, self.config.n
        if kernel == "forward":
            return self._features(m) + 17 + 8 * m
        return self._features(m) + 40 + 4 * m + 4 * n + m * n * self.itemsize

    @property
    def total(self) -> int:
        return self.forward().total + self.gradient().total + self.products().total

    def forward(self) -> Traffic:
        """The positives' products, the tiles, and the parts of statistics (a level and a total), written and merged."""
        n, config = self.n, self.config
        on = Tiling(n, config, self.low)
        blocks, _, splits = cut_forward(n, n, config, processors=self.processors, fields=2, workspace=self.workspace)
        chunks = -(-on.col_blocks // blocks)
        programs = on.col_blocks * splits
        positives = Traffic((4 + 8 * config.m) * on.row_blocks + on.diagonal * self._features(config.m), 4 * n)
        fast = Traffic(
            4 * programs + 16 * on.tiles + 8 * config.m * on.diagonal + on.interior * self._features(config.m),
            on.tiles + 4 * programs + 8 * config.m * on.interior + 8 * n * splits,
        )
        careful = Traffic(
            8 * programs + on.low_tiles + on.careful * (8 * on.low + self._features(on.low)),
            8 * on.careful_rows + 8 * n * splits,
        )
        rows, cols = 8 * n * (chunks + on.col_blocks), 8 * n * (1 + 2 * splits)
        merges = Traffic(rows + cols, 8 * n * (chunks + 1))
        return _sum(self._bounds(on), positives, fast, careful, merges)

    def gradient(self) -> Traffic:
        """Weights of rows and columns, then tiles again. Written are g, in whole tiles, and a sum for each."""
        config = self.gradient_config or self.config
        on = Tiling(self.n, config, self.low)
        m, n = config.m, config.n
        sides = on.row_blocks + on.col_blocks
        weights = Traffic(4 * sides + 16 * self.n, 4 * sides + 8 * self.n)
        fast = Traffic(
            28 * on.tiles + 8 * m * on.diagonal + on.interior * (4 + 4 * m + 4 * n + self._features(m, config)),
            4 * on.tiles + on.interior * (4 + m * n * self.itemsize),
        )
        # Of a row: its label twice, log-sum-exp, gradient and g at its positive; of a column the second and third.
        careful = Traffic(
            8 * on.low_tiles + on.careful * (28 * on.low + 8 * n + self._features(on.low, config)),
            on.careful * (4 + on.low * n * self.itemsize),
        )
        return _sum(self._bounds(on), weights, fast, careful)

    def _features(self, rows: int, config: Config | None = None) -> int:
        """Each tile of scores reads its rows and its columns."""
        return (rows + (config or self.config).n) * self.d * self.itemsize

    def _bounds(self, on: Tiling) -> Traffic:
        """The lowest and highest label of each row block."""
        return Traffic(8 * on.config.m * on.row_blocks, 16 * on.row_blocks)

    def products(self) -> Traffic:
        """dq += g k and dk += g^T q: each output tile reads its rows of one factor and columns of the other; fp32 sums
        are read and written once for each chunk."""
        n, d = self.n, self.d
        config = self.gradient_config or self.config
        rows, cols = cut_backward(n, n, config, itemsize=self.itemsize, symmetric=False, workspace=self.workspace)
        outputs = -(-n // LIBRARY_TILE) * -(-d // LIBRARY_TILE)
        factors = 2 * outputs * 2 * LIBRARY_TILE * n * self.itemsize
        sums = 4 * n * d * (-(-n // rows) + -(-n // cols))
        return Traffic(factors + sums, sums)

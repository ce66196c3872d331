"""What a step of `clip_loss` moves between L2 and the multiprocessors, by formula, in bytes.

Kernels: counted by the interpreter too, which has to agree. Library products: as if cut into tiles of 128 x 128, which
is what such libraries do or better.
"""

from typing import NamedTuple

from contratile.engine.backends.triton_configs import Config, cut_backward, cut_forward

LIBRARY_TILE = 128


class Traffic(NamedTuple):
    loaded: int
    stored: int

    @property
    def total(self) -> int:
        return self.loaded + self.stored


class Step(NamedTuple):
    """N pairs of D features of so many bytes each."""

    n: int
    d: int
    itemsize: int
    config: Config
    processors: int
    workspace: int

    @property
    def blocks(self) -> int:
        return -(-self.n // self.config.m)

    @property
    def tiles(self) -> int:
        return self.blocks * -(-self.n // self.config.n)

    @property
    def features_of_a_tile(self) -> int:
        """Each tile of scores reads its rows and its columns."""
        return (self.config.m + self.config.n) * self.d * self.itemsize

    def forward(self) -> Traffic:
        """Tiles, then the parts of column statistics (a level and a total for each row block) and of row statistics."""
        n = self.n
        blocks, _, splits = cut_forward(
            n, n, self.config, processors=self.processors, fields=2, workspace=self.workspace
        )
        chunks = -(-self.blocks // blocks)
        scale_and_labels = self.blocks * splits * (4 + 8 * self.config.m)
        col_parts, row_parts = 8 * self.blocks * n, 8 * splits * n
        merged = 8 * n * (chunks + 1)
        loaded = self.tiles * self.features_of_a_tile + scale_and_labels + col_parts + row_parts + merged
        return Traffic(loaded, col_parts + row_parts + merged + 4 * n)

    def gradient(self) -> Traffic:
        """Tiles again, with the label, score and gradient of each row's positive (16 bytes) and, of rows and columns,
        the log-sum-exp and its gradient. Written are g, in whole tiles, and two sums for each."""
        vectors = 4 + 16 * self.config.m + 8 * self.config.m + 8 * self.config.n
        loaded = self.tiles * (self.features_of_a_tile + vectors)
        return Traffic(loaded, self.tiles * (self.config.m * self.config.n * self.itemsize + 8))

    def products(self) -> Traffic:
        """dq += g k and dk += g^T q: each output tile reads its rows of one factor and columns of the other; fp32 sums
        are read and written once for each chunk."""
        n, d = self.n, self.d
        rows, cols = cut_backward(n, n, self.config, itemsize=self.itemsize, symmetric=False, workspace=self.workspace)
        outputs = -(-n // LIBRARY_TILE) * -(-d // LIBRARY_TILE)
        factors = 2 * outputs * 2 * LIBRARY_TILE * n * self.itemsize
        sums = 4 * n * d * (-(-n // rows) + -(-n // cols))
        return Traffic(factors + sums, sums)

    @property
    def total(self) -> int:
        return self.forward().total + self.gradient().total + self.products().total

"""What a call of the primitive is given and what it is asked for."""

from typing import Any, Literal, NamedTuple

from torch import Tensor

LOG2E = 1.4426950408889634
_HOW = ("tile", "cache_bytes", "backend", "precision")


class Inputs(NamedTuple):
    """The tensors of a call. N queries, M keys, D features."""

    query: Tensor  # [N, D]
    key: Tensor | None  # [M, D]; None stands for the queries
    scale: Tensor  # 0-d
    bias: Tensor | None = None  # 0-d
    labels: Tensor | None = None  # [N] key index of each query's positive
    query_ids: Tensor | None = None  # [N]
    key_ids: Tensor | None = None  # [M] pairs of equal id are left out, except a query's own positive
    query_classes: Tensor | None = None  # [N]
    key_classes: Tensor | None = None  # [M] scores are summed over pairs of equal class
    query_level: Tensor | None = None  # [N] the positives' products, where they are not among these keys


class Task(NamedTuple):
    """What is computed, in plain values."""

    reduce: Literal["lse", "softplus"] = "lse"
    rows: bool = True
    cols: bool = True
    exclude_self: bool = False
    margin: float = float("inf")
    """For each side, pairs whose product exceeds its positive's minus `margin` are dropped. Infinite: none are."""

    ranks: bool = False
    """Count the pairs that score higher than the positive of their side."""

    ties: bool = False
    """Beside `ranks`: count the pairs that score exactly as the positive, which is one of them."""

    differ: bool = False
    """Scores are summed over pairs of different class instead."""

    tile: int = 0
    cache_bytes: int = 0
    backend: str = "auto"
    precision: str = "ieee"
    """Empty: as PyTorch is set, which a compiler cannot trace, so the passes look it up."""

    @property
    def unit(self) -> float:
        """Nats in a unit of the results: log-sum-exps are computed in base 2."""
        return 1.0 if self.reduce == "softplus" else 1 / LOG2E

    def definition(self) -> dict[str, Any]:
        """What decides the results, without how they are computed."""
        return {name: value for name, value in self._asdict().items() if name not in _HOW}

    @property
    def filters(self) -> bool:
        return self.margin < float("inf")

    @property
    def knows_positives(self) -> bool:
        """Whether tiles are compared with the positives, which must then be known before the first tile.

        Products are compared, before the scale: its rounding would break ties, and make others.
        """
        return self.filters or self.ranks


Results = dict[str, Tensor]
"""Those asked for: row, col, pos, level (the positives' products), cache, and of either side its slack (see `Stats`),
sums, counts, higher, equal."""

DIFFERENTIABLE = ("row", "col", "pos", "row_sums", "col_sums")


def result_shapes(x: Inputs, task: Task) -> dict[str, tuple[int, ...]]:
    """The names of the results and their shapes. The cache, whose size depends on tiles, is not among them."""
    n, m = x.query.shape[0], (x.query if x.key is None else x.key).shape[0]
    shapes: dict[str, tuple[int, ...]] = {}
    for side, length, wanted in (("row", n, task.rows), ("col", m, task.cols)):
        if wanted:
            shapes[side] = (length,)
            if task.reduce == "lse":
                shapes[f"{side}_slack"] = (length,)
            if x.query_classes is not None:
                shapes[f"{side}_sums"] = shapes[f"{side}_counts"] = (length,)
            if task.ranks:
                shapes[f"{side}_higher"] = (length,)
            if task.ties:
                shapes[f"{side}_equal"] = (length,)
    if x.labels is not None:
        shapes["pos"] = (n,)
        if task.knows_positives:
            shapes["level"] = (n,)
    return shapes

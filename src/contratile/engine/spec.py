"""What the engine is given (`Inputs`), what it is asked (`Spec`), and what it answers (`PairStats`).

These three records travel unchanged from a loss to the backends. N queries, M keys, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile.ring.nodes import RingKind

LOG2E = 1.4426950408889634
SameId = Literal["exclude", "positive"]
SAME_ID: tuple[str, ...] = get_args(SameId)
GuideMargin = Literal["absolute", "relative"]
GUIDE_MARGINS: tuple[str, ...] = get_args(GuideMargin)


class Inputs(NamedTuple):
    """The tensors of a call. The first ones, as many as `DIFFERENTIABLE`, may have gradients."""

    query: Tensor  # [N, D]
    key: Tensor | None  # [M, D]; None: the keys are the queries
    scale: Tensor  # 0-d
    bias: Tensor | None = None  # 0-d
    key_bias: Tensor | None = None  # [M] added to all scores of a key; log-sum-exps of two sets only
    stand_in: Tensor | None = None  # [N, D] receives the queries' gradient in full precision, instead of the queries
    labels: Tensor | None = None  # [N] index of each query's positive key
    query_ids: Tensor | None = None  # [N]
    key_ids: Tensor | None = None  # [M] for pairs of equal id, see `Spec.same_id`
    query_classes: Tensor | None = None  # [N]
    key_classes: Tensor | None = None  # [M] for `Spec.sums` over pairs of equal class
    query_level: Tensor | None = None  # [N] the positives' products, if the positives are not among these keys
    teacher_query: Tensor | None = None  # [N, T] features of another model; `SideStats.cross` goes by its softmax
    teacher_key: Tensor | None = None  # [M, T]
    teacher_scale: Tensor | None = None  # 0-d
    guide_query: Tensor | None = None  # [N, G] features of another model, which decide which pairs count
    guide_key: Tensor | None = None  # [M, G]; None if `key` is None
    guide_level: Tensor | None = None  # [N] the guide's products of the positives, if these are not among these keys

    @property
    def keys(self) -> Tensor:
        return self.query if self.key is None else self.key

    @property
    def guide_keys(self) -> Tensor | None:
        return self.guide_query if self.guide_key is None else self.guide_key


DIFFERENTIABLE = 6
"""From the queries to their stand-in."""


class Wanted(NamedTuple):
    """Which gradients the backward pass computes."""

    query: bool
    key: bool
    scale: bool
    bias: bool
    key_bias: bool = False


class InputGrads(NamedTuple):
    """The gradients of the inputs; None where not wanted. The first fields of `Inputs`, in their order."""

    query: Tensor | None
    key: Tensor | None
    scale: Tensor | None
    bias: Tensor | None
    key_bias: Tensor | None = None


class Spec(NamedTuple):
    """What is computed, and how, in plain values."""

    reduce: Literal["lse", "softplus"] = "lse"
    rows: bool = True
    cols: bool = True
    exclude_self: bool = False
    margin: float = inf
    """Per side: drop pairs whose product exceeds the positive's product minus `margin`."""

    ranks: bool = False
    """Count the pairs that score higher than the positive."""

    ties: bool = False
    """With `ranks`: also count the pairs that score exactly the same as the positive (itself included)."""

    paired: bool = False
    """The positive of query i is key i: the labels are 0, 1, 2, ..."""

    same_id: SameId = "exclude"
    """How pairs of equal id count, apart from a query's labelled positive: excluded, or positive too. Ranks never count
    them. If positive, softplus flips their sign, log-sum-exps contain them, and `sums="same"` sums their scores."""

    sums: Literal["", "all", "equal", "differ", "same"] = ""
    """Also sum scores: of all pairs, of equal class, of different id, or of equal id without the labelled positive."""

    col_sums: bool = True
    """Whether columns are summed too."""

    tile: int | None = None
    """Rows and columns of a tile; None lets `plan_tiles` choose."""

    cache_bytes: int = 0
    ring: RingKind = "auto"
    """How blocks travel between ranks: a flat ring, a ring over nodes, or chosen by where the ranks run."""

    backend: str = "auto"
    precision: str | None = None
    """None follows `torch.get_float32_matmul_precision()`. The passes read it: a compiler cannot trace that call."""

    dims: tuple[int, ...] | None = None
    """Ask for the scores of the first 64, 128, ... features, ascending: statistics get an axis for them."""

    normalize: bool = False
    """With `dims`: divide each truncated row by its norm."""
    guide_margin: float = 0.0
    """With a guide, per side: drop pairs whose guide similarity exceeds the positive's minus this margin."""

    guide_relative: bool = False
    """The margin is relative: multiplied by the positive's absolute guide similarity."""

    hardness: float = 0.0
    """Rows add `hardness` times the product to the score of every pair except their labelled positive, without a
    gradient. Columns, sums and ranks do not. Only for log-sum-exps of two sets without a margin."""

    @property
    def unit(self) -> float:
        """Nats per unit of the scores: log-sum-exps are computed in base 2."""
        return 1.0 if self.reduce == "softplus" else 1 / LOG2E

    @property
    def prefixes(self) -> tuple[int, ...]:
        return self.dims or ()

    @property
    def sums_rows(self) -> bool:
        return self.rows and self.sums != ""

    @property
    def sums_cols(self) -> bool:
        return self.cols and self.col_sums and self.sums != ""

    @property
    def filters(self) -> bool:
        return self.margin < inf

    @property
    def compares(self) -> bool:
        """Whether pairs are compared with the positives, whose products must then be known before the first tile.

        Products are compared, before the scale: rounding after the multiplication would break ties and create others.
        """
        return self.filters or self.ranks


def number(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A factor for a tensor. Multiplying a 0-d CPU tensor is faster by a tensor than by a float."""
    if isinstance(value, Tensor) or like.dim() or not like.is_cpu:
        return value
    return torch.scalar_tensor(value, dtype=like.dtype)


class SideStats(NamedTuple):
    """Statistics of the rows, or of the columns. None: not requested."""

    total: Tensor | None = None  # log-sum-exps, or sums of softplus
    slack: Tensor | None = None  # exp(total) / true sum, close to 1: see `Stats.finish`
    sums: Tensor | None = None  # sums of scores (without biases), as `Spec.sums` says
    counts: Tensor | None = None  # number of those pairs
    higher: Tensor | None = None  # number of pairs above the positive
    equal: Tensor | None = None  # number of pairs equal to the positive
    cross: Tensor | None = None  # mean of scores under the teacher's softmax, minus the positive's as a constant
    teacher: Tensor | None = None  # log-sum-exps of the teacher's scores
    teacher_slack: Tensor | None = None


class PairStats(NamedTuple):
    """The answer. Totals, sums and positives are logits in units of `unit` nats; `nats` converts them.

    With `Spec.dims` every [N] is [N, prefixes].

    Losses convert once, after summing: exp2 is faster than exp, and converting every element first would round N times.
    """

    row: SideStats = SideStats()
    col: SideStats = SideStats()
    pos: Tensor | None = None  # [N] the positives' scores
    level: Tensor | None = None  # [N] the positives' products
    cache: Tensor | None = None  # score tiles kept for the backward pass
    unit: float = 1.0
    teacher_pos: Tensor | None = None  # [N] the teacher's scores of the positives
    guide_level: Tensor | None = None  # [N] the guide's products of the positives

    def nats(self, logits: Tensor, times: float = 1.0, over: float | Tensor = 1.0) -> Tensor:
        """times / over * logits, in nats."""
        return logits * number(self.unit * times / over, logits)

    def logits(self, products: Tensor, scale: Tensor) -> Tensor:
        """Products as scores, in the unit of these statistics."""
        return products * (scale / self.unit)

    def of_nats(self, nats: Tensor) -> Tensor:
        """Nats, converted to the unit of these statistics."""
        return nats if self.unit == 1 else nats / self.unit

    def logaddexp(self, a: Tensor, b: Tensor) -> Tensor:
        if self.unit != 1:
            return torch.logaddexp2(a, b)
        # Second derivatives too are finite: those of torch.logaddexp overflow, and those of -inf are NaN.
        a, b = (x.clamp(min=torch.finfo(x.dtype).min / 2) for x in (a, b))
        return torch.where(a > b, a - F.logsigmoid(a - b), b - F.logsigmoid(b - a))

    def logsumexp(self, logits: Tensor, dim: int) -> Tensor:
        return (logits * self.unit).logsumexp(dim) / self.unit

    def tensors(self) -> tuple[Any, ...]:
        """All fields except the unit in one flat tuple, as autograd and `torch.library` need them."""
        return *self.row, *self.col, self.pos, self.level, self.teacher_pos, self.guide_level, self.cache

    @classmethod
    def of(cls, tensors: Sequence[Any], unit: float = 1.0) -> PairStats:
        """The inverse of `tensors`."""
        per_side = len(SideStats._fields)
        row, col = SideStats(*tensors[:per_side]), SideStats(*tensors[per_side : 2 * per_side])
        pos, level, teacher_pos, guide_level, cache = tensors[2 * per_side :]
        return cls(row, col, pos, level, cache, unit, teacher_pos, guide_level)

    def constants(self) -> tuple[Tensor | None, ...]:
        """The fields without gradient."""
        own = self.level, self.teacher_pos, self.guide_level, self.cache
        return *_constants(self.row), *_constants(self.col), *own


def _constants(side: SideStats) -> tuple[Tensor | None, ...]:
    return side.slack, side.counts, side.higher, side.equal, side.teacher, side.teacher_slack


def shapes(x: Inputs, spec: Spec) -> PairStats:
    """The shapes of the results, as a record of tuples. The size of the cache depends on the tiles and is not here."""
    n, m = x.query.shape[0], x.keys.shape[0]
    prefixes = (len(spec.prefixes),) if spec.prefixes else ()
    sides = []
    for length, wanted, classes in ((n, spec.rows, spec.sums_rows), (m, spec.cols, spec.sums_cols)):
        size: Any = (length, *prefixes)
        taught = size if wanted and x.teacher_query is not None else None
        sides.append(
            SideStats(
                total=size if wanted else None,
                slack=size if wanted and spec.reduce == "lse" else None,
                sums=size if classes else None,
                counts=size if classes else None,
                higher=size if wanted and spec.ranks else None,
                equal=size if wanted and spec.ties else None,
                cross=taught,
                teacher=taught,
                teacher_slack=taught,
            )
        )
    own: Any = None if x.labels is None else (n, *prefixes)
    row, col = sides
    return PairStats(
        row,
        col,
        pos=own,
        level=own if spec.compares else None,
        teacher_pos=None if x.teacher_query is None else own,
        guide_level=None if x.guide_query is None else own,
    )

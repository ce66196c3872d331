"""The inputs and results of a tiled backend: the scores of this rank's queries with one visiting block of keys.

    rows, cols = backend.forward(scores, spec, pos)      # statistics, ready to be merged with other blocks'
    backend.backward(scores, spec, given, into)                  # adds the block's share to the gradients

One process has one block, a ring one for each rank; a backend does not know the difference.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from contratile.engine.plan import TilePlan
from contratile.engine.prefixes import WHOLE, Prefixes
from contratile.engine.rule import PairRule
from contratile.engine.spec import Spec
from contratile.engine.stats import SideParts


class Beside(NamedTuple):
    """Features of another model (a teacher or a guide), whose products are computed along with each tile of scores."""

    q: Tensor
    k: Tensor
    factor: Tensor
    """0-d: multiplies the products."""

    row: Tensor | None
    col: Tensor | None
    """Teacher: centres of rows and columns (`stats.TeacherSide`). Guide: the guide's products of their positives."""

    pos: Tensor | None = None
    """Receives the teacher's scores of the rows' positives in the forward pass."""


class Scores(NamedTuple):
    """What the scores of a block are made of, and how they are cut into tiles."""

    q: Tensor
    k: Tensor | None
    """None: the keys are the queries. Scores are symmetric, and only the upper triangle of tiles is computed."""

    alpha: Tensor
    """Scores are alpha <q, k> + bias + the column's bias."""

    bias: Tensor | None
    rule: PairRule
    plan: TilePlan
    """The tiles of the torch backend."""

    row_level: Tensor | None
    col_level: Tensor | None
    """The positives' products of rows and columns, which tiles are compared with if the spec asks for it."""

    cache: Tensor | None = None
    """Keeps the score tiles that fit into it from forward to backward."""

    query_classes: Tensor | None = None
    key_classes: Tensor | None = None
    """For sums over pairs of equal class."""

    col_bias: Tensor | None = None
    """[M] is added to the scores of each column, but not to the sums of scores."""

    folded: bool = True
    """Multiply the queries by alpha. Otherwise each tile is multiplied by it, after products were compared."""

    prefixes: Prefixes = WHOLE
    """Which prefixes of the features have scores of their own; only all features, as a rule."""
    teacher: Beside | None = None
    """The teacher: its softmax weights the scores in `SideParts.cross`."""

    guide: Beside | None = None
    """The guide: its products decide which pairs count, see `PairRule.within`."""

    hardness: Tensor | None = None
    """0-d: the factor of the products in the rows' scores instead of alpha, except at positives."""

    @property
    def biased_late(self) -> bool:
        """Whether tiles are made without biases, which are added later: a bias would round what hardness multiplies."""
        return self.hardness is not None and self.col_bias is not None

    @property
    def key(self) -> Tensor:
        return self.q if self.k is None else self.k

    @property
    def query_factor(self) -> Tensor:
        """The factor of the queries: alpha, or its sign, so that a higher product is a higher score."""
        return self.alpha if self.folded else torch.where(self.alpha < 0, -1, 1).to(self.alpha.dtype)


class SideGrad(NamedTuple):
    """Inputs of the backward pass for the rows, or the columns."""

    lse: Tensor | None
    """Their log-sum-exps; None for sums of softplus."""

    grad: Tensor
    level: Tensor | None

    def of_prefix(self, at: int) -> SideGrad:
        return SideGrad(of_prefix(self.lse, at), self.grad[:, at].contiguous(), self.level)


def of_prefix(x: Tensor | None, at: int) -> Tensor | None:
    """One prefix of a statistic."""
    return None if x is None else x[:, at].contiguous()


class Given(NamedTuple):
    """What the gradients of a block are made from. Rows of symmetric scores are columns too."""

    row: SideGrad | None
    col: SideGrad | None
    pos: Tensor | None
    """The positives' scores as the forward pass read them."""

    pos_grad: Tensor | None
    row_sums: Tensor | None = None
    col_sums: Tensor | None = None
    """Gradients of the sums of scores."""

    teacher: TeacherGrads | None = None

    def by_prefix(self, prefixes: Prefixes) -> list[Given]:
        """One record for each prefix; this record itself if there is only one."""
        if not prefixes.asked:
            return [self]
        row, col = self.row, self.col
        return [
            Given(
                None if row is None else row.of_prefix(at),
                None if col is None else col.of_prefix(at),
                of_prefix(self.pos, at),
                of_prefix(self.pos_grad, at),
            )
            for at in range(len(prefixes.blocks))
        ]


class TeacherGrads(NamedTuple):
    """What the gradients of `SideStats.cross` are made from."""

    row: SideGrad | None
    col: SideGrad | None
    pos: Tensor
    """The teacher's scores of the positives."""


class Gradients(NamedTuple):
    """Where `backward` adds to; None: not wanted."""

    dq: Tensor | None
    """[N, D], in the queries' dtype or the accumulation dtype."""

    dk: Tensor | None
    """[M, D], in the accumulation dtype, as every row block adds to it; zero-initialised, unless `shared`. For
    symmetric scores it is `dq` itself, of which the same is true then."""

    dalpha: Tensor | None
    dbias: Tensor | None
    once: bool = False
    """Only this block writes to `dq`: it is overwritten and need not be initialised."""

    dcol_bias: Tensor | None = None
    """[M], zero-initialised."""

    drow_norm: Tensor | None = None
    dcol_norm: Tensor | None = None
    """[N, prefixes] and [M, prefixes], zero-initialised: sums of score times gradient, of which gradients of norms are
    made."""

    shared: bool = False
    """Other calls have added to `dq` or `dk`, whose shares stay as they are."""


class KernelError(RuntimeError):
    """A kernel cannot be built for this device, with this compiler."""


class Tiles(Protocol):
    """A tiled backend, as the passes see it."""

    def positives(self, scores: Scores, spec: Spec, level: Tensor) -> None:
        """Write each row's product with its positive, exactly as `forward` will compare it."""

    def forward(self, scores: Scores, spec: Spec, pos: Tensor | None) -> tuple[SideParts, SideParts]:
        """What the rows and the columns gather from the block. Each row's positive score is written to `pos`."""

    def backward(self, scores: Scores, spec: Spec, given: Given, into: Gradients) -> None:
        """Add the block's share to the gradients."""

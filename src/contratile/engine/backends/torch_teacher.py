"""Distillation: statistics of the student's scores under a teacher's softmax, and their gradients.

    cross_i = sum_j p_ij s_ij - centre_i        p_ij = exp2(t_ij - lse_i(t)), t the teacher's scores
    g_ij   += cross.grad_i p_ij                 the same for columns

For each tile of the student's scores s the teacher's scores t of the same pairs are computed. The teacher has no
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine.backends.torch_guide import Products
from contratile.engine.backends.torch_reductions import LseReader, LseWeights, Reader, Sums, Weights
from contratile.engine.plan import Tile
from contratile.engine.rule import PairRule
from contratile.engine.stats import SideParts, Stats, lowest, part


class CrossSums(Sums):
    """Partial log-sum-exps of the teacher, and sums of the student's scores weighted by the same exponentials."""

    def __init__(self, n: int, like: Tensor, centre: Tensor) -> None:
        super().__init__(n, like)
        self.centre, self.cross = centre, Sums(n, like)

    def flush(self, shift: float | None) -> Stats:
        self.cross.flush(shift)
        return super().flush(shift)

    def parts(self, shift: float | None) -> SideParts:
        teacher, cross = self.finish(shift), self.cross.finish(shift)
        return SideParts(teacher_level=teacher.level, teacher=teacher.total, cross_level=cross.level, cross=cross.total)


class TeacherReader(LseReader):
    """Reads a tile for the student's statistics and for `CrossSums`."""

    def __init__(
        self,
        student: Reader,
        rule: PairRule,
        row: CrossSums | None,
        col: CrossSums | None,
        products: Products,
        pos: Tensor | None,
    ) -> None:
        """The teacher's scores of the rows' positives are written to `pos`."""
        super().__init__(rule, row, col)
        self.student, self.products, self.pos = student, products, pos

    def read(self, s_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        self.student.read(s_RC, spare_RC, tile)
        t_RC = self.products(tile, spare_RC)
        if self.pos is not None:
            for at in self.rule.places(t_RC, tile):
                known = part(self.pos, at.rows)
                known.copy_(at.get(known))
        self.rule.exclude_(t_RC, tile)
        self._student_RC, self._teacher_RC, self._tile = s_RC, t_RC, tile
        super().read(t_RC, spare_RC, tile)

    def seen(self, e_RC: Tensor, dim: int, side: Sums, index: slice, level: Tensor | None) -> None:
        assert isinstance(side, CrossSums)
        # At the shared shift the teacher's scores are not needed again.
        out = self._teacher_RC if level is None else self.products.spare(self._tile)
        torch.sub(self._student_RC, part(side.centre, index).unsqueeze(dim), out=out)
        if self.rule.query_ids is not None:  # excluded pairs have a score of -inf and a weight of 0
            out.clamp_(min=lowest(out.dtype))
        total = out.mul_(e_RC).sum(dim)
        if level is None:
            side.cross.add_(index, total)
        else:
            side.cross.merge_(index, level, total)

    def parts(self) -> tuple[SideParts, SideParts]:
        found = []
        for student, side in zip(self.student.parts(), (self.row, self.col), strict=True):
            assert side is None or isinstance(side, CrossSums)
            teacher = SideParts() if side is None else side.parts(self.shift)
            found.append(SideParts(*(a if b is None else b for a, b in zip(student, teacher, strict=True))))
        return found[0], found[1]


class TeacherWeights:
    """The student's weights plus the teacher's softmax times the gradient of the cross statistics."""

    def __init__(self, student: Weights, teacher: LseWeights, rule: PairRule, products: Products) -> None:
        self.student, self.teacher, self.rule, self.products = student, teacher, rule, products

    def weigh(self, s_RC: Tensor, g_RC: Tensor, spare_RC: Tensor, tile: Tile) -> None:
        self.student.weigh(s_RC, g_RC, spare_RC, tile)
        t_RC = self.products(tile, spare_RC)
        self.rule.exclude_(t_RC, tile)
        self.teacher.weigh(t_RC, t_RC, spare_RC, tile)
        g_RC.add_(t_RC)

    def positive(self, rows: slice, *, both: bool) -> Tensor:
        return self.student.positive(rows, both=both) + self.teacher.positive(rows, both=both)

"""Sums of scores over classes, in O(N D).

The scores of a query with all keys of its class add up to its score with the sum of these keys:

    row_i = sum of alpha q_i k_j        over the keys j of query i's class
    col_j = sum of alpha q_i k_j        over the queries i of key j's class

Classes are arbitrary integers. Rows are visited sorted by class, a slice of classes at a time, so that no table of all
classes exists. `differ` sums over all other classes instead. A row may leave out one row of the other side (`LeftOut`):
itself, where queries and keys are the same rows, or its positive.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.stats import take

STEP = 2048
"""Classes per slice, and rows gathered at once."""


class ClassSums(NamedTuple):
    """Sums and counts of scores."""

    row: Tensor  # [N]
    row_count: Tensor
    col: Tensor  # [M]
    col_count: Tensor


class LeftOut(NamedTuple):
    """For each row of a side the row of the other side that its sum leaves out, if that has its class; -1: none."""

    row: Tensor | None = None  # [N]
    col: Tensor | None = None  # [M]


_NOTHING = LeftOut()


class _Members(NamedTuple):
    """The rows of one side in a slice of classes, and the index of their class in it."""

    rows: Tensor
    slot: Tensor

    def chunks(self) -> Iterator["_Members"]:
        return (
            _Members(*pair) for pair in zip(torch.split(self.rows, STEP), torch.split(self.slot, STEP), strict=True)
        )


def class_sums(
    q: Tensor,
    k: Tensor,
    alpha: Tensor,
    query_classes: Tensor,
    key_classes: Tensor,
    *,
    rows: bool,
    cols: bool,
    differ: bool = False,
    left_out: LeftOut = _NOTHING,
) -> ClassSums:
    """The sums over one block of queries and one of keys. A side that is not requested stays 0."""
    assert not differ or left_out.row is None, "a row never differs from itself"
    sums = ClassSums(*(torch.zeros(len(x), dtype=alpha.dtype, device=q.device) for x in (q, q, k, k)))
    buffers, ids = _buffers(max(len(q), len(k)), q, alpha), (query_classes, key_classes)
    all_q, all_k = (_total(x, buffers[0]) if differ and wanted else None for x, wanted in ((q, cols), (k, rows)))
    for queries, keys, slots in _by_class(query_classes, key_classes, of_both=differ):
        for side, other, mine, theirs, everything, out, classes, total, count in (
            *([(q, k, queries, keys, all_k, left_out.row, ids, sums.row, sums.row_count)] if rows else []),
            *([(k, q, keys, queries, all_q, left_out.col, ids[::-1], sums.col, sums.col_count)] if cols else []),
        ):
            table = _table(other, theirs, slots, buffers[0], everything)
            size = torch.bincount(theirs.slot, minlength=slots)
            size = len(other) - size if differ else size
            for part in mine.chunks():
                sum_RD, number = _gather(table, part.slot, buffers[0]), size[part.slot]
                if out is not None:
                    index, inside = _places(out, part.rows, *classes)
                    sum_RD.sub_(_gather(other, index, buffers[1]).mul_(inside.unsqueeze(1)))
                    number = number - inside.to(number.dtype)
                total[part.rows] = sum_RD.mul_(_gather(side, part.rows, buffers[1])).sum(1).mul_(alpha).to(total.dtype)
                count[part.rows] = number.to(count.dtype)
    return sums


def add_class_grads(
    dq: Tensor,
    k: Tensor,
    alpha: Tensor,
    query_classes: Tensor,
    key_classes: Tensor,
    row: Tensor | None,
    col: Tensor | None,
    *,
    differ: bool = False,
    left_out: Tensor | None = None,
) -> None:
    """dq_i += alpha * sum over i's class of (row_i + col_j) k_j, where `row` and `col` are the gradients of the sums.

    `left_out` is the side's own part of `LeftOut`. The keys' gradient is the same with the sides exchanged.
    """
    buffers = _buffers(max(len(dq), len(k)), k, alpha)
    row, col = (None if x is None else x.to(buffers[0].dtype) for x in (row, col))
    all_plain = _total(k, buffers[0]) if differ and row is not None else None
    all_weighed = _total(k, buffers[0], col) if differ and col is not None else None
    for queries, keys, slots in _by_class(query_classes, key_classes, of_both=differ):
        plain = None if row is None else _table(k, keys, slots, buffers[0], all_plain)
        weighed = None if col is None else _table(k, keys, slots, buffers[0], all_weighed, col)
        for part in queries.chunks():
            grad_RD = buffers[0][: len(part.rows)].zero_()
            if plain is not None and row is not None:
                _gather(plain, part.slot, grad_RD).mul_(take(row, part.rows).unsqueeze(1))
            if weighed is not None:
                grad_RD.add_(_gather(weighed, part.slot, buffers[1]))
            if left_out is not None:
                index, inside = _places(left_out, part.rows, query_classes, key_classes)
                out_RD = _gather(k, index, buffers[1]).mul_(inside.unsqueeze(1))
                for side, at in ((row, part.rows), (col, index)):
                    if side is not None:
                        grad_RD.addcmul_(out_RD, take(side, at).unsqueeze(1), value=-1)
            dq.index_add_(0, part.rows, grad_RD.mul_(alpha).to(dq.dtype))


def _places(left_out: Tensor, rows: Tensor, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """What some rows leave out: the rows of the other side, and whether they are in the class at all."""
    index = take(left_out, rows)
    inside = index >= 0
    index = index.clamp_min(0)
    return index, inside & (take(other, index) == take(own, rows))


def _buffers(rows: int, like: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Two buffers for chunks of rows; allocating one per chunk would cost more than the work on it.

    In fp64 where the device has it: subtracting rows from a sum may leave a small remainder.
    """
    dtype = alpha.dtype if like.device.type == "mps" else torch.float64
    one = torch.empty(min(STEP, rows), like.shape[1], dtype=dtype, device=like.device)
    return one, torch.empty_like(one)


def _gather(x: Tensor, index: Tensor, buffer: Tensor) -> Tensor:
    """x[index], in the buffer and its dtype."""
    out = buffer[: len(index)]
    return torch.index_select(x, 0, index, out=out) if x.dtype == out.dtype else out.copy_(take(x, index))


def _total(x: Tensor, buffer: Tensor, weights: Tensor | None = None) -> Tensor:
    """The (weighted) sum of all rows [D]."""
    total = buffer.new_zeros(x.shape[1])
    for start in range(0, len(x), STEP):
        rows_RD = buffer[: len(x) - start].copy_(x[start : start + STEP])
        if weights is not None:
            rows_RD.mul_(weights[start : start + STEP].unsqueeze(1))
        total += rows_RD.sum(0)
    return total


def _table(
    x: Tensor,
    members: _Members,
    slots: int,
    buffer: Tensor,
    everything: Tensor | None,
    weights: Tensor | None = None,
) -> Tensor:
    """The (weighted) sum of each class's rows [slots, D], or of all other rows if `everything` is given."""
    table = buffer.new_zeros(slots, x.shape[1])
    for part in members.chunks():
        rows_RD = _gather(x, part.rows, buffer)
        if weights is not None:
            rows_RD.mul_(take(weights, part.rows).unsqueeze(1))
        table.index_add_(0, part.slot, rows_RD)
    return table if everything is None else torch.sub(everything, table, out=table)


def _by_class(left: Tensor, right: Tensor, *, of_both: bool) -> Iterator[tuple[_Members, _Members, int]]:
    """Slices of the classes of the left side (or of both): the members of each side, and the number of classes."""
    values = torch.unique(torch.cat([left, right]) if of_both else left)
    sides = [_sorted(left, values)]
    sides.append(sides[0] if torch.equal(left, right) else _sorted(right, values))
    for start in range(0, len(values), STEP):
        slots = min(STEP, len(values) - start)
        bounds = torch.tensor([start, start + slots], device=left.device)
        cuts = [slice(*torch.searchsorted(side.slot, bounds).tolist()) for side in sides]
        mine, theirs = (_Members(side.rows[cut], side.slot[cut] - start) for side, cut in zip(sides, cuts, strict=True))
        yield mine, theirs, slots


def _sorted(classes: Tensor, values: Tensor) -> _Members:
    """The rows whose class is among the values, sorted by class."""
    slot = torch.searchsorted(values, classes.contiguous()).clamp_max_(len(values) - 1)
    rows = (values[slot] == classes).nonzero().squeeze(1) if len(values) else slot[:0]
    slot, order = slot[rows].sort(stable=True)
    return _Members(rows[order], slot)

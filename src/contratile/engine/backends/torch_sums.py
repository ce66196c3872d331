"""Sums of scores and their gradients in plain PyTorch, for a block of keys: see `engine/classes.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine.backends.block import Given, Scores
from contratile.engine.classes import STEP, LeftOut, add_class_grads, class_sums
from contratile.engine.spec import Spec
from contratile.engine.stats import SideParts, take


def _classes(scores: Scores, spec: Spec) -> tuple[Tensor, Tensor]:
    """The classes to sum over: those given, ids, or one class for all."""
    if spec.sums == "equal":
        query, key = scores.query_classes, scores.key_classes
    elif spec.sums in ("differ", "same"):
        query, key = scores.rule.query_ids, scores.rule.key_ids
    else:
        one = scores.q.new_zeros(max(len(scores.q), len(scores.key)), dtype=torch.long)
        query, key = one[: len(scores.q)], one[: len(scores.key)]
    assert query is not None and key is not None
    return query, key


def _left_out(scores: Scores, spec: Spec) -> LeftOut:
    """The rows that sums leave out: a row itself if a set is compared with itself, and labelled positives."""
    rule = scores.rule
    if rule.exclude_self:
        assert len(scores.q) == len(scores.key), "queries and keys must be the same rows"
        each = torch.arange(len(scores.q), device=scores.q.device)
        return LeftOut(each, each)
    if spec.sums != "same" or rule.labels is None:
        return LeftOut()
    of_keys = torch.arange(len(scores.key), device=scores.q.device)
    return LeftOut(rule.labels, torch.where(of_keys < len(scores.q), of_keys, -1) if rule.paired else None)


def with_class_sums(rows: SideParts, cols: SideParts, scores: Scores, spec: Spec) -> tuple[SideParts, SideParts]:
    """Add sums and counts to the parts of the sides that the spec asks for."""
    own, other = _classes(scores, spec)
    out = _left_out(scores, spec)
    assert not spec.sums_cols or out.row is None or out.col is not None, "labels name one query per key"
    which = {"rows": spec.rows, "cols": spec.sums_cols, "differ": spec.sums == "differ"}
    found = class_sums(scores.q, scores.key, scores.alpha, own, other, **which, left_out=out)
    if spec.rows:
        rows = rows._replace(sums=found.row, counts=found.row_count)
    if spec.sums_cols:
        cols = cols._replace(sums=found.col, counts=found.col_count)
    return rows, cols


def add_sum_grads(dq: Tensor | None, dk: Tensor | None, scores: Scores, spec: Spec, given: Given) -> None:
    """Add the gradients of the sums."""
    own, other = _classes(scores, spec)
    out, differ = _left_out(scores, spec), spec.sums == "differ"
    q, k, alpha = scores.q, scores.key, scores.alpha
    if dq is not None:
        add_class_grads(dq, k, alpha, own, other, given.row_sums, given.col_sums, differ=differ, left_out=out.row)
    if dk is not None:
        add_class_grads(dk, q, alpha, other, own, given.col_sums, given.row_sums, differ=differ, left_out=out.col)
        if out.row is not None and out.col is None and given.row_sums is not None:
            # Several queries may have the same labelled key: subtract what they left out here.
            labelled = torch.where(take(other, out.row) == own, given.row_sums, 0).mul_(-alpha)
            for start in range(0, len(q), STEP):
                at = slice(start, start + STEP)
                dk.index_add_(0, out.row[at], labelled[at].unsqueeze(1) * q[at].to(dk.dtype))

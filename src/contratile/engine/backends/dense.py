"""The dense backend: materialises the scores, for comparison.

It is plain PyTorch, so it also has what tiles do not: second derivatives, forward mode, `torch.func`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from contratile import reference
from contratile.engine.spec import Inputs, PairStats, SideStats, Spec
from contratile.engine.stats import accumulation_dtype


def pair_stats(x: Inputs, spec: Spec) -> PairStats:
    """What `autograd.pair_stats` returns, in nats, on one process."""
    if spec.prefixes:
        return _by_prefix(x, spec)
    acc, device = accumulation_dtype(x.query.dtype), x.query.device.type
    classes = x.query_classes, x.key_classes
    if spec.sums in ("differ", "same"):
        classes = x.query_ids, x.key_ids
    elif spec.sums == "all":
        classes = x.query.new_zeros(len(x.query), dtype=torch.long), x.query.new_zeros(len(x.keys), dtype=torch.long)
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        found = reference.pair_stats(
            x.query.to(acc),
            None if x.key is None else x.key.to(acc),
            x.scale,
            x.bias,
            key_bias=x.key_bias,
            labels=x.labels,
            query_ids=x.query_ids,
            key_ids=x.key_ids,
            query_classes=classes[0],
            key_classes=classes[1],
            query_level=x.query_level,
            reduce=spec.reduce,
            rows=spec.rows,
            cols=spec.cols,
            exclude_self=spec.exclude_self,
            margin=spec.margin,
            ranks=spec.ranks,
            ties=spec.ties,
            differ=spec.sums == "differ",
            same_id=spec.same_id,
            without_labelled=spec.sums == "same",
            hardness=spec.hardness,
            teacher=_beside(acc, x.teacher_query, x.teacher_key, x.teacher_scale),
            guide=_beside(acc, x.guide_query, x.guide_keys),
            guide_level=x.guide_level,
            guide_margin=spec.guide_margin,
            guide_relative=spec.guide_relative,
        )
    row, col = (
        SideStats(
            total=found.get(side),
            sums=found.get(f"{side}_sums") if spec.sums else None,
            counts=found.get(f"{side}_counts") if spec.sums else None,
            higher=found.get(f"{side}_higher"),
            equal=found.get(f"{side}_equal"),
            cross=found.get(f"{side}_cross"),
        )
        for side in ("row", "col")
    )
    return PairStats(row, col, found.get("pos"), found.get("level"), guide_level=found.get("guide_level"))


def _by_prefix(x: Inputs, spec: Spec) -> PairStats:
    """One call for each prefix; their statistics get a last axis."""
    assert x.key is not None
    acc, found = accumulation_dtype(x.query.dtype), []
    for dim in spec.prefixes:
        query, key = (reference.prefix(side.to(acc), dim, spec.normalize) for side in (x.query, x.key))
        found.append(pair_stats(x._replace(query=query, key=key), spec._replace(dims=None)).tensors())
    return PairStats.of([None if xs[0] is None else torch.stack(xs, -1) for xs in zip(*found, strict=True)])


def _beside(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Any, ...] | None:
    """Another model's features in the accumulation dtype."""
    return None if tensors[0] is None else tuple(None if x is None else x.to(dtype) for x in tensors)

"""Cross-entropies of queries against keys, with every kind of negative: what `clip_loss` and `info_nce` share.

    loss_i = lse_i - (1 - e) pos_i - e mean_i

over the keys that count for query i: keys of all ranks, extra keys of all ranks, and its own hard negatives. Each
source gives a log-sum-exp, and those of several are added by `logaddexp`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.engine.autograd import Engine, pair_stats
from contratile.engine.spec import Inputs, Results, Task
from contratile.errors import (
    bad_type,
    bad_value,
    check_features,
    check_ids,
    check_storage,
    check_vector,
    transform_under_way,
)

Ids = Tensor | tuple[Tensor, Tensor]


class BatchStats(NamedTuple):
    """How well a batch is told apart, over the pairs of all ranks: detached 0-d tensors.

    The rank of a positive is 1 + the number of other keys that score strictly higher, and top-1 means rank 1. Pairs
    that a margin drops take part; pairs of equal id do not. `col_*` are None where there is one direction only, and
    `negative_logit` is NaN where there is no negative. Scores are compared by their products, before the scale: exact
    ties are ties, while products that differ by their rounding alone may fall on either side of each other.
    """

    row_top1: Tensor
    row_rank: Tensor
    col_top1: Tensor | None
    col_rank: Tensor | None
    positive_logit: Tensor
    negative_logit: Tensor


@dataclass(frozen=True)
class Options:
    """What may be asked of a contrastive loss beyond its features."""

    ids: Ids | None = None
    extra_keys: Tensor | None = None
    extra_ids: Tensor | None = None
    hard_negatives: Tensor | None = None
    hard_mask: Tensor | None = None
    margin: float | None = None
    label_smoothing: float = 0.0
    weights: Tensor | None = None
    return_stats: bool = False

    @property
    def pair_of_ids(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        if self.ids is None:
            return None, None
        query_ids, key_ids = (self.ids, self.ids) if isinstance(self.ids, Tensor) else self.ids
        return query_ids.long(), key_ids.long()

    def check(self, query: Tensor, key: Tensor, scale: Tensor | float) -> None:
        """Refuse what cannot be used, and combinations that mean nothing."""
        device = query.device
        if self.ids is not None:
            self._check_ids(query, key)
        if self.extra_keys is not None:
            check_features({"query": query, "extra_keys": self.extra_keys}, empty=True)
        if self.extra_ids is not None:
            if self.extra_keys is None or self.ids is None:
                needed = "extra_keys" if self.extra_keys is None else "ids"
                remedy = f"Pass {needed}= too, or drop extra_ids=."
                bad_value("extra_ids", expected=f"{needed}= beside it", got="none", remedy=remedy)
            check_vector("extra_ids", self.extra_ids, length=len(self.extra_keys), device=device)
        if self.hard_negatives is not None:
            self._check_hard(query, self.hard_negatives)
        elif self.hard_mask is not None:
            remedy = "Pass hard_negatives= too, or drop hard_mask=."
            bad_value("hard_mask", expected="hard_negatives= beside it", got="none", remedy=remedy)
        if self.margin is not None:
            if isinstance(self.margin, bool) or not isinstance(self.margin, int | float):
                remedy = "It is a difference of similarities, before the scale."
                bad_type("margin", expected="a number", got=type(self.margin).__name__, remedy=remedy)
            if not math.isfinite(self.margin):
                bad_value("margin", expected="a finite number", got=self.margin, remedy="Leave it out for no filter.")
            number = scale.item() if isinstance(scale, Tensor) and _may_look(scale) else scale
            if not isinstance(number, Tensor) and not number > 0:
                remedy = "Scores of other scales are not in the order of the similarities: drop margin=."
                bad_value("scale", expected="a positive number beside margin=", got=number, remedy=remedy)
            if self.label_smoothing:
                remedy = "Smoothing is uniform over all keys that count, known before their scores: drop one of them."
                got = f"margin={self.margin}, label_smoothing={self.label_smoothing}"
                bad_value("margin and label_smoothing", expected="one of them", got=got, remedy=remedy)
        if isinstance(self.label_smoothing, bool) or not isinstance(self.label_smoothing, int | float):
            remedy = "It is the share of the target that is spread over all keys."
            bad_type("label_smoothing", expected="a number", got=type(self.label_smoothing).__name__, remedy=remedy)
        if not 0 <= self.label_smoothing < 1:
            remedy = "It is the share of the target that is spread over all keys."
            bad_value("label_smoothing", expected="from 0 to below 1", got=self.label_smoothing, remedy=remedy)
        if self.weights is not None:
            check_weights(self.weights, len(query), device)

    def _check_ids(self, query: Tensor, key: Tensor) -> None:
        check_ids(self.ids)
        if isinstance(self.ids, tuple | list):
            check_vector("ids[0]", self.ids[0], length=len(query), device=query.device)
            check_vector("ids[1]", self.ids[1], length=len(key), device=query.device)
            return
        if len(query) != len(key):
            remedy = "Pass ids=(query_ids, key_ids)."
            bad_value(
                "ids",
                expected="a pair of vectors",
                got=f"one for {len(query)} queries and {len(key)} keys",
                remedy=remedy,
            )
        assert self.ids is not None
        check_vector("ids", self.ids, length=len(query), device=query.device)

    def _check_hard(self, query: Tensor, hard: Tensor) -> None:
        n, d = query.shape
        if not isinstance(hard, Tensor) or hard.dim() != 3 or hard.shape[0] != n or hard.shape[2] != d:
            got = list(hard.shape) if isinstance(hard, Tensor) else type(hard).__name__
            remedy = "Give each query its own H negatives; pad them and pass hard_mask= if their numbers differ."
            bad_value("hard_negatives", expected=f"shape [{n}, H, {d}]", got=got, remedy=remedy)
        check_storage("hard_negatives", hard)
        if hard.dtype != query.dtype or hard.device != query.device:
            expected, found = f"{query.dtype} on {query.device}", f"{hard.dtype} on {hard.device}"
            bad_type("hard_negatives", expected=expected, got=found, remedy="Use hard_negatives.to(query).")
        mask = self.hard_mask
        if mask is None:
            return
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != hard.shape[:2]:
            found = f"{mask.dtype} of shape {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            expected = f"bool of shape {list(hard.shape[:2])}"
            bad_value("hard_mask", expected=expected, got=found, remedy="True marks a negative, False padding.")
        if mask.device != hard.device:
            remedy = "Use hard_mask.to(hard_negatives.device)."
            bad_type("hard_mask", expected=f"device {hard.device}", got=mask.device, remedy=remedy)

    def named(self) -> str:
        """The options that every rank must agree on."""
        used = [name for name in ("ids", "extra_keys", "extra_ids", "weights") if getattr(self, name) is not None]
        return f"{' '.join(used)} {self.margin} {self.label_smoothing} {self.return_stats}"


def check_weights(weights: Tensor, n: int, device: torch.device) -> None:
    """One non-negative constant per pair."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point() or tuple(weights.shape) != (n,):
        got = (
            f"{weights.dtype} of shape {list(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        )
        bad_value("weights", expected=f"floats of shape [{n}]", got=got, remedy="Give one weight to each pair.")
    if weights.device != device:
        bad_type("weights", expected=f"device {device}", got=weights.device, remedy=f"Use weights.to({str(device)!r}).")
    if weights.requires_grad:
        bad_value(
            "weights", expected="constants", got="a tensor that needs a gradient", remedy="Pass weights.detach()."
        )
    if _may_look(weights) and bool((weights < 0).any()):
        remedy = "Give pairs that shall not count weight 0."
        bad_value("weights", expected="numbers from 0 up", got=float(weights.min()), remedy=remedy)


def _may_look(x: Tensor) -> bool:
    """To look at the numbers would stall an accelerator; a compiler and the transforms of torch.func cannot."""
    return x.is_cpu and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


class Tally(NamedTuple):
    """What a source of keys gives to queries: log-sum-exps minus the positive, sums and numbers of scores, numbers of
    those above the positive. Late in training log-sum-exp and positive are almost equal; their difference is exact."""

    above: Tensor
    total: Tensor | None
    number: Tensor | None
    higher: Tensor | None

    def join(self, other: Tally, unit: float) -> Tally:
        add = torch.logaddexp if unit == 1 else torch.logaddexp2
        sums = (None if a is None or b is None else a + b for a, b in zip(self[1:], other[1:], strict=True))
        return Tally(add(self.above, other.above), *sums)


class Losses(NamedTuple):
    """One value per pair in units of so many nats: of its query or, where columns count, of its query and its key."""

    per_pair: Tensor
    unit: float
    stats: BatchStats | None


def cross_entropies(
    query: Tensor, key: Tensor, scale: Tensor | float, labels: Tensor, options: Options, engine: Engine, *, cols: bool
) -> Losses:
    """The losses of the queries against all keys; if `cols`, those of the keys against all queries are added."""
    sums = options.label_smoothing > 0 or options.return_stats
    query_ids, key_ids = options.pair_of_ids
    margin = float("inf") if options.margin is None else float(options.margin)
    task = Task(cols=cols, margin=margin, ranks=options.return_stats)
    place = None
    several = options.extra_keys is not None or options.hard_negatives is not None
    if several and engine.backend != "dense" and GradientPlace.serves(query):
        place, query = GradientPlace.apply(query), query.detach()  # type: ignore[no-untyped-call]
    scale = as_tensor(scale, query)  # once: the gradients from all sources of keys add up in full precision
    x = Inputs(query, key, scale, labels=labels, query_ids=query_ids, key_ids=key_ids)
    results, unit = pair_stats(*(sums_over(x, task) if sums else (x, task)), _shared_cache(engine), place)
    pos = results["pos"]
    spared = None if query_ids is None or key_ids is None else query_ids == key_ids[labels]
    rows = _tally("row", results, spared, pos)
    level = results.get("level")
    if engine.extra is not None and any(engine.extra.sizes):
        rows = rows.join(_extra(query, scale, pos, level, options, engine, task, sums, place), unit)
    elif options.extra_keys is not None:  # of no rows: they stay in the graph
        rows = rows._replace(above=rows.above + options.extra_keys.to(pos.dtype).sum())
    if options.hard_negatives is not None:
        rows = rows.join(_hard(query, scale, pos, level, options, unit, sums, place), unit)
    columns = _tally("col", results, spared, pos) if cols else None
    e = options.label_smoothing
    losses = _loss(rows, pos, e) if columns is None else _loss(rows, pos, e) + _loss(columns, pos, e)
    return Losses(losses, unit, batch_stats(rows, columns, pos, unit, engine) if options.return_stats else None)


def _shared_cache(engine: Engine) -> Engine:
    """Keys and extra keys share the memory of the cache by their numbers."""
    if engine.extra is None or not engine.cache_bytes:
        return engine
    keys, extras = sum(engine.ring.sizes), sum(engine.extra.sizes)
    return engine._replace(cache_bytes=engine.cache_bytes * keys // (keys + extras))


def sums_over(x: Inputs, task: Task) -> tuple[Inputs, Task]:
    """The same call, with scores also summed over all keys, or over those of another id."""
    if x.query_ids is not None:
        return x._replace(query_classes=x.query_ids, key_classes=x.key_ids), task._replace(differ=True)
    n, m = len(x.query), len(x.query if x.key is None else x.key)
    one = x.query.new_zeros(max(n, m), dtype=torch.long)
    return x._replace(query_classes=one[:n], key_classes=one[:m]), task


def as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """A 0-d tensor on the features' device, at least fp32. A number is written there: a copy would wait."""
    if isinstance(value, Tensor):
        value = value if value.dim() == 0 else value.reshape(())
        return value.to(like.device, torch.promote_types(value.dtype, torch.float32))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.scalar_tensor(value, dtype=dtype, device=like.device)


def _tally(side: str, results: Results, spared: Tensor | None, pos: Tensor, *, own: bool = True) -> Tally:
    """One side of the primitive's results. Sums over keys of another id lack positives of the same: the `spared`. The
    positives are among the keys unless `own` is False."""
    total, count, higher = (results.get(f"{side}{part}") for part in ("_sums", "_counts", "_higher"))
    if total is not None and count is not None and spared is not None:
        total, count = total + torch.where(spared, pos, 0), count + spared
    return Tally(lse_above(pos, results, side, floor=own), total, count, higher)


def lse_above(level: Tensor, results: Results, side: str = "row", *, floor: bool = True) -> Tensor:
    """The log-sum-exp minus a level close to it, with the digits that the log-sum-exp alone has no room for.

    `floor`: the level is a term of the sum, or a mean of such, and so never above the log-sum-exp.
    """
    slack = results.get(f"{side}_slack")
    above = results[side] - level
    above = above if slack is None else above - slack.log2()
    return lifted(above) if floor else above


def _extra(
    query: Tensor,
    scale: Tensor,
    pos: Tensor,
    level: Tensor | None,
    options: Options,
    engine: Engine,
    task: Task,
    sums: bool,
    place: Tensor | None,
) -> Tally:
    assert options.extra_keys is not None and engine.extra is not None
    query_ids = None if options.extra_ids is None else options.pair_of_ids[0]
    extra_ids = None if options.extra_ids is None else options.extra_ids.long()
    x = Inputs(query, options.extra_keys, scale, query_ids=query_ids, key_ids=extra_ids, query_level=level)
    left = engine.cache_bytes - _shared_cache(engine).cache_bytes
    task, engine = task._replace(cols=False), engine._replace(ring=engine.extra, cache_bytes=left)
    results, _ = pair_stats(*(sums_over(x, task) if sums else (x, task)), engine, place)
    return _tally("row", results, None, pos, own=False)


def _hard(
    query: Tensor,
    scale: Tensor,
    pos: Tensor,
    level: Tensor | None,
    options: Options,
    unit: float,
    sums: bool,
    place: Tensor | None,
) -> Tally:
    """`level` are the positives' products, with which products are compared."""
    assert options.hard_negatives is not None
    scale = scale / unit
    products = own_scores(query, options.hard_negatives, options.hard_mask, place)
    scores = products * scale
    counts = torch.ones_like(scores, dtype=torch.bool) if options.hard_mask is None else options.hard_mask
    higher = None
    total = torch.where(counts, scores, 0).sum(1) if sums else None
    count = counts.sum(1) if sums else None
    if level is not None:
        rising = products.detach() * torch.where(scale < 0, -1, 1)
        higher = (counts & (rising > level.unsqueeze(1))).sum(1) if options.return_stats else None
        if options.margin is not None:
            counts = counts & (rising <= level.unsqueeze(1) - options.margin)
    # A finite floor, not -inf: a query whose every negative is masked has a gradient of 0 here, not NaN.
    floor = torch.finfo(scores.dtype).min / 2
    above = torch.where(counts, scores - pos.unsqueeze(1), floor)
    return Tally((above * unit).logsumexp(1) / unit, total, count, higher)


def class_losses(x: Inputs, engine: Engine, *, exclude_self: bool) -> tuple[Tensor, Tensor]:
    """Of each query its log-sum-exp less its mean score with the keys of its class, and how many these are. Without any
    the loss is 0."""
    results, unit = pair_stats(x, Task(cols=False, exclude_self=exclude_self), engine)
    total, count = results["row_sums"], results["row_counts"]
    return torch.where(count > 0, lse_above(total / count.clamp(min=1), results), 0) * unit, count


def lifted(losses: Tensor) -> Tensor:
    """Losses that are never negative. Where rounding says otherwise the value is lifted; the gradient stays."""
    return losses - losses.detach().clamp(max=0)


def _loss(side: Tally, pos: Tensor, e: float) -> Tensor:
    if e == 0:
        return side.above
    assert side.total is not None and side.number is not None
    return lifted(side.above + e * (pos - side.total / side.number))


def batch_stats(rows: Tally, cols: Tally | None, pos: Tensor, unit: float, engine: Engine) -> BatchStats:
    """From tallies with all their parts, the positives counted among the keys. One sum over the ranks."""
    assert rows.total is not None and rows.number is not None
    sums = [torch.full((), float(len(pos))), pos.sum(), (rows.total - pos).sum(), (rows.number - 1).sum()]
    for side in (rows,) if cols is None else (rows, cols):
        assert side.higher is not None
        sums += [(side.higher == 0).sum(), (side.higher + 1).sum()]
    n, positive, negative, negatives, *found = engine.ring.team.sum(torch.stack([x.detach().to(pos) for x in sums]))
    row_top1, row_rank, *col = (x / n for x in found)
    col_top1, col_rank = col or (None, None)
    negative_logit = torch.where(negatives > 0, negative * unit / negatives, torch.nan)
    return BatchStats(row_top1, row_rank, col_top1, col_rank, positive * unit / n, negative_logit)


CHUNK = 256
"""Queries whose own negatives are visited at once."""


class GradientPlace(torch.autograd.Function):
    """Where the gradients of 16-bit features from several sources of keys are added up, in fp32, and rounded once.

    It stands for the features beside them, with their shape and without memory: autograd would round each share.
    """

    @staticmethod
    def serves(features: Tensor) -> bool:
        wanted = features.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return wanted and features.dtype in (torch.float16, torch.bfloat16)

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        ctx.dtype = features.dtype
        return features.new_zeros((), dtype=torch.float32).expand(features.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _OwnScores(torch.autograd.Function):
    """scores[n, h] = <query[n], hard[n, h]> in the accumulation dtype, a chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, hard: Tensor, mask: Tensor | None, place: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, hard, mask)
        acc = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty(hard.shape[:2], dtype=acc, device=query.device)
        for start in range(0, len(query), CHUNK):
            at = slice(start, start + CHUNK)
            torch.bmm(hard[at].to(acc), query[at].to(acc).unsqueeze(2), out=out[at].unsqueeze(2))
        return out if mask is None else out.masked_fill_(~mask, 0)  # padding may be anything, NaN too

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None]:
        query, hard, mask = ctx.saved_tensors
        wants_query, wants_hard, _, full = ctx.needs_input_grad
        dtype = grad.dtype if full else query.dtype
        dquery = torch.empty(query.shape, dtype=dtype, device=query.device) if wants_query or full else None
        dhard = torch.empty_like(hard, memory_format=torch.contiguous_format) if wants_hard else None
        for start in range(0, len(query), CHUNK):
            at = slice(start, start + CHUNK)
            if dquery is not None:
                hard_RHD = hard[at].to(grad.dtype)
                if mask is not None:
                    hard_RHD = hard_RHD.masked_fill(~mask[at].unsqueeze(2), 0)
                dquery[at] = (grad[at].unsqueeze(2) * hard_RHD).sum(1)  # no bmm, which autocast would round
            if dhard is not None:
                dhard[at] = grad[at].unsqueeze(2) * query[at].to(grad.dtype).unsqueeze(1)
        return (None, dhard, None, dquery) if full else (dquery, dhard, None, None)


def own_scores(query: Tensor, hard: Tensor, mask: Tensor | None = None, place: Tensor | None = None) -> Tensor:
    """Each query's similarity with its own H negatives [N, H], without an fp32 copy of them. `place`, if given,
    receives the gradient of the queries."""
    if torch.compiler.is_compiling() or transform_under_way((query, hard)):  # a compiler fuses this anyway
        acc = torch.promote_types(query.dtype, torch.float32)
        hard = hard if mask is None else hard.masked_fill(~mask.unsqueeze(2), 0)
        return (hard.to(acc) * query.to(acc).unsqueeze(1)).sum(2)
    return _OwnScores.apply(query, hard, mask, place)  # type: ignore[no-any-return, no-untyped-call]

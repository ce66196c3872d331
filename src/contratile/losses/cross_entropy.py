"""Cross-entropies of queries against keys, with every kind of negative; `clip_loss` and `info_nce` are built on them.

    loss_i = lse_i - (1 - e) pos_i - e mean_i

The log-sum-exp runs over the keys that count for query i: keys of all ranks, extra keys of all ranks, and its own hard
negatives. Each source gives a log-sum-exp, and `logaddexp` joins them; `directions` adds further ones. With several
positives (`same_id="positive"`) their mean score replaces pos_i. With `in_batch_negatives=False` the keys provide the
positives only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats, stand_in
from contratile.engine.spec import Inputs, PairStats, Spec
from contratile.engine.summed import summed
from contratile.losses.batch_stats import BatchStats, Tally, all_negatives, batch_stats
from contratile.losses.beside import LossTerms
from contratile.losses.call import Call, Rings
from contratile.losses.hard_negatives import own_products
from contratile.losses.more_negatives import (
    extra_keys,
    keys_of,
    own_hard_negatives,
    products_with,
    same_type,
    shared_hard_negatives,
    with_sums,
)
from contratile.losses.options import PairOptions
from contratile.losses.terms import as_tensor, lifted, lse_above, tally_of, with_axes, without_bias, without_positives


class Losses(NamedTuple):
    """One value per pair, in the unit of the statistics, and the batch statistics if they were requested."""

    per_pair: Tensor
    stats: PairStats
    batch: BatchStats | None
    distill: Tensor | None = None
    """Per pair: the weighted cross-entropy with the teacher's softmax. Not part of `per_pair`."""


def cross_entropies(
    query: Tensor, key: Tensor, scale: Tensor | float, labels: Tensor, options: PairOptions, spec: Spec, rings: Rings
) -> Losses:
    """The losses of the queries against all keys, plus those of the keys against all queries if `spec.cols`."""
    spec = _asked(spec, options)
    nested = options.matryoshka
    share = _shared_cache(spec, rings, options)
    if options.more.several:
        query, key = summed(query), summed(key)
    proxy = None
    if options.several_sources and spec.backend != "dense":
        proxy = stand_in(query)
    if proxy is not None:
        query = query.detach()
    scale = as_tensor(scale, query)  # once: the gradients from all sources of keys add up in full precision
    query_ids, key_ids = options.pair_of_ids
    x = Inputs(
        query=query,
        key=key,
        scale=scale,
        key_bias=options.key_bias,
        labels=labels,
        query_ids=query_ids,
        key_ids=key_ids,
        stand_in=proxy,
    )
    x = _with_models(x, options)
    spared = None
    if query_ids is not None and key_ids is not None and not options.several_positives:
        spared = query_ids == key_ids[labels]
    if options.in_batch_negatives:
        own = with_sums(x, share(sum(rings.keys.sizes)), options)
        own = own._replace(hardness=options.more.in_batch) if options.more.hardness else own
        stats = pair_stats(rings.keys, x, own)
        assert stats.pos is not None
        rows = tally_of(stats.row, stats.pos, spared, without_bias(stats, x))
    else:
        stats, rows = _positives_alone(x, spec, options)
        assert stats.pos is not None
    shared = None
    if options.extra_keys is not None or options.hard_negatives is not None:
        rows, shared = _with_more_keys(rows, x, stats, options, share, rings)
    cols = tally_of(stats.col, stats.pos, spared, without_bias(stats, x)) if spec.cols else None
    losses = _loss(rows, stats.pos, options)
    if cols is not None and options.more.back and options.more.partition_mode == "joint":
        losses = stats.logaddexp(losses, cols.above)
    elif cols is not None:
        losses = losses + _loss(cols, stats.pos, options)
    if options.more.several:
        for above in same_type(x, stats, options, share, rings, shared):
            losses = stats.logaddexp(losses, above)
    if nested is not None:
        losses = nested.total(losses)
    distill = None if options.teacher is None else _distill(stats, spec, options)
    if not options.return_stats:
        return Losses(losses, stats, None, distill)
    negatives = all_negatives(x, rows, stats, options, rings) if options.several_positives else None
    stats = stats._replace(pos=without_bias(stats, x))
    return Losses(losses, stats, batch_stats(rows, cols, stats, rings.keys.team, negatives), distill)


def loss_and_extras(call: Call, losses: Losses, rings: Rings, share: float = 1.0) -> Tensor | tuple[Any, ...]:
    """The reduced loss, followed by its terms and the statistics if they were requested."""
    per_pair, options = losses.per_pair, call.options
    assert options is not None
    more: list[Any] = []
    if options.return_terms:
        assert losses.distill is not None
        terms = (call.reduce(x, losses.stats, rings.keys, share=share) for x in (per_pair, losses.distill))
        more.append(LossTerms(*terms))
        loss = more[0].contrastive + more[0].distill
    else:
        per_pair = per_pair if losses.distill is None else per_pair + losses.distill
        loss = call.reduce(per_pair, losses.stats, rings.keys, share=share)
    if losses.batch is not None:
        more.append(losses.batch)
    return (loss, *more) if more else loss


def _asked(spec: Spec, options: PairOptions) -> Spec:
    """The spec with the fields that these options set for every call."""
    more: dict[str, Any] = {}
    if options.margin is not None:
        more["margin"] = float(options.margin)
    if options.same_id != spec.same_id:
        more["same_id"] = options.same_id
    if options.guide is not None:
        more["guide_margin"] = float(options.guide_margin)
        more["guide_relative"] = options.guide_margin_strategy == "relative"
    spec = spec._replace(**more) if more else spec
    return spec if options.matryoshka is None else options.matryoshka.spec(spec)


def _with_models(x: Inputs, options: PairOptions) -> Inputs:
    """Add the features of the teacher and the guide."""
    if options.teacher is not None:
        query, key, scale = options.teacher
        scale = as_tensor(scale, query) / options.teacher_temperature
        x = x._replace(teacher_query=query, teacher_key=key, teacher_scale=scale)
    if options.guide is not None:
        x = x._replace(guide_query=options.guide[0], guide_key=options.guide[1])
    return x


def _distill(stats: PairStats, spec: Spec, options: PairOptions) -> Tensor:
    """Per pair: cross-entropies with the teacher, which are log-sum-exps minus mean scores under its softmax.

    Both are computed relative to the positive's score, which is a constant here.
    """
    assert stats.pos is not None
    pos, found = stats.pos.detach(), []
    for side in (stats.row, stats.col) if spec.cols else (stats.row,):
        assert side.cross is not None
        found.append(lifted(lse_above(pos, side, floor=False) - side.cross))
    return sum(found[1:], found[0]) * options.teacher_weight


def _with_more_keys(
    rows: Tally, x: Inputs, stats: PairStats, options: PairOptions, share: Callable[[int], Spec], rings: Rings
) -> tuple[Tally, Tensor | None]:
    """Join extra keys and hard negatives. Returns the tally, and shared hard negatives as one set of keys."""
    assert stats.pos is not None
    if rings.extra is not None and any(rings.extra.sizes):
        rows = rows.join(extra_keys(x, stats, options, share(sum(rings.extra.sizes)), rings.extra), stats)
    elif options.extra_keys is not None:  # no rank has any: keep the empty tensors in the graph
        rows = rows._replace(above=rows.above + options.extra_keys.to(stats.pos.dtype).sum())
    if rings.hard is not None and options.hard_negatives is not None and options.hard_negatives.shape[1]:
        shared = keys_of(options.hard_negatives)
        spec = share(sum(rings.hard.sizes))
        return rows.join(shared_hard_negatives(x, stats, options, spec, rings.hard, shared), stats), shared
    if options.hard_negatives is not None:
        rows = rows.join(own_hard_negatives(x, stats, options, options.hard_negatives), stats)
    return rows, None


def _positives_alone(x: Inputs, spec: Spec, options: PairOptions) -> tuple[PairStats, Tally]:
    """Statistics and tally of the positives alone, without negatives."""
    assert x.key is not None and x.labels is not None
    own = x.key[: len(x.query)] if spec.paired else x.key.index_select(0, x.labels)
    products = products_with(x, own.unsqueeze(1), None, options).squeeze(1)
    stats = PairStats(unit=1.0 if spec.backend == "dense" else spec.unit)
    pos = stats.logits(products, x.scale)
    if x.key_bias is not None:
        pos = pos + with_axes(stats.of_nats(x.key_bias.to(pos.dtype).index_select(0, x.labels)), pos)
    level = products.detach() * torch.where(x.scale < 0, -1, 1) if spec.compares else None
    if x.guide_query is not None and x.guide_key is not None:
        of_guide = own_products(x.guide_query, x.guide_key.index_select(0, x.labels).unsqueeze(1)).squeeze(1)
        stats = stats._replace(guide_level=of_guide)
    nothing_above = 0 * pos  # in the graph, as there may be no negatives yet
    tally = Tally(nothing_above, pos, torch.ones_like(pos), torch.zeros_like(pos))
    return stats._replace(pos=pos, level=level), without_positives(tally) if options.several_positives else tally


def _shared_cache(spec: Spec, rings: Rings, options: PairOptions) -> Callable[[int], Spec]:
    """The spec of a call, given its number of keys: calls share the cache in proportion to their keys."""
    if not spec.cache_bytes:
        return lambda keys: spec
    both_types = 1 + ("doc_to_doc" in options.more.names)
    keys, extras, column = (0 if ring is None else sum(ring.sizes) for ring in rings)
    hard = 0 if options.hard_negatives is None else options.hard_negatives.shape[1] * column
    calls = keys * (both_types + ("query_to_query" in options.more.names)) + (extras + hard) * both_types
    return lambda keys: spec._replace(cache_bytes=spec.cache_bytes * keys // calls)


def _loss(side: Tally, pos: Tensor, options: PairOptions) -> Tensor:
    """The loss of one side, with label smoothing or several positives."""
    e = options.label_smoothing
    if not (e or options.several_positives):
        return side.above
    assert side.total is not None and side.number is not None
    if options.several_positives:  # pos minus the mean of all positives; exactly 0 if there is one
        return lifted(side.above + (side.number * pos - side.total) / (side.number + 1))
    return lifted(side.above + e * (pos - side.total / side.number))

"""Cross-entropies of queries against keys, with every kind of negative: what `clip_loss` and `info_nce` share.

    loss_i = lse_i - (1 - e) pos_i - e mean_i

over the keys that count for query i: keys of all ranks, extra keys of all ranks, and its own hard negatives. Each
source gives a log-sum-exp, and `logaddexp` joins them. With several positives (`same_id="positive"`) their mean score
takes the place of pos_i. Without negatives from the batch, keys give no more than the positives. With more directions
(`directions.py`) further log-sum-exps join them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats, stand_in
from contratile.engine.spec import Inputs, PairStats, SideStats, Spec
from contratile.losses.batch_stats import BatchStats, Tally, batch_stats
from contratile.losses.hard_negatives import own_products
from contratile.losses.options import PairOptions, Rings
from contratile.reference import guide_limit
from contratile.ring.ring import Ring


class Losses(NamedTuple):
    """One value per pair, in the unit of the statistics, and what `return_stats` asks for."""

    per_pair: Tensor
    stats: PairStats
    batch: BatchStats | None
    distill: Tensor | None = None
    """Per pair: the weighted cross-entropy with a teacher's softmax, not part of `per_pair`."""


def cross_entropies(
    query: Tensor, key: Tensor, scale: Tensor | float, labels: Tensor, options: PairOptions, spec: Spec, rings: Rings
) -> Losses:
    """The losses of the queries against all keys, plus those of the keys against all queries if `spec.cols`."""
    if options.margin is not None:
        spec = spec._replace(margin=float(options.margin))
    spec = spec._replace(same_id=options.same_id)
    nested = options.matryoshka
    if nested is not None:
        spec = nested.spec(spec)
    spec = spec._replace(
        guide_margin=float(options.guide_margin), guide_relative=options.guide_margin_strategy == "relative"
    )
    share = _shared_cache(spec, rings, options)
    proxy = None
    if options.several_sources and spec.backend != "dense":
        proxy = stand_in(query)
    if proxy is not None:
        query = query.detach()
    scale = as_tensor(scale, query)  # once: the gradients from all sources of keys add up in full precision
    query_ids, key_ids = options.pair_of_ids
    x = Inputs(
        *(query, key, scale),
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
        own = _with_sums(x, share(sum(rings.keys.sizes)), options)
        stats = pair_stats(rings.keys, x, own._replace(hardness=options.more.in_batch))
        assert stats.pos is not None
        rows = _tally(stats.row, stats.pos, spared, _without_bias(stats, x))
    else:
        stats, rows = _positives_alone(x, spec, options)
        assert stats.pos is not None
    if rings.extra is not None and any(rings.extra.sizes):
        rows = rows.join(_extra_keys(x, stats, options, share(sum(rings.extra.sizes)), rings.extra), stats)
    elif options.extra_keys is not None:  # none on any rank: keep them in the graph
        rows = rows._replace(above=rows.above + options.extra_keys.to(stats.pos.dtype).sum())
    if rings.hard is not None and options.hard_negatives is not None and options.hard_negatives.shape[1]:
        rows = rows.join(_shared_hard_negatives(x, stats, options, share(sum(rings.hard.sizes)), rings.hard), stats)
    elif options.hard_negatives is not None:
        rows = rows.join(_hard_negatives(x, stats, options, options.hard_negatives), stats)
    cols = _tally(stats.col, stats.pos, spared, _without_bias(stats, x)) if spec.cols else None
    losses = _loss(rows, stats.pos, options)
    if cols is not None and options.more.back and options.more.partition_mode == "joint":
        losses = stats.logaddexp(losses, cols.above)
    elif cols is not None:
        losses = losses + _loss(cols, stats.pos, options)
    for above in _same_type(x, stats, options, share, rings):
        losses = stats.logaddexp(losses, above)
    if nested is not None:
        losses = nested.total(losses)
    distill = None if options.teacher is None else _distill(stats, spec, options)
    if not options.return_stats:
        return Losses(losses, stats, None, distill)
    negatives = _negatives(x, rows, stats, options, rings) if options.several_positives else None
    stats = stats._replace(pos=_without_bias(stats, x))
    return Losses(losses, stats, batch_stats(rows, cols, stats, rings.keys.team, negatives), distill)


def _with_models(x: Inputs, options: PairOptions) -> Inputs:
    """With the features of a teacher and a guide."""
    if options.teacher is not None:
        query, key, scale = options.teacher
        scale = as_tensor(scale, query) / options.teacher_temperature
        x = x._replace(teacher_query=query, teacher_key=key, teacher_scale=scale)
    if options.guide is not None:
        x = x._replace(guide_query=options.guide[0], guide_key=options.guide[1])
    return x


def _distill(stats: PairStats, spec: Spec, options: PairOptions) -> Tensor:
    """Per pair the cross-entropies with the teacher: log-sum-exps minus mean scores under its softmax.

    Both are taken from the positive's score, as a constant.
    """
    assert stats.pos is not None
    pos, found = stats.pos.detach(), []
    for side in (stats.row, stats.col) if spec.cols else (stats.row,):
        assert side.cross is not None
        found.append(lifted(lse_above(pos, side, floor=False) - side.cross))
    return sum(found[1:], found[0]) * options.teacher_weight


def _positives_alone(x: Inputs, spec: Spec, options: PairOptions) -> tuple[PairStats, Tally]:
    """What queries read from their positives, without any other key."""
    assert x.key is not None and x.labels is not None
    own = x.key[: len(x.query)] if spec.paired else x.key.index_select(0, x.labels)
    products = _own_products(x, own.unsqueeze(1), None, options).squeeze(1)
    stats = PairStats(unit=1.0 if spec.backend == "dense" else spec.unit)
    pos = stats.logits(products, x.scale)
    if x.key_bias is not None:
        pos = pos + _with_axes(stats.of_nats(x.key_bias.to(pos.dtype).index_select(0, x.labels)), pos)
    level = products.detach() * torch.where(x.scale < 0, -1, 1) if spec.compares else None
    if x.guide_query is not None and x.guide_key is not None:
        of_guide = own_products(x.guide_query, x.guide_key.index_select(0, x.labels).unsqueeze(1)).squeeze(1)
        stats = stats._replace(guide_level=of_guide)
    nothing_above = 0 * pos  # with a gradient: there may be no negative yet
    tally = Tally(nothing_above, pos, torch.ones_like(pos), torch.zeros_like(pos))
    return stats._replace(pos=pos, level=level), _without_positives(tally) if options.several_positives else tally


def _shared_cache(spec: Spec, rings: Rings, options: PairOptions) -> Callable[[int], Spec]:
    """The spec of a call with some of the keys: all calls share the memory of the cache in proportion to these."""
    if not spec.cache_bytes:
        return lambda keys: spec
    both_types = 1 + ("doc_to_doc" in options.more.names)
    keys, extras, column = (0 if ring is None else sum(ring.sizes) for ring in rings)
    hard = 0 if options.hard_negatives is None else options.hard_negatives.shape[1] * column
    calls = keys * (both_types + ("query_to_query" in options.more.names)) + (extras + hard) * both_types
    return lambda keys: spec._replace(cache_bytes=spec.cache_bytes * keys // calls)


def _with_sums(x: Inputs, spec: Spec, options: PairOptions) -> Spec:
    """Also sum scores over all keys, those of another id, or further positives. Statistics need only the rows' sums."""
    if options.several_positives:
        return spec if x.query_ids is None else spec._replace(sums="same")
    if not options.sums:
        return spec
    return spec._replace(sums="all" if x.query_ids is None else "differ", col_sums=options.label_smoothing > 0)


def as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """A 0-d tensor on the features' device, at least fp32. A number is created there: copying it would synchronise."""
    if isinstance(value, Tensor):
        value = value if value.dim() == 0 else value.reshape(())
        return value.to(like.device, torch.promote_types(value.dtype, torch.float32))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.scalar_tensor(value, dtype=dtype, device=like.device)


def _without_bias(stats: PairStats, x: Inputs) -> Tensor:
    """The positives' scores as sums have them."""
    assert stats.pos is not None and x.labels is not None
    if x.key_bias is None:
        return stats.pos
    return stats.pos - _with_axes(stats.of_nats(x.key_bias.detach()[x.labels]), stats.pos)


def _with_axes(x: Tensor, like: Tensor) -> Tensor:
    """One value per pair, beside those of several dimensions."""
    return x.reshape(*x.shape, *(1 for _ in range(like.dim() - x.dim())))


def _own_products(x: Inputs, hard: Tensor, mask: Tensor | None, options: PairOptions) -> Tensor:
    """The products of queries with negatives of their own [N, H], or for each dimension [N, H, dims]."""
    nested = options.matryoshka
    if nested is None:
        return own_products(x.query, hard, mask, x.stand_in)
    return nested.own_products(x.query, hard, mask, x.stand_in)


def _tally(
    side: SideStats, pos: Tensor, spared: Tensor | None, plain: Tensor | None = None, *, own: bool = True
) -> Tally:
    """One side of the statistics.

    Sums over keys of another id lack the positives of the same id (`spared`): these are added, without bias (`plain`).
    `own`: the positives are among the keys.
    """
    total, count = side.sums, side.counts
    if total is not None and count is not None and spared is not None:
        assert plain is not None
        total, count = total + torch.where(spared, plain, 0), count + spared
    return Tally(lse_above(pos, side, floor=own), total, count, side.higher)


def lse_above(level: Tensor, side: SideStats, *, floor: bool = True) -> Tensor:
    """The log-sum-exp minus a level close to it, with the digits that the log-sum-exp alone has no room for.

    `floor`: the level is a term of the sum, or a mean of such terms, and so never above the log-sum-exp.
    """
    assert side.total is not None
    above = side.total - level
    if side.slack is None:
        return lifted(above) if floor else above
    value = above.detach()  # the same memory: what follows is constant and needs no gradient
    value.sub_(side.slack.log2())
    if floor:
        value.clamp_min_(0)
    return above


def _extra_keys(x: Inputs, stats: PairStats, options: PairOptions, spec: Spec, ring: Ring) -> Tally:
    assert options.extra_keys is not None
    return _more_keys(x, stats, options, spec, ring, options.extra_keys, options.extra_ids, options.extra_bias)


def _more_keys(
    x: Inputs,
    stats: PairStats,
    options: PairOptions,
    spec: Spec,
    ring: Ring,
    keys: Tensor,
    ids: Tensor | None,
    bias: Tensor | None,
    *,
    exclude_self: bool = False,
) -> Tally:
    """What queries read from keys that hold no positive. `exclude_self`: query i is not compared with key i."""
    assert stats.pos is not None
    given = ids is not None
    more = x._replace(
        key=keys,
        key_bias=bias,
        labels=None,
        query_ids=x.query_ids if given else None,
        key_ids=ids.long() if ids is not None else None,
        query_level=stats.level,
        guide_key=options.extra_guide,
        guide_level=stats.guide_level,
    )
    spec = spec._replace(cols=False, exclude_self=exclude_self, hardness=options.more.in_batch)
    found = pair_stats(ring, more, _with_sums(more, spec, options))
    tally = _tally(found.row, stats.pos, None, own=False)
    return tally if given or not options.several_positives else _without_positives(tally)


def _shared_hard_negatives(x: Inputs, stats: PairStats, options: PairOptions, spec: Spec, ring: Ring) -> Tally:
    """Hard negatives that all queries are compared with, in one call unless a query's own weigh differently."""
    hard, ids, bias = options.hard_negatives, options.hard_ids, options.hard_bias
    assert hard is not None
    if options.more.own == options.more.in_batch:
        all_hard, ids, bias = (None if t is None else t.flatten(0, 1) for t in (hard, ids, bias))
        assert all_hard is not None
        count = hard.shape[1]
        spec = spec._replace(cache_bytes=spec.cache_bytes * count)
        ring = ring._replace(sizes=tuple(count * size for size in ring.sizes))
        return _more_keys(x, stats, options, spec, ring, all_hard, ids, bias)
    tally = _hard_negatives(x, stats, options, hard)
    for keys, its_ids, its_bias in _columns(hard, ids, bias):
        others = _more_keys(x, stats, options, spec, ring, keys, its_ids, its_bias, exclude_self=True)
        tally = tally.join(others, stats)
    return tally


def _columns(hard: Tensor, *more: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """One hard negative of each query after the other, with the same columns of other tensors."""
    sides = [repeat(None) if x is None else x.unbind(1) for x in more]
    return zip(hard.unbind(1), *sides, strict=False)


def _same_type(
    x: Inputs, stats: PairStats, options: PairOptions, share: Callable[[int], Spec], rings: Rings
) -> list[Tensor]:
    """Log-sum-exps, above the positives' scores, of queries over other queries, and of documents over documents."""
    pos, found = stats.pos, []
    assert pos is not None

    def read(ring: Ring, inputs: Inputs, *, exclude_self: bool = True) -> None:
        spec = share(sum(ring.sizes))._replace(cols=False, paired=False, ranks=False, exclude_self=exclude_self)
        found.append(lse_above(pos, pair_stats(ring, inputs, spec).row, floor=False))

    if "query_to_query" in options.more.names:
        read(
            rings.keys, Inputs(x.query, None, x.scale, query_ids=x.query_ids, key_ids=x.query_ids, stand_in=x.stand_in)
        )
    if "doc_to_doc" in options.more.names and x.key is not None:
        proxy = None if share(0).backend == "dense" else stand_in(x.key)
        documents = x.key if proxy is None else x.key.detach()
        x = Inputs(documents, None, x.scale, query_ids=x.key_ids, key_ids=x.key_ids, stand_in=proxy)
        read(rings.keys, x)
        if rings.extra is not None and any(rings.extra.sizes):
            read(rings.extra, _compared(x, options.extra_keys, options.extra_ids), exclude_self=False)
        if rings.hard is not None and options.hard_negatives is not None:
            for keys, ids in _columns(options.hard_negatives, options.hard_ids):
                read(rings.hard, _compared(x, keys, ids))
    return found


def _compared(x: Inputs, key: Tensor | None, ids: Tensor | None) -> Inputs:
    """The same queries with other keys, and with their ids if these have some."""
    return x._replace(
        key=key, query_ids=None if ids is None else x.query_ids, key_ids=None if ids is None else ids.long()
    )


def _without_positives(tally: Tally) -> Tally:
    return tally._replace(total=torch.zeros_like(tally.above), number=torch.zeros_like(tally.above))


def _negatives(x: Inputs, rows: Tally, stats: PairStats, options: PairOptions, rings: Rings) -> tuple[Tensor, Tensor]:
    """The sum of the scores of this rank's queries with all keys but their positives, and the number of these pairs.

    Scores of all pairs add up to the product of the sums of queries and of keys.
    """
    pos, others, count = stats.pos, rows.total, rows.number
    assert pos is not None and others is not None and count is not None
    exact = torch.float32 if pos.device.type == "mps" else torch.float64
    of_keys = torch.zeros(x.query.shape[1], dtype=exact, device=pos.device)
    size = 0
    for keys, ring in ((x.keys if options.in_batch_negatives else None, rings.keys), (options.extra_keys, rings.extra)):
        if keys is not None and ring is not None:
            of_keys, size = of_keys + keys.detach().sum(0, dtype=exact), size + sum(ring.sizes)
    of_keys = rings.keys.team.sum(of_keys)
    total = stats.logits((x.query.detach().sum(0, dtype=exact) * of_keys).sum(), x.scale.detach())
    number: Tensor | int = len(pos) * size
    if options.hard_negatives is not None:
        products = own_products(x.query.detach(), options.hard_negatives.detach(), options.hard_mask)
        total = total + stats.logits(products.sum(dtype=exact), x.scale.detach())
        there = products.numel() if options.hard_mask is None else options.hard_mask.sum()
        number = number + there
    if x.bias is not None:
        total = total + number * x.bias.detach()
    positives, labelled = others, count
    if options.in_batch_negatives:  # the labelled ones are among these keys
        positives, labelled = pos + others, count + 1
    return total - positives.detach().sum(dtype=exact), number - labelled.sum()


def _hard_negatives(x: Inputs, stats: PairStats, options: PairOptions, hard: Tensor) -> Tally:
    assert stats.pos is not None
    products = _own_products(x, hard, options.hard_mask, options)
    scores = stats.logits(products, x.scale)
    counts = torch.ones_like(scores, dtype=torch.bool)
    if options.hard_mask is not None:
        counts = _with_axes(options.hard_mask, scores)
    if options.hard_ids is not None and x.query_ids is not None:
        counts = counts & _with_axes(options.hard_ids != x.query_ids.unsqueeze(1), scores)
    higher = None
    total = torch.where(counts, scores, 0).sum(1) if options.sums else None
    number = counts.sum(1) if options.sums else None
    if stats.level is not None:  # products are compared with the positives', before the scale
        rising = products.detach() * torch.where(x.scale < 0, -1, 1)
        higher = (counts & (rising > stats.level.unsqueeze(1))).sum(1) if options.return_stats else None
        if options.margin is not None:
            counts = counts & (rising <= stats.level.unsqueeze(1) - options.margin)
    if options.more.own:
        scores = scores + stats.of_nats(options.more.own * products.detach())
    if stats.guide_level is not None and options.guide is not None and options.hard_guide is not None:
        relative = options.guide_margin_strategy == "relative"
        limit = guide_limit(stats.guide_level, options.guide_margin, relative=relative)
        counts = counts & (own_products(options.guide[0], options.hard_guide) <= limit.unsqueeze(1))
    if options.hard_bias is not None:
        scores = scores + _with_axes(stats.of_nats(options.hard_bias.to(scores.dtype)), scores)
    # A finite floor, not -inf: a query whose every negative is masked has a gradient of 0 here, not NaN.
    floor = torch.finfo(scores.dtype).min / 2
    above = torch.where(counts, scores - stats.pos.unsqueeze(1), floor)
    tally = Tally(stats.logsumexp(above, 1), total, number, higher)
    return _without_positives(tally) if options.several_positives else tally


def sigmoid_stats(x: Inputs, stats: PairStats, options: PairOptions, rings: Rings) -> BatchStats:
    """The statistics of `siglip_loss`."""
    row, col, pos = stats.row, stats.col, stats.pos
    assert x.bias is not None and pos is not None and row.total is not None and col.total is not None
    assert row.sums is not None and row.counts is not None
    total, number = row.sums + row.counts * x.bias, row.counts  # sums are without the bias
    negatives = None
    if options.several_positives:
        rows = Tally(row.total, total, number, row.higher)
        negatives = _negatives(x, rows, stats, options, rings)
    elif x.query_ids is not None and x.key_ids is not None:  # sums over other ids lack positives of the same id
        spared = x.query_ids == x.key_ids
        total, number = total + torch.where(spared, pos, 0), number + spared
    rows = Tally(row.total, total, number, row.higher)
    return batch_stats(rows, Tally(col.total, None, None, col.higher), stats, rings.keys.team, negatives)


def class_losses(x: Inputs, spec: Spec, ring: Ring) -> tuple[Tensor, Tensor]:
    """Per query: log-sum-exp minus mean same-class score, in nats, and the number of such keys; 0 without any."""
    stats = pair_stats(ring, x, spec._replace(cols=False, sums="equal"))
    total, count = stats.row.sums, stats.row.counts
    assert total is not None and count is not None
    return stats.nats(torch.where(count > 0, lse_above(total / count.clamp(min=1), stats.row), 0)), count


def lifted(losses: Tensor) -> Tensor:
    """Lift losses that rounding made negative to 0; the gradient stays."""
    return losses - losses.detach().clamp(max=0)


def _loss(side: Tally, pos: Tensor, options: PairOptions) -> Tensor:
    """The loss of one side, with label smoothing or several positives."""
    e = options.label_smoothing
    if not (e or options.several_positives):
        return side.above
    assert side.total is not None and side.number is not None
    if options.several_positives:  # pos minus the mean of all positives; exactly 0 if there is one
        return lifted(side.above + (side.number * pos - side.total) / (side.number + 1))
    return lifted(side.above + e * (pos - side.total / side.number))

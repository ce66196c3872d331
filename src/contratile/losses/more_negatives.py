"""Negatives beyond the keys of the batch: extra keys, hard negatives, and what `directions` adds. One tally each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats, stand_in
from contratile.engine.spec import Inputs, PairStats, Spec
from contratile.engine.summed import summed
from contratile.losses.batch_stats import Tally
from contratile.losses.call import Rings
from contratile.losses.hard_negatives import own_products
from contratile.losses.options import PairOptions
from contratile.losses.terms import lse_above, tally_of, with_axes, without_positives
from contratile.reference import guide_limit
from contratile.ring.ring import Ring


def with_sums(x: Inputs, spec: Spec, options: PairOptions) -> Spec:
    """Ask for the sums of scores that the options need: over all keys, keys of other ids, or further positives.

    Statistics need the rows' sums only.
    """
    if options.several_positives:
        return spec if x.query_ids is None else spec._replace(sums="same")
    if not options.sums:
        return spec
    return spec._replace(sums="all" if x.query_ids is None else "differ", col_sums=options.label_smoothing > 0)


def products_with(x: Inputs, hard: Tensor, mask: Tensor | None, options: PairOptions) -> Tensor:
    """The products of each query with its own hard negatives [N, H]; with Matryoshka [N, H, dims]."""
    nested = options.matryoshka
    if nested is None:
        return own_products(x.query, hard, mask, x.stand_in)
    return nested.own_products(x.query, hard, mask, x.stand_in)


def extra_keys(x: Inputs, stats: PairStats, options: PairOptions, spec: Spec, ring: Ring) -> Tally:
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
    """The tally of keys that contain no positive. `exclude_self`: query i is not compared with key i."""
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
    found = pair_stats(ring, more, with_sums(more, spec, options))
    tally = tally_of(found.row, stats.pos, None, own=False)
    return tally if given or not options.several_positives else without_positives(tally)


def keys_of(hard: Tensor) -> Tensor:
    """All hard negatives as one set of keys."""
    return summed(hard.flatten(0, 1))


def shared_hard_negatives(
    x: Inputs, stats: PairStats, options: PairOptions, spec: Spec, ring: Ring, shared: Tensor
) -> Tally:
    """The tally of all queries against the hard negatives of all queries.

    One call of the engine. If a query's own hard negatives have another hardness, they are computed separately, and
    each column of the others takes a call.
    """
    hard, ids, bias = options.hard_negatives, options.hard_ids, options.hard_bias
    assert hard is not None
    if options.more.own == options.more.in_batch:
        ids, bias = (None if t is None else t.flatten(0, 1) for t in (ids, bias))
        count = hard.shape[1]
        spec = spec._replace(cache_bytes=spec.cache_bytes * count)
        ring = ring._replace(sizes=tuple(count * size for size in ring.sizes))
        return _more_keys(x, stats, options, spec, ring, shared, ids, bias)
    tally = own_hard_negatives(x, stats, options, hard)
    for keys, its_ids, its_bias in _columns(hard, ids, bias):
        others = _more_keys(x, stats, options, spec, ring, keys, its_ids, its_bias, exclude_self=True)
        tally = tally.join(others, stats)
    return tally


def _columns(hard: Tensor, *more: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the columns: the first hard negative of every query, then the second, ..., with those of other tensors."""
    sides = [repeat(None) if x is None else x.unbind(1) for x in more]
    return zip(hard.unbind(1), *sides, strict=False)


def same_type(
    x: Inputs,
    stats: PairStats,
    options: PairOptions,
    share: Callable[[int], Spec],
    rings: Rings,
    shared: Tensor | None,
) -> list[Tensor]:
    """Log-sum-exps minus the positives' scores: of queries over other queries, of documents over other documents."""
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
                keys = shared if shared is not None and shared.shape == keys.shape else keys
                read(rings.hard, _compared(x, keys, ids))
    return found


def _compared(x: Inputs, key: Tensor | None, ids: Tensor | None) -> Inputs:
    """The same queries against other keys. Ids are compared only if the keys have some."""
    return x._replace(
        key=key, query_ids=None if ids is None else x.query_ids, key_ids=None if ids is None else ids.long()
    )


def own_hard_negatives(x: Inputs, stats: PairStats, options: PairOptions, hard: Tensor) -> Tally:
    assert stats.pos is not None
    products = products_with(x, hard, options.hard_mask, options)
    scores = stats.logits(products, x.scale)
    counts = torch.ones_like(scores, dtype=torch.bool)
    if options.hard_mask is not None:
        counts = with_axes(options.hard_mask, scores)
    if options.hard_ids is not None and x.query_ids is not None:
        counts = counts & with_axes(options.hard_ids.long() != x.query_ids.unsqueeze(1), scores)
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
        scores = scores + with_axes(stats.of_nats(options.hard_bias.to(scores.dtype)), scores)
        counts = counts & (scores > -torch.inf)
    # A finite floor, not -inf: a query whose every negative is masked has a gradient of 0 here, not NaN.
    floor = torch.finfo(scores.dtype).min / 2
    above = torch.where(counts, scores - stats.pos.unsqueeze(1), floor)
    tally = Tally(stats.logsumexp(above, 1), total, number, higher)
    return without_positives(tally) if options.several_positives else tally

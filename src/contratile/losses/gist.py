"""GISTEmbed's loss: queries against keys, queries and extra keys, and keys against keys, filtered by a guide.

    scores = [query key^T, query query^T, key key^T, query extra^T] * scale
    scores[guide's score of the pair > limit of the row, except positives] = -inf
    loss = -log_softmax(scores)[positive]

The limit of row i is the guide's similarity of query i and its key, minus a margin: see `info_nce(guide=...)`. Scores
of a set with itself are symmetric, so only half of them are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contratile.engine.autograd import pair_stats
from contratile.engine.spec import Inputs, Spec
from contratile.engine.summed import summed
from contratile.errors import check_pairs
from contratile.losses.beside import Guide
from contratile.losses.call import Call
from contratile.losses.cross_entropy import cross_entropies
from contratile.losses.options import PairOptions
from contratile.losses.terms import as_tensor, lse_above
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE, Group


def gist_loss(
    query: Tensor,
    key: Tensor,
    scale: Tensor | float,
    options: PairOptions,
    guide: Guide,
    *,
    contrast_queries: bool,
    contrast_keys: bool,
    group: Group,
    tile: int | None = None,
    cache_bytes: int = 0,
) -> Tensor:
    """The mean loss of the queries; key i is the positive of query i.

    Args:
        query: Features [N, D].
        key: Features [N, D].
        scale: The logit scale.
        options: Extra keys with their guide features, and the guide's margin.
        guide: The guide's features of queries and keys.
        contrast_queries: Also compare queries with the queries of this rank.
        contrast_keys: Also compare keys with the keys of all ranks.
        group: The ranks whose keys and extra keys are used.
        tile: Edge of the tiles; None: chosen automatically.
        cache_bytes: Memory for keeping tiles of queries and keys from forward to backward.
    """
    options = options._replace(guide=guide)
    spec = Spec(cols=False, paired=True, tile=tile, cache_bytes=cache_bytes)

    def check() -> None:
        check_pairs("anchors and positives", query, key)
        options.check(query, key, scale, spec)

    call = Call("gist_loss", {"query": query, "key": key}, {"scale": scale}, spec, "mean", options)
    rings = call.start(group, check)
    query, key = summed(query), summed(key)
    labels = torch.arange(len(query), device=query.device)
    losses = cross_entropies(query, key, scale, labels, options, spec, rings)
    stats, above = losses.stats, losses.per_pair
    assert stats.pos is not None
    of_one_set = spec._replace(
        paired=False,
        cache_bytes=0,
        guide_margin=float(options.guide_margin),
        guide_relative=options.guide_margin_strategy == "relative",
    )
    alone = Ring.flat(ALONE, (len(query),), total=len(query))
    for wanted, ring, z, seen in (
        (contrast_queries, alone, query, guide[0]),
        (contrast_keys, rings.keys, key, guide[1]),
    ):
        if wanted:
            x = Inputs(z, None, as_tensor(scale, z), guide_query=seen, guide_level=stats.guide_level)
            found = pair_stats(ring, x, of_one_set)
            above = stats.logaddexp(above, lse_above(stats.pos, found.row, floor=False))
    return call.reduce(above, stats, rings.keys)

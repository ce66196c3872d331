"""How the scores of each visiting block are cut into tiles, and how many of them the cache keeps.

    cuts = cuts_of(ring, x, spec)                # one per block, in the order of visits
    for block, cut, piece in zip(trip, cuts, pieces(cache, cuts)): ...

Forward and backward ask for the same cuts, so both find the same tiles at the same places in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine import tuned
from contratile.engine.plan import TilePlan, plan_tiles
from contratile.engine.spec import Inputs, Spec
from contratile.engine.stats import accumulation_dtype
from contratile.ring.ring import Ring


class Cut(NamedTuple):
    """The tiles of one visiting block."""

    plan: TilePlan
    cached: int
    """Scores of it that fit into the cache."""


def cuts_of(ring: Ring, x: Inputs, spec: Spec) -> list[Cut]:
    """The cuts of all blocks, in the order of their visits. Those that come first fill the cache."""
    cuts, room = [], spec.cache_bytes
    for source in ring.route.visits():
        plan = tile_plan(ring, source, x, spec)
        cached = plan.cached_items(room) if room else 0
        room -= cached * plan.itemsize
        cuts.append(Cut(plan, cached))
    return cuts


def cached_items(cuts: list[Cut]) -> int:
    """Scores of all blocks that fit into the cache."""
    return sum(cut.cached for cut in cuts)


def pieces(cache: Tensor | None, cuts: list[Cut]) -> Iterator[Tensor | None]:
    """The part of the cache of each visiting block."""
    if cache is None or len(cuts) == 1:
        return repeat(cache, len(cuts))
    return iter(torch.split(cache, [cut.cached for cut in cuts]))


def tile_plan(ring: Ring, source: int, x: Inputs, spec: Spec) -> TilePlan:
    """The tiles of this rank's queries with the keys of a rank."""
    itemsize = accumulation_dtype(x.query.dtype).itemsize
    symmetric = x.key is None and source == ring.team.rank
    n, d = x.query.shape
    m = ring.sizes[source]
    # Sizes may be symbols while a compiler traces, and a cache cannot hold those.
    make = _known_plan if type(n) is type(m) is type(d) is int else plan_tiles
    # With `key=None` two ranks compute the same tiles, one of them transposed.
    flip = x.key is None and source < ring.team.rank
    # Tuned on one machine, so not for tiles that several ranks have to cut alike.
    of_other = x.teacher_query if x.guide_query is None else x.guide_query
    beside = 0 if of_other is None else of_other.shape[1]
    own = ring.team.size == 1 and x.key is not None and x.query.is_cpu and spec.tile is None
    own = own and not spec.prefixes and not beside
    plan = make(
        *((m, n) if flip else (n, m)),
        d,
        tile=spec.tile,
        itemsize=itemsize,
        symmetric=symmetric,
        shape=tuned.tiles(d, itemsize) if own else None,
        prefixes=len(spec.prefixes),
        beside=beside,
    )
    return plan.transposed() if flip else plan


_known_plan = lru_cache(maxsize=1024)(plan_tiles)

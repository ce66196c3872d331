"""How the scores of each visiting block are cut into tiles, and how many of them the cache keeps.

    cuts = cuts_of(ring, x, spec)                # one per block, in the order of visits
    for block, cut, piece in zip(trip, cuts, pieces(cache, cuts)): ...

Forward and backward ask for the same cuts, so both find the same tiles at the same places in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.engine import tuned
from contratile.engine.plan import TilePlan, plan_tiles
from contratile.engine.spec import Inputs, Spec
from contratile.engine.stats import accumulation_dtype
from contratile.ring.ring import Ring
from contratile.ring.schedule import Schedule


class Cut(NamedTuple):
    """The tiles of one visiting block."""

    plan: TilePlan
    cached: int
    """Number of its scores that fit into the cache."""


def cuts_of(ring: Ring, x: Inputs, spec: Spec) -> tuple[Cut, ...]:
    """The cuts of all blocks, in the order of their visits."""
    n, d = x.query.shape
    one_set, itemsize = x.key is None, accumulation_dtype(x.query.dtype).itemsize
    of_other = x.teacher_query if x.guide_query is None else x.guide_query
    beside = 0 if of_other is None else of_other.shape[1]
    # Tuned shapes belong to one machine; several ranks must cut the same tiles.
    own = not (one_set or beside or spec.prefixes) and spec.tile is None and ring.team.size == 1 and x.query.is_cpu
    # Sizes may be symbols while a compiler traces, and a cache cannot hold those.
    make = _cuts if type(n) is type(ring.sizes[0]) is type(d) is int else _cuts.__wrapped__
    return make(
        *(ring.schedule, ring.team.rank, ring.sizes, n, d),
        one_set=one_set,
        room=spec.cache_bytes,
        tile=spec.tile,
        itemsize=itemsize,
        shape=tuned.tiles(d, itemsize) if own else None,
        prefixes=len(spec.prefixes),
        beside=beside,
    )


@lru_cache(maxsize=256)
def _cuts(
    schedule: Schedule,
    rank: int,
    sizes: tuple[int, ...],
    queries: int,
    d: int,
    *,
    one_set: bool,
    room: int,
    **how: Any,
) -> tuple[Cut, ...]:
    """The cuts of a rank's queries with the keys of all ranks. The first blocks fill the cache of `room` bytes."""
    cuts = []
    for source in schedule.route(rank).visits():
        flip = one_set and source < rank  # two ranks compute the same tiles, one of them transposed
        shape = (sizes[source], queries) if flip else (queries, sizes[source])
        plan = plan_tiles(*shape, d, symmetric=one_set and source == rank, **how)
        plan = plan.transposed() if flip else plan
        cached = plan.cached_items(room) if room else 0
        room -= cached * plan.itemsize
        cuts.append(Cut(plan, cached))
    return tuple(cuts)


def cached_items(cuts: tuple[Cut, ...]) -> int:
    """Number of scores of all blocks that fit into the cache."""
    return sum(cut.cached for cut in cuts)


def pieces(cache: Tensor | None, cuts: tuple[Cut, ...]) -> Iterator[Tensor | None]:
    """The part of the cache of each visiting block."""
    if cache is None or len(cuts) == 1:
        return repeat(cache, len(cuts))
    return iter(torch.split(cache, [cut.cached for cut in cuts]))

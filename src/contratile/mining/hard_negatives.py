"""Hard negatives: for each query, keys that score high and are not its positives.

    found = mine_hard_negatives(query, key, num_negatives=5, relative_margin=0.05)
    found.indices                               # [N, 5]: numbers of keys, -1 where fewer were found

The search is exact. Tiles of scores are computed one at a time, so that the memory beyond the features is a constant
plus the result. Over several ranks blocks of keys travel round the ring of the losses.
"""

from collections.abc import Callable
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.errors import bad_type, bad_value, check_count, check_features, check_labels, check_vector
from contratile.mining.best_keys import NO_KEY, BestKeys
from contratile.mining.options import Rules, Sampling, Window
from contratile.ring.ring import Ring, RingPass
from contratile.ring.team import Facts, Group, Team

TILE = 2048
"""Rows and columns of a tile: 16 MiB of fp32 scores."""

ROWS = 1 << 16
"""Rows that are checked, or positives that are scored, at once."""


class HardNegatives(NamedTuple):
    """Hard negatives of this rank's queries, best first."""

    indices: Tensor
    """[N, num_negatives] int64: numbers of keys, counted through all ranks; -1 where fewer were found."""

    scores: Tensor
    """[N, num_negatives]: their scores; NaN where there is none."""

    positive_scores: Tensor
    """[N]: the lowest score of a positive of each query, which margins refer to; NaN if it has none."""


class _Keys(NamedTuple):
    key: Tensor


@torch.no_grad()
def mine_hard_negatives(
    query: Tensor,
    key: Tensor,
    *,
    positives: Tensor | None = None,
    num_negatives: int = 5,
    range_min: int = 0,
    range_max: int | None = None,
    absolute_margin: float | None = None,
    relative_margin: float | None = None,
    min_score: float | None = None,
    max_score: float | None = None,
    sampling: Sampling = "top",
    seed: int = 0,
    group: Group = "auto",
    tile: int | None = None,
    notify: Callable[[float], object] = lambda share: None,
) -> HardNegatives:
    """Find the keys that score highest with each query and are not its positives. Replaces

        scores, index = (query @ key.T).sort(1, descending=True, stable=True)
        scores, index = scores[:, :window], index[:, :window]
        keep = ~is_positive(index) & (scores <= positive - positive.abs() * relative_margin) & ...
        return [i[k][range_min:range_max][:num_negatives] for i, k in zip(index, keep)]

    with the rules and defaults of sentence-transformers' `mine_hard_negatives`, but without the N x M scores. Scores
    are plain products: pass normalised features for cosines. Nothing is random unless `sampling="random"`. The result
    does not depend on the tile or on how queries and keys are spread over ranks; among equal scores the key with the
    lower number comes first.

    Args:
        query: Features [N, D].
        key: Features [M, D]. Equal keys should be passed once.
        positives: Keys that fit a query and are never its negatives: [N] one key per query, or [P, 2] rows (query, key)
            for any number of them. None: key i belongs to query i. Over ranks, queries are numbered on each rank,
            keys through all ranks in rank order.
        num_negatives: Negatives per query.
        range_min: Skip this many of the best keys that pass the other rules.
        range_max: Use only this many of them. It also limits how many of the nearest keys are examined: `range_max`
            plus the largest number of positives of a query. None: range_min + num_negatives + that number; with a
            margin or `max_score`, 10 * num_negatives instead of num_negatives.
        absolute_margin: Skip keys with score + absolute_margin > positive score. If a query has several positives, its
            lowest positive score counts.
        relative_margin: Skip keys with score > positive score - relative_margin * abs(positive score).
        min_score: Skip keys with a lower score.
        max_score: Skip keys with a higher score.
        sampling: "top" takes the best of the remaining keys, "random" draws from them.
        seed: Seed of "random".
        group: As in the losses: "auto", None for this process alone, or a process group. Collective: every rank calls
            it with its own queries and keys, and gets the negatives of its queries.
        tile: Rows and columns of a tile.
        notify: Called with the share of the work that is done, from 0 to 1.

    Returns:
        Indices and scores [N, num_negatives], with -1 and NaN where fewer were found, and positive scores [N].

    Raises:
        ValueError: A feature is not finite, a positive does not exist, or the window is too small for `num_negatives`.

    Examples:
        >>> import torch, contratile as ct
        >>> key = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
        >>> ct.mine_hard_negatives(key, key, num_negatives=2).indices
        tensor([[1, 2],
                [2, 0],
                [1, 3],
                [2, 1]])
    """
    team = Team.of(group)
    try:
        rules = Rules(
            num_negatives=num_negatives,
            range_min=range_min,
            range_max=range_max,
            absolute_margin=absolute_margin,
            relative_margin=relative_margin,
            min_score=min_score,
            max_score=max_score,
            sampling=sampling,
            seed=seed,
        )
        _check(query, key, positives, tile)
    except Exception as error:  # so that the other ranks do not hang
        team.refuse(error)
        raise
    facts = team.handshake(_facts(query, key, f"mine_hard_negatives {astuple(rules)}"))
    keys = [fact.keys for fact in facts]
    try:
        pairs = _pairs(query, key, positives, first=sum(keys[: team.rank]), total=sum(keys))
    except Exception as error:
        team.refuse(error)
        raise
    most = int(pairs[:, 0].bincount().max()) if len(pairs) else 0
    most = max(fact.extra for fact in team.handshake(_facts(query, key, "mine_hard_negatives", extra=most)))
    ring = Ring.flat(team, tuple(keys), total=sum(fact.queries for fact in facts))
    search = _Search(query.detach(), pairs, rules, Window.of(rules, most, sum(keys)), ring)
    return search.run(key.detach(), sum(fact.queries for fact in facts[: team.rank]), tile or TILE, notify)


class _Search:
    """The search for the negatives of this rank's queries."""

    def __init__(self, query: Tensor, pairs: Tensor, rules: Rules, window: Window, ring: Ring) -> None:
        self.query, self.pairs, self.rules, self.window, self.ring = query, pairs, rules, window, ring
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.total = sum(ring.sizes)
        self.codes = torch.unique(pairs[:, 0] * self.total + pairs[:, 1])  # sorted
        self.lowest = query.new_full((len(query),), torch.inf, dtype=self.dtype)

    def run(self, key: Tensor, first_query: int, tile: int, notify: Callable[[float], object]) -> HardNegatives:
        n, wanted, world = len(self.query), self.rules.num_negatives, self.ring.team.size
        found = HardNegatives(
            torch.full((n, wanted), -1, device=self.query.device),
            self.lowest.new_full((n, wanted), torch.nan),
            self.lowest,
        )
        starts = range(0, n, tile)
        # With one block of keys a tile row is finished before the next one begins; otherwise all of them are kept.
        kept: dict[int, BestKeys] = {}
        space = self.lowest.new_empty(min(tile, n) * min(tile, max(self.ring.sizes)))
        trip: RingPass[_Keys, Any] = RingPass(self.ring, _Keys(key))
        for step, block in enumerate(trip):
            first = sum(self.ring.sizes[: block.source])
            self._score_positives(block.carried.key, first)
            for number, start in enumerate(starts):
                rows = self.query[start : start + tile].to(self.dtype)
                best = kept.pop(start, None) or BestKeys(len(rows), self.window.search, like=rows)
                for begin in range(0, block.size, tile):
                    cols = block.carried.key[begin : begin + tile].to(self.dtype)
                    scores = space[: len(rows) * len(cols)].view(len(rows), len(cols))
                    best.add_(torch.mm(rows, cols.t(), out=scores), first + begin)
                if step < world - 1:
                    kept[start] = best
                else:
                    place = slice(start, start + len(rows))
                    index, values = self._choose(best, start, first_query)
                    width = index.shape[1]  # smaller than wanted if there are too few keys
                    found.indices[place, :width], found.scores[place, :width] = index, values
                notify((step + (number + 1) / len(starts)) / world)
        self.lowest.masked_fill_(self.lowest == torch.inf, torch.nan)
        return found

    def _score_positives(self, key: Tensor, first: int) -> None:
        """Lower `lowest` to the scores of the positives in a block of keys that begins with number `first`."""
        for part in torch.split(self.pairs, ROWS):
            part = part[(part[:, 1] >= first) & (part[:, 1] < first + len(key))]
            queries, keys = part[:, 0], part[:, 1] - first
            scores = (self.query[queries].to(self.dtype) * key[keys].to(self.dtype)).sum(1)
            self.lowest.scatter_reduce_(0, queries, scores, "amin")

    def _choose(self, best: BestKeys, start: int, first_query: int) -> tuple[Tensor, Tensor]:
        """Numbers and scores of the negatives among the best keys of the queries from `start` on."""
        rules, scores = self.rules, best.scores
        rows = torch.arange(start, start + len(scores), device=scores.device)[:, None]
        out = self._is_positive(rows, best.index)
        positive = self.lowest[start : start + len(scores), None]
        known = positive < torch.inf  # margins do not apply to a query without positives
        if rules.absolute_margin is not None:
            out |= known & (scores + rules.absolute_margin > positive)
        if rules.relative_margin is not None:
            out |= known & (scores > positive - positive.abs() * rules.relative_margin)
        if rules.max_score is not None:
            out |= scores > rules.max_score
        if rules.min_score is not None:
            out |= scores < rules.min_score
        scores, order = scores.masked_fill(out, -torch.inf).sort(dim=1, descending=True, stable=True)
        index = best.index.gather(1, order)
        scores, index = (x[:, rules.range_min : self.window.end] for x in (scores, index))
        if rules.sampling == "random":
            drawn = _shuffled(rules.seed, rows + first_query, index).masked_fill(scores == -torch.inf, NO_KEY)
            chosen = drawn.argsort(dim=1, stable=True)[:, : rules.num_negatives].sort(dim=1).values
            scores, index = scores.gather(1, chosen), index.gather(1, chosen)
        scores, index = scores[:, : rules.num_negatives], index[:, : rules.num_negatives]
        missing = scores == -torch.inf
        return index.masked_fill(missing, -1), scores.masked_fill(missing, torch.nan)

    def _is_positive(self, rows: Tensor, index: Tensor) -> Tensor:
        """Which of the keys [B, K] are positives of the queries `rows` [B, 1]."""
        if not len(self.codes):
            return torch.zeros_like(index, dtype=torch.bool)
        codes = (rows * self.total + index).where(index < self.total, -1)  # no pair has the code of a missing key
        place = torch.searchsorted(self.codes, codes).clamp_(max=len(self.codes) - 1)
        found: Tensor = self.codes[place] == codes
        return found


def _check(query: Tensor, key: Tensor, positives: Tensor | None, tile: int | None) -> None:
    """Check what a rank can check alone. A rank may hold no queries or no keys."""
    check_features({"query": query, "key": key}, empty=True)
    if tile is not None:
        check_count("tile", tile, least=1)
    if positives is None and len(query) != len(key):
        remedy = "Pass positives=, the key of each query or rows (query, key)."
        got = f"{len(query)} and {len(key)}"
        bad_value("query and key", expected="equally many rows without positives", got=got, remedy=remedy)
    for name, x in (("query", query), ("key", key)):
        if not all(bool(part.isfinite().all()) for part in torch.split(x, ROWS)):
            bad_value(name, expected="finite features", got="NaN or infinity", remedy="Check the encoder's outputs.")
        dtype = torch.promote_types(x.dtype, torch.float32)
        most = (torch.finfo(dtype).max / x.shape[1]) ** 0.5  # scores of such features are finite
        ends = (end for part in torch.split(x, ROWS) if part.numel() for end in part.aminmax())
        largest = max((abs(float(end)) for end in ends), default=0.0)
        if largest > most:
            remedy = "Scores could overflow: normalise the features."
            bad_value(name, expected=f"features of at most {most:.1e}", got=f"{largest:.1e}", remedy=remedy)


def _pairs(query: Tensor, key: Tensor, positives: Tensor | None, *, first: int, total: int) -> Tensor:
    """Rows (query, number of its positive key) [P, 2]."""
    if total == 0:
        bad_value("key", expected="at least one key", got="none", remedy="Pass the features to search.")
    rows = torch.arange(len(query), device=query.device)
    if positives is None:
        return torch.stack([rows, rows + first], 1)
    if isinstance(positives, Tensor) and positives.dim() == 2 and positives.shape[1] == 2:
        for name, column, count in (("query", positives[:, 0], len(query)), ("key", positives[:, 1], total)):
            _check_numbers(f"positives ({name})", column, len(positives), count, query.device)
        return positives.long()
    if isinstance(positives, Tensor) and positives.dim() != 1:
        remedy = "Pass the key of each query, or rows (query, key)."
        bad_type("positives", expected="a tensor of shape [N] or [P, 2]", got=list(positives.shape), remedy=remedy)
    _check_numbers("positives", positives, len(query), total, query.device)
    return torch.stack([rows, positives.long()], 1)


def _check_numbers(name: str, x: Tensor, length: int, count: int, device: torch.device) -> None:
    check_vector(name, x, length=length, device=device)
    if length:
        check_labels(x, count, name=name, rows=name)


def _facts(query: Tensor, key: Tensor, call: str, extra: int = 0) -> Facts:
    return Facts(
        queries=len(query),
        keys=len(key),
        extra=extra,
        features=query.shape[1],
        dtype=str(query.dtype).removeprefix("torch."),
        device=query.device.type,
        call=call,
        gradient="none",
    )


def _shuffled(seed: int, queries: Tensor, keys: Tensor) -> Tensor:
    """Random numbers from 0 up for pairs of queries [B, 1] and keys [B, K], which depend on the pair alone.

    The finalizer of splitmix64, applied to the seed and the numbers one after the other. Products wrap around.
    """
    state = torch.full_like(queries, seed)
    for number in (queries, keys):
        state = _mixed(state + number * -7046029254386353131)
    return state & NO_KEY


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))

"""The best keys of some queries, found tile by tile.

    best = BestKeys(len(query), k, like=query)
    for first in range(0, len(key), 2048):
        best.add_(query @ key[first : first + 2048].t(), first)
    best.scores, best.index                    # [N, k], best first; among equal scores the key with the lower number

Few scores of a tile are better than the k best so far, so a tile is first reduced to the maxima of groups of columns.
Only groups with a maximum above a row's k-th best score are examined, which takes a fraction of the product's time.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

NO_KEY = torch.iinfo(torch.int64).max
"""Number of a key that does not exist: it comes after all others."""

GROUP = 32
"""Columns whose maximum is compared first."""


class BestKeys:
    """The k best keys so far of each of n queries. Keys may come in any order; the result does not depend on it."""

    def __init__(self, n: int, k: int, *, like: Tensor) -> None:
        self.k = k
        self.scores = like.new_full((n, k), -torch.inf)
        self.index = torch.full((n, k), NO_KEY, device=like.device)
        self._end = 0  # every key seen so far has a lower number

    def add_(self, scores: Tensor, first: int) -> None:
        """Add the keys `first`, `first + 1`, ... with these scores [n, w]."""
        floor = self.scores[:, -1]
        # A key with the same score as the k-th best one replaces it only if its number is lower.
        ties = first < self._end
        self._end = max(self._end, first + scores.shape[1])
        if scores.shape[1] > self.k and bool((floor == -torch.inf).any()):
            # Every score would pass a floor of -inf, as at the start: take the tile's k-th best score instead.
            floor = torch.maximum(floor, scores.topk(self.k, dim=1).values[:, -1])
            ties = True
        rows, cols = _above(scores, floor, ties=ties)
        if len(rows):
            self._merge_(rows, scores[rows, cols], cols + first)

    def _merge_(self, rows: Tensor, scores: Tensor, index: Tensor) -> None:
        """Insert scores and key numbers, one for each entry of `rows`, which ascends."""
        there, counts = torch.unique_consecutive(rows, return_counts=True)
        line = torch.arange(len(there), device=rows.device).repeat_interleave(counts)
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[line] + self.k
        width = self.k + int(counts.max())
        found = scores.new_full((len(there), width), -torch.inf)
        keys = torch.full((len(there), width), NO_KEY, device=rows.device)
        found[:, : self.k], keys[:, : self.k] = self.scores[there], self.index[there]
        found[line, place], keys[line, place] = scores, index
        keys, order = keys.sort(dim=1)
        found, best = found.gather(1, order).sort(dim=1, descending=True, stable=True)
        self.scores[there] = found[:, : self.k]
        self.index[there] = keys.gather(1, best[:, : self.k])


def _above(scores: Tensor, floor: Tensor, *, ties: bool) -> tuple[Tensor, Tensor]:
    """Rows and columns of the scores above a floor per row, and of those equal to it with `ties`; rows ascend."""
    compare = torch.ge if ties else torch.gt
    n, w = scores.shape
    if w % GROUP:
        scores = F.pad(scores, (0, GROUP - w % GROUP), value=-torch.inf)
    # A group is every (w / GROUP)-th column: maxima of whole rows of memory are fast.
    groups = scores.view(n, GROUP, -1)
    rows, places = compare(groups.amax(1), floor[:, None]).nonzero(as_tuple=True)
    hits, inner = compare(groups[rows, :, places], floor[rows, None]).nonzero(as_tuple=True)
    rows, cols = rows[hits], inner * groups.shape[2] + places[hits]
    there = cols < w  # padding equals a floor of -inf
    return rows[there], cols[there]

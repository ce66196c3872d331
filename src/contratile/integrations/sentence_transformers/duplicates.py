"""Ids for tokenized texts: equal for pairs that share a text, so that a loss leaves them out.

    ids = duplicate_ids(sentence_features, everywhere=True)
    info_nce(..., ids=ids.pairs, hard_ids=ids.negatives)

Pairs (anchor, positive) that share an anchor or a positive are not used as each other's negatives. A hard negative that
equals one of a pair's texts is not used for that pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contratile.errors import bad_value
from contratile.losses.memory_queue import gather_rows
from contratile.ring.team import Team


class DuplicateIds(NamedTuple):
    """Integers for the rows of a batch."""

    pairs: Tensor  # [N]
    negatives: Tensor | None  # [N, H]


def duplicate_ids(columns: list[dict[str, Tensor]], *, everywhere: bool) -> DuplicateIds:
    """The ids of tokenized columns: anchors, positives, then any number of negatives.

    `everywhere` also compares with the texts of all ranks, which is collective.
    """
    hashes = [text_hashes(features) for features in columns]
    sizes = [len(x) for x in hashes]
    if len(set(sizes)) > 1:
        remedy = "With exclude_duplicates= each anchor needs its own documents."
        bad_value("exclude_duplicates", expected="columns of one length", got=sizes, remedy=remedy)
    texts = torch.stack(hashes, 1)
    team = Team.of("auto" if everywhere else None)
    (pairs,) = gather_rows(team, "exclude_duplicates", texts[:, :2].contiguous())
    known, at = torch.unique(pairs, return_inverse=True)
    root = torch.arange(len(known), device=known.device)
    while True:  # both texts of a pair take the lower root of the two, until nothing changes
        lower = root[at].amin(1, keepdim=True).expand_as(at)
        found = root.scatter_reduce(0, at.flatten(), lower.flatten(), "amin")
        if torch.equal(found, root):
            break
        root = found
    place = torch.searchsorted(known, texts).clamp_max_(len(known) - 1)
    ids = torch.where(known[place] == texts, known[root[place]], texts)
    return DuplicateIds(ids[:, 0].contiguous(), ids[:, 2:].contiguous() if len(columns) > 2 else None)


def text_hashes(features: dict[str, Tensor]) -> Tensor:
    """A number for each tokenized text [N]: equal tokens without padding have equal numbers on every process."""
    tokens = features.get("input_ids")
    if tokens is None or tokens.dim() != 2:
        got = f"columns with {', '.join(features)}"
        remedy = "Drop exclude_duplicates=, and use a sampler without duplicates."
        bad_value("exclude_duplicates", expected="padded input_ids in every column", got=got, remedy=remedy)
    mask = features.get("attention_mask")
    there = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
    place = (there.cumsum(1) - 1).clamp_min_(0)
    factors = _factors(int(place.shape[1])).to(tokens.device)
    return ((tokens.long() + 1) * factors[place] * there).sum(1)  # modulo 2**64


def _factors(length: int) -> Tensor:
    """An odd number for each place of a text, always the same."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(1 << 62), 1 << 62, (length,), generator=generator)
    return drawn * 2 + 1

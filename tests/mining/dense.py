"""Mining as sentence-transformers defines it, query by query over all scores: what the tests compare with."""

from typing import Any

import torch
from torch import Tensor


def candidates(query: Tensor, key: Tensor, pairs: Tensor, *, num_negatives: int, **rules: Any) -> list[list[int]]:
    """All keys that may be negatives of each query, best first."""
    known = [pairs[pairs[:, 0] == i, 1].tolist() for i in range(len(query))]
    most = max(map(len, known), default=0)
    strict = any(rules.get(name) is not None for name in ("absolute_margin", "relative_margin", "max_score"))
    skipped = rules.get("range_min", 0)
    end = rules.get("range_max") or skipped + num_negatives * (10 if strict else 1) + most
    found = []
    for x, positives in zip(query, known, strict=True):
        scores = key @ x
        order = sorted(range(len(key)), key=lambda i: (-float(scores[i]), i))[: end + most]
        lowest = min((float(scores[i]) for i in positives), default=None)
        passing = [i for i in order if i not in positives and _passes(float(scores[i]), lowest, rules)]
        found.append(passing[skipped:end])
    return found


def _passes(score: float, positive: float | None, rules: dict[str, Any]) -> bool:
    absolute, relative = rules.get("absolute_margin"), rules.get("relative_margin")
    low, high = rules.get("min_score"), rules.get("max_score")
    if positive is not None and absolute is not None and score + absolute > positive:
        return False
    if positive is not None and relative is not None and score > positive - abs(positive) * relative:
        return False
    return (low is None or score >= low) and (high is None or score <= high)


def padded(found: list[list[int]], count: int) -> Tensor:
    """The first `count` of each list, filled up with -1."""
    return torch.tensor([(row + [-1] * count)[:count] for row in found])

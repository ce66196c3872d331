"""Values and options that are too large: refused, or cut to the size of the data."""

from typing import Any

import pytest
import torch

import contratile as ct
from tests.helpers import features


@pytest.mark.parametrize("side", [0, 1])
def test_features_whose_scores_overflow_are_refused(side: int) -> None:
    pair = [features(4, 3, seed=0), features(4, 3, seed=1)]
    pair[side][2] = torch.tensor([1e30, -1e30, 0.0])
    with pytest.raises(ValueError, match=r"features of at most 1.1e\+19, got 1.0e\+30"):
        ct.mine_hard_negatives(*pair)
    found = ct.mine_hard_negatives(*(x.double() for x in pair))
    assert bool(found.scores[found.indices >= 0].isfinite().all())


@pytest.mark.parametrize("sampling", ["top", "random"])
def test_windows_and_tiles_larger_than_the_data(sampling: Any) -> None:
    """They would take hundreds of gigabytes."""
    x = features(7, 3, seed=0)
    want = ct.mine_hard_negatives(x, x, num_negatives=9)
    found = ct.mine_hard_negatives(x, x, num_negatives=9, range_max=10**10, tile=10**9, sampling=sampling)
    assert found.indices.shape == (7, 9) and bool((found.indices[:, 6:] == -1).all())
    assert torch.equal(found.indices, want.indices) and torch.equal(found.scores.isnan(), want.scores.isnan())
    few = ct.mine_hard_negatives(x, x, num_negatives=2, range_min=6)
    assert bool((few.indices == -1).all()) and bool(few.scores.isnan().all())

"""Running statistics: one merge, any order, any level."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contratile.engine.stats import SideParts, Stats, lowest
from tests.helpers import randn

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64]


def empty(n: int, dtype: torch.dtype = torch.float32) -> Stats:
    return Stats.empty(n, dtype=dtype, device=CPU)


def merge_logits_(stats: Stats, logits: Tensor, level: Tensor | None = None) -> None:
    level = logits.amax(1) if level is None else level
    stats.merge_(level, (logits - level.unsqueeze(1)).exp2().sum(1))


def exact(logits: Tensor) -> Tensor:
    return (logits.double() * torch.tensor(2.0).double().log()).logsumexp(1) / torch.tensor(2.0).double().log()


@settings(deadline=None)
@given(
    centres=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8),
    spread=st.floats(0, 200),
    order=st.randoms(use_true_random=False),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_merge_in_any_order(centres: list[float], spread: float, order: Random, dtype: torch.dtype, seed: int) -> None:
    blocks = [randn(3, 5, seed=seed + i).to(dtype) * spread + centre for i, centre in enumerate(centres)]
    shuffled = list(blocks)
    order.shuffle(shuffled)
    truth = exact(torch.cat(blocks, 1))
    for sequence in (blocks, shuffled, blocks[::-1]):
        stats = empty(3, dtype)
        for block in sequence:
            merge_logits_(stats, block)
        tolerance = 8 * torch.finfo(dtype).eps * (1 + truth.abs())
        assert ((stats.lse2().double() - truth).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [-1e30, -1e4, -200.0, 0.0, 200.0, 1e4, 1e30])
def test_extreme_levels_neither_overflow_nor_vanish(level: float, dtype: torch.dtype) -> None:
    stats = empty(2, dtype)
    for _ in range(4):
        stats.merge_(torch.full((2,), level, dtype=dtype), torch.ones(2, dtype=dtype))
    assert torch.allclose(stats.lse2(), torch.full((2,), level + 2.0, dtype=dtype), rtol=1e-6)
    stats.merge_(torch.full((2,), -3e38, dtype=dtype), torch.ones(2, dtype=dtype))  # far below: cannot be seen
    assert torch.allclose(stats.lse2(), torch.full((2,), level + 2.0, dtype=dtype), rtol=1e-6)
    stats.merge_(torch.full((2,), 3e38, dtype=dtype), torch.ones(2, dtype=dtype))  # far above: all that is seen
    assert torch.equal(stats.lse2(), torch.full((2,), 3e38, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_merged_is_minus_infinity(dtype: torch.dtype) -> None:
    assert empty(3, dtype).lse2().tolist() == [-torch.inf] * 3
    assert empty(0, dtype).lse2().shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_nothing_into_nothing(dtype: torch.dtype) -> None:
    stats = empty(3, dtype)
    stats.merge_(torch.full((3,), lowest(dtype), dtype=dtype), torch.zeros(3, dtype=dtype))
    assert stats.lse2().tolist() == [-torch.inf] * 3 and not stats.total.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_nothing_changes_nothing(dtype: torch.dtype) -> None:
    stats, logits = empty(3, dtype), randn(3, 5, seed=0).to(dtype)
    merge_logits_(stats, logits)
    before = stats.lse2()
    stats.merge_(torch.full((3,), lowest(dtype), dtype=dtype), torch.zeros(3, dtype=dtype))
    assert torch.equal(stats.lse2(), before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_merge_is_the_logits_own(dtype: torch.dtype) -> None:
    stats, logits = empty(4, dtype), 50 * randn(4, 7, seed=0).to(dtype)
    merge_logits_(stats, logits)
    assert torch.allclose(stats.lse2().double(), exact(logits), rtol=8 * torch.finfo(dtype).eps)


def test_a_shift_shared_by_all_serves_as_level() -> None:
    logits = randn(4, 7, seed=0)
    shared, own = empty(4), empty(4)
    for block in logits.split(3, 1):
        shared.merge_(0.0, block.exp2().sum(1))
        merge_logits_(own, block)
    assert torch.allclose(shared.lse2(), own.lse2(), rtol=1e-6)


def test_views_write_through() -> None:
    stats, logits = empty(6), randn(6, 5, seed=0)
    merge_logits_(stats.at(slice(2, 5)), logits[2:5])
    result = stats.lse2()
    assert result[[0, 1, 5]].tolist() == [-torch.inf] * 3
    assert torch.allclose(result[2:5].double(), exact(logits[2:5]), rtol=1e-6)


def test_nan_is_passed_on() -> None:
    stats = empty(2)
    stats.merge_(torch.tensor([torch.nan, 0.0]), torch.tensor([torch.nan, 1.0]))
    stats.merge_(torch.tensor([5.0, 5.0]), torch.ones(2))
    assert stats.lse2().isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slack_gives_back_what_rounding_took(dtype: torch.dtype) -> None:
    """Four equal logits near 1e6 in fp32: of log2(4) = 2 steps of 0.06 are left, yet the weights must be 1/4."""
    logits = torch.tensor([[1e6, 0.3, -55.0, 1e9]], dtype=dtype).expand(4, 4) + 1 / 3
    stats = empty(4, dtype)
    for row in logits:
        stats.merge_(row.clone(), torch.ones(4, dtype=dtype))
    lse2, slack = stats.finish()
    weights = (logits - lse2).exp2() * slack
    assert torch.allclose(weights, torch.full_like(weights, 0.25), rtol=4 * torch.finfo(dtype).eps)
    above = (lse2 - logits[0]) - slack.log2()
    assert torch.allclose(above, torch.full_like(above, 2.0), rtol=8 * torch.finfo(dtype).eps)


def test_a_sum_of_one_term_is_the_term() -> None:
    logits = torch.linspace(-40, 40, 160)
    stats = Stats(torch.zeros(160), logits.exp2())
    lse2, slack = stats.finish(logits)
    assert torch.equal(lse2, logits) and torch.equal(slack, torch.ones(160))
    assert not torch.equal(stats.lse2(), logits)  # rounding alone would not give it
    more = Stats(torch.zeros(160), 3 * logits.exp2())
    assert (more.finish(logits)[0] > logits).all()
    nothing = empty(3, torch.float32).finish(torch.full((3,), -torch.inf))
    assert nothing[0].tolist() == [-torch.inf] * 3 and nothing[1].tolist() == [1.0] * 3


@pytest.mark.parametrize("with_term", [True, False])
def test_a_level_of_0_for_all(with_term: bool) -> None:
    total = torch.tensor([0.0, 1e-3, 1.0, 700.0])
    term = torch.tensor([-torch.inf, -12.0, 0.0, 3.0]) if with_term else None
    found, expected = (Stats(level, total).finish(term) for level in (torch.zeros(()), torch.zeros(4)))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    parts = SideParts(torch.zeros(()), total).spread()
    assert parts.level is not None and torch.equal(parts.level, torch.zeros(4))
    assert parts.spread() is parts
    assert SideParts().spread() == SideParts()

"""Plans of chunks: pure integers."""

import itertools

import pytest
import torch

from contratile.grad_cache.plan import Padding, Piece, by_length, by_rows, in_pieces


def rows_of(plan: list[Piece]) -> list[list[int]]:
    return [piece.rows.tolist() for piece in plan]


def test_rows_in_order() -> None:
    assert rows_of(by_rows(7, 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert [piece.span for piece in by_rows(4, 3)] == [slice(0, 3), slice(3, 4)]


def test_longest_first_and_equal_ones_in_order() -> None:
    plan = by_length(torch.tensor([5, 2, 9, 2, 5]), size=2)
    assert rows_of(plan) == [[2, 0], [4, 1], [3]]
    assert [piece.length for piece in plan] == [9, 5, 2]
    assert [piece.cost for piece in plan] == [18, 10, 2]


def test_equal_lengths_stay_where_they_are() -> None:
    plan = by_length(torch.full((10,), 6), size=4)
    assert [piece.span for piece in plan] == [slice(0, 4), slice(4, 8), slice(8, 10)]


@pytest.mark.parametrize("rows", [[3, 1, 2], [1, 3], [2, 1], [0, 2, 1, 3]])
def test_no_slice_of_rows_that_do_not_follow_each_other(rows: list[int]) -> None:
    assert Piece(torch.tensor(rows), 0).span is None


@pytest.mark.parametrize("tokens", [1, 7, 40, 1000])
@pytest.mark.parametrize("size", [3, 1000])
def test_a_budget_of_tokens(tokens: int, size: int) -> None:
    """Every row once; no chunk above the budget unless it is a row of its own; no chunk that could be larger."""
    lengths = torch.randint(1, 30, (100,), generator=torch.Generator().manual_seed(tokens))
    plan = by_length(lengths, size=size, tokens=tokens)
    assert sorted(itertools.chain(*rows_of(plan))) == list(range(100))
    for piece in plan:
        assert piece.length == lengths[piece.rows].max()
        assert piece.cost <= tokens or len(piece.rows) == 1
        assert len(piece.rows) <= size
    for piece in plan[:-1]:
        assert len(piece.rows) == size or piece.cost + piece.length > tokens


def test_buckets() -> None:
    plan = by_length(torch.tensor([1, 7, 8, 9, 40]), size=2, tokens=32, buckets=(8, 16))
    assert [(piece.rows.tolist(), piece.length) for piece in plan] == [([4], 40), ([3, 2], 16), ([1, 0], 8)]


def cheapest(lengths: list[int], overhead: int, size: int, tokens: int) -> int:
    """The least that chunks of these rows, longest first, can cost: tried one by one."""
    if not lengths:
        return 0
    most = min(size, max(1, tokens // lengths[0]))
    return min(
        rows * lengths[0] + overhead + cheapest(lengths[rows:], overhead, size, tokens)
        for rows in range(1, min(most, len(lengths)) + 1)
    )


@pytest.mark.parametrize("overhead", [0, 3, 20, 1000])
@pytest.mark.parametrize(("size", "tokens"), [(3, 1000), (100, 24), (4, 24), (100, 1000)])
def test_chunks_that_cost_least(overhead: int, size: int, tokens: int) -> None:
    """Padding and further chunks are weighed against each other; both limits hold."""
    for seed in range(5):
        lengths = torch.randint(1, 10, (12,), generator=torch.Generator().manual_seed(seed))
        plan = by_length(lengths, size=size, tokens=tokens, overhead=overhead)
        assert sorted(itertools.chain(*rows_of(plan))) == list(range(12))
        assert all(len(x.rows) <= size and (x.cost <= tokens or len(x.rows) == 1) for x in plan)
        least = cheapest(sorted(lengths.tolist(), reverse=True), overhead, size, tokens)
        assert sum(piece.cost + overhead for piece in plan) == least
    assert len(plan) == len(by_length(lengths, size=size, tokens=tokens)) or overhead < 1000


def test_equal_lengths_fill_their_chunks() -> None:
    plan = by_length(torch.full((10,), 6), size=4, overhead=0)
    assert [piece.span for piece in plan] == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_what_was_saved() -> None:
    padding = Padding(100, 110, 320).plus(Padding(100, 100, 280))
    assert padding == (200, 210, 600)
    assert str(padding) == "1.05 tokens per real token (as given: 3.00)"
    assert str(Padding()) == "not cut by length"


def test_more_chunks_of_the_same_rows() -> None:
    """The most expensive chunks are halved, in place; chunks of one row stay."""
    plan = by_length(torch.tensor([9, 2, 2, 2, 1]), size=2)
    more = in_pieces(plan, 4)
    assert [piece.rows.tolist() for piece in plan] == [[0, 1], [2, 3], [4]]
    assert [(piece.rows.tolist(), piece.length) for piece in more] == [([0], 9), ([1], 9), ([2, 3], 2), ([4], 1)]
    assert in_pieces(plan, 2) == plan and [len(piece.rows) for piece in in_pieces(plan, 9)] == [1] * 5

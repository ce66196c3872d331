"""The pair rule tile by tile against one dense mask."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from contratile.engine.plan import Tile, plan_tiles
from contratile.engine.rule import PairRule, Places
from tests.helpers import labels_of

SHAPES = [(1, 1), (5, 5), (9, 17), (17, 9)]
TILES = [1, 2, 4, 7, 100]


def left_out_naively(n: int, m: int, rule: PairRule) -> Tensor:
    left_out = torch.zeros(n, m, dtype=torch.bool)
    for i, j in product(range(n), range(m)):
        if rule.query_ids is not None and rule.key_ids is not None:
            positive = rule.labels is not None and rule.labels[i] == j
            left_out[i, j] = bool(rule.query_ids[i] == rule.key_ids[j]) and not positive
        if rule.exclude_self and i == j:
            left_out[i, j] = True
    return left_out


def rules(n: int, m: int) -> dict[str, PairRule]:
    labels = labels_of(n, m, seed=1)
    ids: dict[str, Any] = {"query_ids": labels_of(n, 4, seed=2), "key_ids": labels_of(m, 4, seed=3)}
    return {
        "nothing": PairRule(labels=labels),
        "self": PairRule(exclude_self=True),
        "ids": PairRule(**ids),
        "ids and labels": PairRule(labels=labels, **ids),
        "everything": PairRule(labels=labels, exclude_self=True, **ids),
    }


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "m"), SHAPES)
@pytest.mark.parametrize("name", rules(1, 1))
def test_exclusions(name: str, n: int, m: int, tile: int) -> None:
    rule = rules(n, m)[name]
    scores = torch.arange(float(n * m)).view(n, m)
    expected = scores.masked_fill(left_out_naively(n, m, rule), -torch.inf)
    for piece in plan_tiles(n, m, 1, tile=tile).tiles():
        rule.exclude_(scores[piece.rows, piece.cols], piece)
    assert torch.equal(scores, expected)


@pytest.mark.parametrize("name", ["ids and labels", "everything"])
def test_exclusions_are_not_all_or_nothing(name: str) -> None:
    """The masks that the test above compares do leave out some pairs, and do spare some positives."""
    rule = rules(9, 17)[name]
    left_out = left_out_naively(9, 17, rule)
    assert left_out.any() and not left_out.all()
    assert rule.labels is not None and rule.query_ids is not None and rule.key_ids is not None
    assert (rule.query_ids == rule.key_ids[rule.labels]).any()


def check_place(place: object, piece: Tile) -> None:
    assert isinstance(place, Places)
    height, width = piece.shape
    assert place.column.shape == (height, 1) and (place.inside is None or place.inside.shape == (height,))
    assert place.column.min() >= 0 and place.column.max() < width  # safe to gather with, inside or not


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_positives(n: int, m: int, tile: int) -> None:
    labels = labels_of(n, m, seed=1)
    before, rule = labels.clone(), PairRule(labels=labels)
    found = torch.zeros(n, m, dtype=torch.int)
    for piece in plan_tiles(n, m, 1, tile=tile).tiles():
        for place in rule.places(found[piece.rows, piece.cols], piece):
            check_place(place, piece)
            place.put_(place.get() + 1)
    expected = torch.zeros(n, m, dtype=torch.int).scatter_(1, labels.unsqueeze(1), 1)
    assert torch.equal(found, expected)
    assert torch.equal(labels, before)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "m"), [(7, 7), (9, 17)])
def test_pairs_are_positives_on_the_diagonal(n: int, m: int, tile: int) -> None:
    labels = torch.arange(n)
    paired, rule = PairRule(labels=labels, paired=True), PairRule(labels=labels)
    scores, values = torch.randn(n, m), torch.randn(n)
    read, written, expected = torch.zeros(n), scores.clone(), scores.clone()
    for piece in plan_tiles(n, m, 1, tile=tile).tiles():
        for at in paired.places(scores[piece.rows, piece.cols], piece):
            read[at.rows] = at.get()
        for at in paired.places(written[piece.rows, piece.cols], piece):
            at.put_(values[at.rows])
        for place in rule.places(expected[piece.rows, piece.cols], piece):
            place.put_(values[place.rows])
    assert torch.equal(read, scores.diagonal())
    assert torch.equal(written, expected)
    of_key = torch.randn(m)
    assert torch.equal(paired.of_positives(of_key), rule.of_positives(of_key))


def test_a_mirrored_tile_of_pairs_has_its_diagonal_once_per_side() -> None:
    rule = PairRule(labels=torch.arange(4), paired=True)
    tile = Tile(slice(0, 4), slice(0, 4), (4, 4), 0, 16, mirrored=True)
    scores = torch.zeros(4, 4)
    for at in rule.places(scores, tile):
        at.put_(at.get() + 1)
    assert torch.equal(scores, 2 * torch.eye(4))


def test_ids_come_for_both_sides() -> None:
    with pytest.raises(AssertionError, match="both sides"):
        PairRule(query_ids=torch.zeros(3, dtype=torch.long))

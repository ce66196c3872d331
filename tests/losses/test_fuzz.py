"""Random calls of every loss against the rule of precision, and metrics of whole-number codes against integers."""

import pytest
import torch
from torch import Tensor

import contratile as ct
from tests.helpers import DTYPES
from tests.losses import fuzz
from tests.losses.fuzz_cases import KINDS, LOSSES, Draw, draw


def test_random_calls_are_as_precise_as_the_naive_formula() -> None:
    broken = fuzz.violations(300, seed=1)
    assert not broken, "\n".join(map(str, broken[:10]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_calls_are_as_precise_as_the_naive_formula() -> None:
    broken = fuzz.violations(20_000, seed=0)
    assert not broken, "\n".join(map(str, broken[:25]))


def test_a_case_can_be_drawn_again() -> None:
    one, two = draw(3, 14), draw(3, 14)
    assert str(one) == str(two)
    assert all(torch.equal(x, y) for x, y in zip(one.leaves.values(), two.leaves.values(), strict=True))


def test_everything_is_drawn() -> None:
    cases = [draw(0, number) for number in range(600)]
    assert {case.loss for case in cases} == set(LOSSES)
    assert {case.dtype for case in cases} == set(DTYPES)
    assert {case.kind for case in cases} == set(KINDS)
    given = {name for case in cases for name in (*case.leaves, *case.constants)}
    assert given >= {"labels", "ids", "extra_ids", "hard_mask", "margin", "label_smoothing", "weights", "reduction"}
    assert given >= {"extra_keys", "hard_negatives", "scale", "bias", "temperature"}
    assert given >= {"directions", "partition_mode", "hardness_mode", "share_hard_negatives", "hard_ids", "key_bias"}
    assert given >= {"matryoshka_dims", "teacher", "guide", "extra_guide", "hard_guide", "in_batch_negatives"}
    assert any("extra_keys" in case.leaves and len(case.leaves["extra_keys"]) == 0 for case in cases)
    assert any(case.constants.get("key", case) is None for case in cases)
    assert any(not x.is_contiguous() for case in cases for x in case.leaves.values())


@pytest.mark.parametrize("spoil", [1e-4, float("nan")])
def test_the_rule_bites(monkeypatch: pytest.MonkeyPatch, spoil: float) -> None:
    """A loss that is off by little, or not finite, breaks it."""
    exact = ct.clip_loss
    monkeypatch.setattr(ct, "clip_loss", lambda image, *args, **keywords: exact(image * (1 + spoil), *args, **keywords))
    cases = [
        case
        for case in (draw(5, number) for number in range(200))
        if case.loss == "clip_loss" and len(case.leaves["image"]) > 9
    ]
    assert any(not v.ratio <= 1 for case in cases for v in fuzz.judge(case))


# --- metrics of codes ---------------------------------------------------------------------------------------------


def codes(r: Draw, n: int, d: int, dtype: torch.dtype) -> Tensor:
    return r.rows(n, d, r.one(["codes", "integers"]), dtype)


def ranks_of(scores: list[list[int]], positives: list[list[int]]) -> list[int]:
    """The rank of each row's best positive: 1 + how many score strictly higher."""
    best = [max(row[at] for at in own) for row, own in zip(scores, positives, strict=True) if own]
    rows = [row for row, own in zip(scores, positives, strict=True) if own]
    return [1 + sum(score > top for score in row) for row, top in zip(rows, best, strict=True)]


def summary(name: str, ranks: list[int]) -> dict[str, float]:
    middle = sorted(ranks)
    found = {f"{name}_R@{k}": sum(rank <= k for rank in ranks) / len(ranks) for k in (1, 5, 10)}
    found[f"{name}_mean_rank"] = sum(ranks) / len(ranks)
    found[f"{name}_median_rank"] = (middle[(len(ranks) - 1) // 2] + middle[len(ranks) // 2]) // 2
    return found


@pytest.mark.parametrize("part", range(10))
def test_metrics_of_codes_are_those_of_integers(part: int) -> None:
    """1,000 sets of features whose products are whole numbers: ties are ties, whatever the dtype and the tiles."""
    wrong = []
    for number in range(100 * part, 100 * part + 100):
        r = Draw(7, number)
        n, d, dtype, tile = r.size(), r.size(40), r.one(DTYPES), r.one([None, 16, 17, 5])
        m = r.one([n, n, r.size()])
        image, text = codes(r, n, d, dtype), codes(r, m, d, dtype)
        image_of_text = None if m == n and r.chance(0.7) else r.integers(0, n, m)
        got = ct.retrieval_metrics(image, text, image_of_text=image_of_text, tile=tile)
        scores = (text.long() @ image.long().T).tolist()
        owner = list(range(m)) if image_of_text is None else image_of_text.tolist()
        by_image = [list(column) for column in zip(*scores, strict=True)]
        texts = [[at for at, whose in enumerate(owner) if whose == i] for i in range(n)]
        true = summary("image_to_text", ranks_of(by_image, texts))
        true |= summary("text_to_image", ranks_of(scores, [[at] for at in owner]))
        if any(got[name] != pytest.approx(value, rel=1e-12) for name, value in true.items()):
            wrong.append(number)
    assert not wrong, f"{len(wrong)} of 100"


def test_zero_shot_metrics_of_codes_are_those_of_integers() -> None:
    for number in range(100):
        r = Draw(8, number)
        n, classes, d, dtype = r.size(), r.size(), r.size(40), r.one(DTYPES)
        image, names, targets = codes(r, n, d, dtype), codes(r, classes, d, dtype), r.integers(0, classes, n)
        got = ct.zero_shot_metrics(image, names, targets, tile=r.one([None, 16, 17]))
        ranks = ranks_of((image.long() @ names.long().T).tolist(), [[at] for at in targets.tolist()])
        for k in (1, 5):
            assert got[f"zero_shot_top{k}"] == pytest.approx(sum(rank <= k for rank in ranks) / n, rel=1e-12), number


@pytest.mark.parametrize("scale", [0.1, 1.0, 14.3, 100.0])
def test_statistics_of_codes_are_those_of_integers(scale: float) -> None:
    """Top-1 and ranks that a loss reports, at scales that are no power of two."""
    for number in range(25):
        r = Draw(9, number)
        n, d, dtype = r.size(), r.size(40), r.one(DTYPES)
        image, text = codes(r, n, d, dtype), codes(r, n, d, dtype)
        _, stats = ct.clip_loss(image, text, scale, return_stats=True, tile=r.one([None, 16, 17]), group=None)
        scores = (image.long() @ text.long().T).tolist()
        own = [[at] for at in range(n)]
        rows, cols = ranks_of(scores, own), ranks_of([list(column) for column in zip(*scores, strict=True)], own)
        for ranks, top1, mean in ((rows, stats.row_top1, stats.row_rank), (cols, stats.col_top1, stats.col_rank)):
            assert top1 is not None and mean is not None
            assert float(top1) == pytest.approx(sum(rank == 1 for rank in ranks) / n, rel=1e-6), number
            assert float(mean) == pytest.approx(sum(ranks) / n, rel=1e-6), number

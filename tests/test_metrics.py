"""Tiled metrics: open_clip's numbers on the same features, several texts of an image, ties, memory."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import contratile as ct
from tests.torchvision_repair import repair_torchvision


def pairs(n: int, d: int, *, noise: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    image = F.normalize(torch.randn(n, d, generator=random), dim=1)
    text = F.normalize(image + noise * torch.randn(n, d, generator=random) / d**0.5, dim=1)
    return image, text


@pytest.mark.parametrize(("n", "tile"), [(1, None), (37, 8), (300, None), (301, 64)])
def test_same_numbers_as_open_clip(n: int, tile: int | None) -> None:
    repair_torchvision()
    from open_clip_train.train import get_clip_metrics

    image, text = pairs(n, 16, noise=2.0)
    theirs = get_clip_metrics(image, text, torch.tensor(1.0))
    ours = ct.retrieval_metrics(image, text, tile=tile)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value == pytest.approx(float(theirs[name]), abs=1e-12), name


def test_several_texts_of_an_image() -> None:
    image, _ = pairs(23, 8)
    random = torch.Generator().manual_seed(1)
    image_of_text = torch.randint(0, 20, (90,), generator=random)  # images 20, 21, 22 have no text
    text = F.normalize(image[image_of_text] + 0.5 * torch.randn(90, 8, generator=random), dim=1)
    scores = text @ image.T
    to_image = (scores > scores.gather(1, image_of_text[:, None])).sum(1) + 1
    ranks = []
    for i in range(20):
        own = image_of_text == i
        if own.any():
            ranks.append(int((scores[~own, i] > scores[own, i].max()).sum()) + 1)
    found = ct.retrieval_metrics(image, text, (1, 3), image_of_text=image_of_text, tile=7)
    assert found["text_to_image_R@3"] == pytest.approx((to_image <= 3).double().mean().item())
    assert found["image_to_text_R@1"] == pytest.approx(sum(r <= 1 for r in ranks) / len(ranks))
    assert found["image_to_text_mean_rank"] == pytest.approx(sum(ranks) / len(ranks))
    assert 0 < found["image_to_text_R@1"] < 1


def test_of_equal_scores_the_positive_is_the_first() -> None:
    same = torch.ones(5, 4)
    assert ct.retrieval_metrics(same, same)["text_to_image_R@1"] == 1
    better = torch.tensor([[1.0, 0], [1, 0], [0, 1]])
    assert ct.retrieval_metrics(better, better[[2, 1, 2]])["text_to_image_mean_rank"] == pytest.approx((2 + 1 + 1) / 3)


def test_zero_shot() -> None:
    image, _ = pairs(200, 16)
    classes, _ = pairs(11, 16, seed=3)
    targets = torch.randint(0, 11, (200,), generator=torch.Generator().manual_seed(2))
    best = (image @ classes.T).topk(5).indices
    found = ct.zero_shot_metrics(image, classes, targets, tile=13)
    assert found["zero_shot_top1"] == pytest.approx((best[:, 0] == targets).double().mean().item())
    assert found["zero_shot_top5"] == pytest.approx((best == targets[:, None]).any(1).double().mean().item())


def test_per_class_recall_is_balanced_accuracy() -> None:
    """Class by class in numpy; class 3 of 6 never occurs and does not count."""
    random = np.random.default_rng(0)
    image, classes = random.normal(size=(90, 8)), random.normal(size=(6, 8))
    targets = random.choice([0, 0, 0, 0, 1, 2, 4, 5], size=90)
    guess = (image @ classes.T).argmax(1)
    recalls = [float((guess[targets == c] == c).mean()) for c in (0, 1, 2, 4, 5)]
    given = torch.from_numpy(image), torch.from_numpy(classes), torch.from_numpy(targets)
    found = ct.zero_shot_metrics(*given, ks=(1,), tile=7)
    assert found["zero_shot_per_class"] == pytest.approx(np.mean(recalls), abs=1e-12)
    assert found["zero_shot_top1"] == pytest.approx(float((guess == targets).mean()), abs=1e-12)
    assert found["zero_shot_per_class"] != pytest.approx(found["zero_shot_top1"], abs=1e-3)


def average_precision(scores: "np.ndarray[Any, Any]", truth: "np.ndarray[Any, Any]") -> float:
    """Of one class: at every positive, how many of the images scored at least as high are positives."""
    found = [truth[scores >= score].mean() for score in scores[truth]]
    return float(sum(found) / max(1, truth.sum()))


@pytest.mark.parametrize("block", [None, 1, 3, 100])
def test_mean_average_precision(block: int | None) -> None:
    random = np.random.default_rng(1)
    image, classes = random.normal(size=(50, 8)), random.normal(size=(7, 8))
    truth = random.random((50, 7)) < 0.2
    truth[:, 2] = False  # a class without images
    expected = np.mean([average_precision(image @ classes[c], truth[:, c]) for c in range(7)])
    given = torch.from_numpy(image), torch.from_numpy(classes)
    for targets in (torch.from_numpy(truth), torch.from_numpy(truth.astype(np.int64))):
        assert ct.mean_average_precision(*given, targets, block=block) == pytest.approx(expected, abs=1e-12)
    assert 0.05 < expected < 0.9


def test_mean_average_precision_of_equal_scores_does_not_depend_on_their_order() -> None:
    """Features that are all alike reach the share of positives; some equal scores count as one threshold."""
    truth = torch.tensor([[1], [1], [0], [0], [0], [0]])
    same, one = torch.ones(6, 4), torch.ones(1, 4)
    assert ct.mean_average_precision(same, one, truth) == pytest.approx(2 / 6)
    assert ct.mean_average_precision(same, one, truth.flip(0)) == pytest.approx(2 / 6)
    levels = torch.tensor([[3.0], [2], [2], [2], [1], [1]])
    expected = average_precision(levels[:, 0].numpy(), truth[:, 0].numpy() > 0)
    assert ct.mean_average_precision(levels, torch.ones(1, 1), truth) == pytest.approx(expected)
    for turn in ([0, 3, 2, 1, 5, 4], [5, 4, 3, 2, 1, 0]):
        assert ct.mean_average_precision(levels[turn], torch.ones(1, 1), truth[turn]) == pytest.approx(expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_features_that_are_not_finite_have_no_metrics(value: float) -> None:
    image, classes = torch.eye(4), torch.eye(4)
    image[2, 1] = value
    assert all(map(math.isnan, ct.zero_shot_metrics(image, classes, torch.arange(4)).values()))
    assert math.isnan(ct.mean_average_precision(image, classes, torch.eye(4)))
    huge = torch.full((4, 4), 1e30)
    assert math.isnan(ct.mean_average_precision(huge, huge, torch.eye(4)))


@pytest.mark.parametrize("tile", [1, 5, 1000])
def test_nearest(tile: int) -> None:
    query, gallery = pairs(9, 8)[0], pairs(33, 8, seed=5)[0]
    scores, index = ct.nearest(query, gallery, 4, tile=tile)
    expected = (query @ gallery.T).topk(4)
    torch.testing.assert_close(scores, expected.values)
    assert torch.equal(index, expected.indices)
    assert ct.nearest(query, gallery[:2], 4)[0].shape == (9, 2)
    assert [x.shape for x in ct.nearest(query[:0], gallery, 4, tile=tile)] == [(0, 4), (0, 4)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nearest_puts_features_that_are_not_finite_last(value: float) -> None:
    gallery = torch.eye(4) + 0.1
    gallery[1, 2] = value
    scores, index = ct.nearest(torch.ones(1, 4), gallery, 4, tile=2)
    assert index[0, 3] == 1 and scores[0, 3] == -math.inf and scores[0, :3].isfinite().all()


@pytest.mark.parametrize("tile", [0, -1])
def test_nearest_wants_a_tile(tile: int) -> None:
    with pytest.raises(ValueError, match="tile: expected"):
        ct.nearest(torch.eye(3), torch.eye(3), 1, tile=tile)


def test_errors_teach() -> None:
    image, text = pairs(6, 4)
    with pytest.raises(ValueError, match=r"image and text: expected equally many rows.*image_of_text="):
        ct.retrieval_metrics(image, text[:5])
    with pytest.raises(ValueError, match="image_of_text: expected indices from 0 to 5"):
        ct.retrieval_metrics(image, text, image_of_text=torch.full((6,), 6))
    with pytest.raises(ValueError, match=r"targets: expected shape \[6\]"):
        ct.zero_shot_metrics(image, text, torch.zeros(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"targets: expected shape \[6, 6\].*got \[6\]. For one class per image"):
        ct.mean_average_precision(image, text, torch.zeros(6))
    with pytest.raises(ValueError, match=r"targets: expected 0 and 1, got other values"):
        ct.mean_average_precision(image, text, torch.full((6, 6), 0.5))
    with pytest.raises(ValueError, match=r"block: expected at least 1"):
        ct.mean_average_precision(image, text, torch.eye(6), block=0)


@pytest.mark.slow
def test_two_hundred_thousand() -> None:
    """200k x 200k scores would take 160 GB."""
    code = (
        "import resource, torch, contratile as ct\n"
        "image = torch.nn.functional.normalize(torch.randn(200_000, 32), dim=1)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = ct.retrieval_metrics(image, image)\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert found['text_to_image_R@1'] == found['image_to_text_R@1'] == 1, found\n"
        "print((after - before) / 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 160

"""One warning for features that were not normalised, and none for those that may be as they are."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile.losses import normalized
from tests.helpers import features, randn

RAW, OTHER = randn(40, 512, seed=1), randn(40, 512, seed=2)
LABELS = torch.arange(40) // 2
LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "clip_loss": lambda a, b: ct.clip_loss(a, b, 100.0),
    "a learned scale": lambda a, b: ct.clip_loss(a, b, torch.tensor(100.0, requires_grad=True)),
    "info_nce": lambda a, b: ct.info_nce(a, b, 100.0),
    "nt_xent": lambda a, b: ct.nt_xent(a, b),
    "sup_con": lambda a, b: ct.sup_con(a, LABELS),
    "siglip_loss": lambda a, b: ct.siglip_loss(a, b, 10.0, -10.0),
    "ClipLoss": lambda a, b: ct.ClipLoss()(a, b, 100.0),
}


@pytest.fixture(autouse=True)
def _a_new_process() -> Iterator[None]:
    before = set(normalized._looked)
    normalized._looked.clear()
    yield
    normalized._looked.clear()
    normalized._looked.update(before)


def warned(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert all(issubclass(x.category, ct.NotNormalizedWarning) for x in found), found  # and no other
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_one_warning(name: str) -> None:
    """For this and for all later calls, of any loss."""
    (found,) = warned(lambda: LOSSES[name](RAW, OTHER))
    text = str(found.message)
    assert "expected features of norm 1 for a scale of" in text and "got norms around 2" in text
    assert "normalize(x, dim=1)" in text and "category=contratile.NotNormalizedWarning" in text
    for loss in LOSSES.values():
        assert not warned(partial(loss, RAW, OTHER))


def test_it_points_at_the_call() -> None:
    (found,) = warned(lambda: ct.clip_loss(RAW, OTHER, 100.0))
    assert found.filename == __file__


@pytest.mark.parametrize("name", LOSSES)
def test_none_for_normalised_features(name: str) -> None:
    assert not warned(lambda: LOSSES[name](features(40, 512, seed=1), features(40, 512, seed=2)))


@pytest.mark.parametrize(
    ("norm", "scale"), [(20.0, 1.0), (0.1, 1000.0), (1.3, 100.0), (4.0, 10.0), (30.0, 1 / 16)],
    ids=["products", "small", "almost", "moderate", "attention"],
)  # fmt: skip
def test_none_for_scores_that_may_be_meant(norm: float, scale: float) -> None:
    image, text = (features(40, 16, seed=seed, norm=norm) for seed in (1, 2))
    assert not warned(lambda: ct.clip_loss(image, text, scale))


def test_some_rows_do_not_make_it() -> None:
    """A few outliers among normalised rows are somebody's business, and so is a pair of log-sum-exps."""
    image, text = features(40, 16, seed=1), features(40, 16, seed=2)
    image[:3] *= 1000
    assert not warned(lambda: ct.clip_loss(image, text, 100.0))
    assert not warned(lambda: ct.pair_lse(RAW, OTHER, 100.0))


def test_where_nobody_may_look() -> None:
    assert not warned(lambda: ct.clip_loss(RAW.to("meta"), OTHER.to("meta"), 100.0))
    assert not normalized._looked
    dense = lambda x: ct.clip_loss(x, OTHER, 100.0, backend="dense")  # noqa: E731
    assert not warned(lambda: torch.func.grad(dense)(RAW))


def test_it_can_be_turned_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=ct.NotNormalizedWarning)
        ct.clip_loss(RAW, OTHER, 100.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none(bad: float) -> None:
    """They are the loss's business."""
    warned(lambda: ct.clip_loss(RAW * bad, OTHER, 100.0))
    warned(lambda: ct.nt_xent(RAW, OTHER, torch.tensor(0.0)))

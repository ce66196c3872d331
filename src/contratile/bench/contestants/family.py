"""The losses of the family, each with the package people use today, ours, and the reference in fp32.

    case = CASES["nt_xent"]
    problem = case.problem(1024, 256, scale=14.3)
    value = case.contestants["lightly"].load()(*problem.args)

Everybody gets the same unit features. Packages that take cosines normalise them again, as they mean to; what they
leave is the gradient of that, and so is the one they are compared with. A temperature is 1 / scale.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contratile import clip_loss, info_nce, nt_xent, reference, siglip_loss, sup_con
from contratile.bench.contestants.loss import (
    CLIP,
    MINI_BATCH,
    Case,
    Contestant,
    Loss,
    Problem,
    Step,
    backward,
    cure_torchvision,
    sentence_transformers_cached,
)

CLASS = 8
"""Examples of each class in a labelled problem."""
BIAS = -10.0
"""That SigLIP starts with."""
MARGIN = 0.1
SYMMETRIC = 2
"""Products where the scores are: half the tiles of each of four."""


def labelled(n: int, d: int, *, scale: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> Problem:
    """N unit features, those of a class a little more alike than others, their labels, and a scale."""
    random = torch.Generator().manual_seed(n + d + seed)
    labels = torch.arange(n) % max(1, n // CLASS)
    centres = F.normalize(torch.randn(n, d, generator=random), dim=1)[labels]
    z = torch.randn(n, d, generator=random).mul_(2 / d**0.5).add_(centres)
    z = F.normalize(z, dim=1, out=z).to(dtype).requires_grad_()
    return Problem((z, labels, torch.tensor(scale, requires_grad=True)))


def biased(n: int, d: int, *, scale: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> Problem:
    """Pairs, a scale and a bias."""
    pairs = Problem.make(n, d, scale=scale, dtype=dtype, seed=seed)
    return Problem((*pairs.args, torch.tensor(BIAS, requires_grad=True)))


def normalised(loss: Loss) -> Loss:
    """The loss of features that it normalises."""
    return lambda *args: loss(*(F.normalize(x, dim=1) if x.ndim == 2 else x for x in args))


def cooled(loss: Loss) -> Loss:
    """A loss that takes a temperature, given a scale."""
    return lambda a, b, scale, **keywords: loss(a, b, 1 / scale, **keywords)


def _fixed(make: Callable[[float], Any]) -> Step:
    """The step of a module whose scale is a number of its own."""
    module = cache(make)
    return backward(lambda a, b, scale: module(scale.item())(a, b))


def _lightly() -> Step:
    cure_torchvision()
    from lightly.loss import NTXentLoss

    return _fixed(lambda scale: NTXentLoss(temperature=1 / scale))


def _pytorch_metric_learning() -> Step:
    from pytorch_metric_learning.losses import SupConLoss

    return _fixed(lambda scale: SupConLoss(temperature=1 / scale))


def _open_clip() -> Step:
    cure_torchvision()
    from open_clip.loss import SigLipLoss

    return backward(SigLipLoss())


def _sentence_transformers() -> Step:
    cure_torchvision()
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model: Any = torch.nn.Sequential(torch.nn.Identity())  # embeddings are given: no model is run
    both: Any = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}

    def make(scale: float) -> Loss:
        loss = MultipleNegativesRankingLoss(model, scale=scale, **both)
        # What its forward does with the embeddings of two columns of sentences; it ignores labels.
        return lambda query, doc: loss.compute_loss_from_embeddings([query, doc], torch.empty(0))

    return _fixed(make)


def _info_nce_pytorch() -> Step:
    from info_nce import InfoNCE

    return _fixed(lambda scale: InfoNCE(temperature=1 / scale))


def _ours(loss: Loss, *, about: str, views: int = 1, products: int = 4) -> list[Contestant]:
    """Without and with room for all tiles."""

    def load() -> Step:
        return backward(partial(loss, group=None))

    def load_cached() -> Step:
        def cached(*args: Tensor) -> Tensor:
            return loss(*args, group=None, cache_bytes=4 * (views * len(args[0])) ** 2)

        return backward(cached)

    kept = views**2 * (0.5 if products == SYMMETRIC else 1.0)
    return [
        Contestant(name="contratile", load=load, about=about, linear=16),
        Contestant(
            name="contratile_cached", load=load_cached, about="with cache_bytes for all tiles", matrices=kept, linear=16
        ),
    ]


def _option(name: str, option: Callable[[int], dict[str, Any]], about: str) -> Contestant:
    """`info_nce` with an option, given the number of queries."""

    def bound(loss: Loss) -> Loss:
        return lambda query, key, scale, **how: loss(query, key, scale, **option(len(query)), **how)

    def load() -> Step:
        return backward(partial(bound(info_nce), group=None))

    return Contestant(name=name, load=load, about=about, oracle=bound(reference.info_nce), linear=32)


def _case(name: str, oracle: Loss, contestants: list[Contestant], *, dense: float, **facts: Any) -> Case:
    """A case, the reference among its contestants; `dense` is the number of matrices that this one holds."""
    formula = Contestant(name="dense", load=lambda: backward(oracle), about="the reference in fp32", matrices=dense)
    everybody = {contestant.name: contestant for contestant in [*contestants, formula]}
    return Case(name=name, contestants=everybody, oracle=oracle, **facts)


_NT_XENT = cooled(reference.nt_xent)
_SUP_CON = cooled(reference.sup_con)

FAMILY = (
    _case(
        "nt_xent",
        _NT_XENT,
        [
            *_ours(cooled(nt_xent), about="nt_xent: upper triangle of 2N x 2N scores", views=2, products=SYMMETRIC),
            Contestant(
                name="lightly",
                load=_lightly,
                about="NTXentLoss(temperature): four N x N blocks, cut, joined",
                matrices=18.4,
                package="lightly",
                oracle=normalised(_NT_XENT),
            ),
        ],
        dense=36.0,
        views=2,
        products=SYMMETRIC,
    ),
    _case(
        "sup_con",
        _SUP_CON,
        [
            *_ours(cooled(sup_con), about="sup_con: upper triangle of N x N scores", products=SYMMETRIC),
            Contestant(
                name="pytorch_metric_learning",
                load=_pytorch_metric_learning,
                about="SupConLoss(temperature), cosines by its default",
                matrices=14.0,
                package="pytorch-metric-learning",
                oracle=normalised(_SUP_CON),
            ),
        ],
        dense=11.1,
        problem=labelled,
        products=SYMMETRIC,
    ),
    _case(
        "siglip",
        reference.siglip_loss,
        [
            *_ours(siglip_loss, about="siglip_loss"),
            Contestant(
                name="open_clip", load=_open_clip, about="SigLipLoss()", matrices=9.2, package="open_clip_torch"
            ),
        ],
        dense=11.0,
        problem=biased,
    ),
    _case(
        "multiple_negatives",
        reference.clip_loss,
        [
            *_ours(clip_loss, about="clip_loss"),
            Contestant(
                name="sentence_transformers",
                load=_sentence_transformers,
                about="MultipleNegativesRankingLoss, both directions averaged, cosines by its default",
                matrices=7.5,
                package="sentence-transformers",
                oracle=normalised(reference.clip_loss),
            ),
            Contestant(
                name="sentence_transformers_cached",
                load=sentence_transformers_cached,
                about=f"the loss stage of CachedMultipleNegativesRankingLoss, mini-batch {MINI_BATCH}",
                linear=11 * MINI_BATCH,
                package="sentence-transformers",
            ),
        ],
        dense=13.4,
    ),
    _case(
        "info_nce",
        reference.info_nce,
        [
            *_ours(info_nce, about="info_nce"),
            _option("contratile_ids", lambda n: {"ids": torch.arange(n) // 2}, "info_nce with ids, two pairs of each"),
            _option("contratile_margin", lambda n: {"margin": MARGIN}, f"info_nce with margin={MARGIN}"),
            Contestant(
                name="info_nce_pytorch",
                load=_info_nce_pytorch,
                about="InfoNCE(temperature), cosines",
                matrices=3.2,
                package="info-nce-pytorch",
                oracle=normalised(reference.info_nce),
            ),
        ],
        dense=7.1,
    ),
)
CASES = {case.name: case for case in (CLIP, *FAMILY)}

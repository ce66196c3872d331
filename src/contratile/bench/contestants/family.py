"""Contestants of the other losses: ours, the package people use today, and the dense reference in fp32.

    case = CASES["nt_xent"]
    problem = case.problem(1024, 256, scale=14.3)
    value = case.contestants["lightly"].load()(*problem.args)

All contestants get the same unit features. Packages that use cosine similarity normalise them again, so they are
compared with the gradient through that normalisation. A temperature is 1 / scale.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contratile import clip_loss, info_nce, nt_xent, reference, siglip_loss, sup_con
from contratile.bench.contestants.beside import (
    GIST_MINI_BATCH,
    GUIDE,
    GUIDED,
    STUDENT,
    TEACHER,
    TEACHER_WIDTH,
    cached_gist,
    distilled,
    gist,
    gist_dense,
    gist_products,
    guided,
    open_clip_distill,
    taught,
)
from contratile.bench.contestants.directions import PAIRS, TRIPLETS, gte, gte_hard, theirs, triplets
from contratile.bench.contestants.family_packages import (
    biased,
    cooled,
    fixed_scale,
    info_nce_pytorch,
    labelled_problem,
    lightly_nt_xent,
    metric_learning_sup_con,
    multiple_negatives,
    normalised,
    open_clip_siglip,
    siglip_kernel,
    unpaired,
)
from contratile.bench.contestants.loss import (
    CLIP,
    MINI_BATCH,
    Case,
    LossContestant,
    LossFunction,
    LossStep,
    sentence_transformers_cached,
    with_backward,
)
from contratile.bench.contestants.matryoshka import looped, matryoshka_loss, nested

MARGIN = 0.1
HARDNESS = 5.0
SYMMETRIC = 2
"""Products of a symmetric score matrix: half the tiles of each of four products."""


def _pairs(query: Tensor) -> Tensor:
    """Ids that each occur twice."""
    return torch.arange(len(query), device=query.device) // 2


def _rare(query: Tensor) -> Tensor:
    """-log q of keys, of which the first occurs e squared times as often as the last."""
    return torch.linspace(-1, 1, len(query), device=query.device)


def _ours(loss: LossFunction, *, about: str, views: int = 1, products: int = 4) -> list[LossContestant]:
    """Our loss without and with a cache for all tiles."""

    def load() -> LossStep:
        return with_backward(partial(loss, group=None))

    def load_cached() -> LossStep:
        def cached(*args: Tensor) -> Tensor:
            return loss(*args, group=None, cache_bytes=4 * (views * len(args[0])) ** 2)

        return with_backward(cached)

    kept = views**2 * (0.5 if products == SYMMETRIC else 1.0)
    return [
        LossContestant(name="contratile", load=load, about=about, linear=16),
        LossContestant(
            name="contratile_cached", load=load_cached, about="with cache_bytes for all tiles", matrices=kept, linear=16
        ),
    ]


def _uncached(loss: LossFunction, about: str, *, linear: int, name: str = "contratile") -> LossContestant:
    """Our loss where it takes no cache."""
    return LossContestant(name=name, load=lambda: with_backward(partial(loss, group=None)), about=about, linear=linear)


def _option(name: str, option: Callable[[Tensor], dict[str, Any]], about: str) -> LossContestant:
    """`info_nce` with an option that depends on the queries."""

    def bound(loss: LossFunction) -> LossFunction:
        return lambda query, key, scale, **how: loss(query, key, scale, **option(query), **how)

    def load() -> LossStep:
        return with_backward(partial(bound(info_nce), group=None))

    return LossContestant(name=name, load=load, about=about, oracle=bound(reference.info_nce), linear=32)


def _their_directions(about: str, oracle: LossFunction, *, matrices: float) -> LossContestant:
    return LossContestant(
        name="sentence_transformers",
        load=lambda: fixed_scale(theirs),
        about=f"MultipleNegativesRankingLoss, {about}, cosines by its default",
        matrices=matrices,
        package="sentence-transformers",
        oracle=normalised(oracle),
    )


def _case(name: str, oracle: LossFunction, contestants: list[LossContestant], *, dense: float, **facts: Any) -> Case:
    """Make a case and add the reference as a contestant, which holds `dense` N x N matrices."""
    formula = LossContestant(
        name="dense", load=lambda: with_backward(oracle), about="the reference in fp32", matrices=dense
    )
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
            LossContestant(
                name="lightly",
                load=lightly_nt_xent,
                about="NTXentLoss(temperature): four N x N blocks, concatenated",
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
            LossContestant(
                name="pytorch_metric_learning",
                load=metric_learning_sup_con,
                about="SupConLoss(temperature), cosines by its default",
                matrices=14.0,
                package="pytorch-metric-learning",
                oracle=normalised(_SUP_CON),
            ),
        ],
        dense=11.1,
        problem=labelled_problem,
        products=SYMMETRIC,
    ),
    _case(
        "siglip",
        reference.siglip_loss,
        [
            *_ours(siglip_loss, about="siglip_loss"),
            LossContestant(
                name="open_clip", load=open_clip_siglip, about="SigLipLoss()", matrices=9.2, package="open_clip_torch"
            ),
            LossContestant(
                name="siglip_kernel",
                load=siglip_kernel,
                about="fused_siglip_loss(backend='auto')",
                linear=8192,
                package="siglip-kernel",
                needs_cuda=True,
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
            LossContestant(
                name="sentence_transformers",
                load=multiple_negatives,
                about="MultipleNegativesRankingLoss, both directions averaged, cosines by its default",
                matrices=7.5,
                package="sentence-transformers",
                oracle=normalised(reference.clip_loss),
            ),
            LossContestant(
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
            _option("contratile_ids", lambda query: {"ids": _pairs(query)}, "info_nce with ids, two pairs of each"),
            _option(
                "contratile_positives",
                lambda query: {"ids": _pairs(query), "same_id": "positive"},
                "info_nce with the same ids as further positives",
            ),
            _option("contratile_key_bias", lambda query: {"key_bias": _rare(query)}, "info_nce with key_bias"),
            _option(
                "contratile_hardness",
                lambda query: {"hardness_mode": "in_batch_negatives", "hardness_strength": HARDNESS},
                f"info_nce with hardness_strength={HARDNESS} for negatives of the batch",
            ),
            _option("contratile_margin", lambda query: {"margin": MARGIN}, f"info_nce with margin={MARGIN}"),
            LossContestant(
                name="info_nce_pytorch",
                load=info_nce_pytorch,
                about="InfoNCE(temperature), cosines",
                matrices=3.2,
                package="info-nce-pytorch",
                oracle=normalised(reference.info_nce),
            ),
        ],
        dense=7.1,
    ),
    _case(
        "unpaired",
        unpaired(reference.info_nce),
        [
            *_ours(unpaired(info_nce), about="info_nce with extra_keys and in_batch_negatives=False"),
            LossContestant(
                name="info_nce_pytorch",
                load=info_nce_pytorch,
                about="InfoNCE(temperature) with unpaired negatives, cosines",
                matrices=3.2,
                package="info-nce-pytorch",
                oracle=normalised(unpaired(reference.info_nce)),
            ),
        ],
        dense=7.1,
        problem=triplets,
    ),
    _case(
        "gte",
        gte(reference.info_nce),
        [
            *_ours(gte(info_nce), about="info_nce, four directions in one softmax", products=PAIRS),
            _their_directions("four directions in one softmax", gte(reference.info_nce), matrices=16.5),
        ],
        dense=30.0,
        products=PAIRS,
    ),
    _case(
        "gte_hard",
        gte_hard(reference.info_nce),
        [
            *_ours(gte_hard(info_nce), about="the same with a hard negative of each query", products=TRIPLETS),
            _their_directions("the same with a column of hard negatives", gte_hard(reference.info_nce), matrices=25.0),
        ],
        dense=45.0,
        problem=triplets,
        products=TRIPLETS,
    ),
    _case(
        "matryoshka",
        nested(reference.clip_loss),
        [
            _uncached(nested(clip_loss), "clip_loss with matryoshka_dims 64, 128, ... and D", linear=64),
            _uncached(looped(clip_loss), "a call of clip_loss for each dimension", linear=4096, name="contratile_loop"),
            LossContestant(
                name="sentence_transformers",
                load=matryoshka_loss,
                about="MatryoshkaLoss around MultipleNegativesRankingLoss, both directions averaged",
                matrices=14.0,
                package="sentence-transformers",
            ),
        ],
        dense=20.0,
    ),
    _case(
        "distill",
        distilled(reference.clip_loss),
        [
            _uncached(distilled(clip_loss), "clip_loss with a teacher", linear=32),
            LossContestant(
                name="open_clip",
                load=open_clip_distill,
                about="DistillClipLoss(), the sum of its terms",
                matrices=11.5,
                package="open_clip_torch",
            ),
        ],
        dense=22.0,
        problem=taught,
        products=STUDENT,
        beside_products=TEACHER,
        beside_width=TEACHER_WIDTH,
    ),
    _case(
        "gist",
        gist_dense,
        [
            LossContestant(
                name="contratile",
                load=lambda: with_backward(gist),
                about="the loss of GISTEmbedLoss, all contrasts, of unit features",
                linear=32,
            ),
            LossContestant(
                name="sentence_transformers_products",
                load=gist_products,
                about="GISTEmbedLoss with matrix products for its cosines",
                matrices=16.0,
                package="sentence-transformers",
            ),
            LossContestant(
                name="sentence_transformers_cached",
                load=cached_gist,
                about=f"the loss stage of CachedGISTEmbedLoss, mini-batch {GIST_MINI_BATCH}, cosines",
                linear=8 * GIST_MINI_BATCH * 256,
                package="sentence-transformers",
                oracle=normalised(gist_dense),
            ),
        ],
        dense=11.0,
        problem=guided,
        products=GUIDED,
        beside_products=GUIDE,
    ),
)
CASES = {case.name: case for case in (CLIP, *FAMILY)}

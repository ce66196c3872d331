"""Contestants of losses that use a second, frozen model: a teacher's softmax (distillation) or a guide (GIST).

    problem = taught(1024, 256, scale=20.0)
    value = distilled(clip_loss)(*problem.args)
    value = gist(*guided(1024, 256, scale=20.0).args)

The other model's features are constants. Products of a step, forward and backward: 4 of the student and 2 of the
teacher. With a guide, queries x keys take 4 and 2 of the guide; queries x queries and keys x keys are symmetric, so
that each takes 2 and 1.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contratile.bench.contestants.loss import LossFunction, LossProblem, LossStep, with_backward
from contratile.losses.gist import gist_loss
from contratile.losses.options import PairOptions

STUDENT, TEACHER = 4, 2
"""Products of a step of distillation."""
TEACHER_WIDTH = 1.5
"""Features of the teacher for each of the student: 768 beside 512."""
GUIDED, GUIDE = 8, 4
"""Products of a step of GIST."""
ALIKE = 8
"""Rows per class of the guided problem; the guide drops many of the other pairs of a row's class."""
GIST_MINI_BATCH = 32
"""The default of sentence-transformers' cached loss, which takes mini-batch x N x D numbers at once."""


def taught(n: int, d: int, **how: Any) -> LossProblem:
    """Make pairs and a scale, then a teacher's features and scale; keywords are those of `LossProblem.make`."""
    student = LossProblem.make(n, d, **how)
    how["seed"] = how.get("seed", 0) + 1
    teacher = LossProblem.make(n, int(TEACHER_WIDTH * d), **how)
    return LossProblem((*student.args, *(x.detach() for x in teacher.args)))


def guided(n: int, d: int, **how: Any) -> LossProblem:
    """Make pairs and a scale, then features of a guide to which all pairs of a class are about equally similar."""
    args = LossProblem.make(n, d, **how).args
    random = torch.Generator().manual_seed(n + d + 1 + how.get("seed", 0))
    centres = F.normalize(torch.randn(n, d, generator=random), dim=1)[torch.arange(n) % max(1, n // ALIKE)]
    noise = (torch.randn(n, d, generator=random).mul_(1.5 / d**0.5) for _ in range(2))
    return LossProblem((*args, *(F.normalize(x.add_(centres), dim=1).to(args[0]) for x in noise)))


def distilled(loss: LossFunction) -> LossFunction:
    """`clip_loss` with a teacher, ours or the reference."""
    return lambda image, text, scale, *teacher, **how: loss(image, text, scale, teacher=teacher, **how)


def open_clip_distill() -> LossStep:
    """The sum of both terms of open_clip's loss."""
    from open_clip.loss import DistillClipLoss

    module = DistillClipLoss()
    return with_backward(lambda *args: sum(module(*args)))


def gist(query: Tensor, key: Tensor, scale: Tensor, *guide: Tensor) -> Tensor:
    """Our loss of pairs, with all contrasts of GIST."""
    of_query, of_key = guide
    more = {"contrast_queries": True, "contrast_keys": True}
    return gist_loss(query, key, scale, PairOptions(), (of_query, of_key), **more, group=None)


def gist_dense(query: Tensor, key: Tensor, scale: Tensor, *guide: Tensor) -> Tensor:
    """The same loss from matrix products of all scores."""
    of_query, of_key = guide
    limit = (of_query * of_key).sum(1, keepdim=True)
    scores: list[Tensor] = []
    for a, b, by_a, by_b in (
        (query, key, of_query, of_key),
        (query, query, of_query, of_query),
        (key, key, of_key, of_key),
    ):
        dropped = by_a @ by_b.T > limit
        if not scores:
            dropped.fill_diagonal_(False)
        scores.append((scale * a @ b.T).masked_fill_(dropped, -torch.inf))
    return F.cross_entropy(torch.cat(scores, 1), torch.arange(len(query), device=query.device))


def _given(kind: str = "model") -> Any:
    """A model for sentence-transformers' losses that is not run: the features of this kind are given."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    untyped: Any = PreTrainedTokenizerFast
    one_word = untyped(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))

    class Given(torch.nn.Module):
        tokenizer = one_word
        max_seq_length = 1

        def __getitem__(self, at: int) -> torch.nn.Module:
            """Its first module, which is asked for its kind."""
            return torch.nn.Identity()

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {"sentence_embedding": features[kind]}

    return Given()


def gist_products() -> LossStep:
    """sentence-transformers' loss with its cosines, made of N x N x D numbers, as matrix products of unit features."""
    from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

    class Products(GISTEmbedLoss):
        def sim_matrix(self, embed1: Tensor, embed2: Tensor) -> Tensor:
            return embed1 @ embed2.T

    module = cache(lambda scale: Products(_given(), _given("guide"), temperature=1 / scale))

    def loss(query: Tensor, key: Tensor, scale: Tensor, *guide: Tensor) -> Tensor:
        pairs = zip((query, key), guide, strict=True)
        columns = [{"model": x, "guide": seen} for x, seen in pairs]
        value: Tensor = module(scale.item())(columns, torch.empty(0))
        return value

    return with_backward(loss)


def cached_gist() -> LossStep:
    """The loss stage of sentence-transformers' cached loss, with gradients of the embeddings."""
    from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss

    model = _given()
    module = cache(
        lambda scale: CachedGISTEmbedLoss(model, model, temperature=1 / scale, mini_batch_size=GIST_MINI_BATCH)
    )

    def step(query: Tensor, key: Tensor, scale: Tensor, *guide: Tensor) -> Tensor:
        columns: Any = [[x] for x in (query, key)], [[x] for x in guide]
        value: Tensor = module(scale.item()).calculate_loss(*columns, with_backward=True)
        return value

    return step

"""Contestants of a training step, in chunks or all at once, without the optimizer.

    step = CACHE_CONTESTANTS["contratile"].load(CacheProblem(n=1024, chunk=64))
    step()                                        # gradients are in .grad
    step.loss_seconds                             # how much of it was the loss

All do the same work: one encoder with dropout for queries and documents, and InfoNCE with scale 20.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile import GradCache, info_nce
from contratile.bench.contestants import Contestant, packages_of
from contratile.bench.contestants.cache_model import LAYERS, Encoder, SentenceModel, tokens
from contratile.bench.memory import MiB

SCALE = 20.0
PLAIN_ROW = 4.6 * MiB
"""Measured bytes that plain training keeps per pair at width 128 and four layers."""


class CacheProblem:
    """A model, a batch, and the chunk size."""

    def __init__(self, n: int, chunk: int, *, width: int = 128, layers: int = LAYERS, dropout: float = 0.1) -> None:
        torch.manual_seed(0)
        self.n, self.chunk = n, chunk
        self.encoder = Encoder(width, layers, dropout=dropout)
        self.query, self.document = tokens(n, seed=1), tokens(n, seed=2)

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        return self.query, self.document

    @cached_property
    def parameters(self) -> list[Tensor]:
        return list(self.encoder.parameters())

    def clear(self) -> None:
        """Drop all gradients."""
        for p in self.parameters:
            p.grad = None


class TrainingStep:
    """One way to compute the gradients of a problem. A call starts without gradients, as after an optimizer's step."""

    def __init__(self, problem: CacheProblem) -> None:
        self.problem, self.loss_seconds = problem, float("inf")
        self.prepare()

    def prepare(self) -> None:
        """Import and build what the step needs."""

    def __call__(self) -> Tensor:
        self.problem.clear()
        return self.run()

    def run(self) -> Tensor:
        raise NotImplementedError

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, which remembers its fastest call in `loss_seconds`."""

        def run(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = work(*args, **keywords)
            self.loss_seconds = min(self.loss_seconds, time.perf_counter() - start)
            return result

        return run


class OurStep(TrainingStep):
    """`contratile.GradCache`."""

    def prepare(self) -> None:
        loss = lambda query, document: info_nce(query, document, SCALE, group=None)  # noqa: E731
        self.cache = GradCache(self.problem.encoder, loss, self.problem.chunk)
        self.loss_and_grads = self.timed(self.cache.loss_and_grads)

    def run(self) -> Tensor:
        encoded = self.cache.encode(*self.problem.sides)
        loss: Tensor = self.loss_and_grads(encoded)
        self.cache.backward(encoded)
        return loss


class PlainStep(TrainingStep):
    """All activations at once, and a score matrix. Its loss cannot be timed apart from the rest of the backward."""

    def run(self) -> Tensor:
        query, document = (self.problem.encoder(x) for x in self.problem.sides)
        loss = F.cross_entropy(SCALE * query @ document.T, torch.arange(len(query)))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach()


class GradCacheStep(TrainingStep):
    """The package GradCache with its own loss class."""

    def prepare(self) -> None:
        import gradcache

        # It imports itself under a name that its distribution does not install.
        sys.modules.setdefault("grad_cache", gradcache)
        from gradcache.grad_cache import GradCache as TheirCache
        from gradcache.loss import SimpleContrastiveLoss

        their_loss = SimpleContrastiveLoss()
        loss = lambda query, document: their_loss(SCALE * query, document)  # noqa: E731
        encoder = self.problem.encoder
        self.cache: Any = TheirCache([encoder, encoder], self.problem.chunk, loss)
        self.cache.build_cache = self.timed(self.cache.build_cache)

    def run(self) -> Tensor:
        loss: Tensor = self.cache.cache_step(*self.problem.sides)
        return loss


class SentenceTransformersStep(TrainingStep):
    """`CachedMultipleNegativesRankingLoss` and the backward that its trainer would call."""

    def prepare(self) -> None:
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

        model: Any = SentenceModel(self.problem.encoder)
        self.loss: Any = CachedMultipleNegativesRankingLoss(model, SCALE, mini_batch_size=self.problem.chunk)
        self.loss.calculate_loss = self.timed(self.loss.calculate_loss)  # type: ignore[method-assign]

    def run(self) -> Tensor:
        loss: Tensor = self.loss([{"input_ids": x} for x in self.problem.sides], None)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach()


class EncoderLimit(TrainingStep):
    """What no gradient cache can avoid: all chunks forward, then forward and backward."""

    def run(self) -> Tensor:
        chunks = [x for side in self.problem.sides for x in torch.split(side, self.problem.chunk)]
        with torch.no_grad():
            for x in chunks:
                self.problem.encoder(x)
        for x in chunks:
            features = self.problem.encoder(x)
            features.backward(torch.ones_like(features))
        return torch.empty(0)


@dataclass(frozen=True, kw_only=True)
class CacheContestant(Contestant):
    """A way to do a training step. `keeps_all` and `matrices` only predict memory."""

    load: Callable[[CacheProblem], TrainingStep]
    keeps_all: bool = False
    """Whether the activations of the whole batch are alive at the same time."""

    matrices: float = 0.0
    """How many N x N fp32 matrices are alive at the same time."""

    def predicted_bytes(self, n: int, *, width: int, layers: int) -> float:
        activations = PLAIN_ROW * n * (width / 128) * (layers / 4) if self.keeps_all else 0.0
        return activations + 4 * self.matrices * n * n


_ALL = (
    CacheContestant(name="contratile", load=OurStep, about="GradCache with info_nce: chunks, no scores kept"),
    CacheContestant(
        name="plain",
        load=PlainStep,
        about="the whole batch at once, one logits matrix",
        keeps_all=True,
        matrices=3.0,
    ),
    CacheContestant(
        name="grad_cache",
        load=GradCacheStep,
        about="GradCache of the package of that name: chunks, one logits matrix",
        matrices=3.0,
        package="GradCache",
    ),
    CacheContestant(
        name="sentence_transformers",
        load=SentenceTransformersStep,
        about="CachedMultipleNegativesRankingLoss: chunks of sentences and of scores",
        package="sentence-transformers",
    ),
)

CACHE_CONTESTANTS = {contestant.name: contestant for contestant in _ALL}
CACHE_PACKAGES = packages_of(_ALL)

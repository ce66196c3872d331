"""Contestants of a training step, in chunks or all at once, without the optimizer.

    step = CACHE_CONTESTANTS["contratile"].load(CacheProblem(n=1024, chunk=64))
    step()                                        # gradients are in .grad
    step.loss_seconds                             # how much of it was the loss

All do the same work: one encoder with dropout for queries and documents, and InfoNCE with scale 20.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile import GradCache, info_nce
from contratile.bench.contestants import Contestant, packages_of
from contratile.bench.contestants.cache_model import LAYERS, TOKENS, Encoder, SentenceModel
from contratile.bench.contestants.cache_texts import LONGEST, Lengths, cut_chunks, make_texts
from contratile.bench.memory import MiB
from contratile.grad_cache.chunks import call, tensors_of

SCALE = 20.0
PLAIN_ROW = 4.6 * MiB
"""Measured bytes that plain training keeps per pair at width 128 and four layers."""


class CacheProblem:
    """A model, a batch, and the chunk size."""

    def __init__(
        self,
        n: int,
        chunk: int,
        *,
        width: int = 128,
        layers: int = LAYERS,
        dropout: float = 0.1,
        lengths: Lengths = "equal",
    ) -> None:
        torch.manual_seed(0)
        self.n, self.chunk, self.lengths = n, chunk, lengths
        self.encoder = Encoder(width, layers, dropout=dropout, longest=TOKENS if lengths == "equal" else LONGEST)
        self.query, self.document = make_texts(n, lengths, seed=1), make_texts(n, lengths, seed=2)

    @property
    def sides(self) -> tuple[Any, Any]:
        return self.query, self.document

    @property
    def chunks(self) -> list[Any]:
        """All chunks in their order, each as wide as its longest text."""
        return [x for side in self.sides for x in cut_chunks(side, self.chunk)]

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        widths: list[int] = [tensors_of(x)[0].shape[1] for x in self.sides]
        return max(widths)

    def padding_of(self, chunks: Sequence[Any]) -> float:
        """Tokens in chunks for each real token."""
        if self.lengths == "equal":
            return 1.0
        real = sum(int(x["attention_mask"].sum()) for x in self.sides)
        encoded: int = sum(x["input_ids"].numel() for x in chunks)
        return encoded / real

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
        self.cpu_seconds = float("inf")
        """CPU time of the cheapest call, over all threads."""
        self.prepare()

    @property
    def padding(self) -> float | None:
        """Tokens that were encoded for each real token."""
        return self.problem.padding_of(self.problem.chunks)

    @property
    def kept(self) -> int:
        """Chunks whose graphs were kept."""
        return 0

    def prepare(self) -> None:
        """Import and build what the step needs."""

    def __call__(self) -> Tensor:
        self.problem.clear()
        start = time.process_time()
        loss = self.run()
        self.cpu_seconds = min(self.cpu_seconds, time.process_time() - start)
        return loss

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


def our_loss(query: Tensor, document: Tensor) -> Tensor:
    """InfoNCE without a matrix of scores."""
    return info_nce(query, document, SCALE, group=None)


class OurStep(TrainingStep):
    """`contratile.GradCache`."""

    def make(self) -> GradCache:
        return GradCache(self.problem.encoder, our_loss, self.problem.chunk)

    def prepare(self) -> None:
        self.cache = self.make()
        self.loss_and_grads = self.timed(self.cache.loss_and_grads)

    @property
    def padding(self) -> float | None:
        found = self.cache.padding
        return found.encoded / found.real if found.real else super().padding

    @property
    def kept(self) -> int:
        return self.cache.kept_chunks

    def run(self) -> Tensor:
        encoded = self.cache.encode(*self.problem.sides)
        loss: Tensor = self.loss_and_grads(encoded)
        self.cache.backward(encoded)
        return loss


class ColumnsStep(OurStep):
    """Each side sorted by itself, as if it had an encoder of its own."""

    def make(self) -> GradCache:
        encoders = [partial(self.problem.encoder) for _ in self.problem.sides]
        return GradCache(encoders, our_loss, self.problem.chunk)


class TokensStep(OurStep):
    """Chunks by tokens: as many as the largest chunk of the others has."""

    def make(self) -> GradCache:
        tokens = self.problem.chunk * self.problem.longest
        return GradCache(self.problem.encoder, our_loss, chunk_tokens=tokens)


class KeptStep(OurStep):
    """All graphs kept."""

    def make(self) -> GradCache:
        return GradCache(self.problem.encoder, our_loss, self.problem.chunk, keep_graphs=sys.maxsize)


class UnsortedStep(OurStep):
    """Rows as they come, with all padding of the batch."""

    def make(self) -> GradCache:
        return GradCache(self.problem.encoder, our_loss, self.problem.chunk, lengths="off")

    @property
    def padding(self) -> float | None:
        return self.problem.padding_of(self.problem.sides)


class PlainStep(TrainingStep):
    """All activations at once, and a score matrix. Its loss cannot be timed apart from the rest of the backward."""

    def run(self) -> Tensor:
        query, document = (call(self.problem.encoder, x) for x in self.problem.sides)
        loss = F.cross_entropy(SCALE * query @ document.T, torch.arange(len(query)))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach()

    @property
    def padding(self) -> float | None:
        return self.problem.padding_of(self.problem.sides)


class GradCacheStep(TrainingStep):
    """The package GradCache with its own loss class. It is told to cut padding per chunk, which is not its default."""

    def prepare(self) -> None:
        from gradcache.loss import SimpleContrastiveLoss

        their_loss = SimpleContrastiveLoss()
        loss = lambda query, document: their_loss(SCALE * query, document)  # noqa: E731
        encoder = self.problem.encoder
        timed, theirs = self.timed, grad_cache_class()

        class Timed(theirs):  # type: ignore[misc, valid-type]  # found when it is called
            def build_cache(self, *args: Any, **keywords: Any) -> Any:
                return timed(super().build_cache)(*args, **keywords)

        self.cache: Any = Timed([encoder, encoder], self.problem.chunk, loss, split_input_fn=cut_chunks)

    def run(self) -> Tensor:
        loss: Tensor = self.cache.cache_step(*self.problem.sides)
        return loss


def grad_cache_class() -> Any:
    """`GradCache` of the package, whose module imports its siblings as `grad_cache` but is installed as `gradcache`."""
    spec = importlib.util.find_spec("gradcache.grad_cache")
    if spec is None or spec.origin is None:
        raise ImportError("gradcache has no module grad_cache", name="gradcache")
    source = Path(spec.origin).read_text(encoding="utf-8").replace("from grad_cache.", "from gradcache.")
    module: dict[str, Any] = {"__name__": spec.name}
    exec(compile(source, spec.origin, "exec"), module)
    return module["GradCache"]


class SentenceTransformersStep(TrainingStep):
    """`CachedMultipleNegativesRankingLoss` and the backward that its trainer would call."""

    def prepare(self) -> None:
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

        model: Any = SentenceModel(self.problem.encoder)
        timed = self.timed

        class Timed(CachedMultipleNegativesRankingLoss):
            def calculate_loss(self, *args: Any, **keywords: Any) -> Any:
                return timed(super().calculate_loss)(*args, **keywords)

        self.loss: Any = Timed(model, SCALE, mini_batch_size=self.problem.chunk)

    def run(self) -> Tensor:
        given = [x if isinstance(x, dict) else {"input_ids": x} for x in self.problem.sides]
        loss: Tensor = self.loss([dict(x) for x in given], None)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach()


class EncoderLimit(TrainingStep):
    """All chunks forward, then forward and backward, of texts sorted by length over both sides."""

    def prepare(self) -> None:
        known = GradCache(self.problem.encoder, our_loss, self.problem.chunk).feed.agenda(self.problem.sides).known
        assert known is not None
        self.ready = [item.chunk() for item in known]

    def run(self) -> Tensor:
        with torch.no_grad():
            for x in self.ready:
                call(self.problem.encoder, x)
        for x in self.ready:
            features = call(self.problem.encoder, x)
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
    CacheContestant(name="contratile_columns", load=ColumnsStep, about="the same, each side sorted by itself"),
    CacheContestant(name="contratile_tokens", load=TokensStep, about="the same, chunks by tokens"),
    CacheContestant(name="contratile_kept", load=KeptStep, about="the same, all graphs kept", keeps_all=True),
    CacheContestant(name="contratile_unsorted", load=UnsortedStep, about="the same, rows as they come"),
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

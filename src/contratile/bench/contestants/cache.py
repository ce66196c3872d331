"""The contestants of `contratile bench cache`: a training step without its optimiser, in chunks or not.

    step = CONTESTANTS["contratile"](Problem(n=1024, chunk=64))
    step()                                        # gradients are in .grad
    step.loss_seconds                             # what the loss took of it

All do the same: one encoder with dropout for queries and documents, and the InfoNCE loss of both, scale 20.

    python -m contratile.bench.contestants.cache --contestant plain --n 1024 --chunk 64 --d 128

prints the peak of a step beyond model, inputs and gradients as JSON, as `contratile.bench.memory` does.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile import GradCache, info_nce
from contratile.bench.contestants.cache_model import LAYERS, Encoder, SentenceModel, tokens
from contratile.bench.contestants.loss import cure_torchvision, quiet
from contratile.bench.harness import describe
from contratile.bench.memory import MiB, Peak
from contratile.host_memory import peak_growth

SCALE = 20.0
PLAIN_ROW = 4.6 * MiB
"""Bytes that plain training keeps for a pair at width 128 and four layers, measured; used only to predict."""


class Problem:
    """A model, a batch, and the size of its chunks."""

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
        for p in self.parameters:
            p.grad = None


class Step:
    """One way to do it. A call starts without gradients, as after an optimiser's step."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.loss_seconds = problem, float("inf")
        self.prepare()

    def prepare(self) -> None:
        """Import and construct what the step needs."""

    def __call__(self) -> Tensor:
        self.problem.clear()
        return self.run()

    def run(self) -> Tensor:
        raise NotImplementedError

    def timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work; the fastest run is remembered."""

        def run(*args: Any, **keywords: Any) -> Any:
            start = time.perf_counter()
            result = work(*args, **keywords)
            self.loss_seconds = min(self.loss_seconds, time.perf_counter() - start)
            return result

        return run


class Ours(Step):
    def prepare(self) -> None:
        loss = lambda query, document: info_nce(query, document, SCALE, group=None)  # noqa: E731
        self.cache = GradCache(self.problem.encoder, loss, self.problem.chunk)
        self.loss_and_grads = self.timed(self.cache.loss_and_grads)

    def run(self) -> Tensor:
        encoded = self.cache.encode(*self.problem.sides)
        loss: Tensor = self.loss_and_grads(encoded)
        self.cache.backward(encoded)
        return loss


class Plain(Step):
    """All activations at once, and a score matrix. Its loss cannot be told apart from the rest of its backward."""

    def run(self) -> Tensor:
        query, document = (self.problem.encoder(x) for x in self.problem.sides)
        loss = F.cross_entropy(SCALE * query @ document.T, torch.arange(len(query)))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach()


class Package(Step):
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


class SentenceTransformers(Step):
    """`CachedMultipleNegativesRankingLoss` and the backward that its trainer would call."""

    def prepare(self) -> None:
        cure_torchvision()
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

        model: Any = SentenceModel(self.problem.encoder)
        self.loss: Any = CachedMultipleNegativesRankingLoss(model, SCALE, mini_batch_size=self.problem.chunk)
        self.loss.calculate_loss = self.timed(self.loss.calculate_loss)  # type: ignore[method-assign]

    def run(self) -> Tensor:
        loss: Tensor = self.loss([{"input_ids": x} for x in self.problem.sides], None)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach()


class Limit(Step):
    """What no cache can avoid: all chunks forward, then forward and backward."""

    def run(self) -> Tensor:
        chunks = [x for side in self.problem.sides for x in torch.split(side, self.problem.chunk)]
        with torch.no_grad():
            for x in chunks:
                self.problem.encoder(x)
        for x in chunks:
            features = self.problem.encoder(x)
            features.backward(torch.ones_like(features))
        return torch.empty(0)


CONTESTANTS: dict[str, Callable[[Problem], Step]] = {
    "contratile": Ours,
    "plain": Plain,
    "grad_cache": Package,
    "sentence_transformers": SentenceTransformers,
}
PACKAGES = ("GradCache", "sentence-transformers")


def predicted_bytes(name: str, n: int, *, width: int, layers: int) -> float:
    """What is known to grow: the activations of plain training, the score matrices of a dense loss."""
    if name == "plain":
        return PLAIN_ROW * n * (width / 128) * (layers / 4) + 12.0 * n * n
    return 12.0 * n * n if name == "grad_cache" else 0.0


def peak(contestant: str, problem: Callable[[int], Problem], n: int) -> Peak:
    """The peak of one step, in this process."""
    try:
        with quiet():
            make = CONTESTANTS[contestant]
            make(problem(min(n, 2 * problem(1).chunk)))()  # threads and libraries start up
            step = make(problem(n))
            step.problem.parameters  # noqa: B018 (made before the measurement starts)
            growth = peak_growth(step)
    except Exception as error:
        return Peak(describe(error))
    if growth is None:
        return Peak("memory: needs a writable /proc/self/clear_refs (Linux)")
    gradients = sum(p.grad.nbytes for p in step.problem.parameters if p.grad is not None)
    return Peak("ok", max(0.0, (growth - gradients) / MiB))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contratile.bench.contestants.cache", description=__doc__)
    parser.add_argument("--contestant", choices=CONTESTANTS, required=True)
    for name in ("n", "chunk", "d"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def problem(n: int) -> Problem:
        return Problem(n, options.chunk, width=options.d, layers=options.layers)

    status, mib = peak(options.contestant, problem, options.n)
    print(json.dumps({"status": status, "peak_extra_mib": mib}))


if __name__ == "__main__":
    main()

"""What the cached losses share: columns go through the model in mini-batches, twice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from contratile.errors import bad_value, check_count
from contratile.grad_cache import ByLength, GradCache
from contratile.grad_cache.chunks import cut
from contratile.grad_cache.keep import KeepGraphs
from contratile.grad_cache.offload import Offload
from contratile.grad_cache.plan import Padding
from contratile.integrations.sentence_transformers.options import OTHERWISE

_FLAT = {
    "cu_seq_lens_q": f"Load the model without input flattening, {OTHERWISE}",
    "offsets": "StaticEmbedding models have no activations to save: use {plain}.",
}
"""Inputs that cannot be cut into mini-batches, by a key that they contain, with the remedy."""


class MiniBatches:
    """Mixin for losses with `model` and `compute_loss_from_embeddings`: batches of any size, by GradCache."""

    model: nn.Module
    compute_loss_from_embeddings: Callable[..., Tensor]
    mini_batch_size: int
    mini_batch_num_tokens: int | None
    show_progress_bar: bool
    offload: Offload
    lengths: Literal["auto", "off"] | ByLength
    keep_graphs: KeepGraphs
    memory_limit: int | None

    uses_gradient_cache = True
    """Read by the package's MatryoshkaLoss, which then wraps `calculate_loss`."""

    def _in_mini_batches(
        self,
        mini_batch_size: int,
        mini_batch_num_tokens: int | None,
        show_progress_bar: bool,
        offload: Offload,
        lengths: Literal["auto", "off"] | ByLength,
        keep_graphs: KeepGraphs,
        memory_limit: int | None,
    ) -> None:
        """The part of the constructor."""
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar
        self.offload = offload
        self.lengths, self.keep_graphs, self.memory_limit = lengths, keep_graphs, memory_limit
        self._caches: dict[bool, tuple[tuple[Any, ...], GradCache]] = {}

    def check_option(self, name: str, value: Any) -> Any:
        """Check an option when it is set."""
        if name == "mini_batch_size" or (name == "mini_batch_num_tokens" and value is not None):
            check_count(name, value, least=1)
        return super().check_option(name, value)  # type: ignore[misc]  # of the loss

    def while_given(self, columns: list[dict[str, Tensor]]) -> AbstractContextManager[None]:
        """Entered while the loss of tokenized columns is computed."""
        return nullcontext()

    def beside(self, columns: list[dict[str, Tensor]], labels: Any) -> Any:
        """The second argument of the loss, for tokenized columns."""
        return labels

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any = None) -> Tensor:
        """Encode the columns and compute the loss and the gradients of the embeddings.

        Args:
            sentence_features: Tokenized columns: anchors, positives, then any number of negatives.
            labels: Passed on by `beside`.

        Returns:
            A loss whose `backward()` computes the gradients of the model.
        """
        given = list(sentence_features)
        whole = self.lengths != "off" and all(map(_is_padded, given))
        cache = self._cache(whole)
        encoded = cache.encode(*(given if whole else map(self._mini_batches, given)))
        columns = [[x] for x in encoded.features]
        labels = self.beside(given, labels)
        with self.while_given(given):
            if not torch.is_grad_enabled():
                with encoded:
                    return self.calculate_loss(columns, labels)
            loss = self.calculate_loss(columns, labels, with_backward=True).requires_grad_()
        loss.register_hook(partial(cache.backward, encoded))  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss

    def _cache(self, whole: bool) -> GradCache:
        """The cache for whole columns, which it sorts and cuts, or for mini-batches that are already cut.

        It is kept until an option is set, because its findings about the model in the first step remain valid.
        """
        sizes, kept = (self.mini_batch_size, self.mini_batch_num_tokens), (self.keep_graphs, self.memory_limit)
        options = (self.model, *sizes, self.lengths, *kept, self.offload, self.show_progress_bar)
        known = self._caches.get(whole)
        if known is None or known[0] != options:
            rows = self.mini_batch_size if self.mini_batch_num_tokens is None else sys.maxsize
            cache = GradCache(
                _Embedding(self.model),
                self.compute_loss_from_embeddings,
                chunk_size=rows if whole else sys.maxsize,
                chunk_tokens=self.mini_batch_num_tokens if whole else None,
                lengths=self.lengths if whole else "off",
                keep_graphs=self.keep_graphs,
                memory_limit=self.memory_limit,
                offload=self.offload,
                progress="bar" if self.show_progress_bar else None,
            )
            known = self._caches[whole] = options, cache
        return known[1]

    @property
    def padding(self) -> Padding:
        """Tokens of the last step: real, encoded, and as given."""
        return self._caches[True][1].padding if True in self._caches else Padding()

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the loss make caches of their own."""
        return {**self.__dict__, "_caches": {}}

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """Compute the loss of embeddings, and optionally their gradients. The package's wrappers call it.

        Args:
            reps: A list of mini-batches of embeddings for each column.
            labels: Not used.
            with_backward: Also backpropagate to the embeddings, and return the detached loss.
        """
        loss = self.compute_loss_from_embeddings([torch.cat(x) if len(x) > 1 else x[0] for x in reps], labels)
        if not with_backward:
            return loss
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach()

    def _mini_batches(self, features: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Cut with the package's own functions if they are loaded, so that dropout draws the same masks; else slice."""
        for name, remedy in _FLAT.items():
            if name in features:
                got = f"flattened ones with {name}"
                remedy = remedy.format(plain=type(self).__name__.removeprefix("Cached"))
                bad_value("sentence_features", expected="padded inputs", got=got, remedy=remedy)
        package = sys.modules.get("sentence_transformers.base.losses.gradcache")
        if package is not None and hasattr(package, "_minibatch_ranges") and hasattr(package, "_create_minibatch"):
            ranges = package._minibatch_ranges(features, self.mini_batch_size, self.mini_batch_num_tokens)
            return (package._create_minibatch(features, begin, end) for begin, end in ranges)
        if self.mini_batch_num_tokens is not None:
            tokens, remedy = self.mini_batch_num_tokens, "Install sentence-transformers 6, or pass mini_batch_size=."
            bad_value("mini_batch_num_tokens", expected="None with this version", got=tokens, remedy=remedy)
        return cut(features, self.mini_batch_size, "sentence_features")


def _is_padded(features: dict[str, Any]) -> bool:
    """Whether all tensors of a column have a row for each text; images of several sizes and flattened texts do not."""
    tensors = [x for x in features.values() if isinstance(x, Tensor) and x.dim()]
    flat = any(name in features for name in _FLAT)
    return not flat and bool(tensors) and len({len(x) for x in tensors}) == 1


class _Embedding(nn.Module):
    """A SentenceTransformer as an encoder: takes keyword arguments, returns embeddings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **features: Any) -> Tensor:
        embedding: Tensor = self.model(features)["sentence_embedding"]
        return embedding

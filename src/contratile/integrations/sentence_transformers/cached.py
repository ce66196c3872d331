"""Ranking losses for batches whose activations do not fit into memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
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
from contratile.integrations.sentence_transformers.citations import GRAD_CACHE
from contratile.integrations.sentence_transformers.options import OTHERWISE, Similarity
from contratile.integrations.sentence_transformers.ranking import MultipleNegativesRankingLoss
from contratile.losses.directions import Direction, HardnessMode, PartitionMode

_FLAT = {
    "cu_seq_lens_q": f"Load the model without input flattening, {OTHERWISE}",
    "offsets": "StaticEmbedding models have no activations to save: use MultipleNegativesRankingLoss.",
}
"""Inputs that cannot be cut into mini-batches, by a key that they contain, with the remedy."""


class CachedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """Replaces `sentence_transformers.losses.CachedMultipleNegativesRankingLoss`: batches of any size.

    The same loss as `MultipleNegativesRankingLoss`, with `contratile.GradCache` over mini-batches of texts: memory does
    not grow with the batch, for a second forward pass. `forward` runs its first two phases and `backward()` the third,
    so trainers use it like any other loss; `backward()` may be called once. Texts of similar length share a mini-batch.

    Requirements: as for `MultipleNegativesRankingLoss`. Flattened inputs and StaticEmbedding models are not supported.

    Relations:
        - `MultipleNegativesRankingLoss` is faster if the whole batch fits into memory.
        - `CachedMultipleNegativesSymmetricRankingLoss` averages both directions.

    The other arguments are those of `MultipleNegativesRankingLoss`.

    Args:
        mini_batch_size: Texts to encode at a time. Affects memory and speed, not the result.
        mini_batch_num_tokens: Tokens to encode at a time instead (sentence-transformers 6).
        show_progress_bar: Draw a progress bar (needs rich).
        offload: Where tokenized mini-batches are kept until the second pass: "none", "host" or "disk".
        lengths: "auto" sorts the texts of all columns by length, so that mini-batches have hardly any padding; "off"
            cuts them as the package does, so that dropout draws what it draws there. See `contratile.ByLength`.
        keep_graphs: Mini-batches that are encoded only once, for more memory: a number, or "auto" for as many as fit.
        memory_limit: Bytes that a mini-batch and kept graphs may take with "auto".

    Raises:
        ValueError: An option is invalid or not supported.

    Examples:
        >>> loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=64)           # doctest: +SKIP
        >>> SentenceTransformerTrainer(model, train_dataset=pairs, loss=loss).train()      # doctest: +SKIP
    """

    uses_gradient_cache = True
    """Read by the package's MatryoshkaLoss, which then wraps `calculate_loss`."""

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Similarity | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: PartitionMode = "joint",
        show_progress_bar: bool = False,
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        *,
        margin: float | None = None,
        exclude_duplicates: bool = False,
        tile: int | None = None,
        cache_bytes: int = 0,
        offload: Offload = "none",
        lengths: Literal["auto", "off"] | ByLength = "auto",
        keep_graphs: KeepGraphs = 0,
        memory_limit: int | None = None,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(
            model,
            scale,
            similarity_fct,
            gather_across_devices,
            directions,
            partition_mode,
            hardness_mode,
            hardness_strength,
            margin=margin,
            exclude_duplicates=exclude_duplicates,
            tile=tile,
            cache_bytes=cache_bytes,
            matryoshka_dims=matryoshka_dims,
            matryoshka_weights=matryoshka_weights,
        )
        check_count("mini_batch_size", mini_batch_size, least=1)
        if mini_batch_num_tokens is not None:
            check_count("mini_batch_num_tokens", mini_batch_num_tokens, least=1)
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar
        self.offload = offload
        self.lengths, self.keep_graphs, self.memory_limit = lengths, keep_graphs, memory_limit
        self._caches: dict[bool, tuple[nn.Module, GradCache]] = {}

    @property
    def loss(self) -> MultipleNegativesRankingLoss:
        """In the package, the options are attributes of an inner loss; here the loss itself has them."""
        return self

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Encode the columns and compute the loss and the gradients of the embeddings.

        Args:
            sentence_features: Tokenized columns: anchors, positives, then any number of negatives.
            labels: Not used.

        Returns:
            A loss whose `backward()` computes the gradients of the model.
        """
        given = list(sentence_features)
        whole = self.lengths != "off" and all(map(_is_padded, given))
        cache = self._cache(whole)
        encoded = cache.encode(*(given if whole else map(self._mini_batches, given)))
        columns = [[x] for x in encoded.features]
        with self.texts_of(given):
            if not torch.is_grad_enabled():
                with encoded:
                    return self.calculate_loss(columns, labels)
            loss = self.calculate_loss(columns, labels, with_backward=True).requires_grad_()
        loss.register_hook(partial(cache.backward, encoded))  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss

    def _cache(self, whole: bool) -> GradCache:
        """The cache for whole columns, which it sorts and cuts, or for mini-batches that are already cut.

        It is kept for later steps: what it found about the model in the first is still true.
        """
        known = self._caches.get(whole)
        if known is None or known[0] is not self.model:
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
            known = self._caches[whole] = self.model, cache
        return known[1]

    @property
    def padding(self) -> Padding:
        """Tokens of the last step: real ones, encoded ones, and as they came."""
        return self._caches[True][1].padding if True in self._caches else Padding()

    def __getstate__(self) -> dict[str, Any]:
        """Copies make caches of their own."""
        return {**self.__dict__, "_caches": {}}

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
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
        """Cut with the package's own functions, so that dropout draws the same masks; plain slices without them."""
        for name, remedy in _FLAT.items():
            if name in features:
                got = f"flattened ones with {name}"
                bad_value("sentence_features", expected="padded inputs", got=got, remedy=remedy)
        package = sys.modules.get("sentence_transformers.base.losses.gradcache")
        if package is not None and hasattr(package, "_minibatch_ranges") and hasattr(package, "_create_minibatch"):
            ranges = package._minibatch_ranges(features, self.mini_batch_size, self.mini_batch_num_tokens)
            return (package._create_minibatch(features, begin, end) for begin, end in ranges)
        if self.mini_batch_num_tokens is not None:
            tokens, remedy = self.mini_batch_num_tokens, "Install sentence-transformers 6, or pass mini_batch_size=."
            bad_value("mini_batch_num_tokens", expected="None with this version", got=tokens, remedy=remedy)
        return cut(features, self.mini_batch_size, "sentence_features")

    def get_config_dict(self) -> dict[str, Any]:
        """Options for the model card."""
        sizes = {"mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
        return {**super().get_config_dict(), **sizes}

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        return GRAD_CACHE


class CachedMultipleNegativesSymmetricRankingLoss(CachedMultipleNegativesRankingLoss):
    """Replaces `sentence_transformers.losses.CachedMultipleNegativesSymmetricRankingLoss`: the mean of both directions.

    Same as `CachedMultipleNegativesRankingLoss(model, directions=("query_to_doc", "doc_to_query"),
    partition_mode="per_direction")`; see there for requirements and arguments.

    Examples:
        >>> loss = CachedMultipleNegativesSymmetricRankingLoss(model, mini_batch_size=64)   # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Similarity | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        *,
        margin: float | None = None,
        exclude_duplicates: bool = False,
        tile: int | None = None,
        cache_bytes: int = 0,
        offload: Offload = "none",
        lengths: Literal["auto", "off"] | ByLength = "auto",
        keep_graphs: KeepGraphs = 0,
        memory_limit: int | None = None,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(
            model,
            scale,
            similarity_fct,
            mini_batch_size,
            mini_batch_num_tokens,
            gather_across_devices=gather_across_devices,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
            show_progress_bar=show_progress_bar,
            margin=margin,
            exclude_duplicates=exclude_duplicates,
            tile=tile,
            cache_bytes=cache_bytes,
            offload=offload,
            lengths=lengths,
            keep_graphs=keep_graphs,
            memory_limit=memory_limit,
            matryoshka_dims=matryoshka_dims,
            matryoshka_weights=matryoshka_weights,
        )


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

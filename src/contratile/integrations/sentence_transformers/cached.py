"""Ranking losses for batches whose activations do not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor, nn

from contratile.grad_cache import ByLength
from contratile.grad_cache.keep import KeepGraphs
from contratile.grad_cache.offload import Offload
from contratile.integrations.sentence_transformers.citations import GRAD_CACHE
from contratile.integrations.sentence_transformers.mini_batches import MiniBatches
from contratile.integrations.sentence_transformers.options import Similarity
from contratile.integrations.sentence_transformers.ranking import MultipleNegativesRankingLoss
from contratile.losses.directions import Direction, HardnessMode, PartitionMode


class CachedMultipleNegativesRankingLoss(MiniBatches, MultipleNegativesRankingLoss):
    """Replaces `sentence_transformers.losses.CachedMultipleNegativesRankingLoss`: batches of any size.

    The same loss as `MultipleNegativesRankingLoss`, with `contratile.GradCache` over mini-batches of texts: activations
    do not grow with the batch, at the price of a second forward pass. `forward` runs the first two phases of GradCache
    and `backward()` the third, so trainers use it like any other loss; `backward()` may be called once. Texts of
    similar length share a mini-batch.

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
            cuts them as the package does, so that dropout draws the same masks. See `contratile.ByLength`.
        keep_graphs: Mini-batches that are encoded only once, for more memory: a number, or "auto" for as many as fit.
        memory_limit: Bytes that a mini-batch and kept graphs may take with "auto".

    Raises:
        ValueError: An option is invalid or not supported.

    Examples:
        >>> loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=64)           # doctest: +SKIP
        >>> SentenceTransformerTrainer(model, train_dataset=pairs, loss=loss).train()      # doctest: +SKIP
    """

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
        self._in_mini_batches(
            mini_batch_size, mini_batch_num_tokens, show_progress_bar, offload, lengths, keep_graphs, memory_limit
        )

    @property
    def loss(self) -> MultipleNegativesRankingLoss:
        """In the package, the options are attributes of an inner loss; here the loss itself has them."""
        return self

    def while_given(self, columns: list[dict[str, Tensor]]) -> AbstractContextManager[None]:
        return self.texts_of(columns)

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

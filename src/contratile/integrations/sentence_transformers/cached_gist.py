"""GISTEmbed's loss for batches whose activations do not fit into memory."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from contratile.engine.spec import GuideMargin
from contratile.grad_cache import ByLength
from contratile.grad_cache.keep import KeepGraphs
from contratile.grad_cache.offload import Offload
from contratile.integrations.sentence_transformers.gist import GISTEmbedLoss
from contratile.integrations.sentence_transformers.mini_batches import MiniBatches


class CachedGISTEmbedLoss(MiniBatches, GISTEmbedLoss):
    """Replaces `sentence_transformers.losses.CachedGISTEmbedLoss`: batches of any size.

    The same loss as `GISTEmbedLoss`, with `contratile.GradCache` over mini-batches of texts; the guide encodes its
    mini-batches once. `backward()` may be called once.

    Requirements: as for `GISTEmbedLoss`. Flattened inputs and StaticEmbedding models are not supported.

    Relations: `GISTEmbedLoss` is faster if the whole batch fits into memory.

    The other arguments are those of `GISTEmbedLoss`.

    Args:
        mini_batch_size: Texts to encode at a time. Affects memory and speed, not the result.
        mini_batch_num_tokens: Tokens to encode at a time instead (sentence-transformers 6).
        show_progress_bar: Draw a progress bar (needs rich).
        offload: Where tokenized mini-batches are kept until the second pass: "none", "host" or "disk".
        lengths: "auto" sorts the texts of all columns by length; "off" cuts them as the package does.
        keep_graphs: Mini-batches that are encoded only once, for more memory: a number, or "auto" for as many as fit.
        memory_limit: Bytes that a mini-batch and kept graphs may take with "auto".

    Raises:
        ValueError: An option is invalid or not supported.

    Examples:
        >>> loss = CachedGISTEmbedLoss(model, guide, mini_batch_size=64)                   # doctest: +SKIP
        >>> SentenceTransformerTrainer(model, train_dataset=pairs, loss=loss).train()      # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        temperature: float = 0.01,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        show_progress_bar: bool = False,
        margin_strategy: GuideMargin = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        gather_across_devices: bool = False,
        *,
        tile: int | None = None,
        cache_bytes: int = 0,
        offload: Offload = "none",
        lengths: Literal["auto", "off"] | ByLength = "auto",
        keep_graphs: KeepGraphs = 0,
        memory_limit: int | None = None,
    ) -> None:
        super().__init__(
            model,
            guide,
            temperature,
            margin_strategy,
            margin,
            contrast_anchors,
            contrast_positives,
            gather_across_devices,
            tile=tile,
            cache_bytes=cache_bytes,
        )
        self._in_mini_batches(
            mini_batch_size, mini_batch_num_tokens, show_progress_bar, offload, lengths, keep_graphs, memory_limit
        )

    def beside(self, columns: list[dict[str, Tensor]], labels: Any) -> list[list[Tensor]]:
        """The guide's embeddings of each column, in mini-batches."""
        return [
            [self.guide_embeddings([dict(part)])[0] for part in self._mini_batches(features)] for features in columns
        ]

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """Compute the loss of embeddings, and optionally their gradients. The package's wrappers call it.

        Args:
            reps: A list of mini-batches of embeddings for each column.
            labels: The same of the guide.
            with_backward: Also backpropagate to the embeddings, and return the detached loss.
        """
        return super().calculate_loss(reps, [torch.cat(x) for x in labels], with_backward=with_backward)

    def get_config_dict(self) -> dict[str, Any]:
        """Options for the model card."""
        sizes = {"mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
        return {**super().get_config_dict(), **sizes}

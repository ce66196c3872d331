"""Ranking losses whose batch goes through the model at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.errors import bad_value, check_choice, check_pairs
from contratile.integrations.attributes import CheckedModule
from contratile.integrations.sentence_transformers.citations import CPC, JINA
from contratile.integrations.sentence_transformers.options import (
    Direction,
    Similarity,
    check_hardness,
    check_partition,
    checked_directions,
    default_similarity,
    embed_columns,
    is_cosine,
    similarity_name,
)
from contratile.losses.functional import clip_loss, info_nce


class MultipleNegativesRankingLoss(CheckedModule):
    """Replaces `sentence_transformers.losses.MultipleNegativesRankingLoss`: a query against all documents.

    Computes, without the score matrix,

        docs = torch.cat(columns[1:])                        # positives, then columns of hard negatives
        scores = scale * cos_sim(columns[0], docs)
        return F.cross_entropy(scores, torch.arange(len(scores)))

    Requirements: (anchor, positive) pairs, or (anchor, positive, negative, ...) tuples with any number of negatives.

    Inputs: texts, or embeddings through `compute_loss_from_embeddings`. Labels are not used.

    Relations:
        - `MultipleNegativesSymmetricRankingLoss` averages both directions.
        - `CachedMultipleNegativesRankingLoss` is the same loss for batches whose activations do not fit into memory.

    Every option is also an attribute and may be changed between calls.

    Args:
        model: The SentenceTransformer.
        scale: Multiplies the similarities; the inverse temperature.
        similarity_fct: The package's `cos_sim` (the default) or `dot_score`, a `functools.partial` of these without
            arguments, or `model.similarity` of a model that uses one of the two.
        gather_across_devices: Use the documents of all ranks as negatives.
        directions: ("query_to_doc",), or ("query_to_doc", "doc_to_query") for both directions.
        partition_mode: "joint", or "per_direction" to average the losses of both directions.
        hardness_mode: Must be None unless `hardness_strength` is 0: weighting of negatives is not supported.
        hardness_strength: Must be 0 unless `hardness_mode` is None.
        margin: Ignore negatives that score above positive - margin; None: use all.
        tile: Edge of the tiles; None: chosen automatically.
        cache_bytes: Memory for keeping tiles from forward to backward.
        matryoshka_dims: Sum the loss over truncated, normalised embeddings in one pass: the same value and gradients as
            `MatryoshkaLoss(model, loss, matryoshka_dims)` of the package, without its pass for each dimension.
        matryoshka_weights: Their weights; 1 each by default.

    Raises:
        ValueError: An option is invalid or not supported.
        TypeError: `similarity_fct` is another function.

    Examples:
        >>> import torch
        >>> loss = MultipleNegativesRankingLoss(torch.nn.Identity())
        >>> query, positive = torch.randn(8, 4, requires_grad=True), torch.randn(8, 4)
        >>> loss.compute_loss_from_embeddings([query, positive]).backward()
        >>> query.grad.shape
        torch.Size([8, 4])
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Similarity | None = None,
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        margin: float | None = None,
        tile: int | None = None,
        cache_bytes: int = 0,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not scale > 0:
            bad_value("scale", expected="a positive number", got=scale, remedy="It is 1 / temperature.")
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.directions = directions
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength
        self.margin = margin
        self.tile = tile
        self.cache_bytes = cache_bytes
        self.matryoshka_dims = matryoshka_dims
        self.matryoshka_weights = matryoshka_weights

        check_partition(self.directions, partition_mode)

    def check_option(self, name: str, value: Any) -> Any:
        """Check an option when it is set. `directions` and `partition_mode` depend on each other and are set one after
        the other, so they are compared in the call."""
        if name == "similarity_fct":
            value = default_similarity() if value is None else value
            is_cosine(value)
        elif name == "directions":
            value = checked_directions(value)
        elif name == "partition_mode":
            check_choice(name, value, ("joint", "per_direction"))
        elif name in ("hardness_mode", "hardness_strength"):
            now = {"hardness_mode": None, "hardness_strength": 0.0, **self.__dict__, name: value}
            check_hardness(now["hardness_mode"], now["hardness_strength"])
        return value

    @property
    def symmetric(self) -> bool:
        """Whether both directions are averaged."""
        return "doc_to_query" in self.directions

    @property
    def temperature(self) -> float:
        """1 / scale."""
        return 1.0 / self.scale

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Encode the columns and compute the loss, as the trainer does.

        Args:
            sentence_features: Tokenized columns: anchors, positives, then any number of negatives.
            labels: Not used: the positive of a query is the document in the same row.
        """
        return self.compute_loss_from_embeddings(embed_columns(self.model, list(sentence_features)), labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of embeddings.

        Args:
            embeddings: Columns [N, D]: queries, positives, then any number of hard negatives.
            labels: Not used.
        """
        if len(embeddings) < 2:
            remedy = "The dataset needs an anchor and a positive, optionally followed by columns of negatives."
            bad_value("sentence_features", expected="two columns or more", got=len(embeddings), remedy=remedy)
        check_partition(self.directions, self.partition_mode)
        if self.symmetric:
            check_pairs("anchors and positives", *embeddings[:2])
        # At least fp32, as in the package: the norm of a 16-bit embedding may not fit into 16 bits.
        dtype = reduce(torch.promote_types, (x.dtype for x in embeddings), torch.float32)
        embeddings = [x.to(dtype) for x in embeddings]
        cosine = is_cosine(self.similarity_fct)  # checked in every call: a model may change its similarity
        if cosine and self.matryoshka_dims is None:  # truncated embeddings are normalised by the loss
            embeddings = [F.normalize(x, dim=-1) for x in embeddings]
        query, positive, *negatives = embeddings
        loss = clip_loss if self.symmetric else info_nce
        return loss(
            query,
            positive,
            self.scale,
            extra_keys=torch.cat(negatives) if negatives else None,
            margin=self.margin,
            group="auto" if self.gather_across_devices else None,
            tile=self.tile,
            cache_bytes=self.cache_bytes,
            matryoshka_dims=self.matryoshka_dims,
            matryoshka_weights=self.matryoshka_weights,
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Options for the model card."""
        return {
            "scale": self.scale,
            "similarity_fct": similarity_name(self.similarity_fct),
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
            "hardness_mode": self.hardness_mode,
            "hardness_strength": self.hardness_strength,
            "margin": self.margin,
            "matryoshka_dims": self.matryoshka_dims,
            "matryoshka_weights": self.matryoshka_weights,
        }

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        return JINA if self.symmetric else CPC


class MultipleNegativesSymmetricRankingLoss(MultipleNegativesRankingLoss):
    """Replaces `sentence_transformers.losses.MultipleNegativesSymmetricRankingLoss`: the mean of both directions.

    Same as `MultipleNegativesRankingLoss(model, directions=("query_to_doc", "doc_to_query"),
    partition_mode="per_direction")`; see there for requirements and arguments.

    Examples:
        >>> loss = MultipleNegativesSymmetricRankingLoss(model)                  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Similarity | None = None,
        gather_across_devices: bool = False,
        *,
        margin: float | None = None,
        tile: int | None = None,
        cache_bytes: int = 0,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(
            model,
            scale,
            similarity_fct,
            gather_across_devices,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
            margin=margin,
            tile=tile,
            cache_bytes=cache_bytes,
            matryoshka_dims=matryoshka_dims,
            matryoshka_weights=matryoshka_weights,
        )

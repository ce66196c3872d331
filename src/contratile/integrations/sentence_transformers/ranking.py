"""Ranking losses that encode the whole batch at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.errors import bad_value, check_choice, check_pairs
from contratile.integrations.attributes import CheckedModule
from contratile.integrations.sentence_transformers.citations import CPC, GTE, JINA
from contratile.integrations.sentence_transformers.duplicates import DuplicateIds, duplicate_ids
from contratile.integrations.sentence_transformers.options import (
    Similarity,
    default_similarity,
    embed_columns,
    is_cosine,
    similarity_name,
)
from contratile.losses.directions import (
    PARTITION_MODES,
    Direction,
    HardnessMode,
    PartitionMode,
    check_directions,
    check_hardness,
)
from contratile.losses.functional import info_nce


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
        directions: What is compared: "query_to_doc" (always), "query_to_query", "doc_to_query", "doc_to_doc". All four
            with "joint" are GTE's loss.
        partition_mode: "joint" for one softmax over all directions, "per_direction" to average one for each; this is
            for "query_to_doc" and "doc_to_query", which both contain the positive.
        hardness_mode: Which negatives of a query weigh more the more similar they are: "in_batch_negatives",
            "hard_negatives" (its own), "all_negatives"; None: none.
        hardness_strength: Multiplies their similarity, which is added to their score without a gradient. Without a mode
            it has no effect, as in the package, and a mode has none without it (a warning says so).
        margin: Ignore negatives that score above positive - margin; None: use all.
        exclude_duplicates: Do not use pairs that share an anchor or a positive, token for token, as each other's
            negatives, nor hard negatives that equal one of a pair's texts. No sampler has to keep duplicates apart.
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
        partition_mode: PartitionMode = "joint",
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        *,
        margin: float | None = None,
        exclude_duplicates: bool = False,
        tile: int | None = None,
        cache_bytes: int = 0,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
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
        self.exclude_duplicates = exclude_duplicates
        self._ids: DuplicateIds | None = None

        check_directions(self.directions, partition_mode)
        if hardness_mode is not None and not hardness_strength:
            warnings.warn("hardness_mode has no effect, because hardness_strength is 0", stacklevel=2)

    def check_option(self, name: str, value: Any) -> Any:
        """Check an option when it is set. `directions` and `partition_mode` depend on each other and are set one after
        the other, so they are compared in the call."""
        if name == "scale" and not value > 0:
            bad_value(name, expected="a positive number", got=value, remedy="It is 1 / temperature.")
        elif name == "similarity_fct":
            value = default_similarity() if value is None else value
            is_cosine(value)
        elif name == "directions":
            value = check_directions(value, "joint")
        elif name == "partition_mode":
            check_choice(name, value, PARTITION_MODES)
        elif name == "hardness_mode":
            check_hardness(value, 0.0)
        elif name == "hardness_strength":
            check_hardness(None, value)
        return value

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
        columns = list(sentence_features)
        with self.texts_of(columns):
            return self.compute_loss_from_embeddings(embed_columns(self.model, columns), labels)

    @contextmanager
    def texts_of(self, columns: list[dict[str, Tensor]]) -> Iterator[None]:
        """Context in which losses are computed for the embeddings of these texts."""
        self._ids = duplicate_ids(columns, everywhere=self.gather_across_devices) if self.exclude_duplicates else None
        try:
            yield
        finally:
            self._ids = None

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """Compute the loss of embeddings.

        Args:
            embeddings: Columns [N, D]: queries, positives, then any number of hard negatives.
            labels: Not used.
        """
        if len(embeddings) < 2:
            remedy = "The dataset needs an anchor and a positive, optionally followed by columns of negatives."
            bad_value("sentence_features", expected="two columns or more", got=len(embeddings), remedy=remedy)
        check_directions(self.directions, self.partition_mode)
        if len(self.directions) > 1:
            check_pairs("anchors and positives", *embeddings[:2])
        if self.exclude_duplicates and self._ids is None:
            remedy = "Call the loss itself, which sees the texts, or drop exclude_duplicates=."
            bad_value("exclude_duplicates", expected="texts", got="embeddings alone", remedy=remedy)
        # At least fp32, as in the package: the norm of a 16-bit embedding may not fit into 16 bits.
        dtype = reduce(torch.promote_types, (x.dtype for x in embeddings), torch.float32)
        embeddings = [x.to(dtype) for x in embeddings]
        cosine = is_cosine(self.similarity_fct)  # checked in every call: a model may change its similarity
        if cosine and self.matryoshka_dims is None:  # truncated embeddings are normalised by the loss
            embeddings = [F.normalize(x, dim=-1) for x in embeddings]
        query, positive, *negatives = embeddings
        return info_nce(
            query,
            positive,
            self.scale,
            ids=None if self._ids is None else self._ids.pairs,
            hard_negatives=torch.stack(negatives, 1) if negatives else None,
            hard_ids=None if self._ids is None else self._ids.negatives,
            share_hard_negatives=bool(negatives),
            directions=self.directions,
            partition_mode=self.partition_mode,
            hardness_mode=self.hardness_mode,
            hardness_strength=self.hardness_strength if self.hardness_mode is not None else 0.0,
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
            "exclude_duplicates": self.exclude_duplicates,
        }

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        if len(set(self.directions)) == 4 and self.partition_mode == "joint":
            return GTE
        both = set(self.directions) == {"query_to_doc", "doc_to_query"}
        return JINA if both and self.partition_mode == "per_direction" else CPC


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
        exclude_duplicates: bool = False,
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
            exclude_duplicates=exclude_duplicates,
            tile=tile,
            cache_bytes=cache_bytes,
            matryoshka_dims=matryoshka_dims,
            matryoshka_weights=matryoshka_weights,
        )

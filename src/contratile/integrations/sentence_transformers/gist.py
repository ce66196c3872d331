"""GISTEmbed's loss, whose guide model drops false negatives from a batch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.engine.spec import GUIDE_MARGINS, GuideMargin
from contratile.errors import bad_type, bad_value, check_choice
from contratile.integrations.attributes import CheckedModule
from contratile.integrations.sentence_transformers.citations import GIST
from contratile.integrations.sentence_transformers.options import embed_columns
from contratile.losses.gist import gist_loss
from contratile.losses.options import PairOptions

TIE = 1e-6
"""Tolerance for rounding: pairs that the guide finds exactly as similar as the positive, such as duplicates, count."""


class GISTEmbedLoss(CheckedModule):
    """Replaces `sentence_transformers.losses.GISTEmbedLoss`: in-batch negatives, except those that a guide rejects.

    Computes, without the score matrices,

        scores = cos_sim(anchors, positives), cos_sim(anchors, anchors), cos_sim(positives, positives), cos_sim(anchors,
            negatives), side by side, / temperature
        scores[the guide's cosine of a pair > its cosine of the row's positive pair - margin] = -inf     # not positives
        return F.cross_entropy(scores, torch.arange(len(anchors)))

    Requirements: (anchor, positive) pairs, or (anchor, positive, negative, ...) tuples; the package's loss takes one
    column of negatives, its cached form any number, as both do here.

    Inputs: texts, or embeddings through `compute_loss_from_embeddings`. Labels are not used.

    Relations:
        - `MultipleNegativesRankingLoss` has no guide.
        - `CachedGISTEmbedLoss` is the same loss for batches whose activations do not fit into memory.

    Every option is also an attribute and may be changed between calls.

    Args:
        model: The SentenceTransformer.
        guide: The SentenceTransformer that judges the pairs; it is not trained.
        temperature: Divides the cosines.
        margin_strategy: "absolute" rejects above positive - margin, "relative" above positive - margin * abs(positive).
        margin: The margin.
        contrast_anchors: Also compare anchors with other anchors.
        contrast_positives: Also compare positives with other positives.
        gather_across_devices: Use the documents of all ranks as negatives.
        tile: Edge of the tiles; None: chosen automatically.
        cache_bytes: Memory for keeping tiles from forward to backward.

    Raises:
        ValueError: An option is invalid.
        TypeError: A model has no tokenizer.

    Examples:
        >>> loss = GISTEmbedLoss(model, guide)                                             # doctest: +SKIP
        >>> SentenceTransformerTrainer(model, train_dataset=pairs, loss=loss).train()      # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        guide: nn.Module,
        temperature: float = 0.01,
        margin_strategy: GuideMargin = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        gather_across_devices: bool = False,
        *,
        tile: int | None = None,
        cache_bytes: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.guide = guide
        self.temperature = temperature
        self.margin_strategy = margin_strategy
        self.margin = margin
        self.contrast_anchors = contrast_anchors
        self.contrast_positives = contrast_positives
        self.gather_across_devices = gather_across_devices
        self.tile = tile
        self.cache_bytes = cache_bytes
        for name, of in (("model", model), ("guide", guide)):
            if not hasattr(getattr(of, "tokenizer", None), "get_vocab"):
                remedy = "Pass a SentenceTransformer of texts with a tokenizer of transformers."
                bad_type(name, expected="a model with a tokenizer", got=type(of).__name__, remedy=remedy)
        mine, its = (getattr(of, "max_seq_length", None) or 0 for of in (model, guide))
        vocabularies = [of.tokenizer.get_vocab() for of in (model, guide)]  # type: ignore[union-attr, operator]
        self.must_retokenize = vocabularies[0] != vocabularies[1] or its < mine
        if self.must_retokenize and type(_first(model)).__name__ == "StaticEmbedding":
            remedy = "Use a guide with the tokenizer of the model."
            bad_value("guide", expected="one tokenizer with a StaticEmbedding model", got="two", remedy=remedy)

    def check_option(self, name: str, value: Any) -> Any:
        if name == "margin_strategy":
            check_choice(name, value, GUIDE_MARGINS)
        if name == "temperature" and not value > 0:
            bad_value(name, expected="a positive number", got=value, remedy="It divides the cosines.")
        return value

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Encode the columns with both models and compute the loss, as the trainer does.

        Args:
            sentence_features: Tokenized columns: anchors, positives, then any number of negatives.
            labels: Not used: the positive of an anchor is the text in the same row.
        """
        columns = list(sentence_features)
        seen = [dict(features) for features in columns]  # models write into what they are given
        embeddings = embed_columns(self.model, columns)
        return self.compute_loss_from_embeddings(embeddings, self.guide_embeddings(seen))

    def guide_embeddings(self, columns: list[dict[str, Tensor]]) -> list[Tensor]:
        """The guide's embeddings of tokenized columns, without gradient."""
        with torch.no_grad():
            if self.must_retokenize:
                columns = [self._retokenized(features) for features in columns]
            return embed_columns(self.guide, columns)

    def _retokenized(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same texts, tokenized for the guide."""
        rows: Any = features["input_ids"]
        if "cu_seq_lens_q" in features:
            flat, bounds = rows[0].tolist(), features["cu_seq_lens_q"].tolist()
            rows = [flat[start:end] for start, end in pairwise(bounds)]
        texts = self.model.tokenizer.batch_decode(rows, skip_special_tokens=True)  # type: ignore[union-attr, operator]
        tokenize: Any = getattr(self.guide, "preprocess", None) or self.guide.tokenize
        device = next(iter(self.guide.parameters()), torch.empty(0)).device
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in tokenize(texts).items()}

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], guide_embeddings: list[Tensor]) -> Tensor:
        """Compute the loss of embeddings.

        Args:
            embeddings: Columns [N, D]: anchors, positives, then any number of negatives.
            guide_embeddings: The guide's columns [N, G] of the same texts.
        """
        if len(embeddings) < 2:
            remedy = "The dataset needs an anchor and a positive, optionally followed by columns of negatives."
            bad_value("sentence_features", expected="two columns or more", got=len(embeddings), remedy=remedy)
        query, positive, *negatives = _normalized(embeddings)
        seen, positive_seen, *negatives_seen = (x.detach().to(query) for x in _normalized(guide_embeddings))
        options = PairOptions(
            extra_keys=torch.cat(negatives) if negatives else None,
            extra_guide=torch.cat(negatives_seen) if negatives_seen else None,
            guide_margin=self.margin - TIE,
            guide_margin_strategy=self.margin_strategy,
        )
        return gist_loss(
            query,
            positive,
            1 / self.temperature,
            options,
            (seen, positive_seen),
            contrast_queries=self.contrast_anchors,
            contrast_keys=self.contrast_positives,
            group="auto" if self.gather_across_devices else None,
            tile=self.tile,
            cache_bytes=self.cache_bytes,
        )

    def get_config_dict(self) -> dict[str, Any]:
        """Options for the model card."""
        return {
            "guide": self.guide,
            "temperature": self.temperature,
            "margin_strategy": self.margin_strategy,
            "margin": self.margin,
            "contrast_anchors": self.contrast_anchors,
            "contrast_positives": self.contrast_positives,
            "gather_across_devices": self.gather_across_devices,
        }

    @property
    def citation(self) -> str:
        """BibTeX for the model card."""
        return GIST


def _first(model: nn.Module) -> nn.Module:
    return next(iter(model.children()), model)


def _normalized(columns: list[Tensor]) -> list[Tensor]:
    """At least fp32: the norm of a 16-bit embedding may not fit into 16 bits."""
    dtype = reduce(torch.promote_types, (x.dtype for x in columns), torch.float32)
    return [F.normalize(x.to(dtype), dim=-1) for x in columns]

"""The losses as modules: they store keywords and call the functions of `functional.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from contratile.keywords import known_keywords, names_of, passing_on, unknown_keyword
from contratile.losses import functional
from contratile.losses.beside import LossTerms
from contratile.losses.options import Ids
from contratile.losses.signatures import Keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from contratile.engine.spec import GuideMargin, SameId
    from contratile.losses.directions import Direction, HardnessMode, PartitionMode

    class ContrastKeywords(Keywords, total=False):
        """Options of `ClipLoss` and `InfoNCE` that stay the same from batch to batch."""

        same_id: SameId
        margin: float | None
        label_smoothing: float
        matryoshka_dims: Sequence[int] | None
        matryoshka_weights: Sequence[float] | None
        matryoshka_normalize: bool
        return_stats: bool
        return_terms: bool
        teacher_weight: float
        teacher_temperature: float
        guide_margin: float
        guide_margin_strategy: GuideMargin

    class SigmoidKeywords(Keywords, total=False):
        """Options of `SigLipLoss` that stay the same from batch to batch."""

        same_id: SameId
        matryoshka_dims: Sequence[int] | None
        matryoshka_weights: Sequence[float] | None
        matryoshka_normalize: bool
        return_stats: bool

    class NegativesKeywords(ContrastKeywords, total=False):
        """Options of `InfoNCE` that stay the same from batch to batch."""

        in_batch_negatives: bool
        share_hard_negatives: bool
        directions: tuple[Direction, ...]
        partition_mode: PartitionMode
        hardness_mode: HardnessMode | None
        hardness_strength: float


class _Loss(nn.Module):
    """Stores the keywords of a function; tensors of the batch go to the call."""

    def __init__(self, function: Callable[..., Any], **keywords: Any) -> None:
        super().__init__()
        of_call = names_of(type(self).forward)
        options = [x.name for x in signature(function).parameters.values() if x.kind is Parameter.KEYWORD_ONLY]
        known = [*names_of(type(self).__init__), *(name for name in options if name not in of_call)]
        for name, value in keywords.items():
            if name not in known:
                elsewhere = "The call of the module", of_call
                unknown_keyword(type(self).__name__, name, value, known, elsewhere=elsewhere)
        self.keywords = keywords

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.keywords.items())


class ClipLoss(_Loss):
    """CLIP's symmetric contrastive loss: `clip_loss` as a module.

    For open_clip's own constructor and call, logit bias included, see `contratile.integrations.open_clip`.

    Args:
        keywords: Options of `clip_loss` that stay the same: group, reduction, backend, tile, cache_bytes, precision,
            ring, same_id, margin, label_smoothing, teacher_weight, teacher_temperature, guide_margin,
            guide_margin_strategy, matryoshka_dims, matryoshka_weights, matryoshka_normalize,
            return_stats, return_terms.

    Call: `loss(image_features, text_features, logit_scale=1.0, output_dict=False, **negatives)`, where `negatives` are
    tensors of the batch: ids, extra_keys, extra_ids, hard_negatives, hard_mask, weights, biases, and what a teacher or
    a guide brings. With `output_dict=True` it returns {"contrastive_loss": loss}, as in open_clip; with `return_terms`
    the two terms as "contrastive_loss" and "distill_loss".

    Examples:
        >>> import torch, contratile as ct
        >>> loss = ct.ClipLoss(label_smoothing=0.1)(torch.randn(8, 4), torch.randn(8, 4), 1.0)
    """

    def __init__(self, **keywords: Unpack[ContrastKeywords]) -> None:
        super().__init__(functional.clip_loss, **keywords)

    @passing_on(functional.clip_loss)
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float = 1.0,
        *,
        output_dict: bool = False,
        **negatives: Any,
    ) -> Any:
        loss = functional.clip_loss(image_features, text_features, logit_scale, **{**self.keywords, **negatives})
        return _answer(loss, output_dict)


class InfoNCE(_Loss):
    """InfoNCE of queries against keys: `info_nce` as a module.

    Args:
        scale: A fixed scale. Pass a learned one to the call.
        keywords: Options of `info_nce` that stay the same: group, reduction, backend, tile, cache_bytes, precision,
            ring, same_id, in_batch_negatives, share_hard_negatives, directions, partition_mode, hardness_mode,
            hardness_strength, margin, label_smoothing, teacher_weight, teacher_temperature, guide_margin,
            guide_margin_strategy, matryoshka_dims, matryoshka_weights, matryoshka_normalize,
            return_stats, return_terms.

    Call: `loss(query, key, scale=None, labels=None, output_dict=False, **negatives)`, where `negatives` are tensors of
    the batch: ids, extra_keys, extra_ids, hard_negatives, hard_mask, hard_ids, key_bias, extra_bias, hard_bias,
    weights, and what a teacher or a guide brings.

    Examples:
        >>> import torch, contratile as ct
        >>> loss = ct.InfoNCE(scale=2.0)(torch.randn(8, 4), torch.randn(12, 4))
    """

    def __init__(self, scale: float = 1.0, **keywords: Unpack[NegativesKeywords]) -> None:
        super().__init__(functional.info_nce, **keywords)
        self.scale = scale

    @passing_on(functional.info_nce)
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        scale: Tensor | float | None = None,
        *,
        labels: Tensor | None = None,
        output_dict: bool = False,
        **negatives: Any,
    ) -> Any:
        scale = self.scale if scale is None else scale
        loss = functional.info_nce(query, key, scale, labels=labels, **{**self.keywords, **negatives})
        return _answer(loss, output_dict)

    def extra_repr(self) -> str:
        return f"scale={self.scale!r}, {super().extra_repr()}".removesuffix(", ")


class NTXent(_Loss):
    """SimCLR's NT-Xent: `nt_xent` as a module.

    Args:
        temperature: A fixed temperature. Pass a learned one to the call.
        keywords: Options of `nt_xent`: group, reduction, backend, tile, cache_bytes, precision, ring,
            return_stats.

    Call: `loss(z1, z2, temperature=None, output_dict=False)`.

    Examples:
        >>> import torch, contratile as ct
        >>> loss = ct.NTXent(0.5)(torch.randn(8, 4), torch.randn(8, 4))
    """

    def __init__(self, temperature: float = 0.5, **keywords: Unpack[Keywords]) -> None:
        super().__init__(functional.nt_xent, **keywords)
        self.temperature = temperature

    @known_keywords
    def forward(
        self, z1: Tensor, z2: Tensor, temperature: Tensor | float | None = None, *, output_dict: bool = False
    ) -> Any:
        temperature = self.temperature if temperature is None else temperature
        return _answer(functional.nt_xent(z1, z2, temperature, **self.keywords), output_dict)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature!r}, {super().extra_repr()}".removesuffix(", ")


class SupCon(_Loss):
    """The supervised contrastive loss: `sup_con` as a module.

    Args:
        temperature: A fixed temperature. Pass a learned one to the call.
        keywords: Options of `sup_con`: group, reduction, backend, tile, cache_bytes, precision, ring.

    Call: `loss(z, labels, temperature=None, output_dict=False)`.

    Examples:
        >>> import torch, contratile as ct
        >>> loss = ct.SupCon(0.1)(torch.randn(8, 4), torch.arange(8) % 3)
    """

    def __init__(self, temperature: float = 0.1, **keywords: Unpack[Keywords]) -> None:
        super().__init__(functional.sup_con, **keywords)
        self.temperature = temperature

    @known_keywords
    def forward(
        self, z: Tensor, labels: Tensor, temperature: Tensor | float | None = None, *, output_dict: bool = False
    ) -> Any:
        temperature = self.temperature if temperature is None else temperature
        return _answer(functional.sup_con(z, labels, temperature, **self.keywords), output_dict)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature!r}, {super().extra_repr()}".removesuffix(", ")


class SigLipLoss(_Loss):
    """SigLIP's sigmoid loss: `siglip_loss` as a module, with open_clip's call.

    Args:
        keywords: Options of `siglip_loss`: group, reduction, backend, tile, cache_bytes, precision, ring, same_id,
            matryoshka_dims, matryoshka_weights, matryoshka_normalize, return_stats.

    Call: `loss(image_features, text_features, logit_scale, logit_bias, output_dict=False, ids=None)`.

    Examples:
        >>> import torch, contratile as ct
        >>> loss = ct.SigLipLoss()(torch.randn(8, 4), torch.randn(8, 4), 10.0, -10.0)
    """

    def __init__(self, **keywords: Unpack[SigmoidKeywords]) -> None:
        super().__init__(functional.siglip_loss, **keywords)

    @known_keywords
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float,
        output_dict: bool = False,
        *,
        ids: Ids | None = None,
    ) -> Any:
        numbers = logit_scale, logit_bias
        loss = functional.siglip_loss(image_features, text_features, *numbers, ids=ids, **self.keywords)
        return _answer(loss, output_dict)


def _answer(loss: Tensor | tuple[Any, ...], output_dict: bool) -> Any:
    """The loss, or open_clip's dictionary with its terms and the statistics, if any, by name."""
    if not output_dict:
        return loss
    value, *more = (loss,) if isinstance(loss, Tensor) else loss
    found = {"contrastive_loss": value}
    for record in more:
        if isinstance(record, LossTerms):
            found = {"contrastive_loss": record.contrastive, "distill_loss": record.distill}
        else:
            found |= {name: x for name, x in record._asdict().items() if x is not None}
    return found

"""The losses as modules: they store keywords and call the function.

Losses are fp32 (fp64 for fp64 features), also for 16-bit features.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from contratile.keywords import known_keywords, names_of, passing_on, unknown_keyword
from contratile.losses import functional
from contratile.losses.functional import Keywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class ContrastKeywords(Keywords, total=False):
        """What is fixed for a training run of `ClipLoss` or `InfoNCE`."""

        margin: float | None
        label_smoothing: float
        return_stats: bool


class _Loss(nn.Module):
    """Keywords given here are those of the function; tensors that change from batch to batch are given to the call."""

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
    """`clip_loss` of image features, text features and a scale. For open_clip's own constructor and call, logit bias
    included, see `contratile.integrations.open_clip`.

    `negatives` are tensors of the batch: ids, extra_keys, extra_ids, hard_negatives, hard_mask, weights.
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
    """`info_nce`; a learned scale is passed to the call, a fixed one may be given here.

    `negatives` are tensors of the batch: ids, extra_keys, extra_ids, hard_negatives, hard_mask, weights.
    """

    def __init__(self, scale: float = 1.0, **keywords: Unpack[ContrastKeywords]) -> None:
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
    """`nt_xent`; a learned temperature is passed to the call."""

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
    """`sup_con`; a learned temperature is passed to the call."""

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
    """`siglip_loss` with open_clip's call: `loss(image_features, text_features, logit_scale, logit_bias)`."""

    def __init__(self, **keywords: Unpack[Keywords]) -> None:
        super().__init__(functional.siglip_loss, **keywords)

    @known_keywords
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float,
        output_dict: bool = False,
    ) -> Any:
        loss = functional.siglip_loss(image_features, text_features, logit_scale, logit_bias, **self.keywords)
        return _answer(loss, output_dict)


def _answer(loss: Tensor | tuple[Tensor, Any], output_dict: bool) -> Any:
    """The loss, or open_clip's dictionary; statistics, if they were asked for, go by their names."""
    if not output_dict:
        return loss
    if isinstance(loss, Tensor):
        return {"contrastive_loss": loss}
    value, stats = loss
    return {"contrastive_loss": value} | {name: x for name, x in stats._asdict().items() if x is not None}

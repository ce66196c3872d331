"""The losses as modules: they store keywords and call the function."""

from typing import Any

from torch import Tensor, nn

from contratile import functional
from contratile.backends import Backend
from contratile.reference import Reduction
from contratile.team import Group


class _Loss(nn.Module):
    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.keywords = keywords

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.keywords.items())


class ClipLoss(_Loss):
    """`clip_loss` with open_clip's call: `loss(image_features, text_features, logit_scale, output_dict=False)`."""

    def __init__(
        self,
        *,
        group: Group = "auto",
        reduction: Reduction = "mean",
        backend: Backend = "auto",
        tile: int | None = None,
        cache_bytes: int = 0,
    ) -> None:
        super().__init__(group=group, reduction=reduction, backend=backend, tile=tile, cache_bytes=cache_bytes)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float = 1.0,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        loss = functional.clip_loss(image_features, text_features, logit_scale, **self.keywords)
        return {"contrastive_loss": loss} if output_dict else loss


class InfoNCE(_Loss):
    """`info_nce`; a learned scale is passed to the call, a fixed one may be given here."""

    def __init__(
        self,
        scale: float = 1.0,
        *,
        group: Group = "auto",
        reduction: Reduction = "mean",
        backend: Backend = "auto",
        tile: int | None = None,
        cache_bytes: int = 0,
    ) -> None:
        super().__init__(group=group, reduction=reduction, backend=backend, tile=tile, cache_bytes=cache_bytes)
        self.scale = scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        scale: Tensor | float | None = None,
        *,
        labels: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        scale = self.scale if scale is None else scale
        loss = functional.info_nce(query, key, scale, labels=labels, **self.keywords)
        return {"contrastive_loss": loss} if output_dict else loss

    def extra_repr(self) -> str:
        return f"scale={self.scale!r}, {super().extra_repr()}"

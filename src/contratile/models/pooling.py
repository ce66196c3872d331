"""One row of features per text, from the hidden states of its tokens."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from contratile.errors import bad_value

TextPooling = Literal["auto", "cls", "pooler", "mean", "last"]


def pool_tokens(hidden: Tensor, mask: Tensor, pooling: TextPooling) -> Tensor:
    """Pool the tokens of each text.

    Args:
        hidden: Hidden states [n, T, C].
        mask: The attention mask [n, T]: 0 for padding, which may be on either side.
        pooling: "cls": the first token; "last": the last one; "mean" or "auto": the mean of all.

    Returns:
        Features [n, C].
    """
    if pooling in ("auto", "mean"):
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1).clamp_min(1)
    counted = mask.cumsum(1)
    # argmax finds the first of equal values: the first token, or the first position at which all tokens are counted.
    where = (mask if pooling == "cls" else counted).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), where]


def freeze_pooler(model: nn.Module) -> None:
    """Freeze a text model's pooler if it is not used: DDP waits for the gradients of all trained parameters."""
    pooler = getattr(model, "pooler", None)
    if isinstance(pooler, nn.Module):
        pooler.requires_grad_(False)
        pooler.unused = True  # type: ignore[assignment]  # torch declares tensors and modules only


def set_sentence_pooling(model: Any, pooling: TextPooling) -> None:
    """Replace the pooling of a sentence-transformers model. "auto" leaves it as it is.

    Raises:
        ValueError: The model has no such pooling, or none that can be replaced.
    """
    if pooling == "auto":
        return
    modes = {"cls": "cls", "mean": "mean", "last": "lasttoken"}
    if pooling not in modes:
        remedy = "Pass cls, mean or last, or drop it for the model's own pooling."
        bad_value("text_pooling", expected="auto, cls, mean or last with st: towers", got=pooling, remedy=remedy)
    for name, module in model.named_children():
        if type(module).__name__ == "Pooling":
            width = getattr(module, "get_embedding_dimension", None) or module.get_sentence_embedding_dimension
            new = type(module)(_token_width(module), pooling_mode=modes[pooling])
            again = getattr(new, "get_embedding_dimension", None) or new.get_sentence_embedding_dimension
            if width() != again():
                remedy = "Drop it: the layers behind it need that many features."
                bad_value("text_pooling", expected=f"a pooling with {width()} features", got=pooling, remedy=remedy)
            model._modules[name] = new
            return
    remedy = "Drop it: this model pools in its own way."
    bad_value("text_pooling", expected="a model with a Pooling module", got=pooling, remedy=remedy)


def _token_width(pooling: Any) -> int:
    """Renamed in sentence-transformers 6."""
    found = getattr(pooling, "embedding_dimension", None) or pooling.word_embedding_dimension
    return int(found)

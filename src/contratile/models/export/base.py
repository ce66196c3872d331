"""What the writers of all formats share: their result, the refusal, and heads that become part of a projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from contratile.errors import bad_value
from contratile.models.towers import Tower, Towers

Format = Literal["transformers", "open_clip", "sentence-transformers"]
FORMATS: tuple[str, ...] = get_args(Format)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A folder that was written, how to use it, and how to compute its features."""

    loaded_by: str
    """Class or function that loads the folder."""

    usage: str
    """Python code for the model card; FOLDER stands for the folder."""

    task: str
    """The Hugging Face hub's name for what the model does."""

    encode_pixels: Callable[[Tensor], Tensor] | None = None
    """Features of normalised pixels, from the folder as the other package loads it; None: it has no image encoder."""

    encode_texts: Callable[[Sequence[str]], Tensor] | None = None
    """Features of texts, likewise."""

    notes: tuple[str, ...] = field(default=())
    """What does not go along, in sentences."""


def image_alone(towers: Towers) -> bool:
    """Whether the run trained one image encoder on two views of each image."""
    return towers.left is towers.right and towers.left.kind == "image"


def refuse_towers(towers: Towers, to: str, *, expected: str, remedy: str) -> NoReturn:
    """Raise a ValueError: the format has no place for these towers."""
    bad_value(f"export to {to}", expected=expected, got=towers.config.towers, remedy=remedy)


def refuse_head(towers: Towers, to: str, why: str) -> NoReturn:
    """Raise a ValueError: the format has no place for the head."""
    remedy = "Use contratile.load in Python, or train with a head that the format has (docs/use.md)."
    bad_value(f"export to {to}", expected=why, got=f"--head {towers.config.head}", remedy=remedy)


def linear_head(tower: Tower) -> Tensor | None:
    """The weight [out, in] of a linear head; None without a head."""
    return tower.head.weight.detach() if isinstance(tower.head, nn.Linear) else None


def through_head(head: Tensor | None, projection: Tensor) -> Tensor:
    """One projection [out, in] instead of a projection and a linear head without bias.

    The product is computed in fp64, so that it is rounded once.
    """
    if head is None:
        return projection.detach().clone()
    return (head.double().cpu() @ projection.detach().double().cpu()).to(head.dtype)


def linear(weight: Tensor) -> nn.Linear:
    """A linear layer without bias, from its weight [out, in]."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.contiguous())
    return layer


def preprocessing(tower: Any) -> tuple[int, list[float], list[float]]:
    """Edge in pixels, mean and standard deviation of an image tower's inputs."""
    pixels = tower.backbone[0]
    return int(tower.prepare.edge), [float(x) for x in pixels.mean], [float(x) for x in pixels.std]

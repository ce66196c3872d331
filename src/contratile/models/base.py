"""What every backbone offers, whichever package it comes from.

backbone = image_backbone(model, width=512, edge=224, pixels=Pixels())
backbone.encoder(backbone.prepare(images))          # [n, 512]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from torch import Tensor, nn

from contratile.data.images import CLIP_MEAN, CLIP_STD, Squares, normalise
from contratile.data.sample import Kind
from contratile.packages import CORE_MODULES, find_spec_safely, why_not

Prepare = Callable[[Sequence[Any]], Any]


class Backbone(NamedTuple):
    """An encoder without its head, and how raw samples become its inputs."""

    encoder: nn.Module
    """Maps prepared inputs of n samples to features [n, width]."""

    width: int
    kind: Kind
    prepare: Prepare
    """Turns raw images or texts into the encoder's inputs. It is pickled for data workers."""


class Pixels(nn.Module):
    """Turns bytes [n, 3, H, W] into normalised floats, on the encoder's device: workers send bytes, a quarter of that.

    Args:
        mean: Subtracted per channel, on a scale of 0 to 1.
        std: Divided by per channel.
    """

    def __init__(self, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> None:
        super().__init__()
        self.mean, self.std = tuple(mean), tuple(std)

    def forward(self, pixels: Tensor) -> Tensor:
        return normalise(pixels, self.mean, self.std)


def image_backbone(model: nn.Module, width: int, edge: int, pixels: Pixels) -> Backbone:
    """A backbone for images from a model that takes normalised pixels [n, 3, edge, edge]."""
    return Backbone(nn.Sequential(pixels, model), width, "image", Squares(edge))


def import_needed(module: str, requirement: str, *, needed_for: str) -> Any:
    """Import a package that towers come from, or that they are written for.

    Args:
        module: Name of the module.
        requirement: What to install if it is missing.
        needed_for: What it is needed for, in words, for messages.

    Raises:
        ImportError: It is not installed, or it cannot be imported: the message names the package at fault, which may
            be one that it imports, and the remedy.
    """
    try:
        imported = import_module(module)
        if module in CORE_MODULES:
            import_module(CORE_MODULES[module])
        return imported
    except Exception as error:  # a broken package raises anything: RuntimeError, OSError, AttributeError
        if not find_spec_safely(module):
            raise ImportError(f"{module} is needed for {needed_for}: pip install {requirement}") from error
        raise ImportError(f"{module} is needed for {needed_for}. {why_not(module, error)}") from error

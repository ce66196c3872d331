"""The encoders that a configuration names, built without weights, and the shapes of their inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from contratile.grad_cache.chunks import Nest, map_tensors
from contratile.models.definition import definitions
from contratile.models.towers import LockedTowerHead, Tower, TowerConfig, Towers, build_towers

LONGEST = 100_000
"""Words of the text that shows how long inputs can be."""


class EncoderExample(NamedTuple):
    """An encoder and an example of its inputs."""

    module: nn.Module
    inputs: Nest


def tower_definitions(config: TowerConfig, *, bias: bool = False, views: bool = False) -> Towers:
    """The towers of a configuration on the meta device, in training mode."""
    with definitions():
        return build_towers(config, bias=bias, views=views).train()


def encoder_sides(
    towers: Towers,
    *,
    tokens: int = 0,
    inputs: tuple[Nest, Nest] | None = None,
    kept: tuple[bool, bool] = (False, False),
) -> tuple[EncoderExample, EncoderExample]:
    """The encoders of a training step with example inputs.

    Args:
        towers: With weights or without.
        tokens: Tokens of a text; 0: as many as the model takes.
        inputs: Real inputs instead of examples.
        kept: Sides whose backbone's outputs are computed once and kept.
    """
    found = []
    for index, tower in enumerate((towers.left, towers.right)):
        if kept[index]:
            width = _hidden(tower)
            found.append(EncoderExample(LockedTowerHead(tower), torch.empty(1, width, device="meta")))
            continue
        example = tower_inputs(tower, tokens) if inputs is None else inputs[index]
        found.append(EncoderExample(tower, (example,) if isinstance(example, dict) else example))
    left, right = found
    if towers.right is towers.left:
        right = EncoderExample(left.module, right.inputs)
    return left, right


def _hidden(tower: Tower) -> int:
    """Outputs of a backbone: what its head takes."""
    for module in tower.head.modules():
        if isinstance(module, nn.Linear):
            return module.in_features
    return tower.width


def tower_inputs(tower: Tower, tokens: int = 0) -> Any:
    """Example inputs of a tower, one row on the meta device."""
    prepare: Any = tower.prepare
    if tower.kind == "image":
        return torch.empty((1, 3, prepare.edge, prepare.edge), dtype=torch.uint8, device="meta")
    with torch.device("cpu"):
        prepared = prepare(["a " * LONGEST])

    def blank(x: torch.Tensor) -> torch.Tensor:
        length = min(tokens, x.shape[1]) if tokens and x.dim() > 1 else None
        shape = x.shape if length is None else (len(x), length, *x.shape[2:])
        return torch.empty(shape, dtype=x.dtype, device="meta")

    return map_tensors(blank, prepared)

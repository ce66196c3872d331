"""The blocks of a backbone, and what comes before and after them.

    blocks = find_blocks(tower.backbone)
    blocks.modules                                       # the transformer blocks, first to last
    blocks.depth["encoder.layers.3.mlp.fc1.weight"]      # 4: blocks count from 1, 0 is the embeddings

Works on any model whose blocks are one ModuleList or Sequential of modules of the same class. Networks with several
such stacks, like the four stages of a ResNet, have no blocks in this sense.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from contratile.errors import bad_value

RUNNER_UP = 0.1
"""Largest share of the parameters of the blocks that another stack may have, such as a small pooling network."""


class Blocks(NamedTuple):
    """The blocks of a model."""

    modules: list[nn.Module]
    """First to last."""

    inputs: list[nn.Module]
    """Modules that run before the first block: embeddings, convolutions, norms."""

    depth: dict[str, int]
    """Per parameter name: 0 before the blocks, 1 in the first block, len(modules) + 1 after the last one."""


def find_blocks(model: nn.Module) -> Blocks | None:
    """Find the blocks of a model.

    Returns:
        The blocks; None if there is no such stack, or several.
    """
    stacks = sorted(_stacks(model), key=lambda stack: stack[1], reverse=True)
    if not stacks or any(size >= RUNNER_UP * stacks[0][1] for _, size in stacks[1:]):
        return None
    path = stacks[0][0].split(".") if stacks[0][0] else []
    members = model.get_submodule(stacks[0][0])._modules
    position = {name: i for i, name in enumerate(members, start=1)}
    depth = {}
    for name, _ in model.named_parameters():
        words = name.split(".")
        if words[: len(path)] == path:
            depth[name] = position[words[len(path)]]
        else:
            depth[name] = 0 if _runs_before(model, words, path) else len(members) + 1
    return Blocks([x for x in members.values() if x is not None], list(_inputs(model, path)), depth)


def need_blocks(model: nn.Module, option: str, *, kind: str) -> Blocks:
    """`find_blocks` for an option that cannot do without.

    Args:
        model: The backbone.
        option: What error messages call the option.
        kind: What error messages call the backbone: "image" or "text".

    Raises:
        ValueError: The blocks cannot be identified.
    """
    found = find_blocks(model)
    if found is None:
        remedy = f"Drop --{option.replace('_', '-')}, or use a transformer; open_clip's ResNets have four stacks."
        bad_value(option, expected="one stack of blocks", got=f"no such stack in the {kind} encoder", remedy=remedy)
    return found


def _stacks(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of each stack that is not inside another one."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        parts = list(module.children())
        least = 1 if isinstance(module, nn.ModuleList) else 2  # a Sequential of one is a wrapper
        alike = len(parts) >= least and len({type(part) for part in parts}) == 1
        size = sum(p.numel() for p in module.parameters())
        if alike and size and next(parts[0].children(), None) is not None:
            found.append(name)
            yield name, size


def _runs_before(model: nn.Module, words: list[str], path: list[str]) -> bool:
    """Whether a module or parameter outside of the stack at `path` is used before it.

    Packages register modules in the order of their use. Parameters of a module around the stack are tokens and
    positions, or a projection.
    """
    shared = next(i for i, (mine, theirs) in enumerate(zip(words, path, strict=False)) if mine != theirs)
    word, around = words[shared], model.get_submodule(".".join(path[:shared]))
    if "embed" in word or "relative" in word:  # some are registered after the blocks
        return True
    if word in around._parameters:
        return "proj" not in word
    order = list(around._modules)
    return order.index(word) < order.index(path[shared])


def _inputs(model: nn.Module, path: list[str]) -> Iterator[nn.Module]:
    for i in range(len(path)):
        for name, child in model.get_submodule(".".join(path[:i])).named_children():
            if name != path[i] and _runs_before(model, [*path[:i], name], path):
                yield child

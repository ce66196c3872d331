"""Towers whose weights, gradients and optimiser state are shared out over the processes: FSDP2.

    shard(tower, device)                             # in place; a layer is whole only while it computes
    optimizer = without_foreach(...)                 # made of the shards
    state = whole(towers.state_dict())               # collective; plain tensors, on the main process
    load_model(towers, state)

Checkpoints hold whole tensors, so a sharded run is resumed unsharded and the other way round.

accelerate's own way to FSDP2 takes one model, and no CPU, so torch's `fully_shard` is called here. A wish for FSDP that
comes from `accelerate config` is heard.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FROM_ACCELERATE = "ACCELERATE_USE_FSDP"
"""What `accelerate launch --use_fsdp` sets."""


def asked_of_accelerate() -> bool:
    return os.environ.get(FROM_ACCELERATE, "false").lower() == "true"


def shard(tower: nn.Module, device: torch.device) -> None:
    """Share a tower out over all processes, each of its layers by itself, beginning with the main process's weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for x in (*tower.parameters(), *tower.buffers()):
        dist.broadcast(x.detach(), src=0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers(tower):
        fully_shard(layer, mesh=mesh)
    fully_shard(tower, mesh=mesh)


def layers(tower: nn.Module) -> list[nn.Module]:
    """What a tower is a stack of, inner ones first: the members of lists of modules of one kind."""
    found: dict[nn.Module, None] = {}
    for stack in reversed(list(tower.modules())):
        parts = list(stack.children())
        if isinstance(stack, nn.ModuleList | nn.Sequential) and len({type(part) for part in parts}) == 1:
            found |= dict.fromkeys(part for part in parts if any(True for _ in part.parameters()))
    return list(found)


def without_foreach(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One parameter after the other: torch's steps for many at once want no shards among plain tensors."""
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False
    return optimizer


def is_shard(x: object) -> bool:
    return hasattr(x, "full_tensor")


def whole(tree: Any) -> Any:
    """The same nesting of dicts and lists with plain tensors for shards. Collective; only the main process keeps them.

    One tensor at a time is whole on every process.
    """
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    if not is_shard(tree):
        return tree
    gathered = tree.full_tensor()
    return gathered.detach().cpu() if dist.get_rank() == 0 else None


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """As `model.load_state_dict`, of whole tensors."""
    mine = model.state_dict()
    model.load_state_dict({name: _like(mine.get(name), value) for name, value in state.items()})


def shared_out(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimiser, of whole tensors, as its parameters are shared out and its steps are made now."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of = dict(zip(names, parameters, strict=True))
    shares = {name: {key: _like(of[name], x) for key, x in kept.items()} for name, kept in state["state"].items()}
    groups = [
        {**saved, **{key: now[key] for key in ("foreach",) if key in now}}
        for saved, now in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {"state": shares, "param_groups": groups}


def _like(mine: Any, value: Any) -> Any:
    """A whole tensor, shared out as one of ours is; sums over some dimensions of it are kept whole on each process."""
    if not is_shard(mine) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = mine.placements if value.shape == mine.shape else [Replicate()]
    return distribute_tensor(value.to(mine.device), mine.device_mesh, placements)

"""FSDP2: weights, gradients and optimiser state sharded over the processes.

    shard(tower, device)                             # in place; a layer is gathered only while it computes
    optimizer = without_foreach(...)                 # built on the shards
    state = whole(towers.state_dict())               # collective; full tensors on the main process
    load_model(towers, state)

Checkpoints hold full tensors, so a sharded run can be resumed unsharded and the other way round.

accelerate's own FSDP2 support takes a single model and no CPU, so this module calls torch's `fully_shard` itself. FSDP
requested through `accelerate config` is honoured.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FROM_ACCELERATE = "ACCELERATE_USE_FSDP"
"""Environment variable that `accelerate launch --use_fsdp` sets."""


def requested_by_accelerate() -> bool:
    """Whether FSDP was requested through `accelerate launch` or `accelerate config`."""
    return os.environ.get(FROM_ACCELERATE, "false").lower() == "true"


def shard(tower: nn.Module, device: torch.device) -> None:
    """Shard a tower over all processes, layer by layer, starting from the main process's weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for x in (*tower.parameters(), *tower.buffers()):
        dist.broadcast(x.detach(), src=0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers(tower):
        fully_shard(layer, mesh=mesh)
    fully_shard(tower, mesh=mesh)


def layers(tower: nn.Module) -> list[nn.Module]:
    """The layers to shard separately, inner ones first: members of ModuleLists and Sequentials of a single type."""
    found: dict[nn.Module, None] = {}
    for stack in reversed(list(tower.modules())):
        parts = list(stack.children())
        if isinstance(stack, nn.ModuleList | nn.Sequential) and len({type(part) for part in parts}) == 1:
            found |= dict.fromkeys(part for part in parts if any(True for _ in part.parameters()))
    return list(found)


def without_foreach(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Update parameters one by one: torch's foreach steps cannot mix shards and plain tensors."""
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False
    return optimizer


def is_shard(x: object) -> bool:
    """Whether a tensor is one process's shard of a larger one."""
    return hasattr(x, "full_tensor")


def whole(tree: Any) -> Any:
    """Gather all shards in a nesting of dicts and lists. Collective; the result is complete on the main process only.

    Processes hold at most one full tensor at a time besides those that the main process keeps.
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
    """`model.load_state_dict` for full tensors, whether the model is sharded or not."""
    mine = model.state_dict()
    model.load_state_dict({name: _like(mine.get(name), value) for name, value in state.items()})


def sharded_like(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Shard an optimiser state of full tensors the way the optimiser's parameters are sharded."""
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
    """Shard a full tensor like one of ours; tensors of another shape (row or column sums) are replicated."""
    if not is_shard(mine) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    placements = mine.placements if value.shape == mine.shape else [Replicate()]
    return distribute_tensor(value.to(mine.device), mine.device_mesh, placements)

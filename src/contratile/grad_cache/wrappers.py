"""Suspends gradient synchronisation of DDP, FSDP and DeepSpeed.

with unsynchronised(wrappers_of(encoder)):
    encoder(chunk).sum().backward()            # accumulates gradients on this rank only
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from contratile.errors import bad_value
from contratile.ring.team import Team


def wrappers_of(module: nn.Module) -> list[nn.Module]:
    """Submodules with `no_sync` (DDP, FSDP1 and similar) and those under FSDP2's `fully_shard`."""
    return [x for x in module.modules() if hasattr(x, "no_sync") or is_sharded(x)]


def is_sharded(module: nn.Module) -> bool:
    """Whether a module is under FSDP2's `fully_shard`."""
    return hasattr(module, "set_requires_gradient_sync")


def is_engine(module: nn.Module) -> bool:
    """Whether a module is DeepSpeed's engine."""
    return hasattr(module, "zero_optimization_stage")


def is_collective(module: nn.Module) -> bool:
    """Whether forward passes gather parameters from all ranks and free them afterwards: FSDP2, ZeRO 3."""
    engine: Any = module
    return is_sharded(module) or (is_engine(module) and int(engine.zero_optimization_stage()) == 3)


@contextmanager
def reduced_once(wrappers: Iterable[nn.Module]) -> Iterator[None]:
    """Context for all backward passes of a step: DeepSpeed's engines reduce gradients once, at its end."""
    with ExitStack() as stack:
        for wrapper in {id(x): x for x in wrappers if is_engine(x)}.values():
            engine: Any = wrapper
            if int(engine.zero_optimization_stage()) == 0:
                continue
            if not hasattr(engine, "coalesce_grad_reduction"):
                remedy = "Update DeepSpeed (0.19 has it), or use DDP."
                bad_value(
                    "encoder", expected="a DeepSpeed engine with coalesce_grad_reduction", got="none", remedy=remedy
                )
            stack.enter_context(engine.coalesce_grad_reduction())
        yield


@contextmanager
def unsynchronised(wrappers: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which forward and backward passes do not reduce gradients over ranks."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            x: Any = wrapper
            if is_engine(wrapper):
                continue  # `reduced_once` is around all passes
            if not is_sharded(wrapper):
                stack.enter_context(x.no_sync())
            elif _reduces(x):
                x.set_requires_gradient_sync(False, recurse=False)
                stack.callback(x.set_requires_gradient_sync, True, recurse=False)
        yield


def _reduces(module: Any) -> bool:
    """Whether gradient reduction is on. FSDP2 has a setter for it and no getter."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return any(group is not None and group.reduce_grads for group in groups)


def check_equal_counts(count: int, team: Team, device: torch.device) -> None:
    """Raise a ValueError unless all ranks have the same number of chunks: their forward passes are collective."""
    values = torch.tensor([count, count * count], dtype=torch.float64, device=device)
    total, squares = team.sum(values).tolist()
    if team.size * squares != total * total:
        remedy = "Give every rank the same number of rows, or ranks with fewer rows smaller chunks. DDP needs neither."
        bad_value(
            "chunks of an encoder under FSDP or ZeRO 3", expected="equally many on every rank", got=count, remedy=remedy
        )


@contextmanager
def without_buffer_broadcast(wrappers: Iterable[nn.Module]) -> Iterator[None]:
    """Context in which DDP does not broadcast buffers before forward passes, which the other ranks may not run."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            before = getattr(wrapper, "require_forward_param_sync", None)
            if before:
                stack.callback(setattr, wrapper, "require_forward_param_sync", before)
                wrapper.require_forward_param_sync = False  # type: ignore[assignment]  # an attribute of DDP
        yield

"""Makes a second forward pass repeat the first: random state, autocast and buffers.

    state = RandomState.now(devices)       # before a chunk's first pass
    state.restore()                        # before its second: dropout draws the same masks

Covers torch's default generators, of the CPU and of every accelerator in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CPU = torch.device("cpu")


def devices_of(tensors: Iterable[Tensor]) -> set[torch.device]:
    """The CPU, and every accelerator that holds one of the tensors."""
    return {CPU} | {x.device for x in tensors if x.device.type not in ("cpu", "meta")}


@dataclass(frozen=True, eq=False)
class RandomState:
    """States of the default random generators of some devices."""

    states: dict[torch.device, Tensor]

    @classmethod
    def now(cls, devices: Iterable[torch.device], last: RandomState | None = None) -> RandomState:
        """The current state. Returns `last` itself if nothing was drawn since: a state takes 5 kB per chunk."""
        states = {device: _generator(device).get_rng_state(*_index(device)) for device in devices}
        if last is not None and last.states.keys() == states.keys():
            if all(torch.equal(state, last.states[device]) for device, state in states.items()):
                return last
        return cls(states)

    def restore(self) -> None:
        """Set the generators to this state."""
        for device, state in self.states.items():
            _generator(device).set_rng_state(state, *_index(device))


def _generator(device: torch.device) -> Any:
    """The module that has get_rng_state and set_rng_state for a device."""
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """The device argument of the functions above; those of CPU and MPS take none."""
    return () if device.type in ("cpu", "mps") else (device,)


class Autocast:
    """The autocast settings at the time of construction, for the types of some devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        types = sorted({device.type for device in devices})
        self.settings = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types]
        self.cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Context for a forward pass, with the recorded settings."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.settings:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cached))
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context for a backward pass, which uses the dtypes of its forward pass and needs no autocast."""
        with ExitStack() as stack:
            for kind, _, _ in self.settings:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield


class Buffer(NamedTuple):
    """A buffer of a module and a copy of its content."""

    module: nn.Module
    name: str
    tensor: Tensor
    content: Tensor


def copy_buffers(modules: Iterable[nn.Module]) -> list[Buffer]:
    """Copy all buffers. Tensor versions do not reveal changed ones: running-stat updates do not bump them."""
    every = {id(module): module for owner in modules for module in owner.modules()}
    return [
        Buffer(module, name, x, x.detach().clone())
        for module in every.values()
        for name, x in module._buffers.items()
        if x is not None
    ]


@torch.no_grad()
def restore_buffers(buffers: Iterable[Buffer]) -> None:
    """Set buffers back to their copies."""
    for module, name, tensor, content in buffers:
        module._buffers[name] = tensor.copy_(content)

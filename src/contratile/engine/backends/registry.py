"""Chooses the tiled backend of a call: `triton` where its kernels run and cover the call, otherwise `torch`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from contratile.engine.backends import torch_tiles
from contratile.engine.backends.block import Given, Gradients, KernelError, Scores, Tiles
from contratile.engine.spec import Inputs, Spec
from contratile.engine.stats import SideParts
from contratile.errors import bad_value

TRITON = (3, 7)
"""The oldest supported version."""

NOT_COVERED: dict[str, Callable[[Inputs, Spec], bool]] = {
    "float64": lambda x, spec: x.query.dtype == torch.float64,
    "softplus of one set": lambda x, spec: spec.reduce == "softplus" and x.key is None,
    "matryoshka_dims": lambda x, spec: bool(spec.prefixes),
    "a teacher": lambda x, spec: x.teacher_query is not None,
    "a guide": lambda x, spec: x.guide_query is not None,
}
"""What the kernels do not cover."""


def choose(x: Inputs, spec: Spec) -> Tiles:
    """The backend for a call. Where kernels cannot run, "triton" raises and "auto" uses the torch backend."""
    if spec.backend == "torch" or (spec.backend == "auto" and not on_gpu(x.query)):
        return torch_tiles
    asked = spec.backend == "triton"
    beyond = [name for name, asks in NOT_COVERED.items() if asks(x, spec)]
    if beyond:
        if asked:
            remedy = "Use backend='auto', which leaves such calls to the torch backend."
            bad_value("backend='triton'", expected="what kernels cover", got=", ".join(beyond), remedy=remedy)
        if beyond != ["float64"]:
            _warn(f"they do not cover {', '.join(beyond)}")
        return torch_tiles
    reason = unavailable(x.query.device)
    if reason is not None:
        if asked:
            refuse(reason)
        _warn(reason)
        return TorchInstead() if x.query.device in _failed else torch_tiles
    from contratile.engine.backends import triton_tiles

    if x.query.dtype == torch.bfloat16 and triton_tiles.INTERPRETED and not triton_tiles.interprets_bf16():
        refuse("Triton's interpreter, which multiplies bfloat16 wrongly", remedy="Check with float32 or float16.")
    return triton_tiles if asked else KernelsOrTorch(x.query.device)


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a device that kernels may support: CUDA or ROCm."""
    return x.is_cuda


def check(backend: str, device: torch.device, ranks: int) -> None:
    """Refuse a backend that cannot run here. `torch.compile` cannot trace this; its operator chooses for itself."""
    if backend == "dense" and ranks > 1:
        remedy = "Use backend='auto', or group=None for this rank's own pairs."
        bad_value("backend", expected="'auto', 'torch' or 'triton' over several ranks", got="'dense'", remedy=remedy)
    if backend == "triton" and not torch.compiler.is_compiling():
        reason = unavailable(device)
        if reason is not None:
            refuse(reason)


def refuse(reason: str, remedy: str = "Use backend='auto' or backend='torch'.") -> NoReturn:
    bad_value("backend='triton'", expected="a device and a Triton that kernels run on", got=reason, remedy=remedy)


_failed: dict[torch.device, str] = {}


def unavailable(device: torch.device) -> str | None:
    """Why kernels cannot run on a device, or None if they can."""
    return _failed.get(device) or _unavailable(device)


@cache
def _unavailable(device: torch.device) -> str | None:
    if device.type not in ("cuda", "cpu"):
        return f"a device of type {device.type}"
    try:
        import triton
    except ImportError:
        return "no Triton (pip install triton)"
    found = str(triton.__version__)
    if tuple(int(number) for number in found.split(".")[:2]) < TRITON:
        return f"Triton {found}, which is older than {'.'.join(map(str, TRITON))}"
    from contratile.engine.backends import triton_launch

    if triton_launch.INTERPRETED:
        return None if device.type == "cpu" else "Triton's interpreter (TRITON_INTERPRET=1), which is for CPU tensors"
    if device.type == "cpu":
        return "CPU tensors, without TRITON_INTERPRET=1 in the environment before Triton is imported"
    if triton_launch.arch_of(device) is None:
        return f"{torch.cuda.get_device_name(device)}, for which there is no launch table"
    return None


_warned: set[str] = set()


def _warn(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"contratile uses the torch backend instead of its kernels: {reason}.", stacklevel=2)


class TorchInstead:
    """The torch backend where a kernel could not be built: scores that kernels kept are computed again."""

    def positives(self, scores: Scores, spec: Spec, level: Tensor) -> None:
        torch_tiles.positives(scores, spec, level)

    def forward(self, scores: Scores, spec: Spec, pos: Tensor | None) -> tuple[SideParts, SideParts]:
        return torch_tiles.forward(scores, spec, pos)

    def backward(self, scores: Scores, spec: Spec, given: Given, into: Gradients) -> None:
        torch_tiles.backward(scores._replace(cache=None), spec, given, into)


class KernelsOrTorch(TorchInstead):
    """The kernels, or the torch backend once a kernel could not be built.

    Kernels are built at their first launch, before the block has changed any result.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def positives(self, scores: Scores, spec: Spec, level: Tensor) -> None:
        self._try("positives", scores, spec, level)

    def forward(self, scores: Scores, spec: Spec, pos: Tensor | None) -> tuple[SideParts, SideParts]:
        found: tuple[SideParts, SideParts] = self._try("forward", scores, spec, pos)
        return found

    def backward(self, scores: Scores, spec: Spec, given: Given, into: Gradients) -> None:
        self._try("backward", scores, spec, given, into)

    def _try(self, step: str, *arguments: Any) -> Any:
        if self.device not in _failed:
            from contratile.engine.backends import triton_tiles

            try:
                return getattr(triton_tiles, step)(*arguments)
            except KernelError as error:
                _failed[self.device] = str(error)
                _warn(str(error))
        return getattr(super(), step)(*arguments)

"""What a training step runs on a GPU, followed on tensors that pretend to be on one: kernels, and nothing read back."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from contratile.engine.backends import registry, triton_tiles
from contratile.engine.backends.triton_launch import Device
from contratile.train.config import LossConfig, LossName
from contratile.train.objective import batch_loss
from tests.engine.kernels.ahead_of_time import recorded

N, D = 300, 64


def options() -> Iterator[dict[str, Any]]:
    """Every combination of the loss section of a configuration that is allowed."""
    for loss, cache in itertools.product(get_args(LossName), (0, 1)):
        own: Any = [("exclude", None, 0.0)]
        if loss in ("clip", "infonce"):
            same = "exclude", "negative"
            own = [x for x in itertools.product(same, (None, 0.1), (0.0, 0.1)) if not (x[1] and x[2])]
        if loss in ("clip", "infonce", "siglip"):
            own.append(("positive", None, 0.0))
        for same_id, margin, smoothing in own:
            yield {
                "loss": loss,
                "cache_mib": cache,
                "same_id": same_id,
                "margin": margin,
                "label_smoothing": smoothing,
            }


class CopiesFromHost(TorchDispatchMode):
    """Copies of tensors from ordinary memory, which wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, Tensor)]
        name = func.__name__.split(".")[0]
        if name in ("_to_copy", "copy_") and isinstance(out, Tensor) and out.is_meta and given[-1].is_cpu:
            self.found.append(name)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", list(options()), ids=lambda given: " ".join(f"{v}" for v in given.values()))
def test_training_uses_kernels(given: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no numbers: whoever read one would raise."""
    monkeypatch.setattr(registry, "on_gpu", lambda x: x.is_meta)
    monkeypatch.setattr(registry, "_unavailable", lambda device: None)
    monkeypatch.setattr(triton_tiles, "adds_in_fp32", lambda device, dtype: True)
    monkeypatch.setattr(triton_tiles, "on_device", lambda device: nullcontext())
    left, right = (torch.empty(N, D, dtype=dtype, device="meta", requires_grad=True) for _ in range(2))
    scale, bias = (torch.empty((), device="meta", requires_grad=True) for _ in range(2))
    ids = torch.empty(N, 1, dtype=torch.long, device="meta")
    with (
        patch.object(Device, "of", lambda device: Device(90, 132)),
        recorded() as launches,
        warnings.catch_warnings(),
        CopiesFromHost() as copies,
    ):
        warnings.simplefilter("error")
        loss, stats, *_ = batch_loss(LossConfig(**given), left, right, ids, scale=scale, bias=bias)
        loss.backward()
    kernels = {launch.kernel.__name__ for launch in launches}
    assert kernels >= {"forward_tiles", "merge_parts", "gradient_tiles"}
    assert all(x.grad is not None for x in (left, right, scale))
    assert (stats is None) == (given["loss"] in ("ntxent", "supcon"))
    assert not copies.found


@pytest.mark.parametrize("mode", ["all", "own"])
@pytest.mark.parametrize("loss", ["clip", "infonce"])
def test_hard_negatives_use_kernels(loss: Any, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which places are empty is known on the CPU: nothing is read back from the GPU."""
    monkeypatch.setattr(registry, "on_gpu", lambda x: x.is_meta)
    monkeypatch.setattr(registry, "_unavailable", lambda device: None)
    monkeypatch.setattr(triton_tiles, "adds_in_fp32", lambda device, dtype: True)
    monkeypatch.setattr(triton_tiles, "on_device", lambda device: nullcontext())
    left, right = (torch.empty(N, D, device="meta", requires_grad=True) for _ in range(2))
    negatives = torch.empty(2 * N, D, device="meta", requires_grad=True)
    facts = torch.cat([torch.arange(N).unsqueeze(1), torch.arange(4 * N).view(N, 4) % 2], dim=1)
    with patch.object(Device, "of", lambda device: Device(90, 132)), recorded() as launches:
        config = LossConfig(loss=loss, hard_negatives=mode, ids="right")
        batch_loss(config, left, right, facts, negatives, scale=torch.empty((), device="meta"))[0].backward()
    kernels = [launch.kernel.__name__ for launch in launches]
    assert kernels.count("forward_tiles") > (1 if mode == "all" else 0) and "gradient_tiles" in kernels
    assert all(x.grad is not None for x in (left, right, negatives))


def test_float64_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "on_gpu", lambda x: True)
    monkeypatch.setattr(registry, "_unavailable", lambda device: None)
    left, right = (torch.randn(8, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with recorded() as launches, warnings.catch_warnings():
        warnings.simplefilter("error")
        scale = torch.tensor(1.0, dtype=torch.float64)
        batch_loss(LossConfig(), left, right, torch.arange(8).unsqueeze(1), scale=scale)[0].backward()
    assert not launches

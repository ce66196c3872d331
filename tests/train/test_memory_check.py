"""Runs that cannot fit are refused before they start; others start."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contratile.data.catalog import DataConfig, open_source
from contratile.models.towers import TowerConfig, build_towers
from contratile.planner.devices import Devices
from contratile.planner.plan_text import decimal_size
from contratile.train import memory_check
from contratile.train.config import RunConfig, TrainConfig
from contratile.train.memory_check import MARGIN, check_memory
from contratile.train.planning import plan_config

CONFIG = TrainConfig(
    run=RunConfig(batch=1024, chunk=256), towers=TowerConfig(width=32, depth=2), data=DataConfig(data="icons")
)
ALONE: Any = SimpleNamespace(num_processes=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def run() -> tuple[Any, Any]:
    pytest.importorskip("resvg_py")
    source = open_source(CONFIG.data, "train")
    return build_towers(CONFIG.towers, texts=["a red circle"]), source


def there(memory: float) -> Devices:
    rates = dict.fromkeys(("fp32", "bf16", "fp16"), 1e12)
    return Devices(name="cpu", memory=memory, host_memory=memory, flops=rates, bandwidth=1e12, link=1e9, on_cpu=True)


def needed(towers: Any) -> float:
    return plan_config(CONFIG, there(1e12), towers=towers).memory.peak


def test_plenty_of_memory_is_not_even_counted(run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "plan_config", lambda *_, **__: pytest.fail("counted"))
    monkeypatch.setattr(memory_check, "devices_here", lambda *_: there(100e9))
    assert check_memory(CONFIG, *run, ALONE) == ""


def test_a_run_that_cannot_fit_names_the_smallest_change(run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = needed(run[0]) / (MARGIN + 0.1)
    monkeypatch.setattr(memory_check, "devices_here", lambda *_: there(memory))
    with pytest.raises(
        ValueError, match=r"memory: expected at most .* per process, got about .*fits: --chunk \d+\."
    ) as told:
        check_memory(CONFIG, *run, ALONE)
    assert decimal_size(memory) in str(told.value)
    chunk = int(str(told.value).rpartition("--chunk ")[2].rstrip("."))
    smaller = replace(CONFIG, run=replace(CONFIG.run, chunk=chunk))
    assert check_memory(smaller, *run, ALONE).startswith(("memory: about", ""))


def test_a_run_that_may_not_fit_is_told_and_starts(run: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions err, so that a run within their error is not refused."""
    monkeypatch.setattr(memory_check, "devices_here", lambda *_: there(needed(run[0]) / 1.1))
    assert "predicted" in check_memory(CONFIG, *run, ALONE)


def test_the_rough_bound_is_above_the_plan(run: tuple[Any, Any]) -> None:
    for config in (CONFIG, replace(CONFIG, run=RunConfig(batch=8192, chunk=1024))):
        bound = memory_check.rough_bound(config, run[0], 1)
        assert bound > plan_config(config, there(1e12), towers=run[0]).memory.peak


def test_an_unknown_device_is_not_checked(run: tuple[Any, Any]) -> None:
    other: Any = SimpleNamespace(num_processes=1, device=torch.device("mps"))
    assert check_memory(CONFIG, *run, other) == ""

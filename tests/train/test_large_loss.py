"""The loss step at the end of the demo: its size follows from the machine, and what it says from the measurement."""

import pytest

from contratile.planner.loss_memory import dense_loss_bytes
from contratile.train import large_loss
from contratile.train.large_loss import LargeLoss, large_loss_step

GiB = 1 << 30


def made(memory: int, monkeypatch: pytest.MonkeyPatch, longest: float = 1e9) -> LargeLoss:
    monkeypatch.setattr(large_loss, "_TRIAL", 64)
    monkeypatch.setattr(large_loss, "memory_bytes", lambda entry: memory)
    return large_loss_step(8, longest=longest)


def test_a_dense_loss_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(dense_loss_bytes(512), monkeypatch)
    assert found.pairs == 1024 and found.dense > found.memory and found.seconds > 0
    assert "this machine has 4 MiB of RAM" in found.sentence and "A dense loss would need 16 MiB;" in found.sentence


def test_it_does_not_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(large_loss, "_TRIAL", 64)
    monkeypatch.setattr(large_loss, "memory_bytes", lambda entry: 1 << 60)
    found = large_loss_step(8, longest=0.0, notify=told.append)
    assert found.pairs == 128 and found.dense < found.memory
    assert told and "128 random pairs" in told[0]


def test_what_it_says() -> None:
    step = LargeLoss(65_536, 96, 41.2, 62 << 20, 64 * GiB, 23 * GiB, "RAM")
    assert step.sentence == (
        "One loss step over 65,536 random pairs of 96 features took 41 s and 62 MiB (measured, gradients included). "
        "A dense loss would need 64 GiB; this machine has 23 GiB of RAM."
    )
    assert step._replace(memory=99 * GiB).sentence.endswith("would need 64 GiB of this machine's 99 GiB of RAM.")
    assert step._replace(memory=0, used=None).sentence.endswith("took 41 s. A dense loss would need 64 GiB.")

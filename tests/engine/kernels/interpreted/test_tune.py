"""`contratile doctor --tune` with kernels that Triton interprets: all candidates are right, none is kept."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import contratile as ct
from contratile.cli import main
from contratile.doctor.tune import Kernel, TuneOptions, subjects
from contratile.engine import tuned
from contratile.engine.backends import triton_launch
from contratile.engine.backends.triton_configs import Config, candidates
from contratile.engine.backends.triton_tiles import KernelCall
from tests.helpers import features

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def test_the_command(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main("doctor --tune --json --device cpu --dtypes float32 tf32 float16".split()) == 0
    found = json.loads(capsys.readouterr().out)["tuned"]
    assert [(row["kind"], row["dtype"]) for row in found] == [
        (kernel, kind) for kind in ("ieee", "tf32", "16-bit") for kernel in ("forward", "gradient")
    ]
    for row in found:
        assert len(row["trials"]) > 1 and not row["timed"] and not row["wrong"] and row["kept"] == "default"
        assert all("interpreted" in trial["note"] and trial["seconds"] is None for trial in row["trials"])
    assert not (folder / tuned.NAME).exists()
    assert main("doctor --tune --device cpu --dtypes float16".split()) == 0
    assert "nothing was timed, so nothing is kept" in capsys.readouterr().out


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Config]:
    """The configuration of each kernel's launches."""
    seen: dict[str, Config] = {}
    launch = KernelCall.launch

    def noted(self: KernelCall, kernel: object, *rest: object) -> object:
        seen[self.kernel] = self.config
        return launch(self, kernel, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(KernelCall, "launch", noted)
    return seen


def step(tile: int | None = None) -> None:
    q, k = (features(48, 64, seed=i).requires_grad_() for i in range(2))
    torch.autograd.grad(ct.clip_loss(q, k, 5.0, group=None, backend="triton", tile=tile), (q, k))


def test_launches_use_what_is_in_the_file(launched: dict[str, Config]) -> None:
    step()
    default = dict(launched)
    name = triton_launch.device_name(CPU)
    for kernel in ("forward", "gradient"):
        other = candidates(80, "ieee", kernel)[1]
        assert other != default[kernel]
        tuned.record(kernel, device=name, dtype="ieee", d=64, choice=other)
        tuned.forget()
        step()
        assert launched[kernel] == other
    step(tile=16)
    assert launched["forward"].m == launched["gradient"].n == 16


def test_configurations_that_were_never_verified_are_not_used(launched: dict[str, Config]) -> None:
    step()
    default = dict(launched)
    tuned.record("forward", device=triton_launch.device_name(CPU), dtype="ieee", d=64, choice=(16, 16, 16, 1, 1))
    tuned.record("gradient", device=triton_launch.device_name(CPU), dtype="ieee", d=64, choice=(1, 2))
    tuned.forget()
    step()
    assert launched == default


@pytest.mark.parametrize("kernel", ["forward", "gradient"])
def test_a_candidate_is_forced_on_its_own_kernel(kernel: str, launched: dict[str, Config]) -> None:
    subject = Kernel(kernel, CPU, 48, 64, torch.float32, "ieee")
    for choice in subject.candidates().values():
        launched.clear()
        subject.step(choice)()
        assert launched[kernel] == choice
        assert subject.check(choice, "nt_xent").ok


def test_a_kind_is_tuned_once() -> None:
    every = subjects(CPU, TuneOptions(dtypes=("float16", "float32", "float16"), dims=(24,)))
    assert [(subject.kind, subject.dtype) for subject in every] == [
        *(("forward", "16-bit"), ("gradient", "16-bit"), ("forward", "ieee"), ("gradient", "ieee"))
    ]

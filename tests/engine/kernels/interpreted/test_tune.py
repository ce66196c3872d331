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
from contratile.engine.backends.triton_configs import Config, candidates, config_for
from contratile.engine.backends.triton_configs import Kernel as KernelName
from contratile.engine.backends.triton_launch import Launch
from tests.engine.kernels import quick_interpreter  # noqa: F401 - half the time
from tests.helpers import features

CPU = torch.device("cpu")
KERNELS: tuple[KernelName, KernelName] = ("forward", "gradient")
D = 64

# Excluded pairs have a product of -3e38: the interpreter as it is warns when it is multiplied by the scale.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


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
        many = row["dtype"] == "16-bit"
        assert (len(row["trials"]) > 1) == many and not row["timed"] and not row["wrong"] and row["kept"] == "default"
        assert all("interpreted" in trial["note"] and trial["seconds"] is None for trial in row["trials"])
    assert not (folder / tuned.NAME).exists()
    assert main("doctor --tune --device cpu --dtypes float16".split()) == 0
    assert "nothing was timed, so nothing is kept" in capsys.readouterr().out


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Config]:
    """The configuration of each kernel's fast launches."""
    seen: dict[str, Config] = {}
    run = Launch.run

    def noted(self: Launch) -> None:
        given, options = self.arguments, self.options
        if given.get("CAREFUL") is False:
            how = options["num_warps"], options["num_stages"], options.get("maxnreg", 256)
            kernel = "forward" if "first" in given else "gradient"
            seen[kernel] = Config(given["BLOCK_M"], given["BLOCK_N"], given["BLOCK_D"], *how)
        run(self)

    monkeypatch.setattr(Launch, "run", noted)
    return seen


def step(tile: int | None = None) -> None:
    q, k = (features(48, D, seed=i, dtype=torch.float16).requires_grad_() for i in range(2))
    torch.autograd.grad(ct.clip_loss(q, k, 5.0, group=None, backend="triton", tile=tile), (q, k))


def test_launches_use_what_is_in_the_file(launched: dict[str, Config]) -> None:
    step()
    default = dict(launched)
    name = triton_launch.device_name(CPU)
    for kernel in KERNELS:
        other = candidates(80, "16-bit", kernel)[2]
        tuned.record(kernel, device=name, dtype="16-bit", d=D, choice=other)
        tuned.forget()
        step()
        assert launched[kernel] == config_for(80, D, "16-bit", kernel=kernel, chosen=other) != default[kernel]
    step(tile=16)
    assert launched["forward"].m == launched["gradient"].n == 16


def test_configurations_that_were_never_verified_are_not_used(launched: dict[str, Config]) -> None:
    step()
    default = dict(launched)
    tuned.record("forward", device=triton_launch.device_name(CPU), dtype="16-bit", d=D, choice=(16, 16, 16, 1, 1))
    tuned.record("gradient", device=triton_launch.device_name(CPU), dtype="16-bit", d=D, choice=(1, 2))
    tuned.forget()
    step()
    assert launched == default


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_candidate_is_forced_on_its_own_kernel(kernel: KernelName, launched: dict[str, Config]) -> None:
    subject = Kernel(kernel, CPU, 48, 64, torch.float16, None)
    assert len(subject.candidates()) > 1
    for choice in subject.candidates().values():
        launched.clear()
        subject.step(choice)()
        assert launched[kernel] == config_for(
            80, 64, "16-bit", kernel=kernel, chosen=None if choice is None else Config(*choice)
        )
        assert subject.check(choice, "nt_xent").ok


def test_a_kind_is_tuned_once() -> None:
    every = subjects(CPU, TuneOptions(dtypes=("float16", "float32", "float16"), dims=(24,)))
    assert [(subject.kind, subject.dtype) for subject in every] == [
        *(("forward", "16-bit"), ("gradient", "16-bit"), ("forward", "ieee"), ("gradient", "ieee"))
    ]

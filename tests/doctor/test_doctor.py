"""`contratile doctor`: a page that says what is here, and a verdict that notices what is broken."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

import contratile
from contratile.cli import main
from contratile.doctor import accuracy, checkup
from contratile.engine.backends import torch_tiles
from contratile.losses import functional
from contratile.packages import BrokenPackage


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> list[BrokenPackage]:
    """What is found broken: nothing, whatever this machine has."""
    broken: list[BrokenPackage] = []
    monkeypatch.setattr(checkup, "broken_packages", lambda names: broken)
    return broken


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "checked_losses", lambda backend: ["clip_loss", "nt_xent"])
    monkeypatch.setattr(checkup, "all_devices", lambda: [torch.device("cpu")])


def findings(capsys: pytest.CaptureFixture[str], *, code: int) -> dict[str, Any]:
    assert main(["doctor", "--quick", "--json", "--device", "cpu"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys, code=0)
    assert found["environment"]["contratile"] == contratile.__version__
    assert found["environment"]["torch"] == torch.__version__ and found["environment"]["version_triton"]
    assert found["devices"][0].startswith("cpu: ")
    states = {(row["device"], row["backend"]): row for row in found["backends"]}
    assert states["cpu", "dense"]["works"] and states["cpu", "torch"]["works"]
    assert not states["cpu", "triton"]["works"] and "TRITON_INTERPRET=1" in states["cpu", "triton"]["reason"]
    checked = {(row["backend"], row["loss"], row["dtype"]) for row in found["accuracy"]}
    losses = {*accuracy.LOSSES, *accuracy.OBJECTIVES}
    assert losses >= {"clip_loss", "info_nce", "nt_xent", "sup_con", "siglip_loss", "directions", "matryoshka_dims"}
    kinds = ("dense", "float32"), ("torch", "float32"), ("torch", "bfloat16")
    assert checked == {(backend, loss, dtype) for backend, dtype in kinds for loss in losses}
    assert all(row["ok"] and row["value_error"] <= row["value_allowed"] for row in found["accuracy"])
    assert {row["backend"] for row in found["timing"] if row["seconds"] > 0} == {"dense", "torch"}
    assert (
        not found["problems"] and found["verdict"] == f"healthy: {3 * len(losses)} of {3 * len(losses)} checks passed"
    )


@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_the_page(rich: bool) -> None:
    """In a process of its own, with and without rich."""
    code = "import sys\n" if rich else "import sys\nsys.modules['rich'] = sys.modules['rich.console'] = None\n"
    code += "from contratile.cli import main\nsys.exit(main(['doctor', '--quick', '--device', 'cpu']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    words = "torch  |cpu: |clip_loss|siglip_loss|err grad|ms|verdict: healthy|TRITON_INTERPRET=1"
    assert all(word in done.stdout for word in words.split("|")), done.stdout
    assert ("━" in done.stdout or "─" in done.stdout) == rich


def test_without_a_gpu_there_is_advice(capsys: pytest.CaptureFixture[str], small: None) -> None:
    assert "no GPU was found" in findings(capsys, code=0)["advice"][0]


def test_broken_packages_are_named(
    capsys: pytest.CaptureFixture[str], small: None, packages: list[BrokenPackage]
) -> None:
    """One that contratile's commands need is a problem; of others there is advice."""
    packages.append(BrokenPackage("torchvision", "0.28.0", "RuntimeError: operator torchvision::nms", ["timm"]))
    found = findings(capsys, code=0)
    told = "torchvision 0.28.0 is installed but cannot be imported (RuntimeError: operator torchvision::nms)"
    assert found["advice"][0].startswith(f"{told}. It breaks timm. Install the torchvision that belongs to torch")
    assert found["packages"][0]["breaks"] == ["timm"] and found["verdict"].startswith("healthy")
    packages.append(BrokenPackage("tokenizers", "1.0", "ImportError: no"))
    found = findings(capsys, code=1)
    assert found["problems"][0].startswith("tokenizers 1.0 is installed but cannot be imported (ImportError: no).")


def test_a_wrong_backend_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """A gradient that is off by one in a thousand."""
    backward = torch_tiles.backward

    def wrong(scores: Any, task: Any, given: Any, into: Any) -> None:
        backward(scores, task, given, into)
        into.dq.mul_(1.001)

    monkeypatch.setattr(torch_tiles, "backward", wrong)
    found = findings(capsys, code=1)
    wrong_rows = {(row["backend"], row["dtype"]) for row in found["accuracy"] if not row["ok"]}
    assert wrong_rows == {("torch", "float32")}
    assert found["verdict"] == "not healthy: 2 problems"
    assert all("of a gradient" in problem and "contratile doctor --json" in problem for problem in found["problems"])


def test_a_backend_that_raises_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(torch_tiles, "forward", broken)
    found = findings(capsys, code=1)
    assert "backend 'torch' fails: RuntimeError: out of order" in found["problems"][0]
    assert {row["backend"] for row in found["accuracy"]} == {"dense"}


def test_nan_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    stock = functional.clip_loss

    def hollow(*args: Any, **options: Any) -> Any:
        return stock(*args, **options) * float("nan")

    monkeypatch.setattr(functional, "clip_loss", hollow)
    assert {row["loss"] for row in findings(capsys, code=1)["accuracy"] if not row["ok"]} == {"clip_loss"}


@pytest.mark.parametrize("loss", accuracy.OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_every_objective_is_checked(monkeypatch: pytest.MonkeyPatch, loss: str, dtype: torch.dtype) -> None:
    """It is right, and is not when its option is left out."""
    assert accuracy.check_accuracy(torch.device("cpu"), "torch", loss, dtype).ok
    name = {"several positives": "same_id", "siglip_loss, positives": "same_id", "hardness": "hardness_strength"}
    plain = {"same_id": "exclude", "hardness_strength": 0.0, "in_batch_negatives": True, "directions": FIRST}
    option = name.get(loss, loss.partition("=")[0])

    class Without:
        def __getattr__(self, function: str) -> Any:
            return lambda *x, **how: getattr(functional, function)(*x, **{**how, option: plain.get(option)})

    monkeypatch.setattr(accuracy, "functional", Without())
    found = accuracy.check_accuracy(torch.device("cpu"), "torch", loss, dtype)
    assert not found.ok and not found.note


FIRST = ("query_to_doc",)


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--device", "toaster"])
    assert "expected a device such as cpu or cuda:0, got 'toaster'" in capsys.readouterr().err

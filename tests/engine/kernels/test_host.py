"""Host code of the kernels on a GPU that is not here: nothing waits for it, and what fails is told apart."""

from contextlib import nullcontext
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.errors import TritonError

from contratile.engine.backends import triton_launch, triton_tiles
from contratile.engine.backends.block import KernelError
from contratile.engine.backends.triton_configs import TABLE, config_for, cut_backward
from contratile.engine.backends.triton_launch import Device, Launch
from contratile.losses.terms import as_tensor
from tests.engine.kernels.ahead_of_time import recorded
from tests.engine.kernels.samples import CALLS, pretended, run_step

N, D = 300, 64
GPU = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_nothing_waits_for_the_gpu(name: str, dtype: torch.dtype) -> None:
    """Tensors that have no numbers cannot be asked for one: so a step can also be captured as a graph."""
    with pretended(Device(90, 132)), recorded() as launches:
        grads = run_step(name, N, D, dtype)
    assert grads and all(grad.device == GPU for grad in grads)
    assert {launch.kernel.__name__ for launch in launches} >= {"forward_tiles", "merge_parts", "gradient_tiles"}


@pytest.mark.parametrize("name", CALLS)
def test_every_step_launches_the_same(name: str) -> None:
    """Whatever the numbers are: a captured graph stays right."""
    with pretended(Device(80, 108)):
        steps = []
        for _ in range(2):
            with recorded() as launches:
                run_step(name, N, D, torch.bfloat16)
            steps.append([described(launch) for launch in launches])
    assert steps[0] and steps[0] == steps[1]


def described(launch: Launch) -> Any:
    """A launch without the addresses of its tensors."""
    arguments = {
        name: (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
        for name, x in launch.arguments.items()
    }
    return launch.kernel.__name__, launch.grid, arguments, launch.options


class Called(TorchDispatchMode):
    """The operators that PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def test_a_number_is_written_and_not_copied() -> None:
    """A copy from ordinary memory waits for the device."""
    there = torch.empty(2, 2, device=GPU)
    for make in (lambda: as_tensor(3.0, there), lambda: triton_launch.device_number(torch.tensor(3.0), GPU)):
        with Called() as called:
            assert make().device == GPU
        assert "scalar_tensor" in called.names and not called.names & {"_to_copy", "copy_"}


ERRORS = [TritonError("x"), RuntimeError("x"), OSError("x"), ImportError("x"), CalledProcessError(1, "ptxas")]


def launch_that_raises(error: Exception) -> Launch:
    class Kernel:
        __name__ = "some_kernel"

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run() -> None:
                raise error

            return run

    return Launch(Kernel(), (1,), {}, {})


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_cannot_be_built(error: Exception) -> None:
    with pytest.raises(KernelError, match=rf"some_kernel could not be built \({type(error).__name__}"):
        launch_that_raises(error).run()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("Triton Error [CUDA]: x")], ids=str)
def test_what_fails_on_the_device(error: Exception) -> None:
    """Another backend would not help."""
    with pytest.raises(type(error)) as caught:
        launch_that_raises(error).run()
    assert caught.value is error


def test_products_where_16_bit_factors_cannot_be_added_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are multiplied as TF32, which holds them."""
    asked: list[str] = []

    def noted(precision: str, features: torch.Tensor) -> nullcontext[None]:
        asked.append(precision)
        return nullcontext()

    monkeypatch.setattr(triton_tiles, "adds_in_fp32", lambda device, dtype: False)
    monkeypatch.setattr(triton_tiles, "library_products", noted)
    a, b, into = torch.full((2, 3), 0.5).bfloat16(), torch.full((3, 4), 3.0).bfloat16(), torch.ones(2, 4)
    triton_tiles.add_product_(into, a, b)
    assert asked == ["tf32"] and (into == 5.5).all()


@pytest.mark.parametrize("arch", TABLE)
@pytest.mark.parametrize("symmetric", [False, True], ids=["two sets", "one set"])
def test_chunks_end_where_tiles_end(arch: Any, symmetric: bool) -> None:
    """g is stored in whole tiles, and the positives of other chunks are not met beyond the end."""
    for kind in TABLE[arch]:
        config = config_for(arch, 512, kind, kernel="gradient", symmetric=symmetric)
        for n in (100, 5000, 1 << 20):
            rows, cols = cut_backward(n, n, config, itemsize=2, symmetric=symmetric, workspace=64 << 20)
            assert (rows == n or rows % config.m == 0) and (cols == n or cols % config.n == 0)
            assert 2 * rows * cols <= 64 << 20

"""Which backend carries out a call, and what happens where kernels cannot run.

Kernels are compiled here, not interpreted: on a machine without a GPU they cannot be built, which is one of the cases.
"""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import contratile as ct
from contratile.engine.backends import registry, torch_tiles, triton_configs, triton_launch, triton_tiles
from contratile.engine.backends.precision import library_products, resolve
from contratile.engine.backends.triton_configs import TABLE, config_for, cut_backward, cut_forward, kind_of, known_arch
from contratile.engine.spec import Inputs, Spec
from tests.engine.kernels.samples import RULES, sample_launches
from tests.helpers import features, run

GPU = torch.device("cuda", 0)
DOCS = Path(__file__).parents[3] / "docs/kernels.md"


def on_gpu(dtype: torch.dtype = torch.float32, **inputs: Any) -> Inputs:
    """Inputs that say they are on a GPU."""
    x: Any = SimpleNamespace(is_cuda=True, is_cpu=False, device=GPU, dtype=dtype)
    return Inputs(x, x, torch.ones(()))._replace(**inputs)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No failure is remembered from or for other tests."""
    monkeypatch.setattr(registry, "_warned", set())
    monkeypatch.setattr(registry, "_failed", {})


def available(monkeypatch: pytest.MonkeyPatch, reason: str | None = None) -> None:
    monkeypatch.setattr(registry, "_unavailable", lambda device: reason)


# --- the choice ---------------------------------------------------------------------------------------------------


def test_auto_takes_kernels_on_a_gpu_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)
    assert isinstance(registry.choose(on_gpu(), Spec()), registry.KernelsOrTorch)
    assert registry.choose(on_gpu(), Spec(backend="torch")) is torch_tiles
    assert registry.choose(on_gpu(), Spec(backend="triton")) is triton_tiles
    assert registry.choose(Inputs(torch.ones(2, 2), None, torch.ones(())), Spec()) is torch_tiles


ASKED: dict[str, tuple[Inputs, Spec]] = {
    "float64": (on_gpu(torch.float64), Spec()),
    "softplus of one set": (on_gpu(key=None), Spec(reduce="softplus")),
    "matryoshka_dims": (on_gpu(), Spec(dims=(2, 4))),
    "a teacher": (on_gpu(teacher_query=torch.ones(2, 2)), Spec()),
    "a guide": (on_gpu(guide_query=torch.ones(2, 2)), Spec()),
}


def test_every_gap_has_a_case_and_a_line_in_the_documentation() -> None:
    assert ASKED.keys() == registry.NOT_COVERED.keys()
    listed = DOCS.read_text().split("## What kernels do not cover")[1].split("\n## ")[0]
    assert {line.split("`")[1] for line in listed.splitlines() if line.startswith("- `")} == registry.NOT_COVERED.keys()


@pytest.mark.parametrize("name", ASKED)
def test_what_kernels_do_not_cover(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch backend does it, with one warning unless it is for float64. Asking for kernels by name raises."""
    available(monkeypatch)
    x, spec = ASKED[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert registry.choose(x, spec) is torch_tiles and registry.choose(x, spec) is torch_tiles
    assert [str(w.message) for w in caught] == (
        []
        if name == "float64"
        else [f"contratile uses the torch backend instead of its kernels: they do not cover {name}."]
    )
    with pytest.raises(ValueError, match=rf"expected what kernels cover, got {name}. Use backend='auto'"):
        registry.choose(x, spec._replace(backend="triton"))


def test_what_options_ask_for_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels, ids, one set, softplus, classes, statistics, margins, kept scores: nothing else falls back."""
    available(monkeypatch)
    some: Any = object()
    every = on_gpu(labels=some, query_ids=some, key_ids=some, query_classes=some, key_classes=some, bias=some)
    asked = (
        Spec(margin=0.1),
        Spec(ranks=True, ties=True),
        Spec(cache_bytes=1),
        Spec(sums="equal"),
        Spec(sums="differ"),
    )
    sides = (Spec(rows=False), Spec(cols=False, tile=64))
    for spec in (Spec(), Spec(exclude_self=True), Spec(reduce="softplus"), *sides, *asked):
        assert isinstance(registry.choose(every, spec), registry.KernelsOrTorch)
    assert isinstance(registry.choose(on_gpu(key=None), Spec(exclude_self=True)), registry.KernelsOrTorch)


# --- where kernels cannot run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu"])
def test_other_devices_use_torch(kind: str) -> None:
    device = torch.device(kind)
    assert registry.unavailable(device) == f"a device of type {kind}"
    x: Any = SimpleNamespace(is_cuda=False, is_cpu=False, device=device, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.choose(Inputs(x, x, torch.ones(())), Spec()) is torch_tiles
    with pytest.raises(ValueError, match=f"got a device of type {kind}"):
        registry.choose(Inputs(x, x, torch.ones(())), Spec(backend="triton"))


def test_one_warning_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, "no Triton (pip install 'contratile[triton]')")
    with pytest.warns(UserWarning, match="torch backend instead of its kernels: no Triton") as caught:
        assert registry.choose(on_gpu(), Spec()) is torch_tiles
        assert registry.choose(on_gpu(), Spec()) is torch_tiles
    assert len(caught) == 1
    with pytest.raises(ValueError, match=r"got no Triton .*Use backend='auto' or backend='torch'"):
        registry.choose(on_gpu(), Spec(backend="triton"))


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    why = registry._unavailable.__wrapped__
    assert "without TRITON_INTERPRET=1" in str(why(torch.device("cpu")))
    with monkeypatch.context() as patch:
        patch.setattr("triton.__version__", "3.6.2")
        assert why(GPU) == "Triton 3.6.2, which is older than 3.7"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        assert "no Triton" in str(why(GPU))
    with monkeypatch.context() as patch:
        patch.setattr(triton_launch, "arch_of", lambda device: None)
        patch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        assert why(GPU) == "Tesla T4, for which there is no launch table"
    with monkeypatch.context() as patch:
        patch.setattr(triton_launch, "arch_of", lambda device: 90)
        assert why(GPU) is None


@pytest.mark.parametrize("loss", ["clip_loss", "siglip_loss", "pair_lse"])
def test_asking_for_kernels_on_a_cpu_is_refused(loss: str) -> None:
    x = features(4, 3, seed=1)
    numbers = (1.0, -1.0) if loss == "siglip_loss" else (1.0,)
    with pytest.raises(ValueError, match=r"backend='triton': expected a device .*, got CPU tensors, without"):
        getattr(ct, loss)(x, x, *numbers, backend="triton")


def test_anyone_can_interpret_kernels() -> None:
    """With Triton as it is: the example of the documentation, and bfloat16, which that interpreter gets wrong."""
    found = re.search(r"python -c \"\n(.*?)\"", DOCS.read_text(), re.DOTALL)
    assert found
    code = f"""{found[1]}
x = x.bfloat16().requires_grad_()
try:
    ct.clip_loss(x, x, backend="triton")
except ValueError as error:
    print(error)
"""
    words = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"tensor\(([\d.]+)\)", done.stdout)]
    assert len(losses) == 2 and losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert "which multiplies bfloat16 wrongly. Check with float32 or float16" in done.stdout


@pytest.mark.parametrize("step", ["forward", "backward"])
def test_a_kernel_that_cannot_be_built_falls_back(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU to build for. The call goes on with the torch backend, with one warning, and so do later ones."""
    q, k, scale = features(20, 6, seed=1), features(20, 6, seed=2), torch.tensor(3.0)
    expected = run(ct.clip_loss, q, k, scale)
    cpu = torch.device("cpu")
    monkeypatch.setattr(registry, "choose", lambda x, spec: registry.KernelsOrTorch(cpu))
    tried: list[str] = []

    def watched(name: str, function: Any) -> Any:
        def watch(*args: Any) -> Any:
            tried.append(name)
            return function(*args)

        return watch

    for name in ("forward", "backward"):
        kernels_or_not = getattr(triton_tiles if name == step else torch_tiles, name)
        monkeypatch.setattr(triton_tiles, name, watched(name, kernels_or_not))
    with pytest.warns(UserWarning, match=r"the kernel \w+ could not be built \(.+\)") as caught:
        first, second = run(ct.clip_loss, q, k, scale), run(ct.clip_loss, q, k, scale)
    assert len(caught) == 1 and tried == ["forward", "backward"][: 1 if step == "forward" else 2]
    for outcome in (first, second):
        for a, b in zip(outcome.values + outcome.grads, expected.values + expected.grads, strict=True):
            assert torch.equal(a, b)


def test_explicit_kernels_that_cannot_be_built_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)
    x = features(4, 3, seed=1)
    with pytest.raises(RuntimeError, match="the kernel positive_products could not be built"):
        ct.clip_loss(x, x, backend="triton")


def test_running_out_of_memory_is_no_reason_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(triton_tiles, "forward", full)
    monkeypatch.setattr(registry, "choose", lambda x, spec: registry.KernelsOrTorch(torch.device("cpu")))
    x = features(4, 3, seed=1)
    with pytest.raises(torch.OutOfMemoryError):
        ct.clip_loss(x, x)


# --- precision ----------------------------------------------------------------------------------------------------


def test_precision_is_pytorchs_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = on_gpu().query, torch.ones(1, 1)
    for setting, expected in (("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        assert resolve("", gpu, "auto") == expected
        assert resolve("tf32x3", gpu, "auto") == "tf32x3"
        assert resolve("", cpu, "auto") == resolve("", on_gpu(torch.bfloat16).query, "auto") == "ieee"


def test_library_products_follow_the_precision() -> None:
    gpu, before = on_gpu().query, torch.get_float32_matmul_precision()
    for precision, inside in (("tf32", "high"), ("tf32x3", "highest"), ("ieee", "highest")):
        with pytest.raises(KeyError), library_products(precision, gpu):
            assert torch.get_float32_matmul_precision() == inside
            raise KeyError
        assert torch.get_float32_matmul_precision() == before


def test_unknown_precision() -> None:
    x = features(4, 3, seed=1)
    with pytest.raises(ValueError, match=r"precision: expected one of 'ieee', 'tf32x3', 'tf32', got 'bf16'"):
        ct.clip_loss(x, x, precision="bf16")  # type: ignore[call-overload]


# --- the launch table ---------------------------------------------------------------------------------------------


def test_architectures() -> None:
    assert [known_arch(x) for x in ((7, 5), (8, 0), (8, 7), (9, 0), (10, 3), (12, 1))] == [None, 80, 86, 90, 100, 120]
    assert kind_of("gfx90a", torch.float32, "tf32") == "ieee" and kind_of(80, torch.float32, "tf32") == "tf32"
    assert kind_of(80, torch.bfloat16, "tf32") == "16-bit"


@pytest.mark.parametrize("arch", TABLE)
def test_blocks_are_what_tensor_cores_take(arch: triton_configs.Arch) -> None:
    for kind in TABLE[arch]:
        for d, tile in ((1, None), (17, None), (512, None), (768, 1), (768, 100), (64, 4096)):
            for kernel in ("forward", "gradient"):
                config = config_for(arch, d, kind, tile, kernel=kernel, height=64 if d == 512 else 256)
                assert all(x >= 16 and x & (x - 1) == 0 for x in config[:3])
                assert tile is None or config.m == config.n == min(128, max(16, 1 << (tile.bit_length() - 1)))
                square = config_for(arch, d, kind, tile, kernel=kernel, symmetric=True)
                assert square.m == square.n, "tiles of symmetric scores end at the diagonal"


@pytest.mark.parametrize("n", [1, 100, 5000, 1 << 20])
@pytest.mark.parametrize("m", [1, 130, 70_000, 1 << 22])
def test_cuts_cover_everything_in_a_bounded_workspace(n: int, m: int) -> None:
    config, room = config_for(80, 512, "16-bit"), 64 << 20
    for fields in (0, 2, 5):
        blocks, span, splits = cut_forward(n, m, config, processors=132, fields=fields, workspace=room)
        assert span % config.m == 0 and (splits - 1) * span < n <= splits * span and 1 <= blocks <= -(-m // config.n)
        assert 4 * fields * blocks * n <= max(room, 4 * fields * n)
        tiles = -(-n // config.m)
        assert blocks * splits >= min(4 * 132, blocks * tiles) / 2, "the GPU is occupied"
    rows, width = cut_backward(n, m, config, itemsize=2, symmetric=False, workspace=room)
    assert 1 <= rows <= n and 1 <= width <= m and rows * width * 2 <= room
    side = cut_backward(n, n, config, itemsize=2, symmetric=True, workspace=room)
    assert side.rows == side.cols and side.rows**2 * 2 <= room and (side.rows == n or side.rows % config.m == 0)


def test_sample_launches_name_every_argument() -> None:
    for arch in TABLE:
        for rule in RULES:
            for launch in sample_launches(arch, 96, torch.bfloat16, rule=rule):
                assert [p.name for p in launch.kernel.params if p.name not in launch.arguments] == []
                assert len(launch.arguments) == len(launch.kernel.params)

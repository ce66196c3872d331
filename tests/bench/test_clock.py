"""Clocks of a CPU and of a GPU that is not here, and benchmarks that use the latter."""

import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contratile.bench import clock, memory, memory_point
from contratile.bench.clock import CpuClock, CudaClock, clock_for
from contratile.bench.contestants.family import CASES
from contratile.bench.contestants.loss import CLIP, LossProblem
from contratile.bench.family import FamilyBenchConfig
from contratile.bench.harness import GemmLimit, describe, interleave
from contratile.bench.loss import BENCH, NEEDS_CUDA, LossBenchConfig, LossSeries
from contratile.bench.rows import Recording, hardware_text, load_rows, save_rows
from contratile.bench.runner import run
from contratile.cli import main

MiB = 1 << 20
NAME = "cuda:1: Some GPU"


class FakeGpu:
    """What clocks use of `torch.cuda`, with a log of the calls and times that only events know."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.used, self.peak = 100 * MiB, 900 * MiB

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        gpu = self

        class Event:
            at = 0.0

            def record(self) -> None:
                gpu.log.append("record")
                self.at = gpu.now

            def synchronize(self) -> None:
                gpu.log.append("wait for the event")

            def elapsed_time(self, end: "Event") -> float:
                return (end.at - self.at) * 1e3

        return Event()

    def allocate(self, size: int) -> None:
        self.used += size
        self.peak = max(self.peak, self.used)

    def reset(self, device: torch.device) -> None:
        self.log.append("reset")
        self.peak = self.used


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Two GPUs, of which the second is current."""
    fake = FakeGpu()
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "get_device_name": lambda device: "Some GPU",
        "device": lambda device: nullcontext(),
        "synchronize": lambda device: fake.log.append("synchronize"),
        "Event": fake.event,
        "empty_cache": lambda: fake.log.append("empty cache"),
        "reset_peak_memory_stats": fake.reset,
        "memory_allocated": lambda device: fake.used,
        "memory_reserved": lambda device: 150 * MiB,
        "max_memory_allocated": lambda device: fake.peak,
        "mem_get_info": lambda device: (1000 * MiB, 2000 * MiB),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return fake


def test_a_gpu_is_timed_with_events(gpu: FakeGpu) -> None:
    found = clock_for("cuda")
    assert found.device == torch.device("cuda:1") and found.name == NAME

    def step() -> None:
        gpu.log.append("step")
        gpu.now += 0.25

    assert found.seconds(step) == 0.25
    assert gpu.log == ["synchronize", "record", "step", "record", "wait for the event"]


def test_memory_of_a_gpu_is_that_of_its_allocator(gpu: FakeGpu) -> None:
    """An earlier peak does not count, nor what was there before."""

    def step() -> None:
        gpu.allocate(300 * MiB)
        gpu.allocate(-200 * MiB)

    assert clock_for("cuda:1").peak_growth(step) == 300 * MiB
    assert gpu.log == ["synchronize", "empty cache", "reset", "synchronize"]
    assert clock_for("cuda:1").available() == (1000 + 150 - 200) * MiB


def test_gradients_are_not_counted_and_the_address_space_stays(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_limit_address_space", None)  # CUDA reserves more addresses than there is memory
    leaf = torch.zeros(MiB, requires_grad=True)

    def step() -> None:
        gpu.allocate(14 * MiB)
        leaf.grad = torch.zeros_like(leaf)  # 4 MiB

    assert memory.extra_peak(step, [leaf], clock=clock_for("cuda")) == memory.Peak("ok", 10.0)
    assert memory.no_room(800 * MiB, clock_for("cuda")) is None
    assert memory.no_room(1100 * MiB, clock_for("cuda")) == "out of memory (predicted 1.1 GiB)"


def test_a_cpu_has_the_same_questions() -> None:
    found = clock_for("cpu")
    assert isinstance(found, CpuClock) and found.name == "cpu" and found.device.type == "cpu"
    calls: list[int] = []
    assert found.seconds(lambda: calls.append(1)) > 0 and calls == [1]
    if sys.platform == "linux":
        kept: list[Tensor] = []
        growth = found.peak_growth(lambda: kept.append(torch.ones(16 * MiB)))
        assert growth is not None and growth > 60 * MiB and found.available() > 0


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "mps", "toaster", "meta"])
def test_a_device_that_is_not_here_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for make in (clock_for, lambda device: LossBenchConfig(device=device), lambda x: FamilyBenchConfig(device=x)):
        with pytest.raises(ValueError, match=rf"device: expected a device that torch sees here \(cpu\), got {name}\."):
            make(name)


def test_a_gpu_beyond_the_last_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(ValueError, match=r"\(cpu, cuda:0, cuda:1\), got cuda:2\. Choose one"):
        clock_for("cuda:2")
    assert isinstance(clock_for("cuda:0"), CudaClock)


def test_the_command_line_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit) as stop:
        main("bench loss --device cuda:77 --sizes 64".split())
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "expected a device that torch sees" in said and "cuda:77" in said


@pytest.mark.parametrize("command", ["bench cache", "bench ring"])
def test_benchmarks_of_the_cpu_refuse_the_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--device", "cpu"])
    assert stop.value.code == 2 and "unknown option --device" in capsys.readouterr().err


# --- a benchmark on a GPU that computes on the CPU ----------------------------------------------------------------


class Pretender:
    """The clock of a GPU whose tensors are on the CPU."""

    device = torch.device("cpu")
    name = NAME

    def __init__(self) -> None:
        self.timed = 0

    def seconds(self, step: clock.Step) -> float:
        self.timed += 1
        step()
        return 0.5

    def peak_growth(self, step: clock.Step) -> int | None:
        step()
        return 64 * MiB

    def available(self) -> int:
        return 1 << 40


def test_rows_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Times come from its clock, errors are measured there, and every row names it."""
    pretender = Pretender()
    monkeypatch.setattr(LossBenchConfig, "clock", lambda self: pretender)
    words: list[list[str]] = []

    def point(said: list[str], timeout: float) -> memory.Peak:
        words.append(said)
        return memory.Peak("ok", 3.0)

    monkeypatch.setattr(memory, "point", point)
    config = LossBenchConfig(
        sizes=(32,),
        memory_sizes=(32,),
        dims=(8,),
        contestants=("contratile", "dense", "contratile_bf16"),
        rounds=1,
        threads=1,
        dtype="float16",
    )
    recording = run(BENCH, config, command="x")
    assert pretender.timed > 0
    assert [row.dtype for row in recording.rows] == ["float16", "float16", "bfloat16"]
    for row in recording.rows:
        assert (row.status, row.seconds_best, row.limit_seconds, row.peak_extra_mib) == ("ok", 0.5, 0.5, 3.0)
        assert row.device == NAME and row.error_grad is not None and row.error_grad < 0.1
    assert recording.environment["device"] == NAME
    assert all(said[-4:] == ["--device", "cpu", "--dtype", "float16"] for said in words) and len(words) == 3
    assert load_rows(save_rows(recording, tmp_path)[1]) == recording
    assert NAME in (tmp_path / "loss.csv").read_text()


def test_rows_from_before_there_were_devices_are_of_the_cpu() -> None:
    for path in (Path(__file__).parents[2] / "benchmarks/results").glob("*/loss.json"):
        old: Recording[Any] = load_rows(path)
        assert {row.device for row in old.rows} == {"cpu"} and hardware_text(old.environment) == old.environment["cpu"]
    assert hardware_text({"device": NAME, "cpu": "Some CPU"}) == f"{NAME}, Some CPU"


def test_limits_have_the_dtype_of_the_features_on_a_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def noted(*sizes: int, **how: Any) -> GemmLimit:
        made.append(how)
        return GemmLimit(*sizes)

    monkeypatch.setattr("contratile.bench.loss.GemmLimit", noted)
    names = ("contratile", "dense", "contratile_bf16", "nobody")
    series = LossSeries(LossBenchConfig(device="cuda", dtype="float16"), CLIP, names, 8)
    limits = series.limit(16, lambda dtype: LossProblem.make(16, 8, scale=1.0, dtype=dtype))
    assert isinstance(limits, dict) and set(limits) == set(names[:3])
    assert limits["contratile"] is limits["dense"] is not limits["contratile_bf16"]
    assert [how["dtype"] for how in made] == [torch.float16, torch.bfloat16]
    assert all(how["device"] == torch.device("cuda:1") for how in made)


def test_contestants_are_compared_with_the_turns_of_their_own_limit() -> None:
    seconds = iter([4.0, 10.0, 2.0, 10.0, 1.0, 10.0])  # a limit and a step, three times
    fast, slow = GemmLimit(8, 4), GemmLimit(8, 4)
    steps = dict.fromkeys(("first", "second", "third"), lambda: None)
    limits = {"first": slow, "second": slow, "third": fast, "somebody who failed": fast}
    found = interleave(steps, limits, rounds=1, clock=lambda step: next(seconds))
    assert [turns.limit for turns in found.values()] == [2.0, 2.0, 1.0]


def test_contestants_that_need_a_gpu_say_so_without_one(gpu: FakeGpu) -> None:
    for device, failed in (("cpu", {"inf_cl": NEEDS_CUDA}), ("cuda", {})):
        series = LossSeries(LossBenchConfig(device=device), CLIP, ("contratile", "inf_cl"), 8)
        assert series.failed == failed


def test_out_of_memory_on_a_gpu_is_a_row() -> None:
    assert describe(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB.")) == "out of memory"


def test_the_process_that_measures_memory_takes_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def noted(step: clock.Step, leaves: list[Tensor], *, clock: clock.Clock) -> memory.Peak:
        step()
        seen.append((clock, {leaf.dtype for leaf in leaves if leaf.ndim}))
        return memory.Peak("ok", 1.0)

    monkeypatch.setattr(memory_point, "extra_peak", noted)
    words = "loss --contestant contratile --n 64 --d 8 --device cpu --dtype bfloat16 --threads 1"
    monkeypatch.setattr(sys, "argv", ["memory_point", *words.split()])
    memory_point.main()
    ((found, dtypes),) = seen
    assert isinstance(found, CpuClock) and dtypes == {torch.bfloat16}


# --- kernels of other packages ------------------------------------------------------------------------------------


def close(step: Callable[..., Tensor], problem: LossProblem, oracle: Callable[..., Tensor]) -> None:
    value = step(*problem.args)
    exact = problem.double()
    truth = oracle(*exact.args)
    truth.backward()
    assert value.item() == pytest.approx(truth.item(), rel=1e-5)
    for got, true in zip(problem.leaves, exact.leaves, strict=True):
        assert got.grad is not None and true.grad is not None
        torch.testing.assert_close(got.grad.double(), true.grad, rtol=1e-3, atol=1e-6)


def test_how_siglip_kernel_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the logarithm of the scale. The formula is that of its reference."""

    def formula(image: Tensor, text: Tensor, log_temperature: Tensor, bias: Tensor) -> Tensor:
        logits = image @ text.T * log_temperature.exp() + bias
        return -torch.nn.functional.logsigmoid((2 * torch.eye(len(image)) - 1) * logits).sum() / len(image)

    package: Any = types.ModuleType("siglip_kernel")
    package.fused_siglip_loss = formula
    monkeypatch.setitem(sys.modules, "siglip_kernel", package)
    case = CASES["siglip"]
    close(case.contestants["siglip_kernel"].load(), case.problem(40, 8, scale=5.0), case.oracle)


def test_how_the_kernels_of_inf_cl_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per row, with positives on the diagonal and heads whose widths add up to D."""

    def formula(q: Tensor, k: Tensor, labels: Any = None, scale: Any = None, head_dim: int = 256) -> Tensor:
        assert labels is None and scale is None
        scores = torch.einsum("mhd,nhd->mn", q.view(len(q), -1, head_dim), k.view(len(k), -1, head_dim))
        return scores.logsumexp(1) - scores.diagonal()

    package: Any = types.ModuleType("inf_cl")
    package.cal_flash_loss = formula
    monkeypatch.setitem(sys.modules, "inf_cl", package)
    for d in (24, 512):
        close(CLIP.contestants["inf_cl"].load(), LossProblem.make(40, d, scale=5.0), CLIP.oracle)

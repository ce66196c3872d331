"""--chunk auto: the largest chunk that fits, the same on all processes, without a trace in the run."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contratile.grad_cache.auto import Trial
from contratile.train import chunk as search
from contratile.train.chunk import find_chunk, saved_chunk
from contratile.train.config import TrainConfig
from contratile.train.config_file import load_config
from contratile.train.header import header
from contratile.train.loop import Trainer
from contratile.train.random_state import random_state
from tests.data.sources import Numbers, River, as_tensor
from tests.ranks import pool
from tests.train.runs import losses, sentence_folder, shapes, small, texts, weights

MiB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


def priced(monkeypatch: pytest.MonkeyPatch, row: float, limit: float) -> list[int]:
    """A pair costs `row` bytes, and a chunk may cost `limit`. Returns a list that gets the sizes that are tried."""
    tried: list[int] = []

    def cost(trial: Trial, size: int) -> float:
        tried.append(size)
        return row * size

    monkeypatch.setattr(Trial, "cost", cost)
    monkeypatch.setattr(search, "_limit", lambda *args: limit)
    return tried


def picture(trainer: Trainer) -> dict[str, Any]:
    """All that a trial could have changed."""
    state = {name: x.clone() for name, x in trainer.towers.state_dict().items()}
    return {"state": state, "grads": [p.grad for p in trainer.towers.parameters()], "random": random_state()}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    return type(a) is type(b) and (a == b if not isinstance(a, list) else all(map(equal, a, b)))


# --- the search ---------------------------------------------------------------------------------------------------


@LINUX
def test_a_run_is_that_of_the_number_it_found(table: Path, tmp_path: Path) -> None:
    """Bit by bit; and there is room for the whole batch of so small towers."""
    found = Trainer(small(table, tmp_path / "auto", chunk="auto"))
    assert found.chunk == found.config.run.chunk == 32
    assert any(line.startswith("chunk 32 (auto): ") and line.endswith("iB") for line in found.notices)
    assert any("32 pairs in chunks of 32" in line for line in header(found))
    found.run()
    Trainer(small(table, tmp_path / "fixed", chunk=32)).run()
    assert losses(tmp_path / "auto") == losses(tmp_path / "fixed")
    assert equal(weights(tmp_path / "auto"), weights(tmp_path / "fixed"))
    assert load_config(tmp_path / "auto" / "config.toml").run.chunk == 32


@LINUX
def test_trials_leave_no_trace(table: Path, tmp_path: Path) -> None:
    trainer = Trainer(small(table, tmp_path))
    trainer.towers.left.head = torch.nn.Sequential(torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.5))
    next(trainer.towers.right.parameters()).grad = torch.ones_like(next(trainer.towers.right.parameters()))
    before = picture(trainer)
    chunk, taken = find_chunk(trainer.config, trainer.towers, trainer.source, trainer.accelerator)
    assert chunk == 32 and 0 < taken < 500 * MiB
    assert equal(picture(trainer), before)


@pytest.mark.parametrize(("room", "expected"), [(100, 32), (20, 20), (11, 11), (1, 1)])
def test_the_limit_is_kept(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, expected: int
) -> None:
    tried = priced(monkeypatch, MiB, room * MiB)
    trainer = Trainer(small(table, tmp_path, chunk="auto"))
    assert expected - expected // 8 <= trainer.chunk <= expected
    assert max(tried) <= max(16, room), "after two trials it is known what the next one takes"
    assert trainer.notices == [f"chunk {trainer.chunk} (auto): {trainer.chunk} MiB"]


def test_no_room_at_all(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    priced(monkeypatch, MiB, 1000)
    with pytest.raises(ValueError, match=r"chunk = auto: expected room for a chunk of one row, got 8: 8 MiB.* --chunk"):
        Trainer(small(table, tmp_path, chunk="auto"))
    assert not (tmp_path / "config.toml").exists()


def test_larger_chunks_repeat_the_samples(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    trainer = Trainer(small(table, tmp_path, chunk=4))
    trainer.towers.left.register_forward_hook(lambda module, given, output: rows.append(len(output)))
    monkeypatch.setattr(search, "SAMPLES", 5)
    monkeypatch.setattr(search, "_limit", lambda *args: 1e15)
    assert find_chunk(trainer.config, trainer.towers, trainer.source, trainer.accelerator).chunk == 32
    assert rows == [8, 8, 16, 32]


@pytest.mark.parametrize("source", [Numbers(40, frozenset(range(0, 40, 2))), River((40,), frozenset(range(0, 40, 2)))])
def test_samples_of_any_source(source: Numbers | River) -> None:
    """Random ones of an indexed source or a stream; broken ones are left out."""
    towers: Any = SimpleNamespace(left=SimpleNamespace(prepare=as_tensor), right=SimpleNamespace(prepare=as_tensor))
    config = small(Path("pairs.csv"), Path("run"), batch=24)
    (left,), (right,) = search.sample_inputs(config, towers, source)
    assert torch.equal(left, -right) and 4 < len(left) < 24 and left.remainder(2).all()
    assert left.tolist() != sorted(left.tolist())
    source.broken = frozenset(range(40))
    with pytest.raises(ValueError, match=f"{source.name}.*: expected samples to train on, got none. All .* are broken"):
        search.sample_inputs(config, towers, source)


def test_systems_that_do_not_tell_are_refused(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "peak_growth", lambda work: None)
    with pytest.raises(ValueError, match=r"chunk: expected a number: auto on a CPU needs Linux, got auto. Pass"):
        Trainer(small(table, tmp_path, chunk="auto"))


# --- the memory that is there -------------------------------------------------------------------------------------


def limit_of(trainer: Trainer, *, processes: int = 1, device: str = "cpu", **changes: Any) -> float:
    config = small(Path("pairs.csv"), Path("run"), **changes)
    accelerator: Any = SimpleNamespace(device=torch.device(device), num_processes=processes)
    blocks = torch.zeros(5, 1000), ({"ids": torch.zeros(5, 24)},)
    return search._limit(config, trainer.towers, blocks, accelerator)


@LINUX
def test_what_else_a_step_holds_is_left_free(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small(table, tmp_path))
    monkeypatch.setattr(search, "available_bytes", lambda: 1 << 40)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    usual = limit_of(trainer)
    assert (1 << 39) - 2 * MiB < usual < 1 << 39
    inputs = 32 * 1024 * 4
    assert limit_of(trainer, offload="disk") - usual == inputs / 2
    assert limit_of(trainer, offload="host") == usual, "on a CPU the host's memory is the same"
    assert usual - limit_of(trainer, batch=1 << 20) > (1 << 20) * 1024 * 4 / 2
    assert limit_of(trainer, batch=1 << 16, backend="dense") < limit_of(trainer, batch=1 << 16) - (1 << 34)
    assert limit_of(trainer, processes=4) < 1 << 37
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert 1 << 37 < limit_of(trainer, processes=4) < 1 << 38, "two of the four processes are on another machine"


def test_the_memory_of_an_accelerator(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(small(table, tmp_path))
    memory = SimpleNamespace(empty_cache=lambda: None, mem_get_info=lambda device: (1 << 36, 1 << 40))
    monkeypatch.setattr(torch, "get_device_module", lambda device: memory)
    found = limit_of(trainer, device="cuda:0")
    assert 0.8 * ((1 << 36) - 2 * MiB) < found < 0.8 * (1 << 36)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert limit_of(trainer, device="mps") == 1.0


# --- resumed runs -------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_chunk(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    priced(monkeypatch, MiB, 12 * MiB)
    Trainer(small(table, tmp_path / "run", chunk="auto", save_every=3)).run()
    Trainer(small(table, tmp_path / "other", chunk=7, steps=2)).run()

    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr("contratile.train.chunk.find_chunk", never)
    again = Trainer(small(table, tmp_path / "run", chunk="auto", steps=8))
    assert (again.step, again.chunk, again.notices) == (6, 12, [])
    branch = tmp_path / "other" / "checkpoints" / "step-00000002"
    assert Trainer(small(table, tmp_path / "branch", chunk="auto", resume=str(branch))).chunk == 7
    assert Trainer(small(table, tmp_path / "run", chunk=5, steps=8)).chunk == 5
    assert saved_chunk(None) is None
    with pytest.raises(AssertionError, match="searched again"):
        Trainer(small(table, tmp_path / "new", chunk="auto"))


# --- options of the run -------------------------------------------------------------------------------------------


@LINUX
@pytest.mark.filterwarnings("ignore")  # of sentence-transformers, about a model without its own pooling
@pytest.mark.parametrize(
    "options",
    [
        {"lock": "image", "head": "linear"},
        {"lock": "image"},
        {"precision": "bf16"},
        {"checkpointing": True},
        {"loss": "ntxent"},
        {"towers": "st"},
    ],
    ids=str,
)
def test_auto_with_other_options(table: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    data = table
    if options.get("towers") == "st":
        options, data = {"towers": f"st:{sentence_folder(tmp_path / 'model')}", "pixels": 0}, texts(tmp_path)
    trainer = Trainer(small(data, tmp_path / "run", chunk="auto", steps=2, **options))
    assert trainer.chunk == 32 and trainer.run().finished


# --- several processes --------------------------------------------------------------------------------------------


def found_on(config: TrainConfig, price: Callable[[int], float]) -> tuple[int, Any]:
    """The chunk that a rank of a pool trains with, or the error."""
    import os

    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    with pytest.MonkeyPatch.context() as patch:
        priced(patch, price(int(os.environ["RANK"])), 10 * MiB)
        try:
            trainer = Trainer(config)
        except ValueError as error:
            return 0, str(error)
        return trainer.chunk, trainer.run().finished


def second_needs_more(rank: int) -> float:
    return (1 + rank) * MiB


def second_has_no_room(rank: int) -> float:
    return MiB if rank == 0 else 20 * MiB


@pytest.mark.parametrize("fsdp", [False, True])
def test_all_processes_take_the_smallest(table: Path, tmp_path: Path, fsdp: bool) -> None:
    config = small(table, tmp_path, chunk="auto", fsdp=fsdp, steps=2)
    assert pool(2).run(found_on, config, second_needs_more) == [(5, True), (5, True)]


def test_all_processes_hear_of_a_process_without_room(table: Path, tmp_path: Path) -> None:
    found = pool(2).run(found_on, small(table, tmp_path, chunk="auto"), second_has_no_room)
    assert found[0] == found[1] and "expected room for a chunk of one row" in found[0][1]

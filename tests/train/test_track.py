"""Trackers of a training run: only the main process has them, and they close after the last checkpoint."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class

from contratile.report.tracking import history
from contratile.train import checkpoint
from contratile.train.config import TrainConfig
from contratile.train.header import header
from contratile.train.loop import Trainer
from tests.ranks import pool
from tests.train.runs import losses, shapes, small


class Witness(GeneralTracker):  # type: ignore[misc]  # accelerate has no annotations
    """A tracker that remembers its steps, and the checkpoints that were there when it was closed."""

    name = "witness"
    requires_logging_directory = False
    run: ClassVar[Path] = Path()
    config: ClassVar[dict[str, Any]] = {}
    steps: ClassVar[list[tuple[int | None, dict[str, Any]]]] = []
    closed: ClassVar[list[str]] = []
    breaks_at: ClassVar[int] = -1

    def __init__(self, run_name: str) -> None:
        super().__init__()

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        Witness.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if step == self.breaks_at:
            raise ConnectionError("the server is gone")
        self.steps.append((step, values))

    def finish(self) -> None:
        self.closed.extend(path.name for path in checkpoint.steps(self.run))


def registered(run: Path) -> None:
    Witness.run, Witness.config, Witness.steps, Witness.closed, Witness.breaks_at = run, {}, [], [], -1
    register_tracker_class(Witness)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    registered(tmp_path / "run")
    yield tmp_path / "run"
    del LOGGER_TYPE_TO_CLASS["witness"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


def test_a_run_tells_its_tracker_everything(table: Path, out: Path) -> None:
    trainer = Trainer(small(table, out, steps=3, track=("witness",), betas=(0.9, 0.95)))
    assert any(line.startswith("trackers") and line.endswith("witness") for line in header(trainer))
    trainer.run()
    told = [(step, {name.partition("/")[2]: x for name, x in values.items()}) for step, values in Witness.steps]
    assert told == [(entry.pop("step"), entry) for entry in history(out)] and len(told) == 5
    assert Witness.config["optim.betas"] == "0.9, 0.95" and Witness.config["run.batch"] == 32
    assert Witness.closed == ["step-00000003"], "closed after the last checkpoint"


def test_a_tracker_that_breaks_does_not_end_the_run(table: Path, out: Path) -> None:
    Witness.breaks_at = 2
    with pytest.warns(UserWarning, match="witness failed .ConnectionError: the server is gone.* The run continues"):
        assert Trainer(small(table, out, steps=4, track=("witness",))).run().finished
    assert [step for step, _ in Witness.steps] == [0, 1] and len(losses(out)) == 4


def test_a_tracker_that_cannot_be_had_is_refused_before_anything_is_written(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"track: expected some of .*, got 'tensorbord'. Did you mean tensorboard\?"):
        Trainer(small(table, tmp_path, track=("tensorbord",)))
    assert not list(tmp_path.iterdir())


def steps_told(config: TrainConfig) -> list[int | None]:
    """On a rank of a pool."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    registered(config.run.out)
    try:
        Trainer(config).run()
    finally:
        del LOGGER_TYPE_TO_CLASS["witness"]
    return [step for step, _ in Witness.steps]


def test_only_the_main_process_tracks(table: Path, tmp_path: Path) -> None:
    found = pool(2).run(steps_told, small(table, tmp_path, steps=2, track=("witness",)))
    assert found == [[0, 1, 2, 2], []]

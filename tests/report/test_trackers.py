"""Trackers by name: they get what metrics.jsonl has, once, and never end a run."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import io
import json
import random
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import tracking
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, register_tracker_class
from rich.console import Console

from contratile.report import tracker_starts
from contratile.report.tracker_starts import Start, Started
from contratile.report.trackers import TRACKERS, check_trackers, chosen_trackers, flat_options
from contratile.report.tracking import Tracker, history
from tests.processes import until

FACTS = {"loss": 8.25, "scale": 14.29, "lr": 1e-3, "pairs": 4096.0, "seconds": 2.0, "epoch": 0}
CONFIG = {
    "run": {"batch": 32, "out": Path("runs/a")},
    "optim": {"betas": (0.9, 0.98), "lr": 1e-3},
    "loss": {"same_id": "exclude"},
}
foreign_warnings = pytest.mark.filterwarnings("ignore")


class Heard(GeneralTracker):  # type: ignore[misc]  # accelerate has no annotations
    """A tracker that remembers what it was told, and fails where a test says so."""

    name = "heard"
    requires_logging_directory = False
    calls: ClassVar[list[tuple[str, Any]]] = []
    fails: ClassVar[str] = ""

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.tell("made", run_name)

    @property
    def tracker(self) -> None:
        return None

    def tell(self, call: str, value: Any) -> None:
        if self.fails == call:
            raise OSError(f"no {call} today")
        Heard.calls.append((call, value))

    def start(self) -> None:
        print("a greeting of the package")
        random.random()
        self.tell("start", None)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.tell("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.tell("log", (step, values))

    def finish(self) -> None:
        self.tell("finish", None)


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Heard]]:
    monkeypatch.setattr(Heard, "calls", [])
    monkeypatch.setattr(Heard, "fails", "")
    register_tracker_class(Heard)
    yield Heard
    del LOGGER_TYPE_TO_CLASS["heard"]


def tracked(out: Path, *names: str, **options: Any) -> Tracker:
    options = {"steps": 9, "tensorboard": False, "config": CONFIG, "console": Console(file=io.StringIO()), **options}
    return Tracker(out, track=names, **options)


def logged(tracker: type[Heard]) -> list[tuple[int, dict[str, Any]]]:
    return [value for call, value in tracker.calls if call == "log"]


def lines(out: Path) -> list[tuple[int, dict[str, Any]]]:
    """metrics.jsonl in the form in which trackers hear it."""
    found = []
    for entry in history(out):
        kind = "train" if "loss" in entry else "eval"
        found.append((entry["step"], {f"{kind}/{name}": x for name, x in entry.items() if name != "step"}))
    return found


# --- names --------------------------------------------------------------------------------------------------------


def test_an_unknown_tracker_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"track: expected some of .*mlflow.*, got 'wandbb'. Did you mean wandb\?"):
        check_trackers(["tensorboard", "wandbb"])


@pytest.mark.parametrize("name", ["comet_ml", "clearml"])
def test_a_tracker_that_needs_a_network_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"track: expected trackers that work without a network, got {name}. Choose"):
        check_trackers([name])


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(ValueError, match=r"track: .*got mlflow, which is not. Install it: pip install mlflow"):
        check_trackers(["mlflow"])


def test_which_trackers_a_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_trackers((), True) == ["tensorboard"]
    assert chosen_trackers(("wandb", "tensorboard", "wandb"), True) == ["tensorboard", "wandb"]
    assert chosen_trackers((), False) == []
    monkeypatch.setattr("accelerate.utils.is_tensorboard_available", lambda: False)
    assert chosen_trackers((), True) == []


def test_options_are_numbers_and_texts() -> None:
    assert flat_options(CONFIG) == {
        "run.batch": 32,
        "run.out": "runs/a",
        "optim.betas": "0.9, 0.98",
        "optim.lr": 1e-3,
        "loss.same_id": "exclude",
    }


# --- what they get ------------------------------------------------------------------------------------------------


def test_a_tracker_gets_everything(heard: type[Heard], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = random.getstate()
    with tracked(tmp_path, "heard") as tracker:
        tracker.evaluation(0, {"text_to_image_R@10": 0.25})
        tracker.step(1, FACTS)
        tracker.step(2, FACTS)
        assert ("finish", None) not in heard.calls
    assert random.getstate() == state
    assert heard.calls[:3] == [("made", "contratile"), ("start", None), ("config", flat_options(CONFIG))]
    assert len(logged(heard)) == 3 and logged(heard) == lines(tmp_path)
    assert heard.calls[-1] == ("finish", None)
    assert capsys.readouterr().out == "", "stdout has results only"


def test_only_the_main_process_tracks(heard: type[Heard], tmp_path: Path) -> None:
    with tracked(tmp_path, "heard", main=False) as tracker:
        tracker.step(1, FACTS)
        tracker.evaluation(1, {"R@1": 0.5})
    assert heard.calls == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["made", "start", "config", "log", "finish"])
def test_a_tracker_that_fails_is_left_out(heard: type[Heard], tmp_path: Path, call: str) -> None:
    heard.fails = call
    with pytest.warns(UserWarning, match=rf"heard failed \(OSError: no {call} today\). The run continues") as warned:
        with tracked(tmp_path, "heard") as tracker:
            for step in (1, 2, 3):
                tracker.step(step, FACTS)
    assert len(warned) == 1 and [entry["step"] for entry in history(tmp_path)] == [1, 2, 3]
    assert len(logged(heard)) == (3 if call == "finish" else 0)


# --- resumed runs -------------------------------------------------------------------------------------------------


def steps_of_two_parts(out: Path, *names: str, pause: float = 0.0, **options: Any) -> None:
    """A run that ended at step 3, and resumes from a checkpoint of step 2."""
    with tracked(out, *names, **options) as tracker:
        tracker.evaluation(0, {"R@1": 0.5})
        for step in (1, 2, 3):
            tracker.step(step, FACTS | {"loss": float(step)})
    time.sleep(pause)
    with tracked(out, *names, step=2, **options) as tracker:
        for step in (3, 4):
            tracker.step(step, FACTS | {"loss": 10.0 * step})
        tracker.evaluation(4, {"R@1": 0.75})


def test_a_tracker_that_cannot_resume_gets_the_whole_history_again(heard: type[Heard], tmp_path: Path) -> None:
    steps_of_two_parts(tmp_path, "heard")
    second = [call for call, _ in heard.calls].index("finish") + 1
    heard.calls = heard.calls[second:]
    assert logged(heard) == lines(tmp_path) and [step for step, _ in logged(heard)] == [0, 1, 2, 3, 4, 4]
    assert not (tmp_path / TRACKERS).exists()


def test_a_tracker_that_resumes_gets_each_step_once(
    heard: type[Heard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def start(name: str, given: Start) -> Started:
        asked.append(given.run)
        return Started(Heard("again"), "the run", {"train": 3, "eval": 0} if given.run else {}, str.upper)

    monkeypatch.setitem(tracker_starts._STARTS, "heard", start)
    steps_of_two_parts(tmp_path, "heard")
    assert asked == ["", "the run"] and json.loads((tmp_path / TRACKERS).read_text()) == {"heard": "the run"}
    told = [(step, value) for step, values in logged(heard) for name, value in values.items() if name == "TRAIN/LOSS"]
    assert told == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [step for step, values in logged(heard) if "EVAL/R@1" in values] == [0, 4]
    with tracked(tmp_path, "heard"):  # from the start again: a new run
        pass
    assert asked[2:] == [""]
    (tmp_path / TRACKERS).write_text("rubbish")
    with tracked(tmp_path, "heard", step=2):
        pass
    assert asked[3:] == [""]


@foreign_warnings
def test_tensorboard_that_joins_later_has_the_history_and_the_options(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracked(tmp_path) as tracker:
        tracker.step(1, FACTS)
    with tracked(tmp_path, step=1, tensorboard=True) as tracker:
        tracker.step(2, FACTS)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2]
    assert b"optim.betas" in board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert [path.name[:6] for path in (tmp_path / "tensorboard").iterdir()] == ["events"]


# --- the packages, where they are installed -----------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No variables of the packages but a home that is empty."""
    import os

    for name in list(os.environ):
        if re.match("WANDB_|MLFLOW_|TRACKIO_", name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "run"


@foreign_warnings
@pytest.mark.slow
def test_wandb_offline(alone: Path) -> None:
    """The second folder has everything, under the id of the first."""
    pytest.importorskip("wandb")
    steps_of_two_parts(alone, "wandb", pause=1.1)  # folders are named by the second
    run = json.loads((alone / TRACKERS).read_text())["wandb"]
    files = sorted((alone / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))
    assert len(files) == 2
    # wandb's own process writes the file, and may still be busy with it.
    assert until(lambda: b"0.75" in files[-1].read_bytes(), 60), files[-1].read_bytes()
    content = files[-1].read_bytes()
    assert content.count(b"train/loss") >= 4 and content.count(b"eval/R@1") >= 2
    for text in (b"optim.betas", b"0.9, 0.98"):
        assert text in content


@foreign_warnings
@pytest.mark.slow
def test_mlflow_in_the_folder_of_the_run(alone: Path) -> None:
    pytest.importorskip("mlflow")
    for out in (alone, alone.parent / "second"):  # mlflow keeps its address in the environment
        steps_of_two_parts(out, "mlflow")
        with sqlite3.connect(out / "mlflow" / "mlflow.db") as base:
            runs = base.execute("select run_uuid, name, status from runs").fetchall()
            losses = base.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()
            recall = base.execute("select step, value from metrics where key = 'eval/R_at_1' order by step").fetchall()
            options = dict(base.execute("select key, value from params").fetchall())
        base.close()
        assert runs == [(json.loads((out / TRACKERS).read_text())["mlflow"], out.name, "FINISHED")]
        assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)] and recall == [(0, 0.5), (4, 0.75)]
        assert options["optim.betas"] == "0.9, 0.98"


@foreign_warnings
@pytest.mark.slow
def test_trackio_on_this_machine(alone: Path) -> None:
    trackio = pytest.importorskip("trackio")
    steps_of_two_parts(alone, "trackio")
    run = json.loads((alone / TRACKERS).read_text())["trackio"]
    with sqlite3.connect(trackio.utils.TRACKIO_DIR / "contratile.db") as base:
        rows = base.execute("select step, metrics from metrics where run_name = ?", (run,)).fetchall()
    base.close()
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, row["train/loss"]) for step, row in found if "train/loss" in row] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert [step for step, row in found if "eval/R@1" in row] == [0, 4]

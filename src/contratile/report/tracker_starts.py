"""How each tracker is started: where it writes, and how it continues the run that it tracked before.

    started = start("wandb", Start(folder=run, step=0, config=options))
    started.tracker.log({"train/loss": 8.3}, step=1)        # accelerate's tracker

No tracker uses the network unless its own environment variables ask for it: WANDB_MODE, MLFLOW_TRACKING_URI,
TRACKIO_SPACE_ID, TRACKIO_SERVER_URL and SWANLAB_MODE.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

PROJECT = "contratile"
"""Name of the project, or experiment, that runs are tracked under."""

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a tracker is started with."""

    folder: Path
    """Folder of the run, an absolute path."""

    step: int = 0
    """Step that the run resumes from; 0 for a new run."""

    config: Values
    """Options of the run by name, as numbers and texts."""

    run: str = ""
    """What identifies the tracker's own run, if it has one already: continue it."""

    @property
    def title(self) -> str:
        """What the run is called."""
        return self.folder.name or PROJECT


class Started(NamedTuple):
    """A tracker that runs."""

    tracker: Any
    """One of accelerate's trackers: `log`, `finish`."""

    run: str = ""
    """What identifies the tracker's own run, to continue it later; empty if it cannot be continued."""

    last: Mapping[str, int] = MappingProxyType({})
    """The last step that the tracker's run has already of each kind of record ("train", "eval")."""

    rename: Callable[[str], str] = str
    """Changes names of metrics that the tracker does not allow."""


def start(name: str, given: Start) -> Started:
    """Start a tracker that accelerate knows by this name, and record the options of the run."""
    return _STARTS.get(name, _other)(name, given)


def _class(name: str) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    return LOGGER_TYPE_TO_CLASS[name]


def _both(step: int) -> dict[str, int]:
    return {"train": step, "eval": step}


def _tensorboard(name: str, given: Start) -> Started:
    files = list((given.folder / name).glob("events.out.tfevents.*"))
    if given.step == 0:  # an attempt that ended before its first checkpoint
        for path in files:
            path.unlink()
    tracker = _class(name)(name, str(given.folder), purge_step=given.step + 1 if given.step else None)
    tracker.start()
    if given.config:
        # accelerate's store_init_configuration would make a folder with another run for them.
        from torch.utils.tensorboard.summary import hparams

        make: Any = hparams  # torch does not annotate it
        for summary in make(dict(given.config), {}):
            tracker.writer.file_writer.add_summary(summary)
    # Later steps are purged.
    return Started(tracker, last=_both(given.step if files and given.step else -1))


def _wandb(name: str, given: Start) -> Started:
    import wandb

    told = os.environ
    mode = told.get("WANDB_MODE", "offline")
    run = given.run or told.get("WANDB_RUN_ID") or secrets.token_hex(4)
    # The terminal shows the run's own progress.
    quiet: dict[str, tuple[str, Any]] = {"console": ("WANDB_CONSOLE", "off"), "silent": ("WANDB_SILENT", True)}
    settings = {option: value for option, (variable, value) in quiet.items() if variable not in told}
    if mode == "offline":
        told.setdefault("WANDB_ERROR_REPORTING", "false")  # crash reports would go over the network
    tracker = _class(name)(
        told.get("WANDB_PROJECT", PROJECT),
        name=told.get("WANDB_NAME", given.title),
        id=run,
        resume=None if mode == "offline" else "allow",
        mode=mode,
        dir=told.get("WANDB_DIR", str(given.folder)),
        settings=wandb.Settings(**settings),
    )
    tracker.start()
    tracker.store_init_configuration(dict(given.config))
    # Offline, wandb starts a new folder with the same id at step 0: the newest folder has the whole history.
    return Started(tracker, run, last=_both(tracker.run.step - 1))


def _trackio(name: str, given: Start) -> Started:
    import trackio

    run = given.run or f"{given.title}-{secrets.token_hex(4)}"  # trackio continues runs by their name
    tracker = _class(name)(PROJECT, name=run, resume="allow", embed=False, config=dict(given.config))
    tracker.start()
    tracker.finish = trackio.finish  # after accelerate's, trackio would finish the run once more at exit
    return Started(tracker, run, last=_both(getattr(tracker.run, "_next_step", 0) - 1))


_local_mlflow: list[str] = []
"""Addresses that were set here: mlflow stores its address in the environment, where the next run would find it."""


def _mlflow(name: str, given: Start) -> Started:
    told, place = os.environ, given.folder / "mlflow"
    told.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    artifacts = None
    if told.get("MLFLOW_TRACKING_URI", "") in ("", *_local_mlflow):
        place.mkdir(parents=True, exist_ok=True)
        for logger in ("alembic", "mlflow.store.db.utils"):  # many lines about a new database
            logging.getLogger(logger).setLevel(logging.WARNING)
        _local_mlflow.append(f"sqlite:///{place / 'mlflow.db'}")
        mlflow.set_tracking_uri(_local_mlflow[-1])
        artifacts = (place / "artifacts").as_uri()
    tracker = _class(name)(PROJECT, logging_dir=artifacts, run_id=given.run or None, run_name=given.title)
    tracker.start()
    if not given.run:  # options that are recorded cannot be changed
        tracker.store_init_configuration(dict(given.config))
    run = tracker.tracker.info.run_id
    return Started(tracker, run, last=_mlflow_last(run) if given.run else {}, rename=_mlflow_name)


def _mlflow_last(run: str) -> dict[str, int]:
    """The last step of each kind of record in a run of mlflow."""
    import mlflow

    client = mlflow.MlflowClient()
    last: dict[str, int] = {}
    for name in client.get_run(run).data.metrics:
        kind = name.partition("/")[0]
        if kind == "eval" or name == "train/memory":  # every step has its memory; evaluations are few
            last[kind] = max([last.get(kind, -1), *(metric.step for metric in client.get_metric_history(run, name))])
    return last


def _mlflow_name(name: str) -> str:
    """R@10 becomes R_at_10."""
    return re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))


def _other(name: str, given: Start) -> Started:
    """Any tracker of accelerate, with the settings of its package. It starts a new run every time."""
    make, place, told = _class(name), str(given.folder / name), os.environ
    options: dict[str, Any] = {}
    if name == "swanlab":
        options = {"mode": told.get("SWANLAB_MODE", "offline"), "logdir": told.get("SWANLAB_LOG_DIR", place)}
    elif name == "dvclive":
        options = {"dir": place, "dvcyaml": None, "save_dvc_exp": False}  # nothing outside of its folder
    tracker = make(PROJECT, *((place,) if make.requires_logging_directory else ()), **options)
    tracker.start()
    tracker.store_init_configuration(dict(given.config))
    return Started(tracker)


_STARTS: dict[str, Callable[[str, Start], Started]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}

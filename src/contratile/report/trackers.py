"""Trackers by name, through accelerate: TensorBoard, wandb, trackio, mlflow.

    check_trackers(["wandb"])                               # known and installed
    trackers = Trackers(["wandb"], run, step=0, config={"batch": 4096})
    trackers.start()
    trackers.log("train", {"loss": 8.3}, step=1)
    trackers.close()

A tracker that fails is dropped with a warning; the run continues, and metrics.jsonl has everything. A resumed run
continues the trackers' own runs: `trackers.json` in the run's folder has their ids, and the last steps they recorded.
"""

from __future__ import annotations

import difflib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from contratile.data.files import written_whole
from contratile.errors import bad_value
from contratile.report.tracker_starts import Start, Started, start

TRACKERS = "trackers.json"
"""Name of the file in a run's folder that remembers the runs of its trackers."""

KINDS = ("train", "eval")


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that accelerate does not know, or whose package is not installed.

    Args:
        names: Names of trackers, as accelerate has them; also of classes passed to `register_tracker_class`.

    Raises:
        ValueError: A tracker is unknown or not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    installed = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = sorted(LOGGER_TYPE_TO_CLASS)
            near = difflib.get_close_matches(name.lower(), known, n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Leave it out for none."
            bad_value("track", expected=f"some of {', '.join(known)}", got=repr(name), remedy=remedy)
        if name in LoggerType.list() and name not in installed:
            remedy = f"Install it: pip install {name}"
            bad_value("track", expected="installed packages", got=f"{name}, which is not", remedy=remedy)


def chosen_trackers(track: Sequence[str], tensorboard: bool) -> list[str]:
    """The trackers of a run: those it names, and TensorBoard unless it is turned off or not installed."""
    from accelerate.utils import is_tensorboard_available

    default = ["tensorboard"] if tensorboard and is_tensorboard_available() else []
    return list(dict.fromkeys([*default, *track]))


class Trackers:
    """The trackers of a run, on its main process.

    Args:
        names: Names of the trackers.
        folder: Folder of the run.
        step: Step that the run resumes from; 0 for a new run.
        config: Options of the run by section and name; nested sections become `section.name`.
        logged: The last step in metrics.jsonl, by kind of record, before it is rewound.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        *,
        step: int = 0,
        config: Mapping[str, Any] | None = None,
        logged: Mapping[str, int] | None = None,
    ) -> None:
        self._names, self._folder, self._step = names, folder.absolute(), step
        self._config, self._logged = flat(config or {}), logged or {}
        self._running: dict[str, Started] = {}
        self._known: dict[str, dict[str, Any]] = {}
        """By tracker: its run, and the last step that it has of each kind of record."""

    def start(self) -> None:
        """Start all trackers. Those that fail are left out, with a warning."""
        before = _load(self._folder / TRACKERS) if self._step else {}
        for name in self._names:
            known = before.get(name, {})
            given = Start(folder=self._folder, step=self._step, config=self._config, run=str(known.get("run", "")))
            self._attempt(name, partial(self._start, name, given))
            if name in self._running and self._running[name].run:
                self._known[name] = {"run": self._running[name].run}
                if given.run:
                    self._known[name] |= {kind: max(_step(known, kind), self._logged.get(kind, -1)) for kind in KINDS}
        if self._known:
            with written_whole(self._folder / TRACKERS) as draft:
                # Trackers that this part of the run does without may come back later.
                draft.write_text(json.dumps({**before, **self._known}, indent=1), encoding="utf-8")

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Record the numbers of a step ("train") or an evaluation ("eval")."""
        for name, started in list(self._running.items()):
            if step <= _step(self._known.get(name, {}), kind):
                continue  # the tracker has it from before the run was resumed
            named = {started.rename(f"{kind}/{key}"): value for key, value in values.items()}
            self._attempt(name, partial(started.tracker.log, named, step=step))

    def close(self) -> None:
        """Finish all trackers. Call it after the last checkpoint: a tracker may hang here."""
        for name, started in list(self._running.items()):
            self._attempt(name, started.tracker.finish)
        self._running = {}

    def _start(self, name: str, given: Start) -> None:
        self._running[name] = start(name, given)

    def _attempt(self, name: str, work: Callable[[], object]) -> None:
        try:
            with redirect_stdout(sys.stderr):  # stdout has results only
                work()
        except Exception as error:  # whatever the package raises
            self._running.pop(name, None)
            told = f"{type(error).__name__}: {error}".strip()
            told = f"{name} failed ({told}). The run continues without it; metrics.jsonl has every record."
            warnings.warn(told, stacklevel=3)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """Options of all sections by `section.name`; what is neither a number nor a text becomes text."""
    found: dict[str, int | float | str | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, tuple | list):
            found[prefix + name] = ", ".join(map(str, value))
        else:
            found[prefix + name] = value if isinstance(value, int | float | str) else str(value)
    return found


def _load(path: Path) -> dict[str, dict[str, Any]]:
    """What the file remembers; a missing or damaged one remembers nothing."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {name: kept for name, kept in known.items() if isinstance(kept, dict)}
    except (OSError, ValueError, AttributeError):
        return {}


def _step(known: Mapping[str, Any], kind: str) -> int:
    step = known.get(kind)
    return step if isinstance(step, int) else -1

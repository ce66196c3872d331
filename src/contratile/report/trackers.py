"""Trackers by name, through accelerate: TensorBoard, wandb, trackio, mlflow.

    check_trackers(["wandb"])                               # known and installed
    trackers = Trackers(["wandb"], run, step=0, config={"batch": 4096})
    trackers.start()
    trackers.log("train", {"loss": 8.3}, step=1)
    trackers.close()

A tracker that fails is dropped with a warning; the run continues, and metrics.jsonl has everything. A resumed run
continues the trackers' own runs, whose ids are in `trackers.json`, and records what they do not have yet.
"""

from __future__ import annotations

import difflib
import json
import random
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

NEED_NETWORK = ("clearml", "comet_ml")
"""Trackers of accelerate that look for their servers even in their offline modes."""


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that accelerate does not know, that cannot work offline, or that are not installed.

    Args:
        names: Names of trackers, as accelerate has them; also of classes passed to `register_tracker_class`.

    Raises:
        ValueError: A tracker cannot be used.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    installed = [str(tracker) for tracker in get_available_trackers()]
    for name in names:
        if name in NEED_NETWORK:
            remedy = "Choose another one, such as wandb, trackio or mlflow."
            bad_value("track", expected="trackers that work without a network", got=name, remedy=remedy)
        if name not in LOGGER_TYPE_TO_CLASS:
            known = sorted(set(LOGGER_TYPE_TO_CLASS) - set(NEED_NETWORK))
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
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        *,
        step: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._names, self._folder, self._step = names, folder.absolute(), step
        self._config = flat_options(config or {})
        self._running: dict[str, Started] = {}

    def start(self) -> None:
        """Start all trackers. Those that fail are left out, with a warning."""
        if self._names:
            from accelerate import PartialState

            PartialState()  # accelerate's trackers ask it whether this is the main process
        runs = _load(self._folder / TRACKERS) if self._step else {}
        for name in self._names:
            given = Start(folder=self._folder, step=self._step, config=self._config, run=runs.get(name, ""))
            self._attempt(name, partial(self._start, name, given))
        runs |= {name: started.run for name, started in self._running.items() if started.run}
        if runs:  # also of trackers that this part of the run does without: they may come back
            with written_whole(self._folder / TRACKERS) as draft:
                draft.write_text(json.dumps(runs, indent=1), encoding="utf-8")

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Record the numbers of a step ("train") or an evaluation ("eval"), wherever they are not recorded yet."""
        for name, started in list(self._running.items()):
            if step <= started.last.get(kind, -1):
                continue
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
        drawn = random.getstate()  # some packages draw names from it
        try:
            with redirect_stdout(sys.stderr):  # stdout has results only
                work()
        except Exception as error:  # whatever the package raises
            self._running.pop(name, None)
            told = f"{type(error).__name__}: {error}".strip()
            told = f"{name} failed ({told}). The run continues without it; metrics.jsonl has every record."
            warnings.warn(told, stacklevel=3)
        finally:
            random.setstate(drawn)


def flat_options(config: Mapping[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """Options of all sections by `section.name`; what is neither a number nor a text becomes text."""
    found: dict[str, int | float | str | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat_options(value, f"{prefix}{name}.")
        elif isinstance(value, tuple | list):
            found[prefix + name] = ", ".join(map(str, value))
        else:
            found[prefix + name] = value if isinstance(value, int | float | str) else str(value)
    return found


def _load(path: Path) -> dict[str, str]:
    """The runs of the trackers by name; none if the file is missing or damaged."""
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))
        return {name: run for name, run in runs.items() if isinstance(run, str)}
    except (OSError, ValueError, AttributeError):
        return {}

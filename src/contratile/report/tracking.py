"""Progress of a run: metrics.jsonl, trackers such as TensorBoard, and a line in the terminal.

    with Tracker(run, steps=300) as tracker:
        tracker.step(1, {"loss": 8.3, "lr": 1e-3, "scale": 14.3, "top1": 0.001, "pairs": 4096, "seconds": 0.9})
        tracker.evaluation(1, {"text_to_image_R@10": 0.02})
    history(run)                       # the lines of metrics.jsonl

A run that resumes at step 100 drops the records of later steps; a new run drops all. Trackers are chosen by name (see
`trackers`); anything with `log(values, step=...)` can be passed as `others`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch

from contratile.data.files import written_whole
from contratile.errors import bad_value
from contratile.printable import printable
from contratile.report.metric_text import PICTURES, in_a_line
from contratile.report.trackers import Trackers, chosen_trackers

if TYPE_CHECKING:
    from rich.console import Console

METRICS = "metrics.jsonl"
_PLAIN_LINES = 50
"""Step lines of a run whose output is not a terminal, about."""


class Log(Protocol):
    """Anything with the `log` method of accelerate's trackers."""

    def log(self, values: dict[str, Any], step: int | None = None) -> object: ...


class Tracker:
    """Records every step in files and on the terminal; silent on all processes but the main one.

    Args:
        folder: Folder of the run.
        steps: Steps of the whole run.
        step: Step that the run resumes from; 0 for a new run.
        log_every: Steps between lines of metrics.jsonl.
        tensorboard: Write TensorBoard files too, if the package is installed.
        track: Names of further trackers, as accelerate has them: "wandb", "trackio", "mlflow".
        config: Options of the run, which the trackers record.
        main: Whether this is the main process.
        on_gpu: Report GPU memory of the process instead of host memory.
        loss_memory: Bytes that the loss needs, for comparison on the step line; None leaves it out.
        dense_memory: Bytes that a dense loss would need.
        others: Further trackers.
        console: Where to print; stderr by default.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        step: int = 0,
        log_every: int = 1,
        tensorboard: bool = True,
        track: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
        main: bool = True,
        on_gpu: bool = False,
        loss_memory: int | None = None,
        dense_memory: int = 0,
        others: Sequence[Log] = (),
        console: Console | None = None,
    ) -> None:
        self._folder, self._steps, self._first, self._log_every = folder, steps, step, log_every
        self._tensorboard, self._track, self._config = tensorboard, track, config
        self._main, self._on_gpu = main, on_gpu
        self._loss_memory = {} if loss_memory is None else {"loss_memory": loss_memory, "dense_memory": dense_memory}
        self._others, self._given_console = others, console

    def __enter__(self) -> Tracker:
        if self._main:
            self._folder.mkdir(parents=True, exist_ok=True)
            rewind(self._folder / METRICS, self._first if self._first else -1)  # a new run records step 0 again
            self._file: BinaryIO = (self._folder / METRICS).open("ab", buffering=0)
            names = chosen_trackers(self._track, self._tensorboard)
            self._trackers = Trackers(names, self._folder, step=self._first, config=self._config)
            self._trackers.start()
            for entry in history(self._folder):  # trackers skip what they have
                step = entry.pop("step")
                self._trackers.log(_kind(entry), _numbers(entry), step)
            self._screen = _Screen(self._steps, self._first, self._given_console)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._main:
            self._screen.close()
            self._file.close()
            self._trackers.close()

    def flush(self) -> None:
        """Force metrics.jsonl to disk, so that it is there before the checkpoint that follows."""
        if self._main:
            os.fsync(self._file.fileno())

    def step(self, step: int, facts: Mapping[str, float], *, broken: Counter[str] | None = None) -> None:
        """Record a finished step.

        Args:
            step: Its number, from 1.
            facts: Its values; `pairs` and `seconds` become samples_per_second.
            broken: Broken samples so far, by reason.
        """
        if not self._main:
            return
        values: dict[str, Any] = dict(facts)
        seconds, pairs = values.pop("seconds", None), values.pop("pairs", None)
        if seconds and pairs:
            values["samples_per_second"] = pairs / seconds
        values |= {"memory": memory_now(self._on_gpu), **self._loss_memory}
        if broken:
            values["broken"] = sum(broken.values())
        self._screen.show(step, line(values))
        if step % self._log_every == 0 or step == self._steps:
            self._record(step, values, "train")

    def evaluation(self, step: int, metrics: Mapping[str, float], sides: tuple[str, str] = PICTURES) -> None:
        """Record an evaluation.

        Args:
            step: The step it was made after.
            metrics: Its values.
            sides: Names of the left and the right side.
        """
        if self._main:
            self._record(step, dict(metrics), "eval")
            self._screen.say(f"step {step}: {in_a_line(metrics, sides)}")

    def _record(self, step: int, values: dict[str, Any], kind: str) -> None:
        # A single write: a killed process leaves at most a cut last line, which `rewind` drops.
        self._file.write(_json_line({"step": step, **values}))
        numbers = _numbers(values)
        self._trackers.log(kind, numbers, step)
        for other in self._others:
            other.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)


def history(run: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl, oldest first. A last line that was cut by a kill is left out.

    Args:
        run: Folder of the run.

    Raises:
        ValueError: Another line is not a JSON object with a step.

    Examples:
        >>> [entry["loss"] for entry in history(Path("runs/icons")) if "loss" in entry]    # doctest: +SKIP
    """
    path = run / METRICS
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = []
    for number, text in enumerate(lines, start=1):
        try:
            if text:
                found.append(_parsed(text))
        except ValueError:
            if number < len(lines):  # after the last line break comes the cut line
                bad_value(f"{path}, line {number}", expected="an object with a step", got=text, remedy="Remove it.")
    return found


def rewind(path: Path, step: int) -> None:
    """Drop lines about later steps than `step`, and lines that cannot be parsed."""
    if not path.exists():
        return
    kept = []
    for text in path.read_bytes().split(b"\n"):
        try:
            entry = _parsed(text)
        except ValueError:
            continue
        if entry["step"] <= step:
            kept.append(text + b"\n")
    with written_whole(path) as draft:
        draft.write_bytes(b"".join(kept))


def memory_now(on_gpu: bool = False) -> int:
    """Bytes that this process holds: reserved on its GPU, or resident in host memory."""
    if on_gpu:
        return torch.cuda.memory_reserved()
    import psutil

    return int(psutil.Process(os.getpid()).memory_info().rss)


def binary_size(number: float) -> str:
    """Format bytes: 14.2 MiB."""
    unit = 0
    while number >= 1024 and unit < 4:
        number, unit = number / 1024, unit + 1
    digits = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{digits} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def line(values: Mapping[str, Any]) -> str:
    """Format the values of a step."""
    forms = {
        "loss": "loss {:.4f}",
        "distill": "distill {:.4f}",
        "guide_drops": "guide drops {:.1%}",
        "top1": "top-1 {:.1%}",
        "scale": "scale {:.1f}",
        "lr": "lr {:.2e}",
        "samples_per_second": "{:,.0f} samples/s",
        "padding_saved": "{:.0%} padding saved",
    }
    parts = [form.format(values[name]) for name, form in forms.items() if name in values]
    if "loss_memory" in values:
        parts.append(f"loss memory {binary_size(values['loss_memory'])} (dense: {binary_size(values['dense_memory'])})")
    if values.get("broken"):
        parts.append(f"{values['broken']} broken samples")
    return " · ".join(parts)


class _Screen:
    """A progress bar with a line below it; plain lines now and then if the output is not a terminal."""

    def __init__(self, steps: int, first: int, console: Console | None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft

        self._console = console or Console(stderr=True)
        self._steps, self._every, self._told = steps, max(1, steps // _PLAIN_LINES), first
        columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
        self._progress = Progress(*columns, TimeLeft(), console=self._console)
        self._task = self._progress.add_task("", total=steps, completed=first)
        self._live = Live(self._progress, console=self._console) if self._console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def show(self, step: int, text: str) -> None:
        from rich.console import Group
        from rich.text import Text

        if self._live is not None:
            self._progress.update(self._task, completed=step)
            self._live.update(Group(self._progress, Text(text)))
        elif step == self._steps or step - self._told >= self._every or self._told == 0:
            self._told = step
            self.say(f"step {step}/{self._steps}: {text}")

    def say(self, text: str) -> None:
        # Wrap long lines between words on a terminal; keep them whole in a file.
        told = printable(text, lines=True)
        self._console.print(told, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _json_line(values: Mapping[str, Any]) -> bytes:
    """One line of JSON, which has no infinities or NaN: they become null."""
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in values.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _kind(entry: Mapping[str, Any]) -> str:
    """Whether a line of metrics.jsonl is about a step or an evaluation."""
    return "train" if "memory" in entry else "eval"  # every step has its memory


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def _parsed(text: bytes) -> dict[str, Any]:
    entry = json.loads(text)
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        raise ValueError("no step")
    return entry


def numbers(entries: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric, wherever it was recorded and finite."""
    return [
        (entry["step"], float(entry[name]))
        for entry in entries
        if isinstance(entry.get(name), int | float) and not isinstance(entry.get(name), bool)
    ]

"""What a run says while it goes on: metrics.jsonl, TensorBoard, and a line to look at.

    with Tracker(config, steps=300, step=0) as tracker:
        tracker.step(1, {"loss": 8.3, "lr": 1e-3, "scale": 14.3, "top1": 0.001, "pairs": 4096, "seconds": 0.9})
        tracker.evaluation(1, {"text_to_image_R@10": 0.02})
    history(run)                       # the lines of metrics.jsonl

A run that goes on from step 100 forgets what it had said about later steps, one that begins everything. Other trackers
(those of accelerate, say) join in through `others`: anything with `log(values, step=...)`.
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
from contratile.report.wording import PICTURES, in_a_line

if TYPE_CHECKING:
    from rich.console import Console

    from contratile.train.config import TrainConfig

METRICS = "metrics.jsonl"
DENSE_MATRICES = 4
"""N x N matrices in fp32 that a dense loss holds at its peak, as measured by `contratile bench loss`."""

_PLAIN_LINES = 50
"""Lines of a run whose output is no terminal."""


class Log(Protocol):
    """A tracker of accelerate's kind."""

    def log(self, values: dict[str, Any], step: int | None = None) -> object: ...


class Tracker:
    """Tells files and the terminal about each step; on other processes than the main one it is silent."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        steps: int,
        step: int = 0,
        main: bool = True,
        others: Sequence[Log] = (),
        console: Console | None = None,
    ) -> None:
        self._config, self._steps, self._first, self._main, self._others = config, steps, step, main, others
        self._given_console = console
        run, views = config.run, 2 if config.loss.loss in ("ntxent", "supcon") else 1
        self._dense = DENSE_MATRICES * 4 * (views * run.batch) ** 2
        self._on_gpu = torch.cuda.is_available() and not run.cpu

    def __enter__(self) -> Tracker:
        if self._main:
            folder = self._config.run.out
            folder.mkdir(parents=True, exist_ok=True)
            rewind(folder / METRICS, self._first if self._first else -1)  # a run that begins says all of it again
            self._file: BinaryIO = (folder / METRICS).open("ab", buffering=0)
            self._board = _board(folder, self._first) if self._config.run.tensorboard else None
            self._screen = _Screen(self._steps, self._first, self._given_console)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._main:
            self._screen.close()
            self._file.close()
            if self._board is not None:
                self._board.close()

    def flush(self) -> None:
        """Push what was said to the disk: what a checkpoint follows from is there before it."""
        if self._main:
            os.fsync(self._file.fileno())
            if self._board is not None:
                self._board.flush()

    def step(self, step: int, facts: Mapping[str, float], *, broken: Counter[str] | None = None) -> None:
        """A step is done. `pairs` and `seconds` among the facts become samples_per_second."""
        if not self._main:
            return
        values: dict[str, Any] = dict(facts)
        seconds, pairs = values.pop("seconds", None), values.pop("pairs", None)
        if seconds and pairs:
            values["samples_per_second"] = pairs / seconds
        values |= {"memory": memory_now(self._on_gpu), "dense_memory": self._dense}
        if broken:
            values["broken"] = sum(broken.values())
        self._screen.show(step, line(values))
        if step % self._config.run.log_every == 0 or step == self._steps:
            self._record(step, values, "train")

    def evaluation(self, step: int, metrics: Mapping[str, float], sides: tuple[str, str] = PICTURES) -> None:
        """An evaluation after a step, of pairs whose sides are called so."""
        if self._main:
            self._record(step, dict(metrics), "eval")
            self._screen.say(f"step {step}: {in_a_line(metrics, sides)}")

    def _record(self, step: int, values: dict[str, Any], kind: str) -> None:
        # One write: a kill leaves the line whole or cuts the last one, which `rewind` then drops.
        self._file.write(_json_line({"step": step, **values}))
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        if self._board is not None:
            for tag, value in numbers.items():
                self._board.add_scalar(tag, value, step)
        for other in self._others:
            other.log(numbers, step=step)


def history(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, oldest first; a last line that a kill has cut is left out."""
    path = run / METRICS
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = []
    for number, text in enumerate(lines, start=1):
        try:
            if text:
                found.append(_parsed(text))
        except ValueError:
            if number < len(lines):  # what follows the last line break is the cut line
                bad_value(f"{path}, line {number}", expected="an object with a step", got=text, remedy="Remove it.")
    return found


def rewind(path: Path, step: int) -> None:
    """Drop lines about steps after `step`, and what is no line at all."""
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
    """Bytes that this process holds: on its GPU, or resident in the machine's memory."""
    if on_gpu:
        return torch.cuda.memory_reserved()
    import psutil

    return int(psutil.Process(os.getpid()).memory_info().rss)


def size(number: float) -> str:
    """Bytes for people."""
    unit = 0
    while number >= 1024 and unit < 4:
        number, unit = number / 1024, unit + 1
    digits = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{digits} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def line(values: Mapping[str, Any]) -> str:
    """A step in words."""
    forms = {
        "loss": "loss {:.4f}",
        "top1": "top-1 {:.1%}",
        "scale": "scale {:.1f}",
        "lr": "lr {:.2e}",
        "samples_per_second": "{:,.0f} samples/s",
    }
    parts = [form.format(values[name]) for name, form in forms.items() if name in values]
    if "memory" in values:
        parts.append(f"memory {size(values['memory'])}, a dense loss alone {size(values['dense_memory'])}")
    if values.get("broken"):
        parts.append(f"{values['broken']} broken samples")
    return " · ".join(parts)


class _Screen:
    """A bar with a line below it; where nobody watches, a plain line now and then."""

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
        # A terminal would break a long line inside a word; in a file lines stay whole.
        told = printable(text, lines=True)
        self._console.print(told, markup=False, highlight=False, soft_wrap=not self._console.is_terminal)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _board(folder: Path, first: int) -> Any:
    """TensorBoard's writer, or None without the package. What was said before about later steps is forgotten."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    make: Any = SummaryWriter  # torch does not annotate it
    if first == 0:  # an attempt that ended before its first checkpoint
        for path in (folder / "tensorboard").glob("events.out.tfevents.*"):
            path.unlink()
    return make(str(folder / "tensorboard"), purge_step=first + 1 if first else None)


def _json_line(values: Mapping[str, Any]) -> bytes:
    """JSON knows no infinities: they are null."""
    finite = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in values.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _parsed(text: bytes) -> dict[str, Any]:
    entry = json.loads(text)
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        raise ValueError("no step")
    return entry


def numbers(entries: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of a metric, where it was recorded and finite."""
    return [
        (entry["step"], float(entry[name]))
        for entry in entries
        if isinstance(entry.get(name), int | float) and not isinstance(entry.get(name), bool)
    ]

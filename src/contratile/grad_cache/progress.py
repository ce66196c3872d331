"""Progress callbacks, called with (phase, rows done, total rows or None). `RichBar` draws a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from contratile.errors import bad_value

Phase: TypeAlias = Literal["encode", "loss", "backward"]
Progress: TypeAlias = Callable[[Phase, int, "int | None"], None]


def silent(phase: Phase, done: int, total: int | None) -> None:
    """Do nothing."""


class RichBar:
    """Draws a progress bar for every phase with rich."""

    def __init__(self) -> None:
        try:
            import rich.progress  # noqa: F401
        except ImportError:
            bad_value("progress", expected="the package rich", got="none", remedy="Install it: pip install rich.")
        self.bar: Any = None
        self.task: Any = None
        self.phase: Phase | None = None
        self.note = ""
        """Shown next to the phase "encode"."""

    def __call__(self, phase: Phase, done: int, total: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if phase != self.phase:
            self.close()
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self.bar, self.phase = Progress(*columns), phase
            self.bar.start()
            note = f", {self.note}" if phase == "encode" and self.note else ""
            self.task = self.bar.add_task(phase + note, total=total)
        self.bar.update(self.task, completed=done, total=total)
        if done == total:
            self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar = self.phase = None

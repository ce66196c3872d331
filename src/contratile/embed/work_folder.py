"""The folder of unfinished work next to an output: one process at a time uses it, and it is removed in one step.

    folder = work_folder(Path("features.npy"))   # .features.npy.unfinished
    held = claim_folder(folder)                  # creates it; no other process can claim it while `held` lives
    remove_folder(folder)

A folder that is being deleted would lose its files one by one, and a process that is killed meanwhile would leave some
of them. So the folder gets another name first.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from contratile.errors import bad_value
from contratile.train.claim import ATTEMPTS, Claim, claim

REMOVED = ".removed-"


def work_folder(out: Path) -> Path:
    """The folder of the unfinished work of an output."""
    return out.with_name(f".{out.name}.unfinished")


def claim_folder(folder: Path) -> Claim | None:
    """Create the folder unless it exists, and claim it. None if the file system cannot lock.

    Raises:
        ValueError: Another process has claimed it, or it is a link or a file.
    """
    for _ in range(ATTEMPTS):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            got = "a link" if folder.is_symlink() else "a file"
            remedy = "Remove it, or pass another --out."
            bad_value(f"unfinished work {folder}", expected="a folder", got=got, remedy=remedy)
        folder.mkdir(exist_ok=True)
        try:
            held = claim(folder)
        except FileNotFoundError:  # just removed
            continue
        for old in folder.parent.glob(f"{_escaped(folder.name)}{REMOVED}*"):  # of a process that was killed
            shutil.rmtree(old, ignore_errors=True)
        return held
    raise AssertionError(f"{folder} cannot be claimed: it is removed again and again")


def remove_folder(folder: Path) -> None:
    """Delete the folder, which this process has claimed. Other processes see all of it or none of it."""
    away = folder.with_name(f"{folder.name}{REMOVED}{os.getpid()}")
    shutil.rmtree(away, ignore_errors=True)
    folder.replace(away)
    shutil.rmtree(away, ignore_errors=True)


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none, or the file is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _escaped(name: str) -> str:
    """A name, escaped so that `Path.glob` takes it literally."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)

"""Helpers for tests that start processes: list those of a session, and wait for a condition."""

import time
from collections.abc import Callable
from pathlib import Path


def members(session: int) -> list[int]:
    """The running processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # ended meanwhile
            continue
        if int(of) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def until(true: Callable[[], object], limit: float = 600.0) -> bool:
    """Wait until a condition holds. Returns False if it does not within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

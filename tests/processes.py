"""Sessions of processes: who is in them, and how to wait for something without counting seconds in assertions."""

import time
from collections.abc import Callable
from pathlib import Path


def members(session: int) -> list[int]:
    """Processes of a session that still run."""
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
    """Wait until something holds; whether it did within a time after which something is wrong."""
    deadline = time.monotonic() + limit
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

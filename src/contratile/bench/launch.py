"""Start ranks on this machine, listen to them, and end them together.

    failure = launch(4, ["--batch", "1024"], threads=1, silence=600, hear=print)      # None if all finished

Every rank is a process of `contratile.bench.ring_rank`. They share one standard output and write JSON objects to it,
one per line; other lines are ignored. If a rank fails, dies or is silent for too long, all of them are ended.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from contratile.bench.memory import KILLED

Event = dict[str, Any]
POLL = 0.5
"""Seconds between checks of ranks that are silent."""
GRACE = 10.0
"""Seconds that a rank may take to exit after the last event."""


def launch(
    world: int, words: Sequence[str], *, threads: int, silence: float, hear: Callable[[Event], None]
) -> str | None:
    """Run ranks until they finish or one fails.

    Args:
        world: Number of ranks.
        words: Arguments of `contratile.bench.ring_rank` besides those that place a rank.
        threads: Threads per rank.
        silence: Seconds without an event after which the ranks count as stuck.
        hear: Called with every event.

    Returns:
        None if the ranks finished, else the failure as the status of a row.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+") as errors:
        ranks: list[subprocess.Popen[str]] = []
        incoming, outgoing = os.pipe()
        said = _read(incoming)
        try:
            for rank in range(world):
                place = ["--rank", str(rank), "--world", str(world), "--store", f"{folder}/store"]
                command = [sys.executable, "-m", "contratile.bench.ring_rank", *place, *words]
                environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
                process = subprocess.Popen(
                    command, env=environment, stdout=outgoing, stderr=errors, text=True, start_new_session=True
                )
                ranks.append(process)
            status = _listen(ranks, said, silence, hear)
            _end(ranks, grace=GRACE if status is None else 0)
        finally:
            os.close(outgoing)
            _end(ranks, grace=0)
        return f"{status}{_tail(errors)}" if status and status.startswith("failed: rank") else status


def _read(incoming: int) -> "queue.SimpleQueue[str]":
    """Read lines from a pipe in a thread, until its other end is closed."""
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with os.fdopen(incoming) as lines:
            for line in lines:
                said.put(line)

    threading.Thread(target=read, daemon=True).start()
    return said


def _listen(
    ranks: list["subprocess.Popen[str]"],
    said: "queue.SimpleQueue[str]",
    silence: float,
    hear: Callable[[Event], None],
) -> str | None:
    """Pass events on until the ranks finish (None) or one fails (its status)."""
    last_word = time.monotonic()
    while True:
        try:
            event = _event(said.get(timeout=POLL))
        except queue.Empty:
            died = _died(ranks)
            if died or time.monotonic() - last_word > silence:
                return died or f"failed: no word after {silence:.0f} s"
            continue
        if event is None:
            continue
        last_word = time.monotonic()
        if event["event"] == "finished":
            return None
        hear(event)
        if event["event"] == "failed":
            time.sleep(POLL)  # a rank that was killed explains the errors of the others
            died = _died(ranks)
            return died if died == KILLED else str(event["status"])


def _event(line: str) -> Event | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "event" in said else None


def _died(ranks: list["subprocess.Popen[str]"]) -> str | None:
    """Return the status if a rank is gone without having finished."""
    codes = [process.poll() for process in ranks]
    if -9 in codes:
        return KILLED
    finished = (None,) if set(codes) == {0} else (None, 0)  # a rank may exit before rank 0's last event is read
    gone = [f"{rank} ended with code {code}" for rank, code in enumerate(codes) if code not in finished]
    return f"failed: rank {gone[0]}" if gone else None


def _end(ranks: list["subprocess.Popen[str]"], *, grace: float) -> None:
    deadline = time.monotonic() + grace
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in ranks:
        process.kill()
        process.wait()


def _tail(errors: IO[str]) -> str:
    """Return the last line of the ranks' standard error."""
    errors.seek(0)
    lines = errors.read().split("\n")
    return next((f": {line.strip()[:150]}" for line in reversed(lines) if line.strip()), "")

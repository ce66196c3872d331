"""Ranks on this machine: started together, heard line by line, and ended together.

    end = launch(4, ["--batch", "1024"], threads=1, silence=600, hear=print)      # None, or why they did not finish

Every rank is a process of `contratile.bench.ring_rank`. They share one standard output, on which they say JSON
objects, a line each; other lines are ignored. A rank that fails, dies or keeps silent for too long ends them all.
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

Event = dict[str, Any]
POLL = 0.5
"""Seconds between looks at the ranks while they say nothing."""
GRACE = 10.0
"""Seconds that a rank may take to leave after the last word."""
KILLED = "out of memory (killed by the system)"


def launch(
    world: int, words: Sequence[str], *, threads: int, silence: float, hear: Callable[[Event], None]
) -> str | None:
    """Run ranks to their end, None, or to the first failure, which is returned as a status."""
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
    """The lines that arrive through a pipe, until nobody holds its other end."""
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
            time.sleep(POLL)  # one that was killed is the reason for what the others say
            died = _died(ranks)
            return died if died == KILLED else str(event["status"])


def _event(line: str) -> Event | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "event" in said else None


def _died(ranks: list["subprocess.Popen[str]"]) -> str | None:
    """The status for ranks that are gone without having finished."""
    codes = [process.poll() for process in ranks]
    if -9 in codes:
        return KILLED
    finished = (None,) if set(codes) == {0} else (None, 0)  # one may leave before rank 0's last word is heard
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
    """The last line of what the ranks had to complain about."""
    errors.seek(0)
    complaints = errors.read().split("\n")
    return next((f": {line.strip()[:150]}" for line in reversed(complaints) if line.strip()), "")

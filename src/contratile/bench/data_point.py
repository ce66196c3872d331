"""A process that runs one contestant of `bench data`, turn after turn.

    with DataPoint("contratile", threads=2, silence=60) as point:
        point.turn(problem, samples=1024)          # Turn(seconds=..., peak_mib=..., workers_mib=...)

`python -m contratile.bench.data_point NAME` is that process. It reads one JSON object per line, takes a turn, and
writes one line with the result. A turn starts a new iterator (and its workers), discards the first batches, and times
the rest: starting up is not counted, and workers have used up what they prepared meanwhile.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from contratile.bench.memory import KILLED, MiB

AHEAD = 2
"""Batches that a worker of a DataLoader prepares ahead."""


class Turn(NamedTuple):
    """What was measured in one turn."""

    seconds: float
    peak_mib: float | None
    """Growth of the training process's resident memory; None if the system does not report it."""

    workers_mib: float | None
    """Memory of all workers at the end, pages that are shared counted once."""


class DataPoint:
    """The process of a contestant.

    Args:
        name: The contestant.
        threads: Threads of torch in the training process.
        silence: Seconds without an answer after which the process counts as stuck.
    """

    def __init__(self, name: str, *, threads: int, silence: float) -> None:
        self.silence = silence
        command = [sys.executable, "-m", "contratile.bench.data_point", name, str(threads)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        self.said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(line)
        self.said.put("")

    def turn(self, problem: dict[str, Any], samples: int) -> Turn:
        """Take a turn. Raises RuntimeError with the status of a row if the contestant cannot."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({**problem, "samples": samples}) + "\n")
            self.process.stdin.flush()
        try:
            line = self.said.get(timeout=self.silence)
        except queue.Empty:
            raise Unable(f"failed: no word after {self.silence:.0f} s") from None
        if not line:
            code = self.process.wait()
            raise Unable(KILLED if code == -9 else f"failed: its process ended with code {code}")
        answer = json.loads(line)
        if "status" in answer:
            raise Unable(answer["status"])
        return Turn(**answer)

    def __enter__(self) -> "DataPoint":
        return self

    def __exit__(self, *error: object) -> None:
        """End the process and its workers."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        self.listener.join(timeout=10)
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


class Unable(RuntimeError):
    """Raised when a contestant cannot take its turn; the message is the status of its row."""


# --- in the process -----------------------------------------------------------------------------------------------


def take_turn(name: str, problem: Any) -> Turn:
    """Read the samples of a problem with a contestant, once."""
    from contratile.bench.contestants.data import DATA_CONTESTANTS
    from contratile.host_memory import peak_growth

    found: dict[str, float | None] = {}
    skipped = problem.batch * (AHEAD * problem.workers + 1)

    def read() -> None:
        pairs = DATA_CONTESTANTS[name].load(problem._replace(samples=problem.samples + skipped))
        _count(pairs, skipped)
        start = time.perf_counter()
        _count(pairs, problem.samples)
        found["seconds"] = time.perf_counter() - start
        found["workers"] = _children_mib()
        close = getattr(pairs, "close", None) or getattr(pairs, "_shutdown_workers", None)
        if close is not None:
            close()

    growth = peak_growth(read)
    if growth is None:
        read()
    assert found["seconds"] is not None
    return Turn(found["seconds"], None if growth is None else growth / MiB, found["workers"])


def _count(pairs: Iterator[Any], samples: int) -> None:
    seen = 0
    while seen < samples:
        images, tokens = next(pairs)
        assert images.is_floating_point() and len(images) == len(tokens)
        seen += len(images)


def _children_mib() -> float | None:
    """Memory of the processes that this one started."""
    try:
        mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        found = 0
        for child in mine:
            lines = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()
            found += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return None
    return found / MiB


def main() -> None:
    """Take turns until the input ends."""
    name, threads = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages print what they like
    import torch

    from contratile.bench.contestants.data import DataProblem
    from contratile.bench.harness import describe, quiet

    torch.set_num_threads(threads)
    warm = False
    for line in sys.stdin:
        try:
            problem = DataProblem(**json.loads(line))
            with quiet():
                if not warm:  # imports and first allocations are not the memory of a turn
                    take_turn(name, problem._replace(workers=0, samples=problem.batch))
                    warm = True
                answer = take_turn(name, problem)._asdict()
        except Exception as error:
            answer = {"status": describe(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

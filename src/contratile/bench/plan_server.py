"""Asks `contratile.bench.plan_point`, a process that runs points in processes of their own.

    server = PointServer(threads=1, returning=True)
    server.ask({"model": "tiny", "batch": 16, "chunk": 8}, timeout=60)      # {"peak": ...} or {"status": "failed: ..."}
    server.stop()

It has imported the libraries once, which takes longer than many points.
"""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from contratile.host_memory import RETURNING

SIGNAL_GRACE = 10.0
"""Seconds that the process may take to end."""


class PointServer:
    """The process that is asked; started when it is first needed.

    Args:
        threads: Torch threads of a point.
        returning: Freed tensors are returned to the system at once.
    """

    def __init__(self, threads: int, *, returning: bool) -> None:
        self.threads, self.returning = threads, returning
        self._process: subprocess.Popen[str] | None = None

    def ask(self, asked: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Run a point, or a calibration; a failure is a status."""
        share = max(1, self.threads // asked.get("world", 1))
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(asked | {"threads": share}) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout)[0]:
                self.stop()
                return {"status": f"failed: no result after {timeout:.0f} s"}
            found: dict[str, Any] = json.loads(process.stdout.readline())
            return found
        except (ValueError, BrokenPipeError):
            self.stop()
            return {"status": f"failed: process ended with code {process.returncode}"}

    def stop(self) -> None:
        """End the process and those that it has started."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SIGNAL_GRACE)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None:
            extra = {**(RETURNING if self.returning else {}), "OMP_NUM_THREADS": str(self.threads)}
            kept = {key: value for key, value in os.environ.items() if key not in RETURNING}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "contratile.bench.plan_point"],
                env=kept | extra,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        return self._process

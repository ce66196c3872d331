"""Worker processes that ignore signals to the process group and end with their parent.

    with shielded():
        start_processes()                     # they do not receive SIGINT and SIGTERM
    DataLoader(..., worker_init_fn=follow)    # they end when their parent ends or terminates them

Ctrl-C and many schedulers signal every process of a run at once. The parent then writes a checkpoint, for which it
needs its workers. Blocked signals are inherited, so that a worker is protected from its first moment on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DIED = (
    "loader: expected running workers, got one that died, perhaps out of memory. Lower --workers or --chunk. "
    "The run can be resumed from its last checkpoint."
)
_PAUSE = 0.5
"""Seconds between checks of the parent."""


@contextmanager
def shielded() -> Iterator[None]:
    """Context in which new processes start with SIGINT and SIGTERM blocked.

    This process loses no signal: they are delivered afterwards, or to another thread.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # if it starts with the first worker, it unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow(worker: int) -> None:
    """In a worker that was started shielded: end when the parent ends or sends SIGTERM, and ignore other signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waits = hasattr(signal, "sigtimedwait")
    if not waits and hasattr(os, "setsid"):  # macOS: leave the group; torch's handler reacts to the parent
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has one"
    # Not getppid(): if the parent has ended meanwhile, that is another process.
    threading.Thread(target=_watch, args=(parent.pid, waits), daemon=True).start()


def _watch(parent: int, waits: bool) -> None:
    while os.getppid() == parent:
        if not waits:
            time.sleep(_PAUSE)
            continue
        asked = signal.sigtimedwait((signal.SIGTERM,), _PAUSE)
        if asked is not None and asked.si_pid == parent:
            break
    os._exit(0)  # not an exception: this is not the worker's main thread


def is_death(error: BaseException) -> bool:
    """Whether this is torch's error for a dead worker. A signal handler raises it, so it can occur anywhere."""
    return str(error).startswith("DataLoader worker (pid")

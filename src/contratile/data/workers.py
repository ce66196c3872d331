"""Processes that help another one, and end with it: a signal to the whole group is for their parent to answer.

    with shielded():
        start_processes()                     # what is started here never receives SIGINT or SIGTERM by itself
    DataLoader(..., worker_init_fn=follow)    # and these end when their parent ends, or asks them to

Ctrl-C and many schedulers signal every process of a run at once. The parent then writes a checkpoint and needs
its workers alive. A blocked signal stays blocked in a new program, so there is no moment at which a worker that is
still starting could be hit.
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
    "loader: expected its workers to run, got one that died. Out of memory, perhaps: lower --workers or --chunk. "
    "The run goes on from its last checkpoint."
)
_PAUSE = 0.5
"""Seconds between looks at the parent."""


@contextmanager
def shielded() -> Iterator[None]:
    """Processes that this thread starts meanwhile inherit that SIGINT and SIGTERM are blocked.

    This process loses none: they are delivered afterwards, or to another thread.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # started with the first worker, it would unblock them on its way
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow(worker: int) -> None:
    """In a worker that was started shielded: end when the parent does, or sends SIGTERM; answer no other signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waits = hasattr(signal, "sigtimedwait")
    if not waits and hasattr(os, "setsid"):  # macOS: out of the group instead, and torch's handler answers the parent
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has one"
    # Its number as it was at the start: by now it may be gone, and `getppid` another one's.
    threading.Thread(target=_watch, args=(parent.pid, waits), daemon=True).start()


def _watch(parent: int, waits: bool) -> None:
    while os.getppid() == parent:
        if not waits:
            time.sleep(_PAUSE)
            continue
        asked = signal.sigtimedwait((signal.SIGTERM,), _PAUSE)
        if asked is not None and asked.si_pid == parent:
            break
    os._exit(0)  # not by an exception: the worker may be in the middle of anything


def is_death(error: BaseException) -> bool:
    """Whether torch says that a worker died. It may say so anywhere: a signal tells it."""
    return str(error).startswith("DataLoader worker (pid")

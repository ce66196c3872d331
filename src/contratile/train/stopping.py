"""Signals that ask a run to stop.

with signals() as received:
    while not received:
        step()
    save()
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C become entries of a list: the step under way is finished. A second Ctrl-C interrupts.

    Under torchrun the third does: the first may come twice, from the terminal and from torchrun, which passes it on.
    """
    received: list[int] = []
    patience = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and received.count(number) >= patience:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Stop a run gracefully on SIGTERM and Ctrl-C.

with signals() as received:
    while not received:
        step()
    save()
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FINISHING = "finishing this step, then saving"
AGAIN = "; press Ctrl-C again to stop now, without saving"


@contextmanager
def signals(*, tell: bool = True) -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT in a list, so that the current step can finish. A second Ctrl-C interrupts.

    Under torchrun the third one does, because the first may arrive twice: from the terminal and from torchrun.

    Args:
        tell: Say on stderr, at the first signal, what happens now. One process of a run does.
    """
    received: list[int] = []
    patience = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 1

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and received.count(number) >= patience:
            raise KeyboardInterrupt
        if tell and not received:
            # Not by print: the signal may come in the middle of another one, which must not be entered again.
            with suppress(OSError):
                os.write(2, f"\n{FINISHING}{AGAIN if number == signal.SIGINT else ''}\n".encode())
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Read an iterator ahead in a background thread.

for record in read_ahead(records, depth=8):        # workers do not wait for a slow pipe
    ...
"""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar, cast

T = TypeVar("T")


def read_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the same items, read by a thread that is up to `depth` items ahead. Its errors are raised here."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    abandoned = threading.Event()

    def hand_over(item: T | None, error: BaseException | None) -> None:
        while not abandoned.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def read() -> None:
        try:
            for item in items:
                hand_over(item, None)
                if abandoned.is_set():
                    return
            hand_over(None, StopIteration())
        except BaseException as error:  # to be raised by the consumer
            hand_over(None, error)

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield cast(T, item)
    finally:
        abandoned.set()

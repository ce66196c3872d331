"""A process with slow loader workers, which imports little: `python -m tests.data.slow FOLDER SECONDS`."""

import os
import sys
import time
from pathlib import Path

from contratile.data import Loader, Sample
from contratile.train.stopping import signals
from tests.data.sources import PREPARE, Numbers


class Slow(Numbers):
    """Samples that take a while, or for ever. Whoever makes one leaves a file."""

    def __init__(self, folder: str, seconds: float) -> None:
        super().__init__(400)
        self.folder, self.seconds = folder, seconds

    def __getitem__(self, index: int) -> Sample:
        (Path(self.folder) / str(os.getpid())).touch()
        time.sleep(self.seconds)
        return super().__getitem__(index)


def load(folder: str, seconds: str) -> None:
    """What the process under test does: batches until it is told to stop, then one more."""
    batches = iter(Loader(Slow(folder, float(seconds)), PREPARE, batch=2, chunk=2, workers=2))
    with signals(tell=False) as received:
        while not received:
            list(next(batches).chunks)
        list(next(batches).chunks)
        print("one more", flush=True)
        batches.close()


if __name__ == "__main__":
    load(*sys.argv[1:])

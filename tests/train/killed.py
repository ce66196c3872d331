"""Writers of checkpoints that are killed: `python -m tests.train.killed moments|random|full FOLDER`.

The writers are forks of this process, which has nothing but torch in one thread, so that a kill costs milliseconds.
"""

import mmap
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from contratile.train import checkpoint


def write(run: Path, step: int, text: str = "") -> None:
    """A checkpoint whose every part tells its step and text."""
    value = torch.full((400,), float(step))
    state = {"model": {"w": value}, "optimizer": {"state": {0: {"avg": value + 1}}, "lr": step / 7}}
    facts = {"step": step, "best_step": step, "text": text}
    checkpoint.save(run / "checkpoints" / checkpoint.step_name(step), state, facts)


def read(run: Path) -> tuple[int, str] | None:
    """Step and text of the latest checkpoint, all of whose parts must agree."""
    folder = checkpoint.latest(run)
    if folder is None:
        return None
    state, facts = checkpoint.load(folder)
    step = facts["step"]
    assert folder.name == checkpoint.step_name(step)
    assert torch.equal(state["model"]["w"], torch.full((400,), float(step)))
    assert torch.equal(state["optimizer"]["state"][0]["avg"], torch.full((400,), float(step + 1)))
    assert state["optimizer"]["lr"] == step / 7
    return step, facts["text"]


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return pid


def was_killed(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a writer failed"
    return os.WIFSIGNALED(status)


def moments(folder: Path) -> None:
    """Kill a writer before each of its operations on files: of a new step, of a step written again, of a removal."""
    works: dict[str, Callable[[Path], None]] = {
        "new": lambda run: write(run, 3, "new"),
        "again": lambda run: write(run, 2, "again"),
        "keep": lambda run: checkpoint.keep(run, last=1),
    }
    # What may be found after a kill; before the work it is (2, "old").
    allowed = {"new": {(2, "old"), (3, "new")}, "again": {(2, "old"), (2, "again")}, "keep": {(2, "old")}}
    for name, work in works.items():
        seen, at, killed = set(), 0, True
        while killed:
            run = folder / f"{name}-{at}"
            write(run, 1, "older")
            write(run, 2, "old")
            killed = was_killed(fork(partial(doomed, work, run, at)))
            found = read(run)
            assert found in allowed[name], (name, at, found)
            seen.add(found)
            assert {1, 2} - ({1} if name == "keep" else set()) <= set(whole(run)) | aside(run), (name, at)
            write(run, 9)
            assert aside(run) == set() and whole(run)[9] == "" and whole(run)[2] in ("old", "again"), (name, at)
            at += 1
        assert seen == allowed[name], (name, seen)
        print(name, at)


def whole(run: Path) -> dict[int, str]:
    """Texts by steps of all that has the name of a checkpoint, which must therefore be one."""
    named = [path for path in (run / "checkpoints").iterdir() if path.name.removeprefix("step-").isdigit()]
    facts = [checkpoint.load(path)[1] for path in named]
    return {fact["step"]: fact["text"] for fact in facts}


def aside(run: Path) -> set[int]:
    """Steps of which something else is there: drafts, and what stepped aside."""
    return {int(path.name[5:13]) for path in (run / "checkpoints").iterdir() if not path.name[5:].isdigit()}


def doomed(work: Callable[[Path], None], run: Path, at: int) -> None:
    """Work on a run, and be killed before operation number `at` on its files."""
    count = 0

    def hook(event: str, values: tuple[object, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink"):
            # Files of a folder that is being removed are named relative to it.
            if any(str(run) in str(value) for value in values) or event in ("os.remove", "os.rmdir"):
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

    sys.addaudithook(hook)
    work(run)


def at_random(folder: Path, kills: int = 60) -> None:
    """Kill a writer that saves and removes without pause, after random times."""
    chance = random.Random(0)
    reported = mmap.mmap(-1, 8)  # shared with the writers
    last, killed = 0, 0
    for _ in range(kills):

        def work(first: int = last) -> None:
            for step in range(first + 1, first + 100_000):
                for text in ("once", "again"):
                    write(folder, step, text)
                    reported[:] = step.to_bytes(8, "little")
                checkpoint.keep(folder)

        pid = fork(work)
        time.sleep(chance.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        killed += was_killed(pid)
        found = read(folder)
        known = int.from_bytes(reported[:], "little")
        assert (found is None and known == 0) or (found is not None and found[0] in (known, known + 1)), (found, known)
        last = found[0] if found else 0
        reported[:] = last.to_bytes(8, "little")
    print(killed, last)


def full(folder: Path) -> None:
    """No file may be larger than a little: as on a full disk, writing stops in the middle."""
    write(folder, 1, "old")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, 1650, 3000):  # in the first file, in its header, in its tensor, in the facts
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        for step in (1, 2):
            try:
                write(folder, step, "new" * 1500)
            except OSError as error:
                os.write(1, f"{error}\n".encode())
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert read(folder) == (1, "old")
        assert [path.name for path in (folder / "checkpoints").iterdir()] == [checkpoint.step_name(1)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"moments": moments, "random": at_random, "full": full}[sys.argv[1]](Path(sys.argv[2]))

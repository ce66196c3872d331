"""Runs that are killed and started again.

    python -m tests.train.killed_runs FOLDER --signals SIGKILL SIGTERM SIGINT      # at every point of `POINTS`
    python -m tests.train.killed_runs FOLDER --random 100 --workers 2              # at random moments
    python -m tests.train.killed_runs FOLDER --random 25 --everything              # augmentation, mixed sources ...

The runs are forks of this process, which has imported everything by a run of its own. Each leads a session with its
loader workers: a signal to the group reaches them too. A killed run is started again by the same command until it is
finished, and must then be what an untouched run is: weights, optimiser, metrics, best and gallery to the last bit.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from contratile.cli import main
from contratile.report.tracking import history
from contratile.train import checkpoint, loop, results
from contratile.train.config_file import to_toml
from contratile.train.results import is_finished
from tests.processes import members, until
from tests.train.runs import everything, shapes, small

STEPS = 6
OPTIONS: dict[str, Any] = {"steps": STEPS, "save_every": 2, "eval_every": 3, "keep": 1}
UNTIMELY = ("samples_per_second", "memory")
"""Of a line of metrics: different in every run."""

# Where a run is hit: in which call, before or after it, and which one of those calls.
POINTS: dict[str, tuple[Any, str, str, int]] = {
    "before the first checkpoint": (checkpoint, "save", "before", 1),
    "in a checkpoint": (checkpoint, "_put", "before", 2),
    "between checkpoint and best": (checkpoint, "keep", "before", 2),
    "between the last checkpoint and best": (checkpoint, "keep", "before", 4),
    "between best and removal": (checkpoint, "link_best", "after", 2),
    "in an evaluation": (loop, "retrieval", "before", 2),
    "before finishing": (results, "save_gallery", "before", 1),
    "in the gallery": (results, "save_gallery", "after", 1),
    "before the report": (results, "write_report", "before", 1),
    "after the report": (results, "write_report", "after", 1),
}


def hit(point: str, number: int) -> None:
    """Make this process signal its whole group at a point: kills it, or asks it to stop."""
    module, name, when, turn = POINTS[point]
    real, calls = getattr(module, name), 0

    def patched(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == turn and when == "before":
            os.killpg(0, number)
        found = real(*args, **options)
        if calls == turn and when == "after":
            os.killpg(0, number)
        return found

    setattr(module, name, patched)


def start(folder: Path, name: str, prepare: Callable[[], None] = lambda: None) -> int:
    """`contratile train` in a fork that leads its own session; what it says goes to a file."""
    ready, leads = os.pipe()
    pid = os.fork()
    if pid:
        os.close(leads)
        os.read(ready, 1)  # until there is a group to signal
        os.close(ready)
        return pid
    try:
        os.setsid()
        os.close(leads)
        os.close(ready)
        said = os.open(folder / f"{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(said, stream)
        this: Any = sys.modules["__main__"]
        this.__spec__ = this.__file__ = None  # workers need not import it
        prepare()
        code = main(["train", "--config", str(folder / "recipe.toml"), "--out", str(folder / name)])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(99)


def ended(pid: int, limit: float = 120.0) -> int:
    """The exit code, a signal's as a negative number; none of its processes may be there afterwards."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        time.sleep(0.01)
    else:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise AssertionError(f"a run did not end within {limit} seconds")
    assert until(lambda: not members(pid)), f"workers outlived their run: {members(pid)}"
    return os.waitstatus_to_exitcode(status)


def result(run: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on how often it was killed."""
    assert is_finished(run, STEPS), "not finished"
    newest, best = checkpoint.latest(run), checkpoint.best(run)
    assert newest is not None and best is not None and (run / "best").samefile(best)
    folders = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert folders == sorted({newest.name, best.name}), folders
    drafts = [path.name for path in run.iterdir() if "part" in path.name or ".tmp-" in path.name]
    assert not drafts, drafts
    state, facts = checkpoint.load(newest)
    lines = [{name: x for name, x in line.items() if name not in UNTIMELY} for line in history(run)]
    gallery = [(run / name).read_bytes() for name in ("gallery.json", "gallery.safetensors")]
    told = {name: facts[name] for name in ("step", "best", "best_step", "loader")}
    return {"state": state, "facts": told, "lines": lines, "best": checkpoint.load(best)[0], "gallery": gallery}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def whole(folder: Path, workers: int, everything_on: bool = False) -> dict[str, Any]:
    """The run that nobody touches."""
    table = shapes(folder / "shapes")
    more = everything(folder / "more") if everything_on else {}
    recipe = to_toml(small(table, folder / "unused", **OPTIONS, **more, workers=workers))
    (folder / "recipe.toml").write_text(recipe, encoding="utf-8")
    options = ["--config", str(folder / "recipe.toml"), "--workers", "0"]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        assert main(["train", *options, "--out", str(folder / "first")]) == 0  # everything is imported now
    assert ended(start(folder, "whole")) == 0, (folder / "whole.txt").read_text()
    found = result(folder / "whole")
    assert [line["step"] for line in found["lines"]] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    return found


def compare(folder: Path, name: str, expected: dict[str, Any]) -> None:
    found = result(folder / name)
    different = [part for part in expected if not same(found[part], expected[part])]
    assert not different, (name, different, (folder / f"{name}.txt").read_text())


def points(folder: Path, names: list[str], numbers: list[signal.Signals], workers: int) -> None:
    """Hit a run at each of the points, by each signal, and start it again."""
    expected = whole(folder, workers)
    for point, number in product(names, numbers):
        name = f"{point} {number.name}"
        code = ended(start(folder, name, partial(hit, point, number)))
        said = (folder / f"{name}.txt").read_text()
        late = POINTS[point][0] is results  # there is nothing left to save: it ends as any process does
        if number == signal.SIGKILL or (late and number == signal.SIGTERM):
            assert code == -number, (name, code, said)
        elif late:
            assert code == 130 and "interrupted" in said, (name, code, said)
        else:
            assert code == 0 and ("stopped at step" in said or "last" in point), (name, code, said)
        assert is_finished(folder / name, STEPS) == (code == 0 and "last" in point), "nothing is left to stop then"
        assert ended(start(folder, name)) == 0, (folder / f"{name}.txt").read_text()
        compare(folder, name, expected)
        print(name, code, flush=True)
    assert ended(start(folder, name)) == 0
    assert "nothing left to do" in (folder / f"{name}.txt").read_text()


def at_random(folder: Path, kills: int, numbers: list[signal.Signals], workers: int, everything_on: bool) -> None:
    """Signals at random moments, one run after the other, until so many have been sent."""
    expected = whole(folder, workers, everything_on)
    began = time.monotonic()
    assert ended(start(folder, "usual")) == 0
    usual = time.monotonic() - began
    luck, sent, codes, runs = random.Random(0), 0, Counter[str](), 0
    while sent < kills:
        name, runs = f"run {runs}", runs + 1
        while True:
            pid, began = start(folder, name), time.monotonic()
            number = luck.choice(numbers)
            left = luck.uniform(0, usual) if sent < kills and luck.random() < 0.9 else 1e9
            if until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), left):  # noqa: B023
                usual = time.monotonic() - began  # other work on the machine may have begun or ended
            else:
                os.killpg(pid, number)
                sent += 1
            code = ended(pid)
            said = (folder / f"{name}.txt").read_text()
            # Before and after the steps there is nothing to save, and signals act as they do everywhere.
            assert code in (0, 130, -number), (name, number.name, code, said)
            codes[f"{number.name} {code}"] += 1
            if code == 0 and is_finished(folder / name, STEPS):
                break
        compare(folder, name, expected)
        print(f"{sent} signals, {runs} runs finished, none lost", flush=True)
    print(json.dumps({"signals": sent, "runs": runs, "ends": codes}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # one thread: it forks
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", nargs="+", default=list(POINTS), choices=POINTS)
    parser.add_argument("--signals", nargs="+", default=[], help="SIGKILL; at random moments also SIGINT and SIGTERM")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--everything", action="store_true", help="augmentation, mixed sources, hard negatives")
    given = parser.parse_args()
    if given.random:
        names = given.signals or ["SIGKILL", "SIGKILL", "SIGINT", "SIGTERM"]
        numbers = [signal.Signals[name] for name in names]
        at_random(given.folder, given.random, numbers, given.workers, given.everything)
    else:
        numbers = [signal.Signals[name] for name in given.signals or ["SIGKILL"]]
        points(given.folder, given.points, numbers, given.workers)

"""Workers of the loader: signals to the group do not reach them, and they end with their parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contratile.data.workers import SIGNALS, shielded
from contratile.train.stopping import signals
from tests.processes import members, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ROOT = Path(__file__).parents[2]


def started(folder: Path, seconds: float) -> Any:
    """Such a process, when both of its workers are at work."""
    words = [sys.executable, "-m", "tests.data.slow", str(folder), str(seconds)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True, text=True, **pipes)  # type: ignore[call-overload]
    assert until(lambda: len(list(folder.iterdir())) == 2 or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]
    return process


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_group_leaves_the_workers(number: signal.Signals, tmp_path: Path) -> None:
    process = started(tmp_path, 0.01)
    os.killpg(process.pid, number)
    said, errors = process.communicate(timeout=600)
    assert (process.returncode, said, errors) == (0, "one more\n", "")
    assert until(lambda: not members(process.pid))


def test_workers_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path, 1000)
    process.kill()
    process.communicate(timeout=600)
    assert until(lambda: not members(process.pid)), members(process.pid)


def test_workers_end_with_a_parent_that_is_killed_while_they_start(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.data.slow", str(tmp_path), "1000"]
    with subprocess.Popen(words, cwd=ROOT, start_new_session=True) as process:
        assert until(lambda: len(members(process.pid)) == 4)  # with the tracker that multiprocessing has
        process.kill()
    assert until(lambda: not members(process.pid)), members(process.pid)


def test_a_second_interrupt_ends_a_run_whose_workers_are_stuck(tmp_path: Path) -> None:
    process = started(tmp_path, 1000)
    os.killpg(process.pid, signal.SIGINT)
    assert not until(lambda: process.poll() is not None, 1.0), "the first one waits for the step under way"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0 and "KeyboardInterrupt" in errors and "DataLoader worker" not in errors
    assert until(lambda: not members(process.pid)), members(process.pid)


DEATH = """
import os, signal, sys
from pathlib import Path
from contratile.data import Loader
from contratile.data.workers import DIED, is_death
from tests.data.slow import Slow
from tests.data.sources import PREPARE

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    batches = iter(Loader(Slow(str(folder), 0.01), PREPARE, batch=2, chunk=2, workers=2))
    list(next(batches).chunks)
    try:
        os.kill(int(next(folder.iterdir()).name), signal.SIGKILL)
        for batch in batches:
            list(batch.chunks)
    except (ChildProcessError, RuntimeError) as error:
        os.write(1, b"told" if is_death(error) or str(error) == DIED else str(error).encode())
    os._exit(0)
"""


def test_a_worker_that_dies_is_told_in_a_line(tmp_path: Path) -> None:
    """By the loader, unless the signal of its death comes first, to whatever the process is at: to one of its own."""
    (tmp_path / "death.py").write_text(DEATH)
    (tmp_path / "workers").mkdir()
    words = [sys.executable, str(tmp_path / "death.py"), str(tmp_path / "workers")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.stdout == "told", done.stderr


def test_signals_are_held_back_only_meanwhile() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals() as received:
        with shielded():
            assert set(SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
            os.kill(os.getpid(), signal.SIGTERM)
            child = subprocess.run(
                ["sh", "-c", "kill -INT $$; kill -TERM $$; echo alive"], capture_output=True, check=True
            )
            assert child.stdout == b"alive\n"
        assert until(lambda: received == [signal.SIGTERM])
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize(("launcher", "needed"), [(None, 2), ("torchrun", 3)])
def test_how_often_one_interrupts(
    launcher: str | None, needed: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # it passes the terminal's signal on: the first comes twice
    with signals() as received:
        for count in range(1, needed):
            signal.raise_signal(signal.SIGINT)
            told = "\nfinishing this step, then saving; press Ctrl-C again to stop now, without saving\n"
            assert capfd.readouterr().err == (told if count == 1 else "")
        assert len(received) == needed - 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_a_signal_says(capfd: pytest.CaptureFixture[str]) -> None:
    """One process of a run speaks, also while it is printing."""
    with signals(tell=False):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == ""
    with signals() as received:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]
    assert capfd.readouterr().err == "\nfinishing this step, then saving\n"

"""One run at a time writes to a folder; whoever comes second hears who was first, and a kill leaves nothing behind."""

import errno
import gc
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from contratile.cli import main
from contratile.train.claim import LOCK, _ours, claim, create_and_claim, remove_unused
from contratile.train.config_file import to_toml
from contratile.train.loop import Trainer
from tests.ranks import process_context
from tests.train.runs import shapes, small, texts

fcntl = pytest.importorskip("fcntl")
CONTEXT = process_context()
"""Processes that have imported the package."""


def hold(runs: tuple[Path, ...], pipe: Connection) -> None:
    """Claim runs, and keep them until the other end is closed."""
    try:
        held = [claim(run) for run in runs]
    except ValueError as error:
        pipe.send(str(error))
        return
    pipe.send("held")
    with suppress(EOFError):
        pipe.recv()
    del held


@contextmanager
def holder(*runs: Path) -> Iterator[tuple[int, str]]:
    """A process that claims runs, and what it says."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=hold, args=(runs, theirs), daemon=True)
    process.start()
    theirs.close()
    said = ours.recv()
    yield process.pid, said
    if said == "held":
        process.kill()
    process.join()
    ours.close()


def test_the_second_is_refused_before_it_writes_and_a_kill_frees_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(small(shapes(tmp_path / "shapes"), run, steps=1)), encoding="utf-8")
    with holder(run) as (pid, said):
        assert said == "held"
        assert main(["train", "--config", str(recipe)]) == 2
        told = capsys.readouterr().err
        assert "out: expected a folder that no other run writes to" in told
        assert f"used by process {pid} on '{socket.gethostname()}'. Wait for it or stop it" in told
        assert [path.name for path in run.iterdir()] == [LOCK]
    assert main(["train", "--config", str(recipe)]) == 0


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    """Whatever it was refused for. What was there before stays, and so does a claim from before."""
    config = small(shapes(tmp_path / "shapes"), tmp_path / "runs" / "run", steps=1)
    late = replace(config, optim=replace(config.optim, optimizer="nothing"))  # the tokenizer has been written
    refused = {
        "resume": replace(config, run=replace(config.run, resume="nowhere")),
        "towers": replace(config, data=replace(config.data, data=str(texts(tmp_path)))),
        "optimizer": late,
    }
    for option, refusal in refused.items():
        with pytest.raises(ValueError, match=rf"^{option}\b"):
            Trainer(refusal)
        assert not config.run.out.parent.exists()
    config.run.out.mkdir(parents=True)
    held = claim(config.run.out)
    with pytest.raises(ValueError, match=r"^optimizer"):
        Trainer(late)
    assert held is not None and held.release.alive and (config.run.out / LOCK).exists()


def test_the_folder_may_be_removed_while_it_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run that is refused just after this one has opened the file to lock."""
    run = tmp_path / "runs" / "run"
    refused, created = create_and_claim(run)
    assert created == [run, run.parent]
    usual = os.open

    def opened(*arguments: Any) -> int:
        descriptor = usual(*arguments)
        monkeypatch.undo()
        remove_unused(refused, created, ())
        assert not run.parent.exists()
        return descriptor

    _ours.clear()  # as in another process
    monkeypatch.setattr(os, "open", opened)
    held, created = create_and_claim(run)
    assert created == [run, run.parent] and held is not None
    with holder(run) as (_, said):
        assert f"process {os.getpid()}" in said


def test_a_process_may_claim_again_and_gives_up_with_the_last_reference(tmp_path: Path) -> None:
    first, second = claim(tmp_path), claim(tmp_path / ".." / tmp_path.name)
    assert first is second is not None
    with holder(tmp_path) as (_, said):
        assert f"process {os.getpid()}" in said
    del first, second
    gc.collect()
    with holder(tmp_path) as (_, said):
        assert said == "held"


def test_rubbish_in_the_file(tmp_path: Path) -> None:
    rubbish = ["", "{", "[]", '{"pid": "x", "host": 1}', "\0" * 3000, "[" * 900]
    runs = [tmp_path / str(number) for number in range(len(rubbish))]
    for run in runs:
        run.mkdir()
    with holder(*runs) as (_, said):
        assert said == "held"
        for run, text in zip(runs, rubbish, strict=True):
            (run / LOCK).write_text(text)
            with pytest.raises(ValueError, match="used by another process"):
                claim(run)
    assert all(claim(run) is not None for run in runs)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked .* make sure that no other run writes to it"):
        assert claim(tmp_path) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert claim(tmp_path) is None

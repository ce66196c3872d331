"""The border of the command line: a line for what a user can act on, a report for what is our mistake."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from contratile import errors
from contratile.cli import COMMANDS, doctor, main, tiles
from contratile.cli.options import options_of, unknown_option


def raising(error: BaseException) -> Callable[..., int]:
    def command(argv: object) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("width: expected 3, got 4. Do so."), "width: expected 3, got 4. Do so."),
        (OSError(21, "Is a directory", "/x/\x1b[2Jy"), "/x/y: Is a directory"),
        (ImportError("no\n  such   package"), "no such package"),
        (MemoryError("1 TB"), "out of memory (1 TB). Lower --chunk or the size of the problem."),
        (FloatingPointError("the loss is nan"), "the loss is nan"),
        (ValueError("file \x1b]0;owned\x07name\u202e"), "file name"),
        (ValueError(), "ValueError"),
    ],
)
def test_what_a_user_can_act_on_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, told: str
) -> None:
    monkeypatch.setattr(tiles, "tiles", raising(error))
    assert main(["tiles"]) == 2
    assert capsys.readouterr().err == f"contratile tiles: {told}\n"


def test_types_are_refused_by_name_and_otherwise_a_defect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(argv: object) -> int:
        errors.bad_type("x", expected="a number", got="str", remedy="Pass one.")

    monkeypatch.setattr(tiles, "tiles", refuses)
    assert main(["tiles"]) == 2
    assert capsys.readouterr().err == "contratile tiles: x: expected a number, got str. Pass one.\n"
    for error in (TypeError("'NoneType' object"), KeyError("step"), RuntimeError("?"), AssertionError()):
        monkeypatch.setattr(tiles, "tiles", raising(error))
        assert main(["tiles"]) == 1
        told = capsys.readouterr().err
        assert told.startswith("Traceback") and "contratile doctor --json" in told


def test_where_an_error_was_raised_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiles, "tiles", raising(ValueError("wrong")))
    for value, shown in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("CONTRATILE_DEBUG", value)
        assert main(["tiles"]) == 2
        told = capsys.readouterr().err
        assert ("Traceback" in told) == shown and told.endswith("contratile tiles: wrong\n")


def test_warnings_cannot_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: pytest takes warnings."""
    code = (
        "import warnings\nfrom contratile.cli import main, tiles\n"
        "tiles.tiles = lambda argv: warnings.warn('passed \\x1b[2Jover') or 0\nmain(['tiles'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert "passed over" in done.stderr and "\x1b" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["tiles", "--help"], ["tiles", "--n", "64", "--d", "8"]])
def test_a_reader_that_has_gone(words: list[str]) -> None:
    """As `contratile --help | head`: no traceback, neither now nor when Python ends."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "contratile", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    os.close(write)
    assert done.stderr == "" and done.returncode in (141, 0)  # argparse itself passes over it


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "--batchsize", "3"], "unknown option --batchsize. Did you mean --batch?"),
        (["train", "--batch_size=3"], "unknown option --batch_size. Did you mean --batch?"),
        (["train", "--learning-rate", "3"], "unknown option --learning-rate. Did you mean --lr?"),
        (["train", "--epoch", "3"], "unknown option --epoch. Did you mean --epochs?"),
        (["train", "--no-fdsp"], "unknown option --no-fdsp. Did you mean --no-fsdp?"),
        (["eval", "run", "--chunksize", "3"], "unknown option --chunksize. Did you mean --chunk?"),
        (["search", "run", "x", "--kk", "3"], "unknown option --kk."),
        (["tiles", "--n", "3", "--d", "3", "--itemsizes", "4"], "Did you mean --itemsize?"),
        (["bench", "loss", "--size", "3"], "unknown option --size. Did you mean --sizes?"),
        (["bench", "plot", "x.json", "--outt", "y"], "Did you mean --out?"),
        (["doctor", "--quickly"], "Did you mean --quick?"),
        (["doctor", "now"], "unexpected 'now'"),
    ],
)
def test_options_that_do_not_exist(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 2
    assert told in capsys.readouterr().err


def test_every_option_is_known() -> None:
    from contratile.train.config import TrainConfig

    known = options_of(TrainConfig())
    assert {"--batch", "--no-fsdp", "--left-kind", "--towers", "--lr"} <= set(known)
    assert unknown_option("--\x1b[2Jx", known).startswith("unknown option")


def test_commands_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err
    assert main(["bench", "los"]) == 2
    assert "Did you mean bench loss?" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["x", "-1", "0", "1e9", "9" * 23, "9" * 5000])
def test_tiles_take_whole_numbers(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["tiles", "--n", number, "--d", "8"])
    assert done.value.code == 2
    assert "expected a whole number from 1 to" in capsys.readouterr().err


def test_tiles_that_nobody_could_count(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tiles", "--n", str(1 << 39), "--d", "8"])
    assert "expected at most 10,000,000 tiles" in capsys.readouterr().err


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    here = [torch.device("cpu"), torch.device("cuda", 0)]
    monkeypatch.setattr(doctor, "all_devices", lambda: here)
    assert doctor._device("cuda") == torch.device("cuda") and doctor._device("cpu:0").type == "cpu"
    for name in ("cuda:1", "meta", "mps"):
        with pytest.raises(SystemExit) as done:
            main(["doctor", "--device", name])
        assert done.value.code == 2
        told = f"expected a device that torch sees here (cpu, cuda:0), got '{name}'"
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
@pytest.mark.parametrize("words", [["\x1b[31m"], ["\udcff"], ["a" * 5000], ["--\x1b[2J"]])
def test_rubbish_is_refused(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the words, there is a message and no traceback."""
    code: Any
    try:
        code = main([*command.split(), *words])
    except SystemExit as done:
        code = done.code
    captured = capsys.readouterr()
    assert code == 2 and captured.err and "Traceback" not in captured.err

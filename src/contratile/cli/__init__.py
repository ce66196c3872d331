"""The command line `contratile`. One file per command; this one finds it.

    contratile --help
    contratile tiles --n 8192 --m 8192 --d 512
    contratile bench loss --quick

A command is a function that takes the words after its name and returns an exit code. Its module is imported only
when it is called, so the help works with torch alone. Errors that a user can act on are one line and exit code 2;
CONTRATILE_DEBUG=1 shows where they were raised.
"""

import csv
import difflib
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

from contratile.printable import printable


class Command(NamedTuple):
    """A line of the help and the function behind it."""

    name: str
    summary: str
    function: str
    """module:function"""

    options: str
    """module:function that gives its parser, or the defaults of its options as a dataclass"""

    example: str


COMMANDS = (
    Command(
        "doctor",
        "check this machine: devices, backends, accuracy, a short timing, a verdict",
        "contratile.cli.doctor:doctor",
        "contratile.cli.doctor:parser",
        "contratile doctor --quick",
    ),
    Command(
        "train",
        "train a pair of encoders with a contrastive loss at any batch size",
        "contratile.cli.train:train",
        "contratile.train.config:TrainConfig",
        "contratile train --data icons --batch 4096 --chunk 256 --out runs/icons",
    ),
    Command(
        "eval",
        "retrieval and zero-shot metrics of a trained pair",
        "contratile.cli.eval:evaluate",
        "contratile.cli.eval:parser",
        "contratile eval runs/icons",
    ),
    Command(
        "search",
        "the images or texts of a run that are nearest to a query",
        "contratile.cli.search:search",
        "contratile.cli.search:parser",
        'contratile search runs/icons "battery charging"',
    ),
    Command(
        "tiles",
        "print how a score matrix is cut into tiles",
        "contratile.cli.tiles:tiles",
        "contratile.cli.tiles:parser",
        "contratile tiles --n 8192 --m 8192 --d 512",
    ),
    Command(
        "bench loss",
        "time, memory and accuracy of the loss against other packages",
        "contratile.cli.bench:loss",
        "contratile.bench.loss:LossBenchConfig",
        "contratile bench loss --quick --out results",
    ),
    Command(
        "bench family",
        "time, memory and accuracy of each loss against the package people use for it",
        "contratile.cli.bench:family",
        "contratile.bench.family:FamilyBenchConfig",
        "contratile bench family --quick --out results",
    ),
    Command(
        "bench ring",
        "time, memory and traffic of the loss over ranks against other ways to compute it",
        "contratile.cli.bench:ring",
        "contratile.bench.ring:RingBenchConfig",
        "contratile bench ring --quick --out results",
    ),
    Command(
        "bench cache",
        "time and memory of training steps in chunks against other gradient caches",
        "contratile.cli.bench:cache",
        "contratile.bench.cache:CacheBenchConfig",
        "contratile bench cache --quick --out results",
    ),
    Command(
        "bench plot",
        "draw the plots of a recorded benchmark again",
        "contratile.cli.bench:plot",
        "contratile.cli.bench:plot_parser",
        "contratile bench plot results/loss.json",
    ),
)


EXPECTED = (ValueError, ImportError, OSError, FloatingPointError, MemoryError, EOFError, csv.Error, pickle.PickleError)
"""What a user's mistake, a file or the machine may raise: one line, and exit code 2."""
DEBUG = "CONTRATILE_DEBUG"
"""Set to 1 in the environment it shows where an error was raised."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the words after the program's name) begins with."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()  # here, where a reader that has gone (| head) can still be met quietly
    except BrokenPipeError:
        _discard_output()
        return 128 + 13  # as a program that SIGPIPE ends


def _run(words: list[str]) -> int:
    if words in (["--version"], ["-V"]):
        from contratile import __version__

        print(f"contratile {__version__}")
        return 0
    for command in COMMANDS:
        name = command.name.split()
        if words[: len(name)] == name:
            return _guarded(command, words[len(name) :])
    asks = [word for word in words if word in ("-h", "--help")]
    group = [word for word in words if word not in asks][:1]
    listed = [command for command in COMMANDS if command.name.split()[:1] == group]
    if asks and (listed or not group):
        print(usage(listed or COMMANDS))
        return 0
    if not words:
        print(usage(COMMANDS))
        return 2
    names = [command.name for command in listed or COMMANDS]
    said = " ".join(words)
    near = difflib.get_close_matches(said, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else "See `contratile --help`."
    print(f"contratile: unknown command {said!r}; expected one of: {', '.join(names)}. {hint}", file=sys.stderr)
    return 2


def _guarded(command: Command, words: list[str]) -> int:
    """The border: what a command raises becomes a line to act on, or, if it is our own mistake, a report."""
    module, function = command.function.split(":")
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *told: printable(usual(*told), lines=True)
    try:
        return int(getattr(import_module(module), function)(words))
    except KeyboardInterrupt:
        print("contratile: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        expected = isinstance(error, EXPECTED) or _is_ours(error)
        if not expected or os.environ.get(DEBUG, "0") not in ("", "0"):
            traceback.print_exc()
        print(f"contratile {command.name}: {_sentence(error)}", file=sys.stderr)
        if not expected:
            print("This is a defect of contratile. Please report it with the lines above and", file=sys.stderr)
            print("the output of `contratile doctor --json`.", file=sys.stderr)
        return 2 if expected else 1
    finally:
        warnings.formatwarning = usual


def _is_ours(error: Exception) -> bool:
    """Whether it was raised by the helpers in `errors`, which say what was expected, or is a class made to be read."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    made = type(error).__module__.startswith("contratile.") or type(error).__name__ == "SafetensorError"
    return made or frame.f_globals.get("__name__") == "contratile.errors"


def _sentence(error: Exception) -> str:
    """What is known of it in one line, without what a foreign name in it could do to a terminal."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, MemoryError):
        text = f"out of memory ({error}). Lower --chunk or the size of the problem."
    else:
        text = str(error) or type(error).__name__
    return " ".join(printable(text).split())


def _discard_output() -> None:
    """Nobody reads any more: what is still buffered goes nowhere, also when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # tests have streams without a descriptor
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def usage(commands: Sequence[Command]) -> str:
    """The help page of some commands."""
    width = max(len(command.name) for command in commands)
    lines = [
        "usage: contratile COMMAND [OPTIONS]",
        "",
        "Exact contrastive losses at near-infinite batch size, in memory linear in the batch.",
        "",
        "commands:",
        *(f"  {command.name:<{width}}  {command.summary}" for command in commands),
        "",
        "examples:",
        *(f"  {command.example}" for command in commands),
        "",
        "`contratile COMMAND --help` lists a command's options; `contratile --version` prints the version.",
    ]
    return "\n".join(lines)

"""The command line `contratile`. There is one file per command; this one finds and runs it.

    contratile --help
    contratile tiles --n 8192 --m 8192 --d 512
    contratile bench loss --quick

A command is a function that takes the words after its name and returns an exit code. Its module is imported only
when it is called, so that the help works with torch alone. Errors that a user can act on are printed on one line and
give exit code 2; CONTRATILE_DEBUG=1 adds the traceback.
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
    """A command: its line in the help, and where its code is."""

    name: str
    summary: str
    function: str
    """module:function"""

    options: str
    """module:callable that returns its argparse parser, or its options as a dataclass with defaults"""

    example: str


COMMANDS = (
    Command(
        "doctor",
        "check this machine: devices, backends, accuracy of every loss, a short timing",
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
        "plan",
        "predict memory, largest batch and time of a training run on any devices",
        "contratile.cli.plan:plan",
        "contratile.cli.plan:parser",
        "contratile plan --towers tiny --batch 65536 --devices 8xA800-80G",
    ),
    Command(
        "eval",
        "compute retrieval and zero-shot metrics of a trained pair of encoders",
        "contratile.cli.eval:evaluate",
        "contratile.cli.eval:parser",
        "contratile eval runs/icons",
    ),
    Command(
        "search",
        "find the images or texts nearest to a query with a trained pair of encoders",
        "contratile.cli.search:search",
        "contratile.cli.search:parser",
        'contratile search runs/icons "battery charging"',
    ),
    Command(
        "serve",
        "search a trained pair of encoders in the browser, by text or picture",
        "contratile.cli.serve:serve",
        "contratile.cli.serve:parser",
        "contratile serve runs/icons",
    ),
    Command(
        "export",
        "write a trained model as a folder of transformers, open_clip or sentence-transformers",
        "contratile.cli.export:export",
        "contratile.cli.export:parser",
        "contratile export runs/icons --to transformers --out icons-clip",
    ),
    Command(
        "embed",
        "write the features of any data to disk with a trained pair of encoders",
        "contratile.cli.embed:embed",
        "contratile.cli.embed:parser",
        "contratile embed runs/icons photos.csv --out features.npy",
    ),
    Command(
        "mine",
        "find hard negatives of any data with a trained pair of encoders, as a table to train on",
        "contratile.cli.mine:mine",
        "contratile.cli.mine:parser",
        "contratile mine runs/words pairs.csv --out mined.jsonl --num-negatives 5 --relative-margin 0.05",
    ),
    Command(
        "tiles",
        "show how a score matrix is cut into tiles on this machine",
        "contratile.cli.tiles:tiles",
        "contratile.cli.tiles:parser",
        "contratile tiles --n 8192 --m 8192 --d 512",
    ),
    Command(
        "bench loss",
        "compare time, memory and accuracy of the symmetric loss with other packages",
        "contratile.cli.bench:loss",
        "contratile.bench.loss:LossBenchConfig",
        "contratile bench loss --quick --out results",
    ),
    Command(
        "bench family",
        "compare every loss with the package people use for it",
        "contratile.cli.bench:family",
        "contratile.bench.family:FamilyBenchConfig",
        "contratile bench family --quick --out results",
    ),
    Command(
        "bench ring",
        "compare the symmetric loss over several ranks with other ways to compute it",
        "contratile.cli.bench:ring",
        "contratile.bench.ring:RingBenchConfig",
        "contratile bench ring --quick --out results",
    ),
    Command(
        "bench scale",
        "memory per device of the symmetric loss up to a million pairs on 8 and on 128 ranks",
        "contratile.cli.bench:scale",
        "contratile.bench.scale:ScaleBenchConfig",
        "contratile bench scale --quick --out results",
    ),
    Command(
        "bench cache",
        "compare training steps in chunks with other gradient caches",
        "contratile.cli.bench:cache",
        "contratile.bench.cache:CacheBenchConfig",
        "contratile bench cache --quick --out results",
    ),
    Command(
        "bench data",
        "compare samples per second of the loader with webdataset and open_clip",
        "contratile.cli.bench:data",
        "contratile.bench.data:DataBenchConfig",
        "contratile bench data --quick --out results",
    ),
    Command(
        "bench plan",
        "compare predicted with measured memory and time of training steps",
        "contratile.cli.bench:plan",
        "contratile.bench.plan:PlanBenchConfig",
        "contratile bench plan --calibrate --out results",
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
"""Errors caused by input, files or the machine: printed on one line, exit code 2."""
DEBUG = "CONTRATILE_DEBUG"
"""Environment variable that, set to 1, adds the traceback to such errors."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The command and its options; by default those of this process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()  # here, where a closed pipe (| head) can still be handled
    except BrokenPipeError:
        _discard_output()
        return 128 + 13  # as if SIGPIPE had ended the program


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
    if listed and len(words) == 1:  # a group, such as bench, without one of its commands
        print(usage(listed))
        return 2
    names = [command.name for command in listed or COMMANDS]
    said = " ".join(words)
    near = difflib.get_close_matches(said, names, n=1)
    hint = f"Did you mean {near[0]}?" if near else "See `contratile --help`."
    print(f"contratile: unknown command {said!r}; expected one of: {', '.join(names)}. {hint}", file=sys.stderr)
    return 2


def _guarded(command: Command, words: list[str]) -> int:
    """Run a command and print what it raises: one line, or a traceback if it is a bug of ours."""
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
            print("This is a bug in contratile. Please report it with the lines above and", file=sys.stderr)
            print("the output of `contratile doctor --json`.", file=sys.stderr)
        return 2 if expected else 1
    finally:
        warnings.formatwarning = usual


def _is_ours(error: Exception) -> bool:
    """Whether the error was raised by the helpers in `errors` or is of a class whose message is meant for users."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    made = type(error).__module__.startswith("contratile.") or type(error).__name__ == "SafetensorError"
    return made or frame.f_globals.get("__name__") == "contratile.errors"


def _sentence(error: Exception) -> str:
    """Return the error on one line, without escape sequences."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, MemoryError):
        text = f"out of memory ({error}). Lower --chunk or the size of the problem."
    else:
        text = str(error) or type(error).__name__
    return " ".join(printable(text).split())


def _discard_output() -> None:
    """Send buffered output to /dev/null: the reader is gone, and Python would complain when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # tests have streams without a descriptor
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def usage(commands: Sequence[Command]) -> str:
    """Return the help page of some commands."""
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

"""The command line `contratile`. One file per command; this one finds it.

    contratile --help
    contratile tiles --n 8192 --m 8192 --d 512
    contratile bench loss --quick

A command is a function that takes the words after its name and returns an exit code. Its module is imported only
when it is called, so the help works with torch alone.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple


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
        "the images of a run that are nearest to a text",
        "contratile.cli.search:search",
        "contratile.cli.search:parser",
        'contratile search runs/icons "arrow pointing left"',
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
        "contratile.bench.loss:LossConfig",
        "contratile bench loss --quick --out results",
    ),
    Command(
        "bench family",
        "time, memory and accuracy of each loss against the package people use for it",
        "contratile.cli.bench:family",
        "contratile.bench.family:FamilyConfig",
        "contratile bench family --quick --out results",
    ),
    Command(
        "bench ring",
        "time, memory and traffic of the loss over ranks against other ways to compute it",
        "contratile.cli.bench:ring",
        "contratile.bench.ring:RingConfig",
        "contratile bench ring --quick --out results",
    ),
    Command(
        "bench cache",
        "time and memory of training steps in chunks against other gradient caches",
        "contratile.cli.bench:cache",
        "contratile.bench.cache:CacheConfig",
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the words after the program's name) begins with."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["--version"], ["-V"]):
        from contratile import __version__

        print(f"contratile {__version__}")
        return 0
    for command in COMMANDS:
        name = command.name.split()
        if words[: len(name)] == name:
            module, function = command.function.split(":")
            try:
                return int(getattr(import_module(module), function)(words[len(name) :]))
            except KeyboardInterrupt:
                print("contratile: interrupted", file=sys.stderr)
                return 130
    asks = [word for word in words if word in ("-h", "--help")]
    group = [word for word in words if word not in asks][:1]
    listed = [command for command in COMMANDS if command.name.split()[:1] == group]
    if asks and (listed or not group):
        print(usage(listed or COMMANDS))
        return 0
    if not words:
        print(usage(COMMANDS))
        return 2
    known = ", ".join(command.name for command in listed or COMMANDS)
    said = " ".join(words)
    print(f"contratile: unknown command {said!r}; expected one of: {known}. See `contratile --help`.", file=sys.stderr)
    return 2


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

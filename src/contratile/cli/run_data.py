"""What `contratile embed` and `contratile mine` share: a run, data of any kind, several processes, progress."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from contratile.errors import bad_value, check_count
from contratile.printable import printable

PAUSE = 30.0
"""Seconds between lines of progress if stderr is not a terminal."""


def add_options(parser: argparse.ArgumentParser, pairs: str) -> None:
    """Add the options that the commands share; `pairs` says what is done with pairs."""
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("data", help="the data, named as in `contratile train`")
    parser.add_argument(
        "--weights",
        default="best",
        help="the checkpoint to load: best, last or a step such as step-00000100 (default: best)",
    )
    parser.add_argument(
        "--left", default="", help="column that holds the image or first text, if not found automatically"
    )
    parser.add_argument("--right", default="", help="column that holds the text, if not found automatically")
    parser.add_argument("--root", type=Path, help="folder of the pictures, if paths are not relative to the table")
    parser.add_argument(
        "--split",
        choices=("all", "train", "test"),
        default="all",
        help="which pairs to use: all, or those that the run would train on or hold out; its --limit does not count. "
        "Data with a test split of its own: all is everything else (default: all)",
    )
    parser.add_argument("--streaming", action="store_true", help="stream a Hugging Face dataset")
    parser.add_argument("--limit", type=int, default=0, help=f"{pairs} only the first pairs, this many (default: all)")
    parser.add_argument("--chunk", type=int, default=256, help="pairs to encode at a time (default: 256)")
    parser.add_argument("--workers", type=int, default=0, help="processes that decode images (default: 0)")
    parser.add_argument("--save-every", type=int, default=8, help="record progress after this many chunks (default: 8)")
    parser.add_argument(
        "--broken-limit",
        type=float,
        help="stop if more samples than this are broken: below 1 a share, else a number (default: that of the run)",
    )
    parser.add_argument(
        "--allow-pipe", action="store_true", help="allow the run's own data to start programs (pipe:COMMAND)"
    )


class Opened(NamedTuple):
    """A run and its data."""

    towers: Any
    step: int
    source: Any
    ranks: Any
    embedding: dict[str, Any]
    """Options of `embed_source`."""


def opened(options: Any) -> Opened:
    """Load the run, open the data, and connect with the other processes if there are any."""
    from contratile.embed.embed import Ranks
    from contratile.embed.run_source import run_source
    from contratile.models.encoding import best_device
    from contratile.train.launch import join, processes_started
    from contratile.train.load import load_run
    from contratile.train.paths import absolute_data

    for name in ("limit", "workers"):
        check_count(f"--{name}", getattr(options, name), least=0)
    for name in ("chunk", "save_every"):
        check_count(f"--{name.replace('_', '-')}", getattr(options, name), least=1)
    towers, config, step = load_run(options.run, options.weights, allow_pipe=options.allow_pipe)
    given = {name: getattr(options, name) for name in ("data", "left", "right", "root", "streaming")}
    limit = config.data.broken_limit if options.broken_limit is None else options.broken_limit
    source = run_source(config.data, {**given, "broken_limit": limit}, split=options.split)
    ranks, device = Ranks(), best_device()
    if processes_started() > 1:
        accelerator = join(replace(config.run, precision="fp32"))
        place = accelerator.process_index, accelerator.num_processes
        ranks, device = Ranks(*place, accelerator.wait_for_everyone), accelerator.device
    embedding = {name: getattr(options, name) for name in ("chunk", "limit", "workers", "save_every")}
    root = options.root and str(options.root.absolute())
    facts = {"data": absolute_data(options.data), "columns": [options.left, options.right], "split": options.split}
    facts |= {"root": root}
    return Opened(towers.to(device), step, source, ranks, {**embedding, "broken_limit": limit, "facts": facts})


@contextmanager
def together() -> Iterator[None]:
    """Leave the process group that the command has joined."""
    import torch.distributed as dist

    joined = dist.is_available() and dist.is_initialized()
    yield
    if not joined and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # gloo's threads could abort the process at its exit


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Shows the latest text on a terminal; elsewhere a line now and then."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, quiet=quiet)
    said = monotonic()
    with console.status("starting") as status:

        def show(told: str) -> None:
            nonlocal said
            status.update(Text(printable(told)))
            if not console.is_terminal and monotonic() - said > PAUSE:
                said = monotonic()
                console.print(printable(told), markup=False, highlight=False, soft_wrap=True)

        yield show


def run_guarded(command: str, work: Callable[[], None]) -> int:
    """Run a command that several processes share; a lost process is an error of one line."""
    from contratile.ring.team import RankLost, watched

    try:
        with together(), watched("to go on"):
            work()
    except RankLost as error:
        print(f"contratile {command}: {error}", file=sys.stderr)
        return 1
    return 0


def check_views(towers: Any, run: Path) -> None:
    """Refuse a run without a text encoder."""
    if towers.kinds[1] != "text":
        remedy = "It was trained on two views of each image. Use a run on pairs."
        bad_value("run", expected="encoders of both sides of a pair", got=run, remedy=remedy)

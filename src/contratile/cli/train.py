"""`contratile train`: train a pair of encoders, everything an option."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import check_options, options_of
from contratile.errors import bad_value
from contratile.printable import printable

if TYPE_CHECKING:
    from contratile.train.config import TrainConfig


def train(argv: Sequence[str]) -> int:
    """Train two encoders; everything is an option, and a recipe sets many at once."""
    if missing("train", TRAIN, "train"):
        return 1
    quiet_progress()
    import torch

    from contratile.data.workers import DIED, is_death
    from contratile.ring.team import RankLost, watched

    config = parse(argv)
    try:
        with watched("to go on"):
            return _train(config)
    except torch.OutOfMemoryError as error:
        remedy = f"Lower --chunk (now {config.run.chunk}), or pass --checkpointing; the batch may stay as it is."
        print(f"contratile train: {error}\n{remedy}", file=sys.stderr)
        return 1
    except RankLost as error:
        remedy = "The same command goes on from the last checkpoint. Waiting for others is limited by --timeout."
        print(f"contratile train: {error}\n{remedy}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not is_death(error):
            raise
        print(f"contratile train: {DIED}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str]) -> "TrainConfig":
    """The options, on top of those of `--config RECIPE`."""
    import tyro

    from contratile.train.config import TrainConfig, load_config

    first = argparse.ArgumentParser(prog="contratile train", add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--allow-pipe", action="store_true")
    known, rest = first.parse_known_args(list(argv))
    default = TrainConfig()
    check_options("train", rest, ["--config", "--allow-pipe", *options_of(default)])
    if known.config is not None:
        default = load_config(known.config, allow_pipe=known.allow_pipe)
        if not any(word.partition("=")[0] == "--out" for word in rest):
            check_out(default.run.out, known.config)
    about = (
        "Train two encoders with a contrastive loss at any batch size. --config RECIPE.toml sets options at once; "
        "--allow-pipe lets the data that a recipe names start programs (pipe:COMMAND)."
    )
    return tyro.cli(
        TrainConfig,
        args=rest,
        default=default,
        prog="contratile train",
        description=about,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def check_out(out: Path, recipe: Path) -> None:
    """A recipe may name a new folder or a run's, not one with other things in it: files there would be replaced."""
    from contratile.train.config import CONFIG, load_config

    try:
        names = [path.name for path in out.iterdir()] if out.is_dir() else []
        if CONFIG in names:
            load_config(out / CONFIG)  # of a run, if that is what it is
            return
    except (ValueError, TypeError, OSError):
        names = [CONFIG]
    # What a run has written that was ended before its configuration was.
    others = [name for name in names if not name.startswith((".", "tokenizer.json", "kept-", "checkpoints"))]
    if others:
        remedy = "Pass --out yourself to write there, or to another folder."
        bad_value(
            f"{recipe} [run] out",
            expected="a new folder, or that of a run",
            got=f"{out} with {others[0]}",
            remedy=remedy,
        )


def _train(config: "TrainConfig") -> int:
    from rich.console import Console

    from contratile.report.wording import table
    from contratile.train.evaluate import chance
    from contratile.train.finish import finish
    from contratile.train.header import header
    from contratile.train.loop import BEST, Trainer

    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    with console.status("preparing data and towers") as status:
        trainer = Trainer(
            config,
            notify=status.update,
            say=lambda text: console.print(printable(text, lines=True), markup=False, highlight=False),
        )
    config = trainer.config  # with the rates, the paths and the batch that were left open
    run = config.run.out
    if trainer.main:
        for line in (*header(trainer), *trainer.notices):
            console.print(printable(line), markup=False, highlight=False, soft_wrap=not console.is_terminal)
    if trainer.main and trainer.resumed is not None and trainer.step < trainer.steps:
        console.print(f"continuing at step {trainer.step} of {trainer.steps}", highlight=False)
    outcome = trainer.run()
    if not trainer.main:
        return 0
    if not outcome.finished:
        again = "the same command" + ("" if config.run.resume == "auto" else " with --resume auto")
        print(f"stopped at step {outcome.step}; {again} continues from there ({run})", file=sys.stderr)
        return 0
    if outcome.encoded is None:  # it had been finished before, and everything is there
        hint = f"see {run / 'report.html'}, or start anew with another --out"
        print(f"nothing left to do: {run} has all {outcome.step} steps; {hint}", file=sys.stderr)
        return 0
    written = finish(config, trainer.held_out, outcome)
    guess = chance(outcome.encoded)
    print("\n".join(map(printable, written.notes)))
    print(printable("\n".join(table(outcome.metrics, guess, trainer.sides)), lines=True))
    print(f"R@10 is {outcome.metrics[BEST] / guess[BEST]:.0f} times chance")
    print(f"these are the weights of step {outcome.step}; best, which eval takes, is step {trainer.best_step}")
    print(f"report: {written.report}")
    if written.sheet is not None:
        print(f"contact sheet: {written.sheet}")
    return 0

"""`contratile train`: train a pair of encoders, everything an option."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contratile.cli.extras import TRAIN, missing, quiet_progress

if TYPE_CHECKING:
    from contratile.train.config import TrainConfig


def train(argv: Sequence[str]) -> int:
    """Train two encoders; everything is an option, and a recipe sets many at once."""
    if missing("train", TRAIN, "train"):
        return 1
    quiet_progress()
    import torch

    try:
        config = parse(argv)
        return _train(config)
    except torch.OutOfMemoryError as error:
        remedy = f"Lower --chunk (now {config.run.chunk}), or pass --checkpointing; the batch may stay as it is."
        print(f"contratile train: {error}\n{remedy}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, ImportError, OSError, FloatingPointError) as error:
        print(f"contratile train: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> "TrainConfig":
    """The options, on top of those of `--config RECIPE`."""
    import tyro

    from contratile.train.config import TrainConfig, load_config

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    known, rest = first.parse_known_args(list(argv))
    default = TrainConfig() if known.config is None else load_config(known.config)
    about = "Train two encoders with a contrastive loss at any batch size. --config RECIPE.toml sets options at once."
    return tyro.cli(
        TrainConfig,
        args=rest,
        default=default,
        prog="contratile train",
        description=about,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def _train(config: "TrainConfig") -> int:
    from rich.console import Console

    from contratile.train.evaluate import chance
    from contratile.train.finish import finish
    from contratile.train.header import header
    from contratile.train.loop import BEST, Trainer
    from contratile.train.words import table

    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    with console.status("preparing data and towers") as status:
        trainer = Trainer(
            config, notify=status.update, say=lambda text: console.print(text, markup=False, highlight=False)
        )
    config = trainer.config  # with the rates and paths that were left open
    run = config.run.out
    if trainer.main:
        for line in header(trainer):
            console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    if trainer.main and trainer.resumed is not None:
        console.print(f"continuing at step {trainer.step} of {trainer.steps}", highlight=False)
    outcome = trainer.run()
    if not trainer.main:
        return 0
    if not outcome.finished:
        again = "the same command" + ("" if config.run.resume == "auto" else " with --resume auto")
        print(f"stopped at step {outcome.step}; {again} continues from there ({run})", file=sys.stderr)
        return 0
    if outcome.encoded is None:  # it had been finished before
        hint = f"see {run / 'report.html'}, or start anew with another --out"
        print(f"nothing left to do: {run} has all {outcome.step} steps; {hint}", file=sys.stderr)
        return 0
    written = finish(config, trainer.held_out, outcome)
    guess = chance(outcome.encoded)
    print("\n".join(written.notes))
    print("\n".join(table(outcome.metrics, guess, trainer.sides)))
    print(f"R@10 is {outcome.metrics[BEST] / guess[BEST]:.0f} times chance")
    print(f"report: {written.report}")
    if written.sheet is not None:
        print(f"contact sheet: {written.sheet}")
    return 0

"""`contratile train`: train a pair of encoders. Every field of `TrainConfig` is an option."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import check_options, options_of
from contratile.errors import bad_value
from contratile.printable import printable
from contratile.recipes import find_recipe, recipe_names

if TYPE_CHECKING:
    from contratile.train.config import TrainConfig
    from contratile.train.loop import Outcome, Trainer
    from contratile.train.results import Written


def train(argv: Sequence[str]) -> int:
    """Train two encoders and write results.

    Args:
        argv: The words after `contratile train`.

    Returns:
        The exit code.
    """
    if missing("train", TRAIN, "train"):
        return 1
    quiet_progress()
    import torch

    from contratile.cli.run_data import together
    from contratile.data.workers import DIED, is_death
    from contratile.ring.team import RankLost, watched

    words = [word for word in argv if word != "--plan"]
    config = parse(words)
    if len(words) < len(argv):
        from contratile.cli.plan import show_run

        return show_run(config)
    try:
        with watched("to go on"), together():
            return _train(config)
    except torch.OutOfMemoryError as error:
        now = "that auto found" if config.run.chunk == "auto" else f"now {config.run.chunk}"
        remedy = f"Lower --chunk ({now}), or pass --checkpointing; the batch can stay as it is."
        print(f"contratile train: {error}\n{remedy}", file=sys.stderr)
        return 1
    except RankLost as error:
        remedy = "The same command resumes from the last checkpoint. --timeout limits how long processes wait."
        print(f"contratile train: {error}\n{remedy}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not is_death(error):
            raise
        print(f"contratile train: {DIED}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str], command: str = "train", more: Sequence[str] = ("--plan",)) -> "TrainConfig":
    """Parse the options, on top of those of `--config RECIPE`.

    Args:
        argv: The words after the command.
        command: Its name.
        more: Further options of the command, for error messages.
    """
    import tyro

    from contratile.train.config import TrainConfig
    from contratile.train.config_file import load_config

    first = argparse.ArgumentParser(prog=f"contratile {command}", add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--allow-pipe", action="store_true")
    known, rest = first.parse_known_args(list(argv))
    default = TrainConfig()
    check_options(command, rest, ["--config", "--allow-pipe", *more, *options_of(default)])
    if known.config is not None:
        recipe = find_recipe(known.config)
        default = load_config(recipe, allow_pipe=known.allow_pipe)
        if command == "train" and not any(word.partition("=")[0] == "--out" for word in rest):
            check_out(default.run.out, recipe)
    return tyro.cli(
        TrainConfig,
        args=rest,
        default=default,
        prog=f"contratile {command}",
        description=ABOUT,
        config=(tyro.conf.OmitArgPrefixes,),
    )


ABOUT = "\n\n".join(
    (
        "Train two encoders with a contrastive loss at any batch size.",
        "The run writes its configuration, metrics, checkpoints, report.html and a gallery for `contratile search` to "
        "--out. Started again with the same options, it continues from its last checkpoint.",
        "Memory: --batch may be as large as the data, since the loss needs memory linear in it. The encoders need "
        "memory for --chunk pairs. If they run out of it, lower --chunk; the results stay the same. --chunk auto finds "
        "the largest that fits.",
        "Data: built-in icons, a table (pairs.csv with a column of image paths or texts and a column of texts), "
        "webdataset shards, or a dataset of the Hugging Face hub. A tenth is held out for evaluation unless "
        "--test-data is given.",
        f"A recipe (--config RECIPE) sets many options at once: {', '.join(recipe_names())}, or a TOML file. "
        "Options on the command line override it. With --allow-pipe the data that a recipe names may start programs "
        "(pipe:COMMAND).",
        "--plan predicts memory and time of the run and stops (`contratile plan` does so for other machines).",
        "Examples:\n"
        "  contratile train --config icons --out runs/icons\n"
        "  contratile train --data pairs.csv --batch 8192 --steps 1000 --out runs/mine\n"
        "  contratile train --data pairs.csv --towers open_clip:ViT-B-32:laion2b_s34b_b79k --out runs/tuned\n"
        "  contratile train --data pairs.csv --guide runs/tuned --guide-margin 0.05 --out runs/guided\n"
        '  torchrun --nproc-per-node 8 -m contratile train --data "shards/{0000..0999}.tar" --steps 5000',
    )
)
"""The description in `contratile train --help`."""


def check_out(out: Path, recipe: Path) -> None:
    """Refuse an output folder named by a recipe that holds other files: they could be replaced.

    Raises:
        ValueError: The folder is neither new nor that of a run.
    """
    from contratile.train.config_file import CONFIG, load_config

    try:
        names = [path.name for path in out.iterdir()] if out.is_dir() else []
        if CONFIG in names:
            load_config(out / CONFIG)  # raises if it is not the configuration of a run
            return
    except (ValueError, TypeError, OSError):
        names = [CONFIG]
    # A run that was killed early may have written these before its configuration.
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

    from contratile.train.header import header
    from contratile.train.loop import Trainer
    from contratile.train.results import write_results

    console = Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0")
    with console.status("preparing data and towers") as status:
        trainer = Trainer(
            config,
            notify=status.update,
            say=lambda text: console.print(printable(text, lines=True), markup=False, highlight=False),
        )
    config = trainer.config  # paths, batch and rates are filled in now
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
    if outcome.held_out is None:  # the run and its results were complete before
        hint = f"see {run / 'report.html'}, or start again with another --out"
        print(f"nothing left to do: {run} has all {outcome.step} steps; {hint}", file=sys.stderr)
        return 0
    with console.status("writing results") as status:
        written = write_results(trainer, outcome, notify=_progress(console, status))
    _print_results(trainer, outcome, written)
    return 0


def _progress(console: Any, status: Any) -> Callable[[str], object]:
    """Show a status text; as a line of its own if the output is not a terminal."""
    if console.is_terminal:
        return status.update  # type: ignore[no-any-return]  # rich's status
    return lambda text: console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _print_results(trainer: "Trainer", outcome: "Outcome", written: "Written") -> None:
    from contratile.cli.search import lines
    from contratile.report.metric_text import neighbor_line, table, zero_shot_lines
    from contratile.train.evaluate import chance
    from contratile.train.loop import BEST

    assert outcome.held_out is not None
    guess = chance(outcome.held_out)
    print("\n".join(map(printable, written.notes)))
    print(printable("\n".join(table(outcome.metrics, guess, trainer.sides)), lines=True))
    if line := neighbor_line(outcome.metrics):
        print(line)
    if trainer.zero_shot is not None:
        print("\n".join(zero_shot_lines(outcome.metrics, trainer.zero_shot.chance)))
    times = outcome.metrics[BEST] / guess[BEST]
    print(f"R@10 is {times:.{0 if times >= 10 else 1}f} times chance")
    print(f"These are the weights of step {outcome.step}, {_used(trainer, outcome.step)}.")
    for row in written.searched:
        print(f'nearest to "{printable(row.query)}"', *(f"  {line}" for line in lines(row)), sep="\n")
    print(f"report: {written.report}")
    if written.sheet is not None:
        print(f"contact sheet: {written.sheet}")
    print(printable("\n".join(next_lines(trainer.config.run.out, written.query)), lines=True))


def _used(trainer: "Trainer", step: int) -> str:
    """Which weights other commands use."""
    if trainer.best_step == step:
        return "the best ones, which `contratile eval` uses too"
    best = f"best ones, those of step {trainer.best_step}" if trainer.best_step else "last ones"
    return f"and `contratile eval` uses the {best}"


def next_lines(run: Path, query: str) -> list[str]:
    """What to do with a finished run: search it, load it, serve it."""
    folder, text = shlex.quote(str(run)), json.dumps(str(run), ensure_ascii=False)
    return [
        f"try: contratile search {folder} {shlex.quote(query)}",
        f"load the model in Python: import contratile as ct; model = ct.load({text})",
        f"search it in the browser: contratile serve {folder}",
    ]

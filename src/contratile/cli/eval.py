"""`contratile eval`: metrics of a trained pair of encoders on any data."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.errors import bad_value, check_count
from contratile.printable import printable


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = Parser(
        prog="contratile eval",
        description="Compute retrieval metrics of a run, and zero-shot accuracy if class names are given.",
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument(
        "--weights",
        default="best",
        help="the checkpoint to load: best, last or a step such as step-00000100 (default: best)",
    )
    parser.add_argument("--data", help="evaluate on other data, named as in `contratile train`")
    parser.add_argument(
        "--left", default="", help="column of --data that holds the image or first text, if not found automatically"
    )
    parser.add_argument("--right", default="", help="column of --data that holds the text, if not found automatically")
    parser.add_argument(
        "--root", type=Path, help="folder of the pictures of --data, if paths are not relative to the table"
    )
    parser.add_argument(
        "--split", choices=("test", "train", "all"), help="which pairs to use (default: test; all if --data is given)"
    )
    parser.add_argument("--classes", type=Path, help="file with one class name per line, for zero-shot classification")
    parser.add_argument("--templates", type=Path, help="file with one prompt per line; {} stands for the class name")
    parser.add_argument("--limit", type=int, default=0, help="use at most this many pairs (default: all)")
    parser.add_argument("--chunk", type=int, default=256, help="pairs to encode at a time (default: 256)")
    parser.add_argument(
        "--broken-limit",
        type=float,
        help="stop if more samples than this are broken: below 1 a share, else a number (default: that of the run)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--allow-pipe", action="store_true", help="allow the run's own data to start programs (pipe:COMMAND)"
    )
    return parser


def evaluate(argv: Sequence[str]) -> int:
    """Evaluate a run.

    Args:
        argv: The words after `contratile eval`.

    Returns:
        The exit code.
    """
    options = parser().parse_args(argv)
    if missing("eval", TRAIN, "train"):
        return 1
    quiet_progress()
    _evaluate(options)
    return 0


def _evaluate(options: Any) -> None:
    from rich.console import Console

    from contratile.data.catalog import open_source
    from contratile.models.encoding import best_device, encode
    from contratile.report.metric_text import neighbor_line, side_names, table
    from contratile.train.evaluate import TEMPLATES, chance, labelled, neighbors, not_finite, retrieval, zero_shot
    from contratile.train.load import load_run
    from contratile.train.results import left_out
    from contratile.train.setup import check_kinds

    # Read these files first, so that a wrong name fails before the work.
    names = lines(options.classes) if options.classes else []
    templates = lines(options.templates) if options.templates else TEMPLATES
    check_count("--limit", options.limit, least=0)
    check_count("--chunk", options.chunk, least=1)
    for name in ("left", "right", "root"):
        if getattr(options, name) and options.data is None:
            remedy = "The run's own data is read as in training."
            bad_value(f"--{name}", expected="other data (--data)", got=getattr(options, name), remedy=remedy)
    towers, config, step = load_run(options.run, options.weights, allow_pipe=options.allow_pipe)
    data, split = _data(config.data, options)
    # For "all" pass the data as test data, which is never split.
    source = open_source(*((replace(data, test_data=data.data), "test") if split == "all" else (data, split)))
    views = config.augment if config.augment.views == 2 else None
    check_kinds(source, towers.kinds, views=views is not None)
    with Console(stderr=True).status("encoding") as status:
        found = encode(
            towers.to(best_device()),
            source,
            chunk=options.chunk,
            limit=options.limit,
            broken_limit=data.broken_limit,
            augment=views,
            notify=lambda done: status.update(f"encoding: {done:,} pairs"),
        )
    wrong = not_finite(found, towers.kinds)
    if wrong:
        remedy = "Evaluate another checkpoint with --weights."
        raise FloatingPointError(f"the weights of step {step} give {wrong}: expected finite numbers. {remedy}")
    metrics = {"step": step, "pairs": len(found.keys), "broken": found.broken, **retrieval(found)}
    if views is not None:
        metrics |= neighbors(found)
    if names and views is not None:
        remedy = "The run trained on two views of each image; it has no text encoder."
        bad_value("--classes", expected="a run with texts", got=options.run, remedy=remedy)
    if names:
        rows = labelled(found.texts, names).rows
        metrics |= {"classes": len(names), "classified": len(rows), **zero_shot(towers, found, names, templates)}
    if options.json:
        print(json.dumps(metrics))
        return
    name = source.name.replace("(test", "(all", 1) if split == "all" else source.name
    print(f"{len(found.keys):,} pairs of {printable(name)}{left_out(found)}, weights of step {step}")
    print(printable("\n".join(table(metrics, chance(found), side_names(source, views=views is not None))), lines=True))
    if line := neighbor_line(metrics):
        print(line)
    if names:
        print(f"zero-shot, {len(names):,} classes, {metrics['classified']:,} samples whose text is one of them")
        for k in (1, 5):
            guess = min(1.0, k / len(names))
            print(f"top-{k} {metrics[f'zero_shot_top{k}']:.4f} (chance {guess:.4f})")


def _data(config: Any, options: Any) -> tuple[Any, Any]:
    """The data options, and the split: test, train or all."""
    from contratile.train.paths import missing_data

    if options.broken_limit is not None:
        config = replace(config, broken_limit=options.broken_limit)
    if options.data is not None:
        given = {name: getattr(options, name) for name in ("data", "left", "right", "root")}
        alone = {"test_data": "", "data_weights": (), "batching": "mixed", "samples_per_epoch": 0}
        return replace(config, **alone, **given), options.split or "all"
    split = options.split or "test"
    names = config.test_names if split == "test" and config.test_names else config.names
    gone = next(filter(None, map(missing_data, names)), "")
    if gone:
        words = "".join(f" --{side} {getattr(config, side)}" for side in ("left", "right") if getattr(config, side))
        whole = split == "all" or (split == "test" and config.test_data)
        remedy = f"If it has moved, pass its new path: --data PATH{words} --split {'all' if whole else split}."
        bad_value("data of the run", expected="what it was trained on", got=f"nothing at {gone}", remedy=remedy)
    return config, split


def lines(path: Path) -> list[str]:
    """The distinct lines of a file, without empty ones."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        bad_value(str(path), expected="a text file in UTF-8", got="other bytes", remedy="One name or prompt per line.")
    found = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    if not found:
        bad_value(str(path), expected="one name or prompt per line", got="an empty file", remedy="Write some.")
    return list(found)

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
    """Its options."""
    parser = Parser(
        prog="contratile eval", description="Retrieval metrics, and zero-shot classification if class names are given."
    )
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument(
        "--weights",
        default="best",
        help="of which checkpoint: best, last or a step such as step-00000100 (default: best)",
    )
    parser.add_argument("--data", help="other data than the run's, named as in `contratile train`")
    parser.add_argument("--left", default="", help="column of the image or first text of --data, if it must be named")
    parser.add_argument("--right", default="", help="column of the text of --data, if it must be named")
    parser.add_argument("--root", type=Path, help="folder of the pictures of --data, if they are not beside it")
    parser.add_argument(
        "--split", choices=("test", "train", "all"), help="which pairs (default: test; all if --data is given)"
    )
    parser.add_argument("--classes", type=Path, help="a file with one class name per line: zero-shot classification")
    parser.add_argument("--templates", type=Path, help="a file with one prompt per line, {} stands for the name")
    parser.add_argument("--limit", type=int, default=0, help="pairs at most (default: all)")
    parser.add_argument("--chunk", type=int, default=256, help="pairs that are encoded at once (default: 256)")
    parser.add_argument(
        "--broken-limit",
        type=float,
        help="stop when more samples than this are broken: a share below 1, else a number (default: the run's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--allow-pipe", action="store_true", help="let the run's own data start programs (pipe:COMMAND)"
    )
    return parser


def evaluate(argv: Sequence[str]) -> int:
    """Metrics of a trained pair of encoders on any data."""
    options = parser().parse_args(argv)
    if missing("eval", TRAIN, "train"):
        return 1
    quiet_progress()
    _evaluate(options)
    return 0


def _evaluate(options: Any) -> None:
    from rich.console import Console

    from contratile.data.catalog import open_source
    from contratile.report.wording import side_names, table
    from contratile.train.evaluate import TEMPLATES, best_device, chance, encode, labelled, not_finite, retrieval
    from contratile.train.evaluate import zero_shot as classified
    from contratile.train.finish import left_out, load_run
    from contratile.train.loop import check_kinds

    # Files are read first: a wrong name is told before the work.
    names = lines(options.classes) if options.classes else []
    templates = lines(options.templates) if options.templates else TEMPLATES
    check_count("--limit", options.limit, least=0)
    check_count("--chunk", options.chunk, least=1)
    for name in ("left", "right", "root"):
        if getattr(options, name) and options.data is None:
            remedy = "The run's own data is read as it was in training."
            bad_value(f"--{name}", expected="other data (--data)", got=getattr(options, name), remedy=remedy)
    towers, config, step = load_run(options.run, options.weights, allow_pipe=options.allow_pipe)
    data, split = _data(config.data, options)
    # With "all" the data serves as test data of its own, which is used whole.
    source = open_source(*((replace(data, test_data=data.data), "test") if split == "all" else (data, split)))
    check_kinds(source, towers.kinds)
    with Console(stderr=True).status("encoding") as status:
        found = encode(
            towers.to(best_device()),
            source,
            chunk=options.chunk,
            limit=options.limit,
            broken_limit=data.broken_limit,
            notify=lambda done: status.update(f"encoding: {done:,} pairs"),
        )
    wrong = not_finite(found, towers.kinds)
    if wrong:
        remedy = "Evaluate another checkpoint with --weights."
        raise FloatingPointError(f"the weights of step {step} give {wrong}: expected finite numbers. {remedy}")
    metrics = {"step": step, "pairs": len(found.keys), "broken": found.broken, **retrieval(found)}
    if names:
        rows = labelled(found.texts, names).rows
        metrics |= {"classes": len(names), "classified": len(rows), **classified(towers, found, names, templates)}
    if options.json:
        print(json.dumps(metrics))
        return
    called = source.name.replace("(test", "(all", 1) if split == "all" else source.name
    print(f"{len(found.keys):,} pairs of {printable(called)}{left_out(found)}, weights of step {step}")
    print(printable("\n".join(table(metrics, chance(found), side_names(source))), lines=True))
    if names:
        print(f"zero-shot, {len(names):,} classes, {metrics['classified']:,} samples whose text is one of them")
        for k in (1, 5):
            guess = min(1.0, k / len(names))
            print(f"top-{k} {metrics[f'zero_shot_top{k}']:.4f} (chance {guess:.4f})")


def _data(config: Any, options: Any) -> tuple[Any, Any]:
    """The data and its split: test, train or all."""
    from contratile.train.places import absent

    if options.broken_limit is not None:
        config = replace(config, broken_limit=options.broken_limit)
    if options.data is not None:
        given = {name: getattr(options, name) for name in ("data", "left", "right", "root")}
        return replace(config, test_data="", **given), options.split or "all"
    split = options.split or "test"
    name = config.test_data if split == "test" and config.test_data else config.data
    gone = absent(name)
    if gone:
        words = "".join(f" --{side} {getattr(config, side)}" for side in ("left", "right") if getattr(config, side))
        whole = split == "all" or (split == "test" and config.test_data)
        remedy = f"If it has moved, name its new place: --data PATH{words} --split {'all' if whole else split}."
        bad_value("data of the run", expected="what it was trained on", got=f"nothing at {gone}", remedy=remedy)
    return config, split


def lines(path: Path) -> list[str]:
    """The lines of a file, each once."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        bad_value(str(path), expected="a text file in UTF-8", got="other bytes", remedy="One name or prompt per line.")
    found = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    if not found:
        bad_value(str(path), expected="one name or prompt per line", got="an empty file", remedy="Write some.")
    return list(found)

"""`contratile eval`: metrics of a trained pair of encoders on any data."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contratile.cli.eval_benchmark import benchmark_table, check_benchmark_options, evaluate_benchmark
from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.errors import bad_value, check_count
from contratile.printable import printable

if TYPE_CHECKING:
    from contratile.models.encoding import SourceFeatures


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = Parser(
        prog="contratile eval",
        description="Compute retrieval metrics of a run, and zero-shot accuracy if class names are given. With "
        "--benchmark, evaluate all data sets of a CLIP_benchmark folder; the processes of torchrun share the work. "
        "The exit code is then 1 if a data set could not be evaluated.",
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
    parser.add_argument(
        "--classes",
        help="class names for zero-shot classification: imagenet (from open_clip) or a file with one per line",
    )
    parser.add_argument(
        "--templates",
        help="prompts: openai or simple (from open_clip) or a file with one per line; {} stands for the class name",
    )
    parser.add_argument(
        "--benchmark",
        type=Path,
        help="folder of a data set in CLIP_benchmark's webdataset layout, or of several (wds_imagenet1k/, ...)",
    )
    parser.add_argument("--datasets", nargs="+", help="with --benchmark: names of the data sets (default: all)")
    parser.add_argument(
        "--limit", type=int, default=0, help="use at most this many pairs, of each data set (default: all)"
    )
    parser.add_argument("--chunk", type=int, default=256, help="pairs to encode at a time (default: 256)")
    parser.add_argument("--workers", type=int, default=0, help="processes that decode images (default: 0)")
    parser.add_argument(
        "--broken-limit",
        type=float,
        help="stop if more samples than this are broken: below 1 a share, else a number (default: that of the run)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
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
    check_benchmark_options(options)
    _check_out(options.out)
    if options.benchmark is not None:
        return _benchmark(options)
    _evaluate(options)
    return 0


def _benchmark(options: Any) -> int:
    from contratile.ring.team import RankLost, watched

    def report(results: dict[str, Any]) -> None:
        _write(results, options.out)
        print(json.dumps(results) if options.json else "\n".join(_told(results)), flush=True)

    try:
        with watched("to go on"):
            return evaluate_benchmark(options, report)
    except RankLost as error:
        print(f"contratile eval: {error}", file=sys.stderr)
        return 1


def _told(results: Any) -> list[str]:
    rows = results["datasets"]
    return [f"{len(rows)} data set{'s' * (len(rows) > 1)}, weights of step {results['step']}", *benchmark_table(rows)]


def _check_out(out: Path | None) -> None:
    """Refuse a name that cannot be written to, before the work."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        got = f"the folder {out}" if out.is_dir() else f"{out}, whose folder does not exist"
        bad_value("--out", expected="the name of a file to write", got=got, remedy="Choose another name.")


def _write(results: Any, out: Path | None) -> None:
    from contratile.data.files import written_whole

    if out is not None:
        with written_whole(out) as draft:
            draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _check_options(options: Any) -> None:
    """Refuse what does not fit together, before anything is read."""
    from contratile.train.launch import processes_started

    if processes_started() > 1:
        remedy = "Start it without torchrun. With --benchmark several processes share the work."
        bad_value("processes", expected="one", got=processes_started(), remedy=remedy)
    if options.templates and not options.classes:
        remedy = "Pass --classes too."
        bad_value("--templates", expected="class names (--classes)", got=options.templates, remedy=remedy)
    check_count("--workers", options.workers, least=0)
    check_count("--limit", options.limit, least=0)
    check_count("--chunk", options.chunk, least=1)
    for name in ("left", "right", "root"):
        if getattr(options, name) and options.data is None:
            remedy = "The run's own data is read as in training."
            bad_value(f"--{name}", expected="other data (--data)", got=getattr(options, name), remedy=remedy)


def _evaluate(options: Any) -> None:
    from contratile.data.catalog import open_source
    from contratile.report.metric_text import side_names
    from contratile.train.class_names import load_classes, load_templates, of_wordnet_ids
    from contratile.train.evaluate import TEMPLATES, labelled, neighbors, not_finite, retrieval, zero_shot
    from contratile.train.load import load_run
    from contratile.train.setup import check_kinds

    _check_options(options)
    # Read these files first, so that a wrong name fails before the work.
    names = load_classes(options.classes) if options.classes else []
    templates = load_templates(options.templates) if options.templates else TEMPLATES
    towers, config, step = load_run(options.run, options.weights, allow_pipe=options.allow_pipe)
    data, split = _data(config.data, options)
    # For "all" pass the data as test data, which is never split.
    source = open_source(*((replace(data, test_data=data.data), "test") if split == "all" else (data, split)))
    views = config.augment if config.augment.views == 2 else None
    check_kinds(source, towers.kinds, views=views is not None)
    if names and views is not None:
        remedy = "The run trained on two views of each image; it has no text encoder."
        bad_value("--classes", expected="a run with texts", got=options.run, remedy=remedy)
    found = _encoded(towers, source, options, broken_limit=data.broken_limit, augment=views)
    wrong = not_finite(found, towers.kinds)
    if wrong:
        remedy = "Evaluate another checkpoint with --weights."
        raise FloatingPointError(f"the weights of step {step} give {wrong}: expected finite numbers. {remedy}")
    metrics = {"step": step, "pairs": len(found.keys), "broken": found.broken, **retrieval(found)}
    if views is not None:
        metrics |= neighbors(found)
    if names:
        found = found._replace(texts=of_wordnet_ids(found.texts, options.classes))
        rows = labelled(found.texts, names).rows
        metrics |= {"classes": len(names), "classified": len(rows), **zero_shot(towers, found, names, templates)}
    _write(metrics, options.out)
    if options.json:
        print(json.dumps(metrics))
    else:
        name = source.name.replace("(test", "(all", 1) if split == "all" else source.name
        _print(metrics, found, name, side_names(source, views=views is not None))


def _encoded(towers: Any, source: Any, options: Any, **reading: Any) -> "SourceFeatures":
    """Encode the data on the best device, with a status line."""
    from rich.console import Console

    from contratile.models.encoding import best_device, encode

    with Console(stderr=True).status("encoding") as status:
        return encode(
            towers.to(best_device()),
            source,
            chunk=options.chunk,
            limit=options.limit,
            workers=options.workers,
            notify=lambda done: status.update(f"encoding: {done:,} pairs"),
            **reading,
        )


def _print(metrics: dict[str, Any], found: "SourceFeatures", name: str, sides: tuple[str, str]) -> None:
    """Print the metrics as tables, with the chance level of each."""
    from contratile.report.metric_text import neighbor_line, table, zero_shot_lines
    from contratile.train.evaluate import chance, zero_shot_chance
    from contratile.train.results import left_out

    print(f"{len(found.keys):,} pairs of {printable(name)}{left_out(found)}, weights of step {metrics['step']}")
    print(printable("\n".join(table(metrics, chance(found), sides)), lines=True))
    if line := neighbor_line(metrics):
        print(line)
    if classes := metrics.get("classes"):
        print(f"zero-shot, {classes:,} classes, {metrics['classified']:,} samples whose text is one of them")
        print("\n".join(zero_shot_lines(metrics, zero_shot_chance(classes))))


def _data(config: Any, options: Any) -> tuple[Any, Any]:
    """The data options, and the split: test, train or all."""
    from contratile.train.paths import missing_data

    config = replace(config, negatives=(), num_negatives=0)  # they are for training
    if options.broken_limit is not None:
        config = replace(config, broken_limit=options.broken_limit)
    if options.data is not None:
        given = {name: getattr(options, name) for name in ("data", "left", "right", "root")}
        alone = {"test_data": "", "data_weights": (), "batching": "mixed", "samples_per_epoch": 0, "negatives": ()}
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

"""`contratile eval RUN --benchmark FOLDER`: all data sets of a CLIP_benchmark folder, shared by the ranks of torchrun.

Every rank encodes its share of each data set, the main one computes the metrics and prints. A data set that cannot be
read gives a row that says why; the others are still evaluated.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from contratile.errors import bad_value, check_count
from contratile.printable import printable

ResultRow = dict[str, Any]

COLUMNS = {
    "acc1": "acc1",
    "acc5": "acc5",
    "mean_per_class_recall": "per class",
    "mean_average_precision": "mAP",
    "image_retrieval_recall@1": "image R@1",
    "image_retrieval_recall@5": "image R@5",
    "text_retrieval_recall@1": "text R@1",
    "text_retrieval_recall@5": "text R@5",
}
"""Metrics in the table, and their headings."""

CONFLICTS = ("data", "left", "right", "root", "split", "classes", "allow_pipe")
"""Options of other data, without meaning for a benchmark folder."""

SKIPPED = (ValueError, OSError, ImportError, FloatingPointError)
"""Errors that end the evaluation of one data set only."""


def check_benchmark_options(options: Any) -> None:
    """Refuse options that have no meaning with, or without, --benchmark."""
    if options.benchmark is None:
        if options.datasets:
            remedy = "Pass --benchmark FOLDER."
            bad_value("--datasets", expected="a benchmark folder", got=" ".join(options.datasets), remedy=remedy)
        return
    for name in CONFLICTS:
        if getattr(options, name):
            remedy = "Drop one of the two: the data sets of the folder have their own images, texts and classes."
            expected = "no other data with --benchmark"
            bad_value(f"--{name.replace('_', '-')}", expected=expected, got=getattr(options, name), remedy=remedy)


def evaluate_benchmark(options: Any, report: Callable[[dict[str, Any]], object]) -> int:
    """Evaluate the data sets of a folder. Collective under torchrun.

    Args:
        options: The parsed options of `contratile eval`.
        report: Called with the results, on the main process only.

    Returns:
        The exit code: 1 if a data set could not be evaluated.
    """
    import torch
    from rich.console import Console
    from rich.text import Text

    from contratile.data.clip_benchmark import choose_sets, find_sets
    from contratile.models.encoding import best_device
    from contratile.train.class_names import load_templates
    from contratile.train.launch import gather_objects, join, processes_started
    from contratile.train.load import load_run

    check_count("--limit", options.limit, least=0)
    check_count("--chunk", options.chunk, least=1)
    check_count("--workers", options.workers, least=0)
    folders = choose_sets(find_sets(options.benchmark), options.datasets or [])
    templates = load_templates(options.templates) if options.templates else []
    towers, config, step = load_run(options.run, options.weights)
    if towers.kinds != ("image", "text"):
        remedy = "Its data sets hold images."
        bad_value("run", expected="encoders of image and text", got=" and ".join(towers.kinds), remedy=remedy)
    if options.broken_limit is not None:
        config = replace(config, data=replace(config.data, broken_limit=options.broken_limit))
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    work = _Work(towers.to(best_device()), options, templates, config.data.broken_limit)
    if processes_started() > 1:
        accelerator = join(replace(config.run, precision="fp32"))
        place = accelerator.process_index, accelerator.num_processes
        work = work._replace(towers=towers.to(accelerator.device), rank=place[0], world=place[1], share=gather_objects)
    console = Console(stderr=True, quiet=work.rank != 0)
    rows: dict[str, ResultRow] = {}
    with console.status("evaluating") as status:
        for name, folder in folders.items():

            def show(done: int, name: str = name) -> None:
                status.update(Text(printable(f"{name}: {done * work.world:,} samples")))

            row = _evaluate_set(work, folder, name, show)
            if work.rank == 0:
                rows[name] = row
                if not console.is_terminal:
                    done = row.get("error") or f"{row['samples']:,} samples"
                    console.print(printable(f"{name}: {done}"), markup=False, highlight=False, soft_wrap=True)
    if work.rank == 0:
        report({"step": step, "datasets": rows})
    # All processes exit with the same code, and after the report, because torchrun kills the others when one fails.
    failed = work.share(any("error" in row for row in rows.values()))[0]
    if work.world > 1 and not joined:
        torch.distributed.destroy_process_group()  # gloo's threads could abort the process at its exit
    return int(failed)


def _alone(mine: Any) -> list[Any]:
    return [mine]


class _Work(NamedTuple):
    """What is the same for all data sets."""

    towers: Any
    options: Any
    templates: list[str]
    broken_limit: float
    rank: int = 0
    world: int = 1
    share: Callable[[Any], list[Any]] = _alone
    """Gives every rank the objects of all ranks. Collective."""


def _evaluate_set(work: _Work, folder: Path, name: str, notify: Callable[[int], object]) -> ResultRow:
    """The row of one data set; on other ranks than the main one an empty one."""
    from contratile.data.clip_benchmark import BenchmarkShards, open_set
    from contratile.train.clip_benchmark import encode_classes, encode_part, merge, merge_classes, set_metrics

    share, options = {"part": work.rank, "parts": work.world}, work.options
    mine: Any
    try:
        data = open_set(folder, name, work.templates)
        source = BenchmarkShards(data, **share, limit=options.limit)
        classes = encode_classes(work.towers, data, chunk=options.chunk, **share)
        mine = encode_part(work.towers, source, chunk=options.chunk, workers=options.workers, notify=notify), classes
    except SKIPPED as error:
        mine = _sentence(error)
    found = work.share(mine)
    if work.rank:
        return {}
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        return {"error": errors[0]}
    try:
        whole = merge([samples for samples, _ in found])
        metrics = set_metrics(data, whole, merge_classes([x for _, x in found]), broken_limit=work.broken_limit)
    except SKIPPED as error:
        return {"error": _sentence(error)}
    facts: ResultRow = {"task": data.task, "samples": len(whole.labels), "broken": whole.broken.total()}
    if data.task == "retrieval":
        return facts | {"texts": len(whole.text)} | metrics
    return facts | {"classes": len(data.classes), "templates": len(data.templates)} | metrics


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def benchmark_table(rows: Mapping[str, ResultRow]) -> list[str]:
    """A line per data set: task, samples and the metrics that it has; or why it was not evaluated."""
    good = {name: row for name, row in rows.items() if "error" not in row}
    shown = [metric for metric in COLUMNS if any(metric in row for row in good.values())]
    lines = [["data set", "task", "samples", *(COLUMNS[metric] for metric in shown)]]
    for name, row in good.items():
        values = [f"{row[metric]:.4f}" if metric in row else "-" for metric in shown]
        lines.append([printable(name), row["task"], f"{row['samples']:,}", *values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    found = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines] if good else []
    found += [printable(f"{name}  not evaluated: {row['error']}") for name, row in rows.items() if "error" in row]
    for name, row in good.items():
        if row["broken"]:
            found.append(printable(f"{name}: {row['broken']:,} broken samples are left out"))
        if row["task"] == "classification" and "acc5" not in row:
            found.append(printable(f"{name}: no acc5, it has {row['classes']} classes"))
    return found

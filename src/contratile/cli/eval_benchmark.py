"""`contratile eval RUN --benchmark FOLDER`: all data sets of a CLIP_benchmark folder, shared by the ranks of torchrun.

Every rank encodes its share of each data set, the main one computes the metrics and prints. A data set that cannot be
read gives a row that says why; the others are still evaluated.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contratile.errors import bad_value, check_count
from contratile.printable import printable

Row = dict[str, Any]
Share = Callable[[Any], list[Any]]
"""Gives every rank the objects of all ranks."""

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

SKIPPED = (ValueError, TypeError, OSError, ImportError, FloatingPointError)
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
    rank, world, device, share = 0, 1, best_device(), _alone
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    if processes_started() > 1:
        accelerator = join(_plain(config.run))
        rank, world = accelerator.process_index, accelerator.num_processes
        device, share = accelerator.device, gather_objects
    towers.to(device)
    limit = config.data.broken_limit if options.broken_limit is None else options.broken_limit
    console = Console(stderr=True, quiet=rank != 0)
    rows: dict[str, Row] = {}
    with console.status("evaluating") as status:
        for name, folder in folders.items():

            def show(done: int, name: str = name) -> None:
                status.update(printable(f"{name}: {done * world:,} samples"))

            row = _evaluate_set(towers, folder, name, templates, options, limit, (rank, world), share, show)
            if rank == 0:
                rows[name] = row
                if not console.is_terminal:
                    done = row.get("error") or f"{row['samples']:,} samples"
                    console.print(printable(f"{name}: {done}"), markup=False, highlight=False, soft_wrap=True)
    if rank == 0:
        report({"step": step, "datasets": rows})
    # All processes end with the same code, and after the report: torchrun ends the others when one fails.
    failed = share(any("error" in row for row in rows.values()))[0]
    if world > 1 and not joined:
        torch.distributed.destroy_process_group()  # gloo's threads could abort the process at its exit
    return int(failed)


def _evaluate_set(
    towers: Any,
    folder: Path,
    name: str,
    templates: list[str],
    options: Any,
    broken_limit: float,
    place: tuple[int, int],
    share: Share,
    notify: Callable[[int], object],
) -> Row:
    """The row of one data set; on other ranks than the main one an empty one."""
    from contratile.data.clip_benchmark import BenchmarkShards, open_set
    from contratile.train.clip_benchmark import encode_classes, encode_part, merge, merge_classes, set_metrics

    part, parts = place
    mine: Any
    try:
        data = open_set(folder, name, templates)
        source = BenchmarkShards(data, part=part, parts=parts, limit=options.limit)
        classes = encode_classes(towers, data, chunk=options.chunk, part=part, parts=parts)
        mine = encode_part(towers, source, chunk=options.chunk, workers=options.workers, notify=notify), classes
    except SKIPPED as error:
        mine = _sentence(error)
    found = share(mine)
    if part:
        return {}
    errors = [each for each in found if isinstance(each, str)]
    if errors:
        return {"error": errors[0]}
    try:
        whole = merge([samples for samples, _ in found])
        metrics = set_metrics(data, whole, merge_classes([each for _, each in found]), broken_limit=broken_limit)
    except SKIPPED as error:
        return {"error": _sentence(error)}
    facts: Row = {"task": data.task, "samples": len(whole.labels), "broken": whole.broken.total()}
    if data.task == "retrieval":
        return facts | {"texts": len(whole.text)} | metrics
    return facts | {"classes": len(data.classes), "templates": len(data.templates)} | metrics


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def _alone(mine: Any) -> list[Any]:
    return [mine]


def _plain(run: Any) -> Any:
    """The options of a run with which processes connect for an evaluation."""
    from dataclasses import replace

    return replace(run, precision="fp32")


def benchmark_table(rows: Mapping[str, Row]) -> list[str]:
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

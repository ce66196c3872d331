"""`contratile doctor`: the first thing to run on a machine, and when results look wrong."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from contratile.cli.options import Parser
from contratile.doctor.checkup import Findings, all_devices, examine

Grid = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, headings, rows."""
WRONG = "WRONG"
WIDTH = 120
"""Columns of the page if the output is not a terminal."""


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    parser = Parser(
        prog="contratile doctor",
        description="Check this machine: list versions, devices and backends, compare every loss on every backend with "
        "fp64, time one step, and end with a verdict. The exit code is 1 if something is wrong.",
    )
    parser.add_argument("--quick", action="store_true", help="check fewer dtypes and packages, at smaller sizes")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for bug reports")
    parser.add_argument(
        "--device",
        type=_device,
        action="append",
        help="check this device, such as cpu or cuda:0; may be repeated (default: the CPU and the first accelerator)",
    )
    return parser


def doctor(argv: Sequence[str]) -> int:
    """Check the machine, print the findings, and return 1 if something is wrong."""
    options = parser().parse_args(argv)
    show_progress = sys.stderr.isatty() and not options.json
    found = examine(
        options.device or all_devices()[:2],
        quick=options.quick,
        notify=_progress if show_progress else lambda text: None,
    )
    if show_progress:
        _progress("")
    if options.json:
        print(json.dumps({**asdict(found), "verdict": verdict(found)}, indent=2))
    else:
        show(found)
    return 1 if found.problems else 0


def show(found: Findings) -> None:
    """Print the findings, in colour if rich is installed."""
    try:
        from rich.console import Console
    except ImportError:
        print("\n".join(text(found)))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print("\n".join(facts(found)), markup=False)
    for title, headings, rows in tables(found):
        table = Table(*headings, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*row, style="bold red" if row[-1] == WRONG else None)
        console.print(table)
    console.print("\n".join(remarks(found)), markup=False)
    console.print(f"verdict: {verdict(found)}", style="bold red" if found.problems else "bold green", markup=False)


def verdict(found: Findings) -> str:
    """Return the verdict in one line."""
    if found.problems:
        return f"not healthy: {len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}"
    checks = len(found.accuracy)
    return f"healthy: {checks} of {checks} checks passed"


def text(found: Findings) -> list[str]:
    """Return the page without colour."""
    lines = facts(found)
    for title, headings, rows in tables(found):
        lines += ["", title, *_aligned(headings, rows)]
    return [*lines, "", *remarks(found), f"verdict: {verdict(found)}"]


def facts(found: Findings) -> list[str]:
    """Return the lines about versions and devices."""
    named = [f"{name.removeprefix('version_'):<12} {value}" for name, value in found.environment.items()]
    return [*named, "devices", *(f"  {device}" for device in found.devices)]


def remarks(found: Findings) -> list[str]:
    """Return what is wrong and what could be better, each with a remedy."""
    return [*(f"problem: {problem}" for problem in found.problems), *(f"advice: {advice}" for advice in found.advice)]


def tables(found: Findings) -> list[Grid]:
    """Return the tables of backends, errors and times."""
    states = [(row.device, row.backend, "works" if row.works else f"no: {row.reason}") for row in found.backends]
    checks = [
        (
            *(row.device, row.backend, row.dtype, row.loss),
            *(f"{row.value_error:.1e}", f"{row.value_allowed:.1e}", f"{row.grad_error:.1e}", f"{row.grad_allowed:.1e}"),
            "ok" if row.ok else WRONG,
        )
        for row in found.accuracy
    ]
    times = [
        (
            *(row.device, row.backend, row.dtype, str(row.n), str(row.d)),
            row.note if row.seconds is None else f"{1e3 * row.seconds:.1f}",
        )
        for row in found.timing
    ]
    accuracy = "device", "backend", "dtype", "loss", "err loss", "allowed", "err grad", "allowed", ""
    return [
        ("backends", ("device", "backend", ""), states),
        ("errors relative to fp64", accuracy, checks),
        ("one step of clip_loss, forward and backward", ("device", "backend", "dtype", "N", "D", "ms"), times),
    ]


def _aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    every = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in every]


def _progress(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _device(name: str) -> torch.device:
    try:
        asked = torch.device(name)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected a device such as cpu or cuda:0, got {name!r}") from None
    here = all_devices()
    if not any(device.type == asked.type and asked.index in (None, device.index or 0) for device in here):
        listed = ", ".join(map(str, here))
        raise argparse.ArgumentTypeError(f"expected a device that torch sees here ({listed}), got {name!r}")
    return asked

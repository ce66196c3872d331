"""`contratile doctor`: the first thing to run on a machine, and when results look wrong."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from contratile.cli.options import Parser
from contratile.cli.pages import WRONG, Grid, show_page
from contratile.doctor.checkup import Findings, Notify, all_devices, examine


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    parser = Parser(
        prog="contratile doctor",
        description="Check this machine: list versions, devices and backends, compare every loss on every backend with "
        "fp64, time one step, and end with a verdict. The exit code is 1 if something is wrong. With --tune, time "
        "tiles and kernels instead and keep the fastest for later runs.",
    )
    parser.add_argument("--quick", action="store_true", help="check fewer dtypes and packages, at smaller sizes")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for bug reports")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also compare times with the dense formula and other packages, and write everything to FILE.md (with the "
        "same as JSON at its end) and FILE.json, without names of users, machines or folders: to attach to an issue",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time launch configurations of the kernels on the first GPU, or tiles of the torch backend on a CPU "
        "(about a minute), and keep the fastest in the user's cache folder, where later runs find them",
    )
    parser.add_argument(
        "--size", type=int, help="with --tune: number of pairs to time (default: 16384 on a GPU, 4096 on a CPU)"
    )
    parser.add_argument("--dims", type=int, nargs="+", help="with --tune: feature sizes (default: 128 512 768)")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=("bfloat16", "float16", "tf32", "float32", "float64"),
        help="with --tune: dtypes of features (default: bfloat16 tf32 float32 on a GPU, float32 on a CPU)",
    )
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
    _check(options)
    show_progress = sys.stderr.isatty() and not options.json
    notify = _progress if show_progress else lambda text: None
    if options.tune:
        from contratile.cli.tune import tune_and_show

        code = tune_and_show(options, notify)
        if code or options.report is None:
            return code
    devices = options.device or all_devices()[:2]
    if options.report is None:
        found = examine(devices, quick=options.quick, notify=notify)
    else:
        found = _reported(options.report, devices, options.quick, notify)
    notify("")
    if options.json:
        print(json.dumps({**asdict(found), "verdict": verdict(found)}, indent=2))
    else:
        show(found)
    return 1 if found.problems else 0


def _check(options: argparse.Namespace) -> None:
    """Exit with an error message if options do not go together."""
    alone = [f"--{name}" for name in ("size", "dims", "dtypes") if getattr(options, name) is not None]
    if alone and not options.tune:
        parser().error(f"{', '.join(alone)}: only with --tune")
    if options.json and options.tune and options.report:
        parser().error("--json: expected either --tune or --report, got both. The report is JSON already")
    for name in ("size", "dims"):
        values = getattr(options, name)
        for value in [values] if isinstance(values, int) else values or []:
            if not 1 <= value <= 1 << 24:
                parser().error(f"--{name}: expected a whole number from 1 to {1 << 24}, got {value}")


def _reported(stem: Path, devices: Sequence[torch.device], quick: bool, notify: Notify) -> Findings:
    """Examine and compare, and write the report."""
    from contratile.doctor import report
    from contratile.doctor.compare import compare

    paths = report.report_paths(stem)  # before the long work
    found = examine(devices, quick=quick, notify=notify)
    timed = [device for device in devices if device.type in ("cpu", "cuda")]
    rows = [row for device in timed for row in compare(device, quick=quick, notify=notify)]
    report.write(report.content(found, rows, verdict(found)), paths)
    notify("")
    print(f"written: {paths[0]}, {paths[1]}", file=sys.stderr)
    return found


def show(found: Findings) -> None:
    """Print the findings."""
    show_page(facts(found), tables(found), remarks(found), f"verdict: {verdict(found)}", bad=bool(found.problems))


def verdict(found: Findings) -> str:
    """Return the verdict in one line."""
    if found.problems:
        return f"not healthy: {len(found.problems)} problem{'s' if len(found.problems) > 1 else ''}"
    checks = len(found.accuracy)
    return f"healthy: {checks} of {checks} checks passed"


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

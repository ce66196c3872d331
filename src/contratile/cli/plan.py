"""`contratile plan`: memory, largest batch and time of a training run, before it starts."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from contratile.cli.extras import TRAIN, missing, quiet_progress
from contratile.cli.options import Parser
from contratile.cli.pages import show_page

if TYPE_CHECKING:
    from contratile.planner.run_plan import Plan
    from contratile.train.config import TrainConfig

GB, TERA = 1e9, 1e12


def parser() -> argparse.ArgumentParser:
    """Return the options of the command besides those of training."""
    parser = Parser(
        prog="contratile plan",
        description="Predict what a training run needs: memory term by term, the largest batch that fits with this and "
        "with other losses, the best chunk, and the seconds of a step. No weights are loaded, and nothing is trained. "
        "All options of `contratile train` are options here too, recipes included; those that change neither memory "
        "nor time only go into the recipe that is written. Data is not opened, so that the number of pairs must be "
        "passed for steps per epoch.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        default="cpu",
        help="8xA800-80G, 4x8xH100 for 4 nodes of 8, 2xcpu for two processes here, or a number of devices that the "
        "options below describe (default: `cpu`)",
    )
    parser.add_argument("--device-memory", type=float, help="GB of a device, instead of the table's")
    parser.add_argument("--device-flops", type=float, help="TFLOP/s that large products reach in this precision")
    parser.add_argument("--link", type=float, help="GB/s between the devices of a node")
    parser.add_argument("--network", type=float, help="GB/s of each device between nodes (default: `25`)")
    parser.add_argument("--host-memory", type=float, help="GB of a node (default: twice the memory of its GPUs)")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of a text (default: as many as the model takes)")
    parser.add_argument(
        "--calibrate", action="store_true", help="run two small chunks here first, and correct what they show (CPU)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--picture", type=Path, help="write bars of memory to this PNG file")
    parser.add_argument("--write", type=Path, help="write a recipe for `contratile train --config` to this TOML file")
    return parser


def plan(argv: Sequence[str]) -> int:
    """Print the plan of a training configuration.

    Args:
        argv: The words after `contratile plan`.

    Returns:
        The exit code: 0 if the run fits, 1 if it does not.
    """
    ours = parser()
    known, rest = argparse.ArgumentParser.parse_known_args(ours, list(argv))
    if missing("plan", TRAIN, "train"):
        return 1
    quiet_progress()
    from contratile.cli.train import parse
    from contratile.planner.devices import parse_devices
    from contratile.train.planning import plan_config

    names = [name for action in ours._actions for name in action.option_strings]
    config = parse(rest, command="plan", more=names)
    with _progress() as notify:
        notify("measuring this machine" if "cpu" in known.devices.lower() else "reading the table of GPUs")
        devices = parse_devices(
            known.devices,
            memory=_times(known.device_memory, GB),
            flops=_times(known.device_flops, TERA),
            link=_times(known.link, GB),
            network=_times(known.network, GB),
            host_memory=_times(known.host_memory, GB),
        )
        found = plan_config(config, devices, tokens=known.tokens, calibrate=known.calibrate, notify=notify)
    if known.write:
        _write_recipe(config, found, known.write)
    if known.picture:
        from contratile.planner.plan_picture import draw

        draw(found, known.picture)
    _show(found, as_json=known.json)
    for path in (known.write, known.picture):
        if path and not known.json:
            print(f"written: {path}")
    return 0 if found.fits else 1


def show_run(config: "TrainConfig") -> int:
    """`contratile train --plan`: print the plan of a run on this machine."""
    from contratile.train.planning import plan_run

    with _progress() as notify:
        found = plan_run(config, notify)
    _show(found, as_json=False)
    return 0 if found.fits else 1


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _write_recipe(config: "TrainConfig", found: "Plan", path: Path) -> None:
    from contratile.data.files import written_whole
    from contratile.train.config_file import to_toml

    work = found.change.work if found.change is not None else found.work
    run = replace(config.run, batch=work.batch, chunk=work.chunk, offload=work.offload, fsdp=work.fsdp)
    with written_whole(path) as draft:
        draft.write_text(to_toml(replace(config, run=run)), encoding="utf-8")


def _show(found: "Plan", *, as_json: bool) -> None:
    from contratile.planner.plan_text import grids, heading, remarks, verdict

    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    show_page(heading(found), grids(found), remarks(found), verdict(found), bad=not found.fits)


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """A line about progress on standard error."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    with console.status("planning") as status:
        yield lambda text: status.update(f"planning: {text}")

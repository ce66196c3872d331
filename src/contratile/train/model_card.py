"""The model card of an exported run: README.md, as the Hugging Face hub shows it.

It names the data, the command and the metrics. Folders of this machine are left out of all names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contratile import __version__
from contratile.models.export import Exported
from contratile.printable import printable
from contratile.report.metric_text import PAIRWISE
from contratile.report.tracking import history
from contratile.train.config import TrainConfig
from contratile.train.config_file import to_dict

LEFT_OUT = ("out", "resume", "cache", "track", "queries", "timeout", "cpu", "workers")
"""Options that say nothing about the model."""

METRIC = re.compile(rf"(_R@\d+|_mean_rank|_median_rank|neighbor_top1|zero_shot_(?!left_out)\w+)({PAIRWISE})?$")


def model_card(run: Path, config: TrainConfig, step: int, exported: Exported, *, name: str, library: str) -> str:
    """Write the card.

    Args:
        run: Folder of the run, for its metrics.
        config: The options of the run.
        step: Step of the exported checkpoint.
        exported: What was written.
        name: Name of the exported folder.
        library: The package that loads it.
    """
    data = ", ".join(f"`{_plain(public_name(x))}`" for x in config.data.names)
    metrics = metrics_at(run, step)
    facts = {
        "data": data,
        "encoders": f"`{_plain(public_name(config.towers.towers))}`",
        "loss": f"`{config.loss.loss}`, {config.run.batch:,} pairs per step",
        "weights": f"step {step:,}",
        "loaded by": f"`{exported.loaded_by}`",
    }
    parts = [
        f"---\nlicense: unknown  # fill in\nlibrary_name: {LIBRARIES.get(library, library)}\n"
        f"pipeline_tag: {exported.task}\ntags:\n- contratile\n- feature-extraction\n---",
        f"# {_plain(name)}",
        f"Trained and exported with Contratile {__version__}.",
        "| | |\n| --- | --- |\n" + "\n".join(f"| {what} | {value} |" for what, value in facts.items()),
        "## Use\n\n```python\n" + exported.usage.replace("FOLDER", _plain(name)).rstrip() + "\n```",
        *(["\n".join(f"- {note}" for note in exported.notes)] if exported.notes else []),
        "## Training\n\n```bash\n" + command(config) + "\n```",
        "## Metrics\n\n" + (_table(metrics) if metrics else "None were computed at this step."),
        "## Licence\n\nFill in `license` at the top of this file. The training data and pretrained weights have "
        "licences of their own.",
    ]
    return "\n\n".join(parts) + "\n"


LIBRARIES = {"open_clip": "open_clip", "transformers": "transformers", "sentence-transformers": "sentence-transformers"}


def metrics_at(run: Path, step: int) -> dict[str, float]:
    """The held-out metrics that were computed at a step."""
    found: dict[str, float] = {}
    for entry in history(run):
        if entry["step"] == step:
            found |= {key: x for key, x in entry.items() if METRIC.search(key) and isinstance(x, int | float)}
    return found


def _table(metrics: Mapping[str, float]) -> str:
    rows = [f"| {_plain(name)} | {value:.4g} |" for name, value in metrics.items()]
    return "\n".join(["On held-out data.\n", "| metric | value |", "| --- | --- |", *rows])


def command(config: TrainConfig) -> str:
    """The command that repeats the run: options that differ from their defaults, without folders of this machine."""
    default, words = to_dict(TrainConfig()), ["contratile train"]
    for section, values in to_dict(config).items():
        for name, value in values.items():
            if name not in LEFT_OUT and value != default[section].get(name):
                words.append(_option(name.replace("_", "-"), value))
    return " \\\n  ".join(words)


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    given = [public_name(x) if isinstance(x, str) else str(x) for x in (value if isinstance(value, tuple) else [value])]
    return " ".join([f"--{name}", *(shlex.quote(_plain(x)) for x in given)])


def public_name(name: str) -> str:
    """A name of data or encoders without this machine's folders, commands, or what follows `?` in an address."""
    if name.startswith("pipe:"):
        return "pipe:COMMAND"
    without_query = re.sub(r"(\w+://[^?\s]*)\?\S*", r"\1", name)
    return re.sub(r"(^|[:+])(/(?!/)[^:+]*)", lambda found: found[1] + Path(found[2]).name, without_query)


def _plain(text: str) -> str:
    """Text that cannot end a code block or a cell of a table."""
    return printable(text).replace("`", "'").replace("|", "/")

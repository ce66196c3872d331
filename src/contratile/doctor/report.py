"""`contratile doctor --report FILE`: one page about this machine that can be attached to an issue.

    paths = report_paths(Path("out/h100"))            # out/h100.md and out/h100.json; refuses a bad path at once
    write(content(examine(...), compare(...)), paths)

The page is Markdown for people, with the same content as JSON at its end and in a file of its own. It holds versions,
device names, errors and times, and nothing about the user: names and paths in error messages are replaced.
"""

import getpass
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from contratile.doctor.checkup import Findings
from contratile.doctor.compare import Comparison
from contratile.engine import tuned
from contratile.machine import version

FORMAT = 1
PEERS = ("inf-cl", "siglip-kernel", "open_clip_torch")
PATHS = re.compile(r"""(?:file://|(?<![\w./\\]))(?:[A-Za-z]:|\\)?(?:[\\/][^\s\\/'":,;()<>|]+){2,}[\\/]?""")
"""Absolute paths of two or more parts, not those of an address on the web."""
TIMES = ("device", "loss", "N", "D", "dtype", "contestant", "ms", "limit", "predicted", "MiB", "")
FREE_TEXT = ("reason", "note", "error", "problems", "advice")
"""Fields that quote error messages, which may say anything."""


def report_paths(stem: Path) -> tuple[Path, Path]:
    """Return the two files of a report, and check that they can be written.

    Args:
        stem: The report's name; a suffix .md or .json is dropped.

    Raises:
        OSError: If nothing can be written there.
    """
    base = stem.with_suffix("") if stem.suffix in (".md", ".json") else stem
    paths = base.with_name(f"{base.name}.md"), base.with_name(f"{base.name}.json")
    for path in paths:
        if path.is_dir():
            raise OSError(f"{path}: is a folder. Name a file")
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=base.parent):
            pass
    except OSError as error:
        raise OSError(f"{base.parent}: cannot be written ({error.strerror or error}). Name another file") from error
    return paths


def content(found: Findings, comparisons: Iterable[Comparison], verdict: str) -> dict[str, Any]:
    """Return everything that is reported, without anything private."""
    made = {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "verdict": verdict,
        **asdict(found),
        "driver": driver(),
        "comparison": [asdict(row) for row in comparisons],
        "tuned": [{**key._asdict(), **entry._asdict()} for key, entry in tuned.entries().items()],
    }
    made["environment"] |= {f"version_{name}": version(name) for name in PEERS}
    cleaned: dict[str, Any] = without_private(made)
    return cleaned


def driver() -> str:
    """Return the version of the GPU driver and of the CUDA or ROCm that torch was built for; empty without a GPU."""
    if not torch.cuda.is_available():
        return ""
    built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return f"torch for {built}"
    try:
        asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        said = []
    return f"driver {said[0]}, torch for {built}" if said else f"torch for {built}"


def without_private(value: Any, field: str = "") -> Any:
    """Replace paths everywhere, the names of user and machine in quoted errors, and numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: without_private(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_private(item, field) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    if not isinstance(value, str):
        return value
    for folder in private_folders():  # whole, because their names may contain spaces
        value = value.replace(folder, "<path>")
    text = PATHS.sub("<path>", value)
    if field in FREE_TEXT:
        for name, stand_in in private_names().items():
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", stand_in, text)
    return text


def private_folders() -> list[str]:
    """Return the folders of this user and this Python, the longest first."""
    found = {str(Path.cwd()), sys.prefix, sys.base_prefix, tempfile.gettempdir()}
    with suppress(RuntimeError):  # no home
        found.add(str(Path.home()))
    return sorted((folder for folder in found if len(folder) > 3), key=len, reverse=True)


def private_names() -> dict[str, str]:
    """Return the names of this user and this machine, with what replaces them."""
    try:
        user, home = getpass.getuser(), Path.home().name
    except (KeyError, OSError, ImportError, RuntimeError):  # no such user in the system's list
        user = home = ""
    host = platform.node()
    names = {user: "<user>", home: "<user>", host: "<host>", host.split(".")[0]: "<host>"}
    return {name: stand_in for name, stand_in in names.items() if name}


def write(found: dict[str, Any], paths: tuple[Path, Path]) -> None:
    """Write the page and the JSON file, each under another name first."""
    text = json.dumps(found, indent=1)
    for path, written in zip(paths, (page(found, text), text + "\n"), strict=True):
        draft = path.with_name(f".{path.name}.part")
        draft.write_text(written, encoding="utf-8")
        draft.replace(path)


def page(found: dict[str, Any], text: str) -> str:
    """Return the report as Markdown."""
    facts = {**found["environment"], "driver": found["driver"] or "no GPU"}
    named = [(name.removeprefix("version_"), value) for name, value in facts.items()]
    states = [(row["device"], row["backend"], "works" if row["works"] else row["reason"]) for row in found["backends"]]
    checks = [
        (
            *(row["device"], row["backend"], row["dtype"], row["loss"]),
            *(_error(row[name]) for name in ("value_error", "value_allowed", "grad_error", "grad_allowed")),
            "ok" if row["ok"] else f"WRONG {row['note']}",
        )
        for row in found["accuracy"]
    ]
    choices = "kind", "device", "dtype", "d", "choice", "versions"
    kept = [[row[name] if name != "choice" else _choice(row) for name in choices] for row in found["tuned"]]
    accuracy = "device", "backend", "dtype", "loss", "error", "allowed", "gradient error", "allowed", ""
    remarks = [f"- {text}" for name in ("problems", "advice") for text in found[name]]
    predicted = sorted({row["predicted_by"] for row in found["comparison"]} - {""})
    parts = [
        f"# contratile doctor: {found['verdict']}",
        f"{found['date']}. Devices: " + "; ".join(found["devices"]) + ".",
        *(["\n".join(remarks)] if remarks else []),
        "## Versions",
        _table(("", ""), named),
        "## Backends",
        _table(("device", "backend", ""), states),
        "## Times",
        "Forward and backward, best of a few rounds, milliseconds. The limit is the time of the matrix products of our "
        "loss (four), run alone in the same rounds. Memory is the peak beyond inputs and gradients, on GPUs only. "
        + (f"Predicted, not measured, for our own loss: {', '.join(predicted)}." if predicted else ""),
        _table(TIMES, _times(found)),
        "## Errors relative to fp64",
        _table(accuracy, checks),
        *(["## Tuned", _table(choices, kept)] if kept else []),
        "<details><summary>The same as JSON</summary>",
        f"```json\n{text}\n```",
        "</details>",
    ]
    return "\n\n".join(parts) + "\n"


def _times(found: dict[str, Any]) -> list[Sequence[object]]:
    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"

    return [
        (
            *(row[name] for name in ("device", "loss", "n", "d", "dtype", "contestant")),
            *(ms(row[name]) for name in ("seconds", "limit_seconds", "predicted_seconds")),
            "" if row["peak_extra_mib"] is None else f"{row['peak_extra_mib']:.1f}",
            row["note"],
        )
        for row in found["comparison"]
    ]


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _choice(row: dict[str, Any]) -> str:
    return " x ".join(map(str, row["choice"]))


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

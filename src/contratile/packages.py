"""Packages that are installed but cannot be imported, and which others they break.

    broken_packages()                  # tried in another process: [BrokenPackage("torchvision", ..., breaks=["timm"])]
    why_not("open_clip", error)        # one sentence, which names the package that is at fault

The usual one is a torchvision that was built for another torch: timm, open_clip and lightly cannot be imported then,
and say that an operator is missing.
"""

import json
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

ESSENTIAL = ("PIL", "accelerate", "datasets", "psutil", "rich", "safetensors", "tokenizers", "transformers", "tyro")
"""What contratile's own commands import."""

CHECKED = (
    *ESSENTIAL,
    *("torchvision", "triton", "webdataset", "tensorboard", "matplotlib", "timm", "open_clip"),
    *("sentence_transformers", "lightly", "lightning", "pytorch_metric_learning"),
)
QUICK = ("PIL", "psutil", "rich", "safetensors", "tokenizers", "torchvision", "tyro")
"""Those whose import takes little time."""

PARTS = {"transformers": "transformers.modeling_utils"}
"""What stands for a package that imports its parts only when they are used."""

DECLARED = {"torchvision": ("lightly", "open_clip", "timm", "transformers")}
"""What is known to be broken by a package, where it was not tried."""

HIDDEN: list[Exception] = []
"""What a torchvision raised that was hidden from the packages that would import it."""

_NOT_AT_FAULT = ("", "__main__", "contratile", "torch")
PATIENCE = 120
"""Seconds for all imports: some packages look at the network or compile when they are imported."""


@dataclass(frozen=True)
class BrokenPackage:
    """A package at fault."""

    name: str
    version: str
    error: str
    breaks: list[str] = field(default_factory=list)
    """Other packages that cannot be imported because of it."""

    def __str__(self) -> str:
        others = f"It breaks {', '.join(self.breaks)}. " if self.breaks else ""
        called = f"{self.name} {self.version}".rstrip()
        return f"{called} is installed but cannot be imported ({self.error}). {others}{_remedy(self)}"


def _remedy(broken: BrokenPackage) -> str:
    if broken.name == "torchvision":
        fits = f"Install the torchvision that belongs to torch {version('torch')}, from the index that torch is from"
        return f"{fits}, or uninstall it: contratile's towers tiny, hf: and st: do without it."
    return f"Reinstall it: pip install --force-reinstall --no-deps {_distribution(broken.name)}."


def culprit(name: str, error: BaseException) -> str:
    """The package in which an import failed: the last one on the way that is not torch."""
    frames = traceback.walk_tb(_root(error).__traceback__)
    tops = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]
    found = [top for top in tops if top not in _NOT_AT_FAULT and top not in sys.stdlib_module_names]
    return found[-1] if found else name


def _root(error: BaseException) -> BaseException:
    """What was raised first: some packages import their parts late, and wrap what happens then."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def why_not(name: str, error: BaseException) -> str:
    """Why a package cannot be imported, and what to do about it, in one sentence or two."""
    if HIDDEN and str(getattr(error, "name", "")).startswith("torchvision"):
        error = HIDDEN[0]
    at_fault = culprit(name, error)
    return str(BrokenPackage(at_fault, _version(at_fault), brief(error), [name] if name != at_fault else []))


def find_spec_safely(name: str) -> bool:
    """Whether a package is installed, without importing it."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # hidden, or half imported
        return name in sys.modules


def broken_packages(names: Sequence[str] = CHECKED) -> list[BrokenPackage]:
    """Import each of the packages that are installed, in another process, and tell those that are at fault."""
    waiting = [name for name in names if find_spec_safely(name)]
    failed: list[dict[str, str]] = []
    while waiting:
        done, ended = _tried(waiting)
        failed += [row for row in done if row["error"]]
        waiting = waiting[len(done) :]
        if waiting and ended:  # the process died of the import
            failed.append({"name": waiting[0], "culprit": waiting[0], "error": ended})
            waiting = waiting[1:]
    by_fault: dict[str, list[dict[str, str]]] = {}
    for row in failed:
        by_fault.setdefault(row["culprit"], []).append(row)
    found = []
    for name, rows in sorted(by_fault.items()):
        others = {row["name"] for row in rows} | {other for other in DECLARED.get(name, ()) if find_spec_safely(other)}
        found.append(BrokenPackage(name, _version(name), rows[0]["error"], sorted(others - {name})))
    return found


def _tried(names: Sequence[str]) -> tuple[list[dict[str, str]], str]:
    """What a process said about its imports, and how it ended, if not well."""
    command = [sys.executable, "-m", "contratile.packages", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, errors="replace")
        output, ended = done.stdout, f"the process ended with code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        ended = f"no end after {PATIENCE} s"
    except OSError as error:
        return [{"name": name, "culprit": name, "error": ""} for name in names], str(error)
    rows = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    return rows, ended or ("it ended early" if len(rows) < len(names) else "")


MARK = "contratile package "


def brief(error: BaseException) -> str:
    """The first line of what was raised, of the cause where a package wraps it."""
    error = _root(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200].rstrip(": .")


def _version(name: str) -> str:
    try:
        return version(_distribution(name))
    except PackageNotFoundError:
        return ""


def _distribution(name: str) -> str:
    return next(iter(_distributions().get(name, [])), name)


@cache
def _distributions() -> Mapping[str, list[str]]:
    return packages_distributions()


def _try_imports(names: Sequence[str]) -> None:
    """In the process that is started for it: a line of JSON for each."""
    for name in names:
        row = {"name": name, "culprit": name, "error": ""}
        try:
            import_module(PARTS.get(name, name))
        except Exception as error:  # whatever a package raises: that is the finding
            row |= {"culprit": culprit(name, error), "error": brief(error)}
        print(f"\n{MARK}{json.dumps(row)}", flush=True)


if __name__ == "__main__":
    _try_imports(sys.argv[1:])

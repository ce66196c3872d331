"""Packages that are installed but cannot be imported, and the packages that fail because of them.

    broken_packages()                  # imports in a subprocess: [BrokenPackage("torchvision", ..., breaks=["timm"])]
    why_not("open_clip", error)        # a sentence that names the package at fault, and the remedy

The usual case is a torchvision that was built for another torch: importing timm, open_clip, lightly or transformers
then fails with "operator torchvision::nms does not exist".
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

ESSENTIAL = ("PIL", "accelerate", "datasets", "psutil", "rich", "safetensors", "tokenizers", "tyro")
"""What contratile's own commands import."""

CHECKED = (
    *ESSENTIAL,
    *("torchvision", "transformers", "triton", "webdataset", "tensorboard", "matplotlib", "timm", "open_clip"),
    *("sentence_transformers", "lightly", "lightning", "pytorch_metric_learning"),
)
QUICK = ("PIL", "psutil", "rich", "safetensors", "tokenizers", "torchvision", "tyro")
"""Packages that import quickly."""

CORE_MODULES = {"transformers": "transformers.modeling_utils"}
"""Modules to import for packages that otherwise import their parts only on first use."""

DECLARED = {"torchvision": ("lightly", "open_clip", "timm", "transformers")}
"""Packages that are known to fail if another one is broken, listed even if their import was not tried."""

_NOT_AT_FAULT = ("", "__main__", "contratile", "torch")
PATIENCE = 120
"""Time limit in seconds for all imports: some packages use the network or compile on import."""


@dataclass(frozen=True)
class BrokenPackage:
    """A package that is installed but cannot be imported. `str` gives the reason and the remedy."""

    name: str
    version: str
    error: str
    breaks: list[str] = field(default_factory=list)
    """Other packages whose import fails because of it."""

    def __str__(self) -> str:
        others = f"It breaks {', '.join(self.breaks)}. " if self.breaks else ""
        called = f"{self.name} {self.version}".rstrip()
        return f"{called} is installed but cannot be imported ({self.error}). {others}{_remedy(self)}"


def _remedy(broken: BrokenPackage) -> str:
    if broken.name == "torchvision":
        install = f"Install the torchvision that belongs to torch {version('torch')}, from the same index as torch"
        return f"{install}, or uninstall it: the towers tiny, hf: and st: do not need it."
    return f"Reinstall it: pip install --force-reinstall --no-deps {_distribution(broken.name)}."


def culprit(name: str, error: BaseException) -> str:
    """The package in which an import failed: the innermost one in the traceback other than torch."""
    frames = traceback.walk_tb(_root(error).__traceback__)
    tops = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames]
    found = [top for top in tops if top not in _NOT_AT_FAULT and top not in sys.stdlib_module_names]
    return found[-1] if found else name


def _root(error: BaseException) -> BaseException:
    """The original error: packages that import their parts lazily wrap it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def why_not(name: str, error: BaseException) -> str:
    """Explain an import error.

    Args:
        name: The package that was imported.
        error: What the import raised.

    Returns:
        A sentence that names the package at fault, which may be one that `name` imports, and the remedy.
    """
    at_fault = culprit(name, error)
    return str(BrokenPackage(at_fault, _version(at_fault), root_cause(error), [name] if name != at_fault else []))


def find_spec_safely(name: str) -> bool:
    """Whether a package is installed, without importing it."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # None in sys.modules, or half imported
        return name in sys.modules


def broken_packages(names: Sequence[str] = CHECKED) -> list[BrokenPackage]:
    """Import each installed package in a subprocess.

    Args:
        names: Packages to try; those that are not installed are skipped.

    Returns:
        The packages at fault, each with the other packages that it breaks.
    """
    waiting = [name for name in names if find_spec_safely(name)]
    failed: list[dict[str, str]] = []
    while waiting:
        done, ended = _tried(waiting)
        failed += [row for row in done if row["error"]]
        waiting = waiting[len(done) :]
        if waiting and ended:  # the import killed the process
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
    """Import packages in a subprocess: a row for each, and why the process ended early, if it did."""
    command = [sys.executable, "-m", "contratile.packages", *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, errors="replace")
        output, ended = done.stdout, f"the process ended with code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        output = raw.decode(errors="replace") if isinstance(raw, bytes) else raw
        ended = f"still importing after {PATIENCE} s"
    except OSError as error:
        return [{"name": name, "culprit": name, "error": ""} for name in names], str(error)
    rows = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    return rows, ended or ("it ended early" if len(rows) < len(names) else "")


MARK = "contratile package "


def root_cause(error: BaseException) -> str:
    """The type and the first line of an error, of the original one where a package wraps it."""
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
    """Runs in the subprocess: prints a line of JSON per package."""
    for name in names:
        row = {"name": name, "culprit": name, "error": ""}
        try:
            import_module(CORE_MODULES.get(name, name))
        except Exception as error:  # a broken package raises anything
            row |= {"culprit": culprit(name, error), "error": root_cause(error)}
        print(f"\n{MARK}{json.dumps(row)}", flush=True)


if __name__ == "__main__":
    _try_imports(sys.argv[1:])

"""Models from folders and from the hub, with distrust: their weights and settings are read, their code is not run.

    with pretrained("hf", name):
        AutoModel.from_pretrained(name, trust_remote_code=False)

Whatever a package raises about a model's files becomes one line.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contratile.data.hub_names import absent, found_at_hub
from contratile.errors import bad_value

OWN = ("sentence_transformers.", "torch.nn.")
"""Packages whose classes a sentence-transformers folder may name."""

LARGE = 1 << 20
"""Bytes of a JSON file that are no settings any more, but a vocabulary."""


@contextmanager
def pretrained(maker: str, name: str) -> Iterator[None]:
    """Around the loading of a model named `maker:name`: one line for a model that is not there, or cannot be read.

    Raises:
        ValueError: The model cannot be loaded.
    """
    what = f"towers {maker}:{name}"
    with found_at_hub(name, what) as folder:
        if folder is not None and maker == "st":
            refuse_code(folder, what)
        with readable(what, missing="" if folder is not None else name):
            yield


@contextmanager
def readable(what: str, *, missing: str = "") -> Iterator[None]:
    """One line for whatever is raised about a model's files; `missing` is a name that no folder here has."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # packages raise their own, the network's, and those of every file format
        try:
            if _is_pickle(error):
                remedy = "A pickle can run code. Ask its author for safetensors, or convert it where you trust it."
                bad_value(what, expected="weights", got="a pickle that holds more than weights", remedy=remedy)
            if missing and isinstance(error, OSError):
                remedy = "Check the name, the path and the network."
                bad_value(what, expected="a folder or a model of the hub", got=absent(missing), remedy=remedy)
            remedy = "Check its name and files; CONTRATILE_DEBUG=1 shows where it failed."
            bad_value(what, expected="a model that can be loaded", got=brief(error), remedy=remedy)
        except ValueError as told:
            raise told from error


def refuse_code(folder: Path, what: str) -> None:
    """Refuse a folder of sentence-transformers that brings code or names foreign classes.

    Versions before 6 import what modules.json names, and run the Python files in a local folder, unasked.
    """
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".py":
            _refuse(what, f"the file {path.relative_to(folder)}")
        if path.is_symlink() and path.is_dir():
            _refuse(what, f"the link {path.relative_to(folder)} to another folder")
    for path in sorted(folder.rglob("*.json")):
        if path.stat().st_size > LARGE:
            if path.name != "tokenizer.json" and "vocab" not in path.name:
                _refuse(what, f"{path.stat().st_size >> 20} MiB of settings in {path.relative_to(folder)}")
            continue
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # the package will tell about it, if it reads it
        for key, value in _pairs(settings):
            where = path.relative_to(folder)
            if key == "auto_map":
                _refuse(what, f"auto_map in {where}")
            if path.name == "modules.json" and key == "path" and _leads_out(str(value)):
                _refuse(what, f"the path {value!r} in {where}")
            if path.name == "tokenizer.json":
                continue  # its types are those of the tokenizers package
            for name in map(str, value.values() if key == "types" and isinstance(value, dict) else [value]):
                dotted = key in ("type", "types", "tokenizer_class") and "." in name
                if (dotted or key == "activation_function") and not name.startswith(OWN):
                    _refuse(what, f"the class {name!r} in {where}")


def _leads_out(path: str) -> bool:
    return Path(path).is_absolute() or ".." in Path(path).parts


def _refuse(what: str, got: str) -> None:
    remedy = "Code in a model's folder is not run. Load it in Python if you trust it, and train with the losses."
    bad_value(what, expected="weights and settings only", got=got, remedy=remedy)


def _pairs(settings: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values, of every depth."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield str(key), value
            yield from _pairs(value)
    elif isinstance(settings, list):
        for value in settings:
            yield from _pairs(value)


def _is_pickle(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, pickle.UnpicklingError):
            return True
        error = error.__cause__ or error.__context__
    return False


def brief(error: BaseException) -> str:
    """The first line of what was raised."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300].rstrip(": .")

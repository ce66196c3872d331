"""Load models from folders and from the hub safely: weights and settings are read, code in them is never run.

    with pretrained("hf", name):
        AutoModel.from_pretrained(name, trust_remote_code=False)

Whatever a package raises about a model's files becomes a ValueError of one line.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contratile.data.hub_names import found_at_hub, why_not_found
from contratile.errors import bad_value

OWN = ("sentence_transformers.", "torch.nn.")
"""Prefixes of classes that the settings of a sentence-transformers model may name."""

LARGE = 1 << 20
"""JSON files above this size hold a vocabulary, not settings."""


@contextmanager
def pretrained(maker: str, name: str) -> Iterator[None]:
    """Wrap the loading of the model `maker:name`, so that failures become one line.

    Raises:
        ValueError: The model does not exist or cannot be loaded.
    """
    what = f"towers {maker}:{name}"
    with found_at_hub(name, what) as folder:
        if folder is not None and maker == "st":
            refuse_code(folder, what)
        with readable(what, missing="" if folder is not None else name):
            yield


@contextmanager
def readable(what: str, *, missing: str = "") -> Iterator[None]:
    """Turn whatever is raised inside into a ValueError of one line.

    Args:
        what: Names the model in the message.
        missing: The model's name if no local folder has it, so that it must come from the hub.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # packages raise errors of their own, of the network and of every file format
        try:
            if _is_pickle(error):
                remedy = "Pickles can run code. Ask the author for safetensors, or convert it yourself if you trust it."
                bad_value(what, expected="weights", got="a pickle that holds more than weights", remedy=remedy)
            if missing and isinstance(error, OSError):
                remedy = "Check the name, the path and the network."
                bad_value(what, expected="a folder or a model of the hub", got=why_not_found(missing), remedy=remedy)
            remedy = "Check its name and files; CONTRATILE_DEBUG=1 shows where it failed."
            bad_value(what, expected="a model that can be loaded", got=first_line(error), remedy=remedy)
        except ValueError as told:
            raise told from error


def refuse_code(folder: Path, what: str) -> None:
    """Raise a ValueError if a sentence-transformers folder contains code or names classes of other packages.

    sentence-transformers before 6 imports whatever modules.json names and runs Python files of a local folder.
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
            continue  # if the package reads it, it raises
        for key, value in _pairs(settings):
            where = path.relative_to(folder)
            if key == "auto_map":
                _refuse(what, f"auto_map in {where}")
            if path.name == "modules.json" and key == "path" and _leads_out(str(value)):
                _refuse(what, f"the path {value!r} in {where}")
            if path.name == "tokenizer.json":
                continue  # its "type" fields name types of the tokenizers package
            for name in map(str, value.values() if key == "types" and isinstance(value, dict) else [value]):
                dotted = key in ("type", "types", "tokenizer_class") and "." in name
                if (dotted or key == "activation_function") and not name.startswith(OWN):
                    _refuse(what, f"the class {name!r} in {where}")


def _leads_out(path: str) -> bool:
    return Path(path).is_absolute() or ".." in Path(path).parts


def _refuse(what: str, got: str) -> None:
    remedy = "Contratile runs no code from a model's folder. If you trust it, load it in Python and use the losses."
    bad_value(what, expected="weights and settings only", got=got, remedy=remedy)


def _pairs(settings: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values, nested ones included."""
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


def first_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300].rstrip(": .")

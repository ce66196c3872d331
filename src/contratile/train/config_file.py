"""Training configurations as TOML files: recipes, and config.toml in a run's folder.

    config = load_config(find_recipe("icons"))
    save_config(config, Path("runs/icons"))

A file may come from anyone: every name, type and value is checked, and nothing in it starts a program.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from contratile.data.files import written_whole
from contratile.data.foreign import Foreign
from contratile.errors import bad_type, bad_value, check_choice, check_size
from contratile.train.config import SECTIONS, TrainConfig

CONFIG = "config.toml"
"""Name of the configuration file in a run's folder."""

LARGEST = 1 << 20
"""Largest recipe in bytes; real ones have a few hundred."""


def load_config(path: Path, default: TrainConfig | None = None, *, allow_pipe: bool = False) -> TrainConfig:
    """Load a recipe: sections and fields of `TrainConfig` in TOML.

    Args:
        path: The file. It may come from anyone, so every value is checked.
        default: Values for fields that the file leaves out; by default those of `TrainConfig()`.
        allow_pipe: Allow the data named in the file to start programs (`pipe:COMMAND`, URLs).

    Returns:
        The configuration.

    Raises:
        ValueError: The file cannot be read, or has an unknown field or a value out of range.
        TypeError: A value has the wrong type.

    Examples:
        >>> config = load_config(Path("runs/icons/config.toml"))             # doctest: +SKIP
    """
    try:
        tomllib: Any = import_module("tomllib")
    except ImportError:  # Python 3.10
        tomllib = import_module("tomli")
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError("The file is larger")
        given = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        bad_value("config", expected="a TOML file", got=path, remedy=f"{error.strerror or error}.")
    except ValueError as error:  # invalid TOML or UTF-8, or a number with thousands of digits
        bad_value("config", expected=f"TOML in UTF-8, at most {LARGEST:,} bytes", got=path, remedy=f"{error}.")
    except RecursionError:
        bad_value(
            "config", expected="sections of values", got=f"{path}, nested too deeply", remedy="See docs/training.md."
        )
    config = from_dict(given, default or TrainConfig(), where=str(path))
    if allow_pipe:
        return config
    foreign = {
        name: _foreign(getattr(config.data, name), path)
        for name in ("data", "test_data")
        if name in given.get("data", {})
    }
    if "zero_shot" in given.get("eval", {}):
        named = Foreign(config.eval.zero_shot, origin=str(path))
        config = replace(config, eval=replace(config.eval, zero_shot=named))
    return replace(config, data=replace(config.data, **foreign))  # type: ignore[arg-type]  # Foreign is a str


def _foreign(names: str | tuple[str, ...], path: Path) -> str | tuple[str, ...]:
    if isinstance(names, tuple):
        return tuple(Foreign(name, origin=str(path)) for name in names)
    return Foreign(names, origin=str(path))


def from_dict(given: Mapping[str, Any], default: TrainConfig, *, where: str) -> TrainConfig:
    """Replace some fields of a configuration.

    Args:
        given: Values by section and field, as TOML has them.
        default: The configuration to start from.
        where: What error messages call the source of the values.

    Raises:
        ValueError: A name is unknown (the message names the nearest one) or a value is out of range.
        TypeError: A value has the wrong type.
    """
    parts = {}
    for section, values in given.items():
        _known(section, SECTIONS, where)
        if not isinstance(values, Mapping):
            bad_value(f"{where}: {section}", expected="a section", got=_short(values), remedy=f"Write [{section}].")
        part, here = getattr(default, section), f"{where} [{section}]"
        hints = get_type_hints(type(part))
        changes = {}
        for name, value in _in_present_words(section, values).items():
            _known(name, tuple(f.name for f in fields(part)), here)
            changes[name] = _convert(f"{here} {name}", value, hints[name], getattr(type(part)(), name))
        if section == "augment" and "augment" not in values and not part.on:
            changes["augment"] = "none" if changes.get("views") == 2 else "clip"  # a section turns it on
        with _named(here):
            parts[section] = replace(part, **changes)
    with _named(where):
        return replace(default, **parts)


def _in_present_words(section: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields that files of 0.1 have under another name."""
    if section != "loss" or not isinstance(values.get("dedup"), bool) or "same_id" in values:
        return values
    rest, loss = {name: value for name, value in values.items() if name != "dedup"}, values.get("loss")
    if loss in ("ntxent", "supcon"):  # it had no effect there, nor on siglip, whose pairs were all negatives
        return rest
    return rest | {"same_id": "exclude" if values["dedup"] and loss != "siglip" else "negative"}


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Prefix errors with the name of the file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where} {error}") from error


def _known(name: str, known: tuple[str, ...], where: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]}?" if near else "Drop it."
        bad_value(where, expected=f"one of {', '.join(known)}", got=_short(name), remedy=remedy)


# For each field type: the accepted TOML types, and how to call them.
_WANTED: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text in quotes"),
    Path: ((str,), "a path in quotes"),
}


def _convert(what: str, value: Any, hint: Any, default: Any) -> Any:
    """Convert a TOML value to the type of a field."""
    words: tuple[str, ...] = ()
    if get_origin(hint) in (Union, UnionType):  # TOML has no None, so it must be one of the other types
        options = [option for option in get_args(hint) if option is not type(None)]
        words = tuple(word for option in options if get_origin(option) is Literal for word in get_args(option))
        if isinstance(value, str) and value in words:
            return value
        options = [option for option in options if get_origin(option) is not Literal] or options
        # Of several, a list wants a tuple and anything else does not.
        fitting = [option for option in options if (get_origin(option) is tuple) == isinstance(value, list)]
        hint = (fitting or options)[0]
    if get_origin(hint) is Literal:
        check_choice(what, value, get_args(hint))
        return value
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if kinds[-1] is ...:
            if not isinstance(value, list):
                bad_type(what, expected="a list", got=_short(value), remedy='Write it as ["first", "second"].')
            return tuple(_convert(what, part, kinds[0], None) for part in value)
        if not isinstance(value, list) or len(value) != len(kinds):
            bad_type(what, expected=f"a list of {len(kinds)}", got=_short(value), remedy="Write it as [0.9, 0.98].")
        return tuple(_convert(what, part, kind, None) for part, kind in zip(value, kinds, strict=True))
    types, word = _WANTED[hint]
    fits = isinstance(value, types) and isinstance(value, bool) == (hint is bool)
    if not fits:
        example = f"{what.rpartition(' ')[2]} = {_toml(str(default) if isinstance(default, Path) else default)}"
        remedy = "Check its type." if default is None else f"Write it like {example}."
        bad_type(what, expected=" or ".join((word, *map(repr, words))), got=_short(value), remedy=remedy)
    if isinstance(value, int | float):
        check_size(what, value)
    elif "\0" in value:
        bad_value(what, expected="a text", got=_short(value), remedy="Remove the NUL.")
    return Path(value) if hint is Path else float(value) if hint is float else value


def _short(value: object) -> str:
    """The repr of a value, cut to fit a line."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def to_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Plain values by section. None is left out, since TOML has no word for it."""
    sections = {}
    for section in SECTIONS:
        part = getattr(config, section)
        values = {f.name: getattr(part, f.name) for f in fields(part)}
        sections[section] = {k: str(v) if isinstance(v, Path) else v for k, v in values.items() if v is not None}
    return sections


def to_toml(config: TrainConfig) -> str:
    """Write a configuration as a recipe; `load_config` reads it back."""
    lines = []
    for section, values in to_dict(config).items():
        lines += [f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items()), ""]
    return "\n".join(lines)


def save_config(config: TrainConfig, folder: Path) -> None:
    """Write config.toml into a run's folder.

    Args:
        config: The options to write.
        folder: Folder of the run, which must exist.

    Examples:
        >>> save_config(TrainConfig(), Path("runs/icons"))                   # doctest: +SKIP
    """
    with written_whole(folder / CONFIG) as draft:
        draft.write_text(to_toml(config), encoding="utf-8")


def _toml(value: Any) -> str:
    for text in value if isinstance(value, tuple) else [value]:
        if isinstance(text, str) and not _is_unicode(text):
            bad_value(
                "config", expected="text in UTF-8", got=ascii(text), remedy="Check the bytes of the command line."
            )
    # Strings, numbers, booleans and lists are written the same in JSON and TOML.
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _is_unicode(text: str) -> bool:
    """Bytes of the command line that are not UTF-8 become lone surrogates, which TOML cannot hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)

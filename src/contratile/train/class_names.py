"""Class names and prompts for zero-shot classification: from a file, or by a name that open_clip knows.

    load_classes("imagenet")               # the 1,000 class names of ImageNet
    load_templates("openai")               # OpenAI's 80 prompts; "simple": 7 of them
    load_classes("names.txt")              # one per line

A word without a folder or a suffix that is one of these names means the list, even if there is a file of that name;
write ./imagenet for the file. The lists are data of the package open_clip. Only that one file of it is executed, so it
does not matter whether open_clip itself can be imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from contratile.errors import bad_value

CLASSES = {"imagenet": "IMAGENET_CLASSNAMES"}
TEMPLATES = {"openai": "OPENAI_IMAGENET_TEMPLATES", "simple": "SIMPLE_IMAGENET_TEMPLATES"}
"""Names of the lists, and what open_clip calls them."""

WORDNET_ID = re.compile(r"n\d{8}")
LARGEST = 1 << 24
"""Maximum bytes of a file of names or prompts."""


def load_classes(name: str) -> list[str]:
    """Load class names, without duplicates.

    Args:
        name: "imagenet", or a file with one name per line.

    Raises:
        ValueError: There is no such file, or it holds no names.
        ImportError: The list comes from open_clip, which is not installed or has no such list.
    """
    if is_listed(name, CLASSES):
        return list(dict.fromkeys(map(str, _of_open_clip(name, CLASSES[name]))))
    return _lines("classes", name, CLASSES)


def of_wordnet_ids(texts: Sequence[str], classes: str) -> list[str]:
    """Class names instead of ImageNet's folder names (n01440764), which in sorted order are the classes.

    Args:
        texts: The texts of samples, for example from a folder of class folders.
        classes: What the class names were loaded with; anything but "imagenet" leaves the texts as they are.

    Raises:
        ValueError: They are such ids, but not of all 1,000 classes, so that their order does not tell which they are.
    """
    found = sorted(set(texts))
    if not is_listed(classes, CLASSES) or not found or not all(map(WORDNET_ID.fullmatch, found)):
        return list(texts)
    names = list(map(str, _of_open_clip(classes, CLASSES[classes])))
    if len(found) != len(names):
        remedy = "Rename the folders to class names, or pass --classes FILE with the names of the folders."
        got = f"{len(found):,}, first {found[0]}"
        bad_value("classes", expected=f"folders of all {len(names):,} WordNet ids of ImageNet", got=got, remedy=remedy)
    place = dict(zip(found, names, strict=True))
    return [place[text] for text in texts]


def load_templates(name: str) -> list[str]:
    """Load prompts; `{}` in them stands for the class name.

    Args:
        name: "openai", "simple", or a file with one prompt per line; `{c}` in it means the same as `{}`.

    Raises:
        ValueError: There is no such file, or a prompt has no place for the class name.
        ImportError: The list comes from open_clip, which is not installed or has no such list.
    """
    if is_listed(name, TEMPLATES):
        found = [prompt("{}") for prompt in _of_open_clip(name, TEMPLATES[name])]  # functions of the class name
    else:
        found = [line.replace("{c}", "{}") for line in _lines("templates", name, TEMPLATES)]
    check_templates(found)
    return found


def check_templates(templates: list[str] | tuple[str, ...]) -> None:
    """Raise a ValueError if a prompt has no `{}`."""
    for template in templates:
        if "{}" not in template:
            remedy = 'Write it like "a photo of a {}."'
            bad_value("template", expected="a prompt with {} for the name", got=repr(template), remedy=remedy)


def is_listed(name: str, known: dict[str, str]) -> bool:
    """Whether a word means one of the known lists, not a file."""
    return name in known and not any(mark in name for mark in (os.sep, os.altsep or os.sep, "."))


def absolute_list(name: str, known: dict[str, str]) -> str:
    """The name of a list as it is, or the absolute path of a file; empty stays empty."""
    return name if not name or is_listed(name, known) else str(Path(name).absolute())


def _lines(option: str, name: str, known: dict[str, str]) -> list[str]:
    """The distinct lines of a file, without empty ones."""
    path = Path(name)
    if not path.is_file():
        expected = f"{' or '.join(known)}, or a file with one per line"
        bad_value(option, expected=expected, got=f"nothing at {name!r}", remedy="Check the path.")
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    try:
        if len(data) > LARGEST:
            raise ValueError
        text = data.decode("utf-8-sig")
    except ValueError:
        expected = f"a text file in UTF-8, at most {LARGEST >> 20} MiB"
        bad_value(str(path), expected=expected, got="other bytes or more", remedy="One name or prompt per line.")
    found = dict.fromkeys(line.strip() for line in text.splitlines() if line.strip())
    if not found:
        bad_value(str(path), expected="one name or prompt per line", got="an empty file", remedy="Write some.")
    return list(found)


def _of_open_clip(name: str, variable: str) -> Any:
    """A list of open_clip, from its module of data alone."""
    needed = f"{name!r} is a list of the package open_clip"
    remedy = "pip install open_clip_torch, or pass a file with one per line"
    try:
        package = find_spec("open_clip")
    except (ImportError, ValueError):  # blocked, or half imported
        package = None
    if package is None or not package.submodule_search_locations:
        raise ImportError(f"{needed}, which is not installed: {remedy}.")
    path = Path(package.submodule_search_locations[0]) / "zero_shot_metadata.py"
    try:
        spec = spec_from_file_location("contratile_open_clip_lists", path)
        assert spec is not None and spec.loader is not None, "a Python file"
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, variable)
    except Exception as error:  # another version of the package
        raise ImportError(f"{needed}, and this version has no {variable} ({error}): {remedy}.") from error

"""The page of all commands and options, made from the options themselves.

python -m contratile.cli.reference > docs/cli.md

A test keeps the page and the options the same.
"""

import argparse
import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from contratile.cli import COMMANDS, Command

INTRODUCTION = """\
# Command line

`contratile COMMAND --help` shows the same in the terminal. This page is made from the options:
`python -m contratile.cli.reference > docs/cli.md`.
"""
OF_THE_MACHINE = "torch.get_num_threads()"
"""A default that differs from machine to machine: the page shows how it is found."""


class Option(NamedTuple):
    """A row of a table."""

    names: str
    value: str
    default: str
    about: str


class Section(NamedTuple):
    """A table; its title is empty where a command has one only."""

    title: str
    options: list[Option]


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *(chapter(command) for command in COMMANDS)])


def chapter(command: Command) -> str:
    """One command: what it does, an example, its options."""
    module, name = command.options.split(":")
    options = getattr(import_module(module), name)()
    sections = of_parser(options) if isinstance(options, argparse.ArgumentParser) else of_config(options)
    about = options.description if isinstance(options, argparse.ArgumentParser) else inspect.getdoc(type(options))
    parts = [f"## contratile {command.name}\n", f"{about}\n", f"```bash\n{command.example}\n```\n"]
    for section in sections:
        parts += [f"### {section.title}\n"] if section.title else []
        parts += ["| option | value | default | |", "| --- | --- | --- | --- |"]
        parts += [f"| {' | '.join(map(_cell, row))} |" for row in section.options]
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    """Text as it looks in a table: neither a border nor a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def of_parser(parser: argparse.ArgumentParser) -> list[Section]:
    """The options of an argparse command."""
    return [Section("", [_of_action(x) for x in parser._actions if not isinstance(x, argparse._HelpAction)])]


def of_config(config: Any, title: str = "") -> list[Section]:
    """The options of a command whose options are the fields of a dataclass, or of the dataclasses in it."""
    parts = [(field.name, getattr(config, field.name)) for field in fields(config)]
    if all(is_dataclass(part) for _, part in parts):
        recipe = Option(
            "`--config`", "PATH", "", "A recipe in TOML: these sections and fields. Options are on top of it."
        )
        pipe = Option(
            "`--allow-pipe`", "", "", "Let the data that a recipe names start programs (`pipe:COMMAND`, addresses)."
        )
        return [
            Section("Recipe", [recipe, pipe]),
            *(section for name, part in parts for section in of_config(part, f"{_first_line(part)} `[{name}]`")),
        ]
    hints, written = get_type_hints(type(config)), dict(_written(type(config)))
    return [Section(title, [_of_field(name, hints[name], value, *written[name]) for name, value in parts])]


def _of_action(action: argparse.Action) -> Option:
    if not action.option_strings:
        names = f"`{action.dest.upper()}{' ...' if action.nargs == '+' else ''}`"
    else:
        names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        value = ""
    elif action.choices is not None:
        value = ", ".join(f"`{choice}`" for choice in action.choices)
    else:
        # Types of the parsers are int, Path, or functions that check an int or a device.
        value = {"_positive": "INT", "int": "INT", "_device": "DEVICE", "Path": "PATH"}.get(
            getattr(action.type, "__name__", ""), "TEXT"
        )
    about, _, default = (action.help or "").partition(" (default: ")
    default = "required" if action.required and action.option_strings else default.removesuffix(")")
    return Option(names, value, default, about)


def _of_field(name: str, hint: Any, default: Any, source: str, about: str) -> Option:
    dashed = name.replace("_", "-")
    names = f"`--{dashed}`, `--no-{dashed}`" if hint is bool else f"`--{dashed}`"
    return Option(names, _value(hint), f"`{source}`" if source == OF_THE_MACHINE else _shown(default), about)


def _value(hint: Any) -> str:
    """What an option takes."""
    if hint is bool:
        return ""
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_value(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        return f"{_value(kinds[0])} ..." if kinds[-1] is ... else " ".join(map(_value, kinds))
    return {type(None): "`None`", str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH"}[hint]


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, tuple):
        return "`" + " ".join(map(str, default)) + "`"
    if default is None or default == "":
        return ""
    return f"`{default:.6g}`" if isinstance(default, float) else f"`{default}`"


def _written(cls: type) -> Iterator[tuple[str, tuple[str, str]]]:
    """(field, (its default in the source, the text under it)), of bases first: a class may say it anew."""
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(node, ast.ClassDef)
            for field, text in pairwise(node.body):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(field.target, ast.Name) and isinstance(text, ast.Expr), "a field without a text"
                    source = "" if field.value is None else ast.unparse(field.value)
                    yield field.target.id, (source, " ".join(str(ast.literal_eval(text.value)).split()))


def _first_line(part: Any) -> str:
    return (inspect.getdoc(type(part)) or "").partition(".")[0]


if __name__ == "__main__":
    sys.stdout.write(page())

"""Every public name documents itself: what it does, its parameters, and an example that runs."""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

import contratile as ct

PUBLIC: dict[str, Callable[..., Any]] = {
    name: value
    for name, value in vars(ct).items()
    if callable(value) and not name.startswith("_") and not inspect.ismodule(value)
}
FUNCTIONS = [name for name, value in PUBLIC.items() if inspect.isfunction(value)]
CORE = ["engine", "ring", "losses", "grad_cache"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_documented(name: str) -> None:
    """`help()` is enough to use a function."""
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert "Args:" in text and "Returns:" in text, name
    arguments = text.split("Args:")[1].split("Returns:")[0]
    for parameter in inspect.signature(PUBLIC[name]).parameters:
        assert f"    {parameter}: " in arguments, f"{name}({parameter}=)"


def modules() -> list[str]:
    found = ["contratile.metrics", "contratile.reference"]
    for package in CORE:
        path = importlib.import_module(f"contratile.{package}").__path__
        found += [x.name for x in pkgutil.walk_packages(path, f"contratile.{package}.") if "triton" not in x.name]
    return found


@pytest.mark.filterwarnings("ignore::contratile.NotNormalizedWarning")
@pytest.mark.parametrize("name", [name for name in modules() if name != "contratile.engine.plan"])
def test_examples_run(name: str) -> None:
    """(The plan's module shows a plan for another machine; its own test compares that.)"""
    module = importlib.import_module(name)
    failures = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert failures.failed == 0


@pytest.mark.parametrize(
    "name", [name for name in PUBLIC if name not in ("BatchStats", "NotNormalizedWarning", "TilePlan")]
)
def test_there_is_an_example(name: str) -> None:
    assert ">>>" in (inspect.getdoc(PUBLIC[name]) or ""), name


def test_plan_example() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(ct.plan_tiles, "plan_tiles", globs={})
    assert doctest.DocTestRunner().run(example).failed == 0

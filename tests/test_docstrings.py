"""Examples in docstrings are run, and public names have one."""

import doctest
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import contratile as ct

ROOT = Path(ct.__file__).parent
MODULES = sorted(
    ".".join(["contratile", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if re.search(r">>> (?!.*\+SKIP)", path.read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    module = import_module(name)
    runner = doctest.DocTestRunner()
    for example in examples(module):
        runner.run(example)
    result = runner.summarize()
    assert result.attempted and not result.failed


def examples(module: ModuleType) -> Iterator[doctest.DocTest]:
    """Those of the module; doctest does not find those of decorated functions by itself."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    yield from finder.find(module)
    for name, value in vars(module).items():
        function = inspect.unwrap(value) if inspect.isroutine(value) else value
        if function is not value and function.__module__ == module.__name__:
            yield from finder.find(function, name, module=module)


def test_public_names_have_an_example() -> None:
    callables = [name for name, value in vars(ct).items() if name[0] != "_" and callable(value)]
    records = {"BatchStats", "LossTerms", "HardNegatives", "NotNormalizedWarning", "TilePlan"}  # results of the others
    assert records < set(callables)
    assert [name for name in callables if name not in records and ">>> " not in (getattr(ct, name).__doc__ or "")] == []

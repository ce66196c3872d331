"""Implementations that benchmarks compare, by what they compute.

`loss` has those of the symmetric loss, `family` those of the other losses, `ring` those of the symmetric loss over
ranks, `cache` those of a training step in chunks, and `data` loaders. To add one, write a function that imports the
package and returns the step, and add a record of it to the table at the end of the module.
"""

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One implementation."""

    name: str
    load: Callable[..., Any]
    """Imports the package and returns the step; ImportError if it is not installed."""

    about: str
    """One line: what is called, and what is special about it."""

    package: str | None = None
    """Its distribution; None for our own code and for plain PyTorch."""


def packages_of(contestants: Iterable[Contestant]) -> tuple[str, ...]:
    """Return the distributions of contestants, in order and without repetition."""
    return tuple(dict.fromkeys(contestant.package for contestant in contestants if contestant.package))


def private_copy(name: str) -> Any:
    """Execute a module again, as a copy for one contestant: changing it changes nothing for others who import it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no module {name}", name=name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

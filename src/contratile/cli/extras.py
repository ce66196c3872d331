"""Commands that need more than torch say so."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def missing(command: str, packages: Sequence[str], extra: str) -> bool:
    """Say what to install if an extra is not there."""
    absent = [name for name in packages if find_spec(name) is None]
    if absent:
        remedy = f'pip install "contratile[{extra}]"'
        print(f"contratile {command}: needs {', '.join(absent)}; install with: {remedy}", file=sys.stderr)
    return bool(absent)

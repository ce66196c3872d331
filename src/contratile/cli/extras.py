"""Commands that need more than torch say so; other packages' bars stay out of logs."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

TRAIN = ("accelerate", "tokenizers", "safetensors", "tyro", "rich", "PIL")
"""What `contratile train`, `eval` and `search` import."""


def missing(command: str, packages: Sequence[str], extra: str) -> bool:
    """Say what to install if an extra is not there."""
    absent = [name for name in packages if not _there(name)]
    if absent:
        remedy = f'pip install "contratile[{extra}]"'
        print(f"contratile {command}: needs {', '.join(absent)}; install with: {remedy}", file=sys.stderr)
    return bool(absent)


def quiet_progress() -> None:
    """No progress bars of other packages where nobody watches. To be called before they are imported."""
    if not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # hidden, or half imported
        return False

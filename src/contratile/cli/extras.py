"""Optional packages of the commands: a hint if they are missing, and no progress bars in logs."""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

TRAIN = ("accelerate", "safetensors", "tokenizers", "tyro", "rich", "PIL", "psutil")
"""What `contratile train`, `eval` and `search` always import."""


def missing(command: str, packages: Sequence[str], extra: str) -> bool:
    """Print what to install, and return True, if a package of an extra is missing."""
    absent = [name for name in packages if not _there(name)]
    if absent:
        remedy = f'pip install ".[{extra}]" in a clone of Contratile'
        print(f"contratile {command}: needs {', '.join(absent)}; install with: {remedy}", file=sys.stderr)
    return bool(absent)


def quiet_progress() -> None:
    """Turn off progress bars of other packages if stderr is not a terminal. Call it before they are imported."""
    if not sys.stderr.isatty():
        for name in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(name, "1")


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # blocked, or partly imported
        return False

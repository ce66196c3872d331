"""Where derived files live, and how they come to be: complete or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from contratile.errors import bad_value


def cache_folder(given: Path | None = None) -> Path:
    """The folder given, else `contratile` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return given if given is not None else Path(base) / "contratile"


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """The file, made first if need be: under another name, then renamed; of several processes one makes it."""
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "Name another folder (--cache)."
            bad_value("cache", expected="a folder to write to", got=f"{path.parent} ({error.strerror})", remedy=remedy)
        with FileLock(path.with_name(f".{path.name}.lock")):
            if not path.exists():
                draft = path.with_name(f".{path.name}.{os.getpid()}.part")
                try:
                    make(draft)
                    draft.replace(path)
                finally:
                    draft.unlink(missing_ok=True)
    return path

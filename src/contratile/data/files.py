"""Derived files: where they are cached, and how they are written completely or not at all."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from contratile.errors import bad_value


def cache_folder(given: Path | None = None) -> Path:
    """The given folder, or `contratile` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return given if given is not None else Path(base) / "contratile"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Context manager that yields a draft to write to, and renames it to `path` on success.

    An existing draft is removed first: in a folder from someone else it could be a link to another file.
    """
    draft = path.with_name(f".{path.name}.part")
    draft.unlink(missing_ok=True)
    try:
        yield draft
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Context in which a new file is written; it gets the access rights of any new file.

    Versions of safetensors write to a temporary file that only its owner can read, and rename it.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def made_once(path: Path, make: Callable[[Path], None]) -> Path:
    """Return `path`. If the file does not exist, one of several processes creates it with `make(draft)`."""
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "Choose another folder (--cache)."
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

"""Where derived files live, and how they come to be: complete or not at all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from contratile.errors import bad_value


def cache_folder(given: Path | None = None) -> Path:
    """The folder given, else `contratile` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return given if given is not None else Path(base) / "contratile"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A draft to write to, which takes the file's name when it is complete.

    What stands in the draft's place is removed: a folder may come from anyone, and a link in it would be followed.
    """
    draft = path.with_name(f".{path.name}.part")
    draft.unlink(missing_ok=True)
    try:
        yield draft
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


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

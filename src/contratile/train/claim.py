"""Only one process may write to a run's folder; a second one is refused with a message that names the first.

    held = claim(run)        # as long as `held` lives, no other process can claim the folder

The claim is an advisory lock on an open file, so the system releases it when the process ends, however that happens.
The file is removed only with its folder; a process that had just opened it notices that it is no longer there. Readers
(`eval`, `search`) need no claim, and a process may claim a folder several times.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from contratile.errors import bad_value

LOCK = ".lock"
ATTEMPTS = 100
"""How often to try again if the folder disappears because another process has just removed it."""

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems without locks, such as some network ones."""


class Claim:
    """A claim, released when the last reference to it is gone."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.release = weakref.finalize(self, os.close, descriptor)


_ours: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
"""Claims of this process by folder. Keys are strings, because paths cannot be compared at interpreter exit."""


def claim(run: Path) -> Claim | None:
    """Claim the folder of a run, which must exist. Warns and returns None if the file system cannot lock.

    Raises:
        ValueError: Another process has claimed it.
        FileNotFoundError: It is not there, or was just removed.
    """
    place = run.resolve()
    held = _ours.get(str(place))
    if held is not None and held.release.alive and _is_of(held.descriptor, place):
        return held
    # Do not follow a link: the folder may come from anyone.
    descriptor = os.open(place / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        fault = _lock(descriptor)
        if fault is not None:
            warnings.warn(f"{run} cannot be locked ({fault}): make sure that no other run writes to it", stacklevel=2)
            os.close(descriptor)
            return None
        if not _is_of(descriptor, place):
            raise FileNotFoundError(errno.ENOENT, "removed while it was claimed", str(run))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    except BlockingIOError:
        holder = _holder(descriptor)
        os.close(descriptor)
        remedy = "Wait for it or stop it, or pass another --out."
        bad_value("out", expected="a folder that no other run writes to", got=f"{run}, used by {holder}", remedy=remedy)
    except BaseException:
        os.close(descriptor)
        raise
    held = _ours[str(place)] = Claim(descriptor)
    return held


def create_and_claim(run: Path) -> tuple[Claim | None, list[Path]]:
    """Create the folder of a run unless it exists, and claim it.

    Returns:
        The claim, None if the file system cannot lock; and the folders that were created, the innermost first.

    Raises:
        ValueError: Another process has claimed it.
    """
    for _ in range(ATTEMPTS):
        new = [folder for folder in (run, *run.parents) if not folder.exists()]
        run.mkdir(parents=True, exist_ok=True)
        try:
            return claim(run), new
        except FileNotFoundError:  # just removed, by a run that was refused
            continue
    raise AssertionError(f"{run} cannot be claimed: it is removed again and again")


def remove_unused(held: Claim | None, created: list[Path], names: Iterable[str]) -> None:
    """Remove the folder of a run that came to nothing, and release it: only what was created for it, and only if there
    is nothing in it but the files of these names and the claim's.

    Args:
        held: The claim.
        created: From `create_and_claim`.
        names: Files that a new run begins with.
    """
    if held is None or not created:
        return
    known = {LOCK, *names}
    with suppress(OSError):  # somebody else may use the folder by now
        if known >= {path.name for path in created[0].iterdir()}:
            for name in known:
                (created[0] / name).unlink(missing_ok=True)
            for folder in created:
                folder.rmdir()
    held.release()


def _is_of(descriptor: int, place: Path) -> bool:
    """Whether the open file is the one in the folder, not one of an earlier folder of the same name."""
    try:
        return os.path.samestat(os.fstat(descriptor), (place / LOCK).stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int) -> str | None:
    """Lock an open file; returns the reason if that is not possible here."""
    try:
        import fcntl
    except ImportError:
        return "this system has no flock"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.strerror(error.errno)
    return None


def _holder(descriptor: int) -> str:
    """The process that holds the lock, from the contents of the file."""
    try:
        told = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {int(told['pid'])} on {str(told['host'])[:100]!r}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"  # it has not written yet, or the file is something else

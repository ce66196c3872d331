"""What `contratile doctor --tune` found to be fastest on a machine, kept in the user's cache folder.

    tuned.lookup("tiles", device="AMD EPYC, 2 cores", dtype="float32", d=512)      # (1024, 512), or None
    tuned.record("tiles", device=..., dtype="float32", d=512, choice=(1024, 512))

The file is read once per process, so forward and backward always make the same choice. What was recorded later, or for
other versions of torch, Triton or these sources, is not used. CONTRATILE_CACHE names another folder, and
CONTRATILE_TUNED=0 ignores the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

FOLDER, SWITCH = "CONTRATILE_CACHE", "CONTRATILE_TUNED"
"""Environment variables: the folder of the file, and 0 to ignore it."""
NAME = "tuned.json"
FORMAT = 1
LARGEST = 1 << 20
"""Bytes of a file that could be ours."""
TILES = "tiles"
"""Height and width of the torch backend's tiles on a CPU. The other kinds are kernels: their launch configurations."""

Choice = tuple[int, ...]


class Key(NamedTuple):
    """What an entry is for."""

    kind: str
    device: str
    dtype: str
    d: int
    versions: str


class TunedEntry(NamedTuple):
    """What was chosen, with its time and that of the default."""

    choice: Choice
    seconds: float | None = None
    default_seconds: float | None = None


def folder() -> Path | None:
    """Return the folder of the file; None if the system does not say where a user's caches are."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return Path(local) / "contratile" if local else None
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if Path(shared).is_absolute():  # the XDG standard says to ignore relative paths
        return Path(shared) / "contratile"
    try:
        return Path.home() / ".cache" / "contratile"
    except RuntimeError:  # no HOME, and no entry for the user
        return None


def prepare() -> Path:
    """Make the folder and return the path of the file.

    Raises:
        OSError: If nothing can be written there.
    """
    here = folder()
    if here is None:
        raise OSError(f"there is no folder for caches on this system. Name one in the variable {FOLDER}")
    try:
        here.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=here):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"{here}: cannot be written ({reason}). Name another folder in the variable {FOLDER}") from error
    return here / NAME


def lookup(kind: str, *, device: str, dtype: str, d: int) -> Choice | None:
    """Return the choice recorded for the nearest D of the same power of two (2^k < D <= 2^(k+1)), or None."""
    found = [key for key in entries() if key[:3] == (kind, device, dtype) and _bucket(key.d) == _bucket(d)]
    found = [key for key in found if key.versions == versions(kind)]
    if not found:
        return None
    return entries()[min(found, key=lambda key: (abs(key.d - d), key.d))].choice


def record(
    kind: str,
    *,
    device: str,
    dtype: str,
    d: int,
    choice: Choice | None,
    seconds: float | None = None,
    default_seconds: float | None = None,
) -> Path:
    """Write a choice to the file, from which later processes read it; None removes it: the default is best.

    Processes that record at the same time wait for each other, and readers only ever see a whole file.

    Raises:
        OSError: If the file cannot be written.
    """
    path = prepare()
    key = Key(kind, device, dtype, d, versions(kind))
    with _alone(path):
        kept = {other: entry for other, entry in _read(path).items() if other != key}
        if choice is not None:
            kept[key] = TunedEntry(choice, seconds, default_seconds)
        rows = [{**other._asdict(), **entry._asdict()} for other, entry in sorted(kept.items())]
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{NAME}.", text=True)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps({"format": FORMAT, "entries": rows}, indent=1) + "\n")
            Path(draft).replace(path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    return path


@cache
def entries() -> Mapping[Key, TunedEntry]:
    """Return what the file held when this process first asked."""
    here = folder()
    if here is None or os.environ.get(SWITCH, "1") == "0":
        return {}
    return _read(here / NAME)


def forget() -> None:
    """Read the file again at the next lookup. Not between a forward and its backward pass."""
    entries.cache_clear()
    _known.cache_clear()
    _warned.clear()


@cache
def versions(kind: str) -> str:
    """Return what an entry must have been made with to be used: torch and our version, or Triton and our kernels."""
    import torch

    if kind == TILES:
        from contratile import __version__

        return f"torch {torch.__version__}, contratile {__version__}"
    from importlib.metadata import PackageNotFoundError, version

    try:
        triton = version("triton")
    except PackageNotFoundError:  # under another name, as for ROCm
        triton = "unknown"
    sources = sorted((Path(__file__).parent / "backends").glob("triton_*.py"))
    digest = sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return f"torch {torch.__version__}, triton {triton}, kernels {digest}"


# --- lookups of a step ----------------------------------------------------------------------------------------------


def tiles(d: int, itemsize: int) -> tuple[int, int] | None:
    """Return the height and width of tiles on this CPU, if they were tuned for such features."""
    forced_shape = _forced.get(TILES)
    if forced_shape is not None:
        return forced_shape[0], forced_shape[1]
    found = _known(TILES, cpu(), accumulated(itemsize), int(d)) if entries() else None
    return (found[0], found[1]) if found is not None and len(found) == 2 and min(found) >= 16 else None


def kernel(name: str, *, device: str, kind: str, d: int) -> Choice | None:
    """Return the launch configuration of a kernel ("forward" or "gradient"), if it was tuned or is forced."""
    if name in _forced:
        return _forced[name]
    return _known(name, device, kind, d) if entries() else None


@cache
def _known(kind: str, device: str, dtype: str, d: int) -> Choice | None:
    return lookup(kind, device=device, dtype=dtype, d=d)


@cache
def cpu() -> str:
    """Return the name of this CPU with the cores that this process may use."""
    from contratile.machine import cpu_name

    return cpu_name()


def accumulated(itemsize: int) -> str:
    """Return the dtype in which tiles of this itemsize are computed."""
    return {4: "float32", 8: "float64"}[itemsize]


_forced: dict[str, Choice] = {}
"""Not a context variable, because backward passes may run in another thread."""


@contextlib.contextmanager
def forced(kind: str, choice: Choice | None) -> Iterator[None]:
    """Context manager: use a choice in this process, whatever was recorded. Run forward and backward inside it."""
    before = _forced.pop(kind, None)
    if choice is not None:
        _forced[kind] = choice
    try:
        yield
    finally:
        _forced.pop(kind, None)
        if before is not None:
            _forced[kind] = before


# --- the file -----------------------------------------------------------------------------------------------------


def _bucket(d: int) -> int:
    return (d - 1).bit_length()


def _read(path: Path) -> dict[Key, TunedEntry]:
    """The entries of a file. One that is not ours, or is damaged, counts as empty."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        return _ignored(path, error.strerror or str(error))
    if len(text) > LARGEST:
        return _ignored(path, "too large")
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            return _ignored(path, f"not format {FORMAT}")
        return dict(_entry(row) for row in content["entries"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return _ignored(path, f"{type(error).__name__}: {str(error)[:80]}")


def _entry(row: Any) -> tuple[Key, TunedEntry]:
    key = Key(*(row[name] for name in Key._fields))
    choice, times = row["choice"], (row.get("seconds"), row.get("default_seconds"))
    whole = [key.d, *choice]
    if not all(isinstance(text, str) for text in (key.kind, key.device, key.dtype, key.versions)):
        raise TypeError("expected text")
    if not isinstance(choice, list) or not all(type(x) is int and 0 < x < 1 << 31 for x in whole):
        raise TypeError("expected positive whole numbers")
    if not all(time is None or type(time) in (int, float) for time in times):
        raise TypeError("expected seconds")
    return key, TunedEntry(tuple(choice), *times)


_warned: set[Path] = set()


def _ignored(path: Path, reason: str) -> dict[Key, TunedEntry]:
    if path not in _warned:
        _warned.add(path)
        what = f"contratile ignores {path} ({reason}). Delete it, or write it again with `contratile doctor --tune`."
        warnings.warn(what, stacklevel=2)
    return {}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process records. Where files cannot be locked, the last one to record wins."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with path.with_name(f".{NAME}.lock").open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield

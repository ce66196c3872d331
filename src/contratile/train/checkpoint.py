"""Crash-safe checkpoints of safetensors and JSON files, without pickles.

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random_state()}
    save(run / "checkpoints" / step_name(100), state, {"step": 100, "best_step": 100})
    keep(run, last=2)
    folder = latest(run)                             # or best(run)
    state, facts = load(folder)

A checkpoint is written under a temporary name, synced to disk and renamed, so a process killed at any moment leaves the
previous one intact. `manifest.json` holds size and checksum of every file; `load` verifies them. One process writes to
a run while any number may read it.

The newest checkpoint records which one is the best (`best_step`), so both become visible with a single rename. The link
`run/best` is derived from it afterwards, for people and other programs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from contratile.data.files import usual_mode
from contratile.errors import bad_type, bad_value
from contratile.train.state_tree import flatten, restore

FORMAT = "contratile checkpoint 1"
_STEP = re.compile(r"step-(\d{8,})")
# Infixes, followed by the writer's process id: a draft or an unfinished removal; an older checkpoint being replaced.
_DRAFT, _OLD = ".tmp-", ".old-"
_ASIDE = "damaged-"
"""Prefix of a damaged checkpoint that was set aside; it is not found under that name."""


class Damaged(ValueError):
    """A checkpoint differs from what `save` wrote; `fault` says where."""

    def __init__(self, fault: str) -> None:
        remedy = (
            "It is damaged or incomplete: restore it from a copy, or remove the folder to continue from the checkpoint "
            "before it, if there is one."
        )
        super().__init__(f"{fault}. {remedy}")
        self.fault = fault

    def __reduce__(self) -> tuple[type[Damaged], tuple[str]]:
        return Damaged, (self.fault,)  # it is broadcast to other ranks


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a folder's name; None if it is not a checkpoint's name."""
    match = _STEP.fullmatch(_named(folder).name)
    return int(match[1]) if match else None


def save(folder: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write a checkpoint, replacing an older one of the same name.

    Leftovers of killed writers beside `folder` are removed.

    Args:
        folder: Where to write it.
        tensors: State by name: state_dicts or other nestings of dicts, lists, tuples, numbers and tensors. The tensors
            of "model" go to model.safetensors, and so on.
        facts: Numbers, texts and nestings of them.

    Raises:
        OSError: It could not be written. Earlier checkpoints are unchanged.
    """
    from safetensors import SafetensorError

    for name in tensors:
        _check_name(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _clean(folder)
    draft = folder.with_name(f"{folder.name}{_DRAFT}{os.getpid()}")
    try:
        _write(draft, tensors, facts)
        _put(draft, folder)
    except (OSError, SafetensorError) as error:
        kept = "Checkpoints written before are untouched. Is the disk full? Free some space and resume."
        raise OSError(f"checkpoint {folder}: could not be written ({error}). {kept}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint: the `tensors` and `facts` given to `save`, tensors on the CPU.

    Raises:
        Damaged: A file is missing or was changed.
        ValueError: There is no such checkpoint, or another version of contratile wrote it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    place = verify(folder)
    try:
        written = json.loads((place / "facts.json").read_text(encoding="utf-8"))
        state = {}
        for name, tree in written["structure"].items():
            _check_name(name)
            # Tensors mapped from a file may be aligned differently, which changes sums in the last bit: clone them.
            flat = {key: x.clone() for key, x in load_file(place / f"{name}.safetensors").items()}
            state[name] = restore(tree, flat)
        return state, restore(written["facts"], {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        _refuse(place, "what `save` writes", repr(error), error)


def verify(folder: Path) -> Path:
    """Compare the checksums of all files of a checkpoint and return the folder where it is.

    Raises:
        Damaged: A file is missing or was changed.
        ValueError: There is no such checkpoint, or another version of contratile wrote it.
    """
    place = _place(folder)
    if place is None:
        bad_value(f"checkpoint {folder}", expected="a folder", got="nothing there", remedy="Check the path.")
    sizes, checksums = _manifest(place)
    for name in sizes:
        _check_size(place / name, sizes[name])
        found = _checksum(place / name)
        if found != checksums[name]:
            _refuse(place, f"{name} with checksum {checksums[name]}", f"{found}")
    return place


def is_sound(folder: Path) -> bool:
    """Whether `load` would load a checkpoint: all checksums are right."""
    try:
        verify(folder)
    except ValueError:
        return False
    return True


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Read-only, so it is safe while the run is going on."""
    for folder in reversed(steps(run)):
        fault = _fault(folder)
        if fault is None:
            return folder
        warnings.warn(f"passed over: {fault}", stacklevel=2)
    return None


def best(run: Path) -> Path | None:
    """The checkpoint that the newest complete one records as the best, or None. Read-only.

    If it records none (earlier versions did not), or one that no longer exists, the link `run/best` decides.
    """
    complete = [folder for folder in steps(run) if _fault(folder) is None]
    named = _best_step(complete[-1]) if complete else None
    for folder in complete:
        if step_of(folder) == named:
            return folder
    link = run / "best"
    return link.resolve() if link.exists() else None


def keep(run: Path, last: int = 2) -> None:
    """Remove all checkpoints of a run except the `last` newest and the best, and update the link `run/best`.

    Damaged checkpoints do not count and are left alone. Leftovers of killed writers are removed.
    """
    if last < 1:
        bad_value("last", expected="at least 1", got=last, remedy="A run without a checkpoint cannot be resumed.")
    _clean(run / "checkpoints" / step_name(0))
    kept = link_best(run)
    complete = [folder for folder in steps(run) if folder.is_dir() and _fault(folder) is None]
    for folder in complete[:-last]:
        if kept is None or not kept.samefile(folder):
            # Rename first, so that nobody finds a half-removed checkpoint.
            gone = folder.with_name(f"{folder.name}{_DRAFT}{os.getpid()}")
            folder.rename(gone)
            shutil.rmtree(gone)


def link_best(run: Path) -> Path | None:
    """Make `run/best` a link to the best checkpoint and return that; None if there is none."""
    found, link = best(run), run / "best"
    place = None if found is None else _place(found)
    if place is None:
        if link.is_symlink() and not link.exists():
            link.unlink()  # its target does not exist
        return None
    if not (link.exists() and link.samefile(place)):
        for draft in run.glob(f"best{_DRAFT}*"):  # left by killed writers
            draft.unlink()
        draft = run / f"best{_DRAFT}{os.getpid()}"
        draft.symlink_to(os.path.relpath(place, run), target_is_directory=True)
        if link.is_dir() and not link.is_symlink():
            check_best(run)
            shutil.rmtree(link)  # in a copy of the run the link may have become a folder
        draft.replace(link)
        _sync(run)
    return place


def check_best(run: Path) -> None:
    """Refuse a `run/best` that this package did not write, since it would be replaced.

    Raises:
        ValueError: It is neither a link nor a copy of a checkpoint.
    """
    link = run / "best"
    if link.is_symlink() or not link.exists():
        return
    others = [path for path in link.iterdir() if path.suffix not in (".json", ".safetensors")] if link.is_dir() else []
    if others or not (link / "manifest.json").is_file():
        got = "a folder with other files" if link.is_dir() else "a file"
        remedy = "Move it, or pass another --out."
        bad_value(str(link), expected="a link to a checkpoint, or a copy of one", got=got, remedy=remedy)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it is no longer found, and return its new path.

    An earlier one of that name is removed.
    """
    place = _place(folder) or folder
    aside = folder.with_name(f"{_ASIDE}{folder.name}")
    if aside.exists():
        shutil.rmtree(aside)
    place.rename(aside)
    _sync(folder.parent)
    return aside


# --- writing ------------------------------------------------------------------------------------------------------


def _write(draft: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write all files of a checkpoint, the manifest last, and sync them to disk."""
    from safetensors.torch import save_file

    draft.mkdir()
    structure = {}
    for name, tree in tensors.items():
        structure[name], flat = flatten(tree, name)
        file = draft / f"{name}.safetensors"
        with usual_mode(file):
            save_file(flat, file, metadata={"format": "pt"})
    told, flat = flatten(facts, "facts")
    if flat:
        remedy = "Pass tensors in the argument `tensors`, or numbers by .item()."
        bad_type("facts", expected="numbers, texts and nestings of them", got=f"tensors {sorted(flat)}", remedy=remedy)
    _write_json(draft / "facts.json", {"facts": told, "structure": structure})
    files = {
        path.name: {"bytes": path.stat().st_size, "crc32": _checksum(path)}
        for path in sorted(draft.iterdir())
        if path.is_file()
    }
    _write_json(draft / "manifest.json", {"format": FORMAT, "files": files})
    for path in draft.iterdir():
        _sync(path)
    _sync(draft)


def _put(draft: Path, folder: Path) -> None:
    """Rename the draft. An older checkpoint is moved aside first; until then it is found under that name."""
    old = folder.with_name(f"{folder.name}{_OLD}{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    _sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _clean(folder: Path) -> None:
    """Remove leftovers of killed writers. A checkpoint moved aside for one that never came is moved back."""
    ours = re.compile(rf"(step-\d{{8,}}|{re.escape(folder.name)})({_DRAFT}|{_OLD})\d+")
    for path in sorted(folder.parent.iterdir()) if folder.parent.is_dir() else ():
        if ours.fullmatch(path.name):
            if _OLD in path.name and not _named(path).exists():
                path.rename(_named(path))
            else:
                shutil.rmtree(path)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ------------------------------------------------------------------------------------------------------


def _named(path: Path) -> Path:
    """The name of a checkpoint, also while it is moved aside."""
    return path.with_name(path.name.partition(_OLD)[0])


def _place(folder: Path) -> Path | None:
    """Where a checkpoint is: under its name, or moved aside if its writer was killed between two renames."""
    if folder.is_dir():
        return folder
    return next(folder.parent.glob(f"{folder.name}{_OLD}*"), None)


def steps(run: Path) -> list[Path]:
    """All checkpoints of a run by name, oldest first, including damaged ones."""

    def found() -> Iterator[tuple[int, Path]]:
        for path in (run / "checkpoints").glob("step-*"):
            step = step_of(path)
            if step is not None and path.is_dir():
                yield step, _named(path)

    return [folder for _, folder in sorted(set(found()))]


def _best_step(folder: Path) -> int | None:
    """The step that a checkpoint records as the best so far."""
    place = _place(folder)
    try:
        facts = json.loads(((place or folder) / "facts.json").read_text(encoding="utf-8"))["facts"]
        return int(facts["best_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _manifest(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes and checksums of the files of a checkpoint."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format"], manifest["files"]
        sizes = {str(name): int(file["bytes"]) for name, file in files.items()}
        checksums = {str(name): str(file["crc32"]) for name, file in files.items()}
        for name in ("facts.json", *sizes):
            if name not in sizes or Path(name).name != name:
                raise ValueError(f"files: {name!r}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        _refuse(folder, "a manifest.json as `save` writes it", repr(error), error)
    if version != FORMAT:
        remedy = "It was written by another version of contratile: use that one."
        bad_value(f"checkpoint {folder}", expected=FORMAT, got=str(version)[:60], remedy=remedy)
    return sizes, checksums


def _fault(folder: Path) -> ValueError | None:
    """What is wrong with a checkpoint, judged by names and sizes of its files; None if nothing is."""
    place = _place(folder)
    if place is None:
        return ValueError(f"checkpoint {folder}: removed in the meantime")
    try:
        for name, size in _manifest(place)[0].items():
            _check_size(place / name, size)
    except ValueError as error:
        return error
    return None


def _check_size(path: Path, size: int) -> None:
    found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
    if found != f"{size} bytes":
        _refuse(path.parent, f"{path.name} of {size} bytes", found)


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def _check_name(name: str) -> None:
    """Check a name of `tensors`, which becomes a file name."""
    if not name.isidentifier() or name in ("facts", "manifest"):
        remedy = 'Use a plain word such as "model".'
        bad_value("name of a part", expected="an identifier but facts or manifest", got=repr(name), remedy=remedy)


def _refuse(folder: Path, expected: str, got: str, error: Exception | None = None) -> NoReturn:
    raise Damaged(f"checkpoint {folder}: expected {expected}, got {got}") from error

"""Checkpoints that are whole or absent: safetensors and JSON, nothing pickled.

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": random_state()}
    save(run / "checkpoints" / step_name(100), state, {"step": 100, "best_step": 100})
    keep(run, last=2)
    folder = latest(run)                             # and best(run), which the newest checkpoint names
    state, facts = load(folder)
    load_optimizer(optimizer, state["optimizer"])

A checkpoint is written under a temporary name, pushed to the disk and renamed: a process killed at any moment leaves
the one before. `manifest.json` holds size and checksum of every file, and `load` believes nothing else. One process
writes to a run; any number may read it meanwhile.

Which checkpoint is the best is a fact of the newest one (`best_step`), so both appear with the same rename. The link
`run/best` is made from it afterwards, for people and other programs.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from contratile.errors import bad_type, bad_value
from contratile.train.tree import flatten, restore

FORMAT = "contratile checkpoint 1"
_STEP = re.compile(r"step-(\d{8,})")
# Drafts and what is being removed; and an older checkpoint that gives its name to a newer one just now.
_DRAFT, _OLD = ".tmp-", ".old-"  # and the writer's number
_ASIDE = "damaged-"
"""Before the name of a checkpoint that cannot be used: nobody looks for it there."""


class Damaged(ValueError):
    """A checkpoint is not what `save` wrote; `fault` says where."""

    def __init__(self, fault: str) -> None:
        remedy = "It is damaged or incomplete: remove the folder to continue from the checkpoint before it."
        super().__init__(f"{fault}. {remedy}")
        self.fault = fault

    def __reduce__(self) -> tuple[type[Damaged], tuple[str]]:
        return Damaged, (self.fault,)  # other ranks hear of it too


def step_name(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a folder, None if it has another name."""
    match = _STEP.fullmatch(_named(folder).name)
    return int(match[1]) if match else None


def save(folder: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write a checkpoint, in place of an older one of that name.

    Each value of `tensors` is a state_dict or any other nesting of dicts, lists, tuples, numbers and tensors; those of
    "model" go to model.safetensors. `facts` hold no tensors. Leftovers of killed writers beside `folder` are removed.
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
    """What `save` was given, tensors on the CPU. A damaged checkpoint is refused."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    place = verify(folder)
    try:
        written = json.loads((place / "facts.json").read_text(encoding="utf-8"))
        state = {}
        for name, tree in written["structure"].items():
            _check_name(name)
            # Clones are aligned as fresh tensors are; sums over a file's bytes in place may differ in the last bit.
            flat = {key: x.clone() for key, x in load_file(place / f"{name}.safetensors").items()}
            state[name] = restore(tree, flat)
        return state, restore(written["facts"], {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        _refuse(place, "what `save` writes", repr(error), error)


def verify(folder: Path) -> Path:
    """Read all files of a checkpoint and compare their checksums; gives the place where it is.

    Raises:
        Damaged: A file is missing or not as it was written.
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


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None. Changes nothing, so a run under way may be asked."""
    for folder in reversed(steps(run)):
        fault = _fault(folder)
        if fault is None:
            return folder
        warnings.warn(f"passed over: {fault}", stacklevel=2)
    return None


def best(run: Path) -> Path | None:
    """The checkpoint that the newest complete one names as the best, or None. Changes nothing.

    Where it names none, as those of earlier versions did, or one that is not there, `run/best` counts.
    """
    complete = [folder for folder in steps(run) if _fault(folder) is None]
    named = _best_step(complete[-1]) if complete else None
    for folder in complete:
        if step_of(folder) == named:
            return folder
    link = run / "best"
    return link.resolve() if link.exists() else None


def keep(run: Path, last: int = 2) -> None:
    """Remove all checkpoints of a run but the `last` newest and the best; damaged ones do not count and are left.

    The link `run/best` is made to point at the best, in one move. Leftovers of killed writers are removed.
    """
    if last < 1:
        bad_value("last", expected="at least 1", got=last, remedy="A run without a checkpoint cannot be resumed.")
    _clean(run / "checkpoints" / step_name(0))
    kept = link_best(run)
    complete = [folder for folder in steps(run) if folder.is_dir() and _fault(folder) is None]
    for folder in complete[:-last]:
        if kept is None or not kept.samefile(folder):
            # Renamed first: a checkpoint that is half removed has no name under which anyone looks for it.
            gone = folder.with_name(f"{folder.name}{_DRAFT}{os.getpid()}")
            folder.rename(gone)
            shutil.rmtree(gone)


def link_best(run: Path) -> Path | None:
    """Make `run/best` a link to the best checkpoint, if there is one; gives it."""
    found, link = best(run), run / "best"
    place = None if found is None else _place(found)
    if place is None:
        if link.is_symlink() and not link.exists():
            link.unlink()  # what it pointed at is gone
        return None
    if not (link.exists() and link.samefile(place)):
        for draft in run.glob(f"best{_DRAFT}*"):  # of writers that were killed
            draft.unlink()
        draft = run / f"best{_DRAFT}{os.getpid()}"
        draft.symlink_to(os.path.relpath(place, run), target_is_directory=True)
        if link.is_dir() and not link.is_symlink():
            check_best(run)
            shutil.rmtree(link)  # a copy of the run may have a folder for the link
        draft.replace(link)
        _sync(run)
    return place


def check_best(run: Path) -> None:
    """Refuse a `best` that is not a run's: it would be replaced.

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
    """Take a damaged checkpoint out of the way, under a name where nobody looks for one; gives it.

    One that was set aside under that name before makes room.
    """
    place = _place(folder) or folder
    aside = folder.with_name(f"{_ASIDE}{folder.name}")
    if aside.exists():
        shutil.rmtree(aside)
    place.rename(aside)
    _sync(folder.parent)
    return aside


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As `optimizer.load_state_dict`, which would round what an optimiser keeps in fp32 for 16-bit parameters."""
    optimizer.load_state_dict(state)
    names = [name for group in state["param_groups"] for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        for key, value in state["state"].get(name, {}).items():
            kept = optimizer.state[parameter]
            if isinstance(value, torch.Tensor) and kept[key].dtype != value.dtype:
                kept[key] = value.to(kept[key].device, copy=True)


def random_state() -> dict[str, Any]:
    """The states of the generators of Python, NumPy (if it is in use) and torch, on the CPU and every CUDA device."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (str(name), [int(key) for key in keys], *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators back where `random_state` found them; devices that are no longer there are passed over."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if torch.cuda.is_available():
        for device, cuda in zip(range(torch.cuda.device_count()), state.get("cuda", ()), strict=False):
            torch.cuda.set_rng_state(cuda, device)


# --- writing ------------------------------------------------------------------------------------------------------


def _write(draft: Path, tensors: dict[str, Any], facts: dict[str, Any]) -> None:
    """All files of a checkpoint, on the disk when this returns; the manifest is the last."""
    from safetensors.torch import save_file

    draft.mkdir()
    structure = {}
    for name, tree in tensors.items():
        structure[name], flat = flatten(tree, name)
        save_file(flat, draft / f"{name}.safetensors", metadata={"format": "pt"})
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
    """Give the draft its name. An older checkpoint steps aside first, and is found under that name meanwhile."""
    old = folder.with_name(f"{folder.name}{_OLD}{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    _sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _clean(folder: Path) -> None:
    """Remove what killed writers left; a checkpoint that had stepped aside for one that never came is put back."""
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
    """Push a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ------------------------------------------------------------------------------------------------------


def _named(path: Path) -> Path:
    """The name that a checkpoint has, or had before it stepped aside."""
    return path.with_name(path.name.partition(_OLD)[0])


def _place(folder: Path) -> Path | None:
    """Where a checkpoint is: under its name, or aside if its writer was killed between two renames."""
    if folder.is_dir():
        return folder
    return next(folder.parent.glob(f"{folder.name}{_OLD}*"), None)


def steps(run: Path) -> list[Path]:
    """The checkpoints of a run by their names, oldest first, damaged ones too."""

    def found() -> Iterator[tuple[int, Path]]:
        for path in (run / "checkpoints").glob("step-*"):
            step = step_of(path)
            if step is not None and path.is_dir():
                yield step, _named(path)

    return [folder for _, folder in sorted(set(found()))]


def _best_step(folder: Path) -> int | None:
    """The step that a checkpoint names as the best so far."""
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
    """What is missing of a checkpoint, judged by names and sizes."""
    place = _place(folder)
    if place is None:
        return ValueError(f"checkpoint {folder}: removed meanwhile")
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
    """Names of parts become names of files."""
    if not name.isidentifier() or name in ("facts", "manifest"):
        remedy = 'Use a plain word such as "model".'
        bad_value("name of a part", expected="an identifier but facts or manifest", got=repr(name), remedy=remedy)


def _refuse(folder: Path, expected: str, got: str, error: Exception | None = None) -> NoReturn:
    raise Damaged(f"checkpoint {folder}: expected {expected}, got {got}") from error

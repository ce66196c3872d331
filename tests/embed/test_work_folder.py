"""Unfinished work: never that of another model, never shared by two processes, gone at once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.embed.units import PLAN, EmbeddedRow, Units
from contratile.embed.work_folder import claim_folder, remove_folder
from contratile.train.claim import LOCK


def begun(folder: Path, plan: dict[str, Any]) -> Units:
    """A folder with one unit."""
    folder.mkdir(exist_ok=True)
    units = Units(folder, {"left": 2})
    units.open(plan)
    writer = units.writer(0)
    writer.add([EmbeddedRow("a", "a", "a", 0)], {"left": torch.ones(1, 2)}, [])
    writer.finish(seen=1, cursor=None)
    return units


@pytest.mark.parametrize("damage", [None, "[]", "null", "{", "{}", "7"])
def test_units_without_their_plan_are_discarded(tmp_path: Path, damage: str | None) -> None:
    units = begun(tmp_path / "work", {"weights": "one"})
    assert list(units.done()) == [0]
    plan = tmp_path / "work" / PLAN
    plan.unlink() if damage is None else plan.write_text(damage)
    units.open({"weights": "two"})
    assert units.done() == {} and json.loads(plan.read_text()) == {"weights": "two"}


def test_a_plan_with_more_or_less_is_another_one(tmp_path: Path) -> None:
    units = begun(tmp_path / "work", {"weights": "one", "data": "a.csv"})
    with pytest.raises(ValueError, match="data of an unfinished --out"):
        units.open({"weights": "one"})


def test_a_folder_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while files are deleted: what is left is not found by the next call, which deletes it."""
    folder = tmp_path / ".f[1].npy.unfinished"
    held = claim_folder(folder)
    begun(folder, {"weights": "one"})
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *given, **options: None)
        remove_folder(folder)
    assert held is not None and not folder.exists() and len(list(tmp_path.iterdir())) == 1
    held = claim_folder(folder)
    assert [path.name for path in folder.iterdir()] == [LOCK] and list(tmp_path.iterdir()) == [folder]


def test_the_lock_of_a_removed_folder_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes between opening the lock and locking it."""
    folder, usual, calls = tmp_path / "work", os.open, 0

    def overtaken(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        descriptor = usual(*arguments)
        if calls == 1:
            remove_folder(folder)
        return descriptor

    monkeypatch.setattr(os, "open", overtaken)
    held = claim_folder(folder)
    assert calls == 2 and held is not None
    assert os.path.samestat(os.fstat(held.descriptor), (folder / LOCK).stat())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "work").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match="expected a folder, got a link"):
        claim_folder(tmp_path / "work")
    assert list((tmp_path / "private").iterdir()) == []

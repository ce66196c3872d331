"""Facts about the machine that recorded numbers need."""

import subprocess
from pathlib import Path

import pytest
import torch

import contratile
from contratile import machine


def test_environment() -> None:
    facts = machine.environment(("torch", "no-such-distribution"))
    assert facts["contratile"] == contratile.__version__ and facts["torch"] == torch.__version__
    assert facts["threads"] == str(torch.get_num_threads()) and float(facts["memory_gib"]) >= 0
    assert facts["version_no-such-distribution"] == machine.NOT_INSTALLED != facts["version_torch"]
    assert "core" in facts["cpu"]


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x.org", *words], check=True)


def test_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the sources, marked if they were changed; unknown for a copy in somebody else's repository."""
    monkeypatch.setattr(contratile, "__file__", str(tmp_path / "contratile/__init__.py"))
    (tmp_path / "contratile").mkdir()
    source = tmp_path / "contratile/__init__.py"
    source.write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "x")
    assert machine.commit() == "unknown"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "y")
    clean = machine.commit()
    assert len(clean) == 10 and "+" not in clean
    source.write_text("x = 1\n")
    assert machine.commit() == f"{clean}+"

"""Runs the files of `interpreted/`, each in a process where triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (Path(__file__).parent / "interpreted").glob("test_*.py"))
NOTHING_SELECTED = 5


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str, request: pytest.FixtureRequest) -> None:
    marks = request.config.option.markexpr
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", file]
    done = subprocess.run(
        [*words, "-m", marks] if marks else words,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, NOTHING_SELECTED if marks else 0), done.stdout + done.stderr


def test_there_are_files() -> None:
    assert FILES

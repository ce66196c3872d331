"""Runs the files of `interpreted/`, each in a process where triton interprets, two at a time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

ROOT = Path(__file__).parents[3]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (Path(__file__).parent / "interpreted").glob("test_*.py"))
NOTHING_SELECTED = 5


Done = dict[str, "Future[CompletedProcess[str]]"]


def interpreted(file: str, marks: str) -> "CompletedProcess[str]":
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", file]
    return subprocess.run(
        [*words, "-m", marks] if marks else words,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def done(request: pytest.FixtureRequest) -> Iterator[Done]:
    """The files that were selected; all are under way when the first is waited for."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    files = [str(item.callspec.params["file"]) for item in items if item.function is test_interpreted]
    pool = ThreadPoolExecutor(2)
    try:
        yield {file: pool.submit(interpreted, file, request.config.option.markexpr) for file in files}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str, done: Done, request: pytest.FixtureRequest) -> None:
    found = done[file].result()
    nothing = NOTHING_SELECTED if request.config.option.markexpr else 0
    assert found.returncode in (0, nothing), found.stdout + found.stderr


def test_there_are_files() -> None:
    assert FILES

"""Runs the files of `interpreted/` in processes where triton interprets, as few as can be: each imports torch anew."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[3]
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))
STOCK = ["test_doctor.py", "test_tune.py"]
"""Files that need the stock interpreter. The others make it strict, which lasts as long as the process."""
NOTHING_SELECTED = 5


def interpreted(files: list[str], marks: str, report: Path) -> dict[str, list[str]]:
    """Run files in one process; what failed in each of them. A file without a selected test is not in the answer."""
    words = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [*words, *(["-m", marks] if marks else []), *(str(FOLDER / file) for file in files)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode in (0, 1, NOTHING_SELECTED if marks else 0), said
    failed: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].split(".")[-1] + ".py"
        problems = [x for x in case if x.tag in ("failure", "error")]
        failed.setdefault(file, []).extend(f"{case.attrib['name']}\n{x.text}" for x in problems)
    assert done.returncode != 1 or any(failed.values()), said
    return failed


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What failed in a file. Its process runs all files that were selected and that can share a process with it."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    selected = [str(item.callspec.params["file"]) for item in items if item.function is test_interpreted]
    marks = request.config.option.markexpr
    done: dict[bool, dict[str, list[str]]] = {}

    def of(file: str) -> list[str]:
        stock = file in STOCK
        if stock not in done:
            together = [other for other in selected if (other in STOCK) == stock]
            done[stock] = interpreted(together, marks, tmp_path_factory.mktemp("interpreted") / "report.xml")
        assert marks or file in done[stock], "no test of it was run"
        return done[stock].get(file, [])

    return of


@pytest.mark.timeout(1800)  # about a minute alone, many on a busy machine
@pytest.mark.parametrize("file", FILES)
def test_interpreted(file: str, failures: Callable[[str], list[str]]) -> None:
    failed = failures(file)
    assert not failed, "\n\n".join(failed)


def test_there_are_files() -> None:
    assert set(STOCK) < set(FILES)

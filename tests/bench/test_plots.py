"""Recorded rows can be drawn again: those in `benchmarks/results`, as users draw theirs."""

from pathlib import Path

import pytest

from contratile.bench.plots import draw
from contratile.bench.rows import load_rows

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("kind", ["nodes", "plan"])  # the others are drawn by the tests of their commands
def test_recorded_rows_are_drawn(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recording = load_rows(RESULTS / kind / f"{kind}.json")
    assert recording.kind == kind and recording.rows
    pictures = draw(recording, tmp_path)
    assert pictures and sorted(pictures) == sorted(tmp_path.iterdir())
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000

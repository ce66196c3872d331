"""The picture in README is drawn from recorded rows."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from contratile.bench.front_page import GIB, RECORDINGS, collect, main, mib_label
from contratile.bench.rows import load_rows

ROOT = Path(__file__).parents[2]
RECORDED = [ROOT / path for path in RECORDINGS]


def test_the_curves_are_the_recorded_rows() -> None:
    recordings = [load_rows(path) for path in RECORDED]
    curves = collect(recordings)
    rows = [row for recording in recordings for row in recording.rows if row.d == 512 and row.peak_extra_mib]
    assert curves.machine == float(recordings[0].environment["memory_gib"]) * GIB
    for name, points in (("contratile", curves.ours), ("dense", curves.dense)):
        assert points == sorted({(row.n, row.peak_extra_mib) for row in rows if row.contestant == name}) and points
    assert curves.ours[-1][0] > curves.dense[-1][0], "beyond its last measurement the dense loss is extrapolated"


def test_machines_of_different_memory_are_drawn_apart() -> None:
    one, other = (load_rows(path) for path in RECORDED)
    other = replace(other, environment={**other.environment, "memory_gib": "1.0"})
    with pytest.raises(ValueError, match="expected machines of one memory size"):
        collect([one, other])


def test_the_picture_is_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as in the documentation: of the curves, the labels and the scales."""
    matplotlib = pytest.importorskip("matplotlib")
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if f"matplotlib=={matplotlib.__version__}\n" not in pinned:
        pytest.skip("other versions of matplotlib write other bytes")
    drawn = tmp_path / "memory.svg"
    monkeypatch.setattr(sys, "argv", ["front_page", *map(str, RECORDED), "--out", str(drawn)])
    main()
    assert drawn.read_bytes() == (ROOT / "docs" / "memory.svg").read_bytes()


def test_sizes_are_labelled_in_mib_and_gib() -> None:
    assert [mib_label(mib) for mib in (31.5, 1023.0, 64 * GIB)] == ["32 MiB", "1023 MiB", "64 GiB"]

"""`contratile bench plan`: the list, the errors, one point."""

import ctypes
import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contratile.bench import plan_point
from contratile.bench.plan import PlanBenchConfig, PlanSeries
from contratile.bench.plan_points import POINTS, PlanPoint
from contratile.bench.plan_server import PointServer
from contratile.bench.plots.plan import error_lines, errors
from contratile.bench.rows import PlanRow
from tests.processes import until

ROW = PlanRow(
    contestant="tiny",
    n=8,
    d=4,
    dtype="float32",
    status="ok",
    chunk=4,
    tokens=16,
    checkpointing=False,
    offload="none",
    world=1,
    allocator="returning",
    measured_mib=400.0,
    predicted_mib=440.0,
    predicted_seconds=1.0,
    commit="",
    threads=1,
    torch="",
    cpu="",
    command="",
)


def test_the_list_is_fixed_and_covers_what_it_should() -> None:
    assert len(POINTS) >= 40 and len(set(POINTS)) == len(POINTS)
    assert {point.model for point in POINTS} == {"tiny", "minilm", "vit", "bert"}
    for model in ("tiny", "minilm", "vit", "bert"):
        mine = [point for point in POINTS if point.model == model]
        assert {point.world for point in mine} == {1, 2}
        assert {point.offload for point in mine} == {"none", "disk"}
        assert {point.checkpointing for point in mine} == {False, True}
        assert len({point.chunk for point in mine}) > 2 and len({point.batch for point in mine}) > 1


def test_errors_are_those_of_runs_above_300_mib() -> None:
    small = replace(ROW, measured_mib=100.0)
    assert errors([ROW, small], "predicted_mib") == pytest.approx([0.1])
    assert error_lines([ROW, small]) == ["memory from the definition: median error 10.0%, worst 10.0%, 1 runs"]
    timed = replace(ROW, seconds_best=2.0)
    assert errors([timed], "predicted_seconds") == [-0.5]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_points_are_run_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One and two ranks; memory is within a few MiB of what is predicted, which libraries take, however small."""
    one = PlanPoint(model="tiny", batch=64, chunk=32, tokens=16)
    points = (one, replace(one, chunk=16, world=2))
    monkeypatch.setattr("contratile.bench.plan.QUICK", points)
    series = PlanSeries(PlanBenchConfig(quick=True, threads=1, timed=True))
    rows = [row for n in range(2) for row in series.rows(n)]
    assert series.server._process is None, "it ends with the last point"
    for row, point in zip(rows, points, strict=True):
        assert row["status"] == "ok" and row["seconds_best"] > 0 and row["predicted_seconds"] > 0
        assert row["world"] == point.world and row["allocator"] == "returning"
        assert -5 < row["measured_mib"] - row["predicted_mib"] < 25


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_rank_that_fails_ends_and_the_others_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 1 to end, as it does in a collective; what is reported is what failed first."""
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("CONTRATILE_STORE", "")

    def measure(*args: Any) -> dict[str, Any]:
        lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
        if os.environ["RANK"] == "1":
            fcntl.flock(lock, fcntl.LOCK_EX)
            (tmp_path / "held").touch()
            raise ValueError("too large")
        assert until((tmp_path / "held").exists)
        fcntl.flock(lock, fcntl.LOCK_EX)
        raise RuntimeError("the connection was closed")

    monkeypatch.setattr(plan_point, "measure", measure)
    monkeypatch.setattr(plan_point, "definition", lambda point: ())
    point = {"model": "tiny", "batch": 4, "chunk": 2, "world": 2, "threads": 1}
    assert plan_point.answer(point) == {"status": "failed: ValueError: too large"}


def test_every_so_many_points() -> None:
    assert PlanBenchConfig(every=7).points == POINTS[::7]
    with pytest.raises(ValueError, match="every: expected at least 1, got 0"):
        PlanBenchConfig(every=0)


def test_a_failure_is_a_status() -> None:
    server = PointServer(threads=1, returning=True)
    command = [sys.executable, "-c", "input(); print('nonsense')"]
    server._process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.ask({"model": "tiny"}, 60)["status"].startswith("failed: process ended")
    command[2] = "input(); import time; time.sleep(60)"
    server._process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert server.ask({"model": "tiny"}, 0.1) == {"status": "failed: no result after 0 s"}
    assert server._process is None


def test_holes_of_the_heap_are_taken() -> None:
    """What was freed in the middle of the heap is not free any more, so the next block comes from elsewhere."""
    code = (
        "import ctypes; from contratile.bench.plug import plug_holes\n"
        "malloc, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free\n"
        "malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "blocks = [malloc(100_000) for _ in range(21)]\n"
        "for block in blocks[1::2]: free(block)\n"
        "assert plug_holes() >= 10 * (1 << 16)\n"
        "assert malloc(90_000) not in blocks\n"
    )
    try:
        getattr(ctypes.CDLL(None), "mallinfo2")  # noqa: B009 - absent without a new glibc
    except (OSError, AttributeError):
        pytest.skip("needs glibc")
    subprocess.run([sys.executable, "-c", code], check=True)

"""`contratile bench plan`: the list, the errors, one point."""

import sys
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from contratile.bench.plan import PlanBenchConfig, PlanSeries, predict
from contratile.bench.plan_points import POINTS, Point
from contratile.bench.plots.plan import error_lines, errors
from contratile.bench.rows import PlanRow

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
def test_a_point_is_run_and_predicted() -> None:
    config = PlanBenchConfig(quick=True, threads=1)
    point = Point(model="tiny", batch=16, chunk=8, tokens=16)
    series = PlanSeries(config)
    done: Future[list[dict[str, Any]]] = Future()
    done.set_result(series._run(point))
    series.ahead[config.points[0]] = done
    (row,) = series.rows(0)
    assert row["status"] == "ok" and row["measured_mib"] > 10 and row["seconds_best"] > 0
    work, seconds = predict(point, None)
    assert work.chunk == 8 and seconds > 0

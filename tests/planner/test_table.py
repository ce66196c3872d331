"""Tables of predictions: rows, label, range."""

import pytest

from contratile.planner import FIRST_GENERATION, all_gpus, predict
from contratile.planner.table import spread, step_table, term_table


@pytest.mark.parametrize("name", ["A100", "H100", "B200", "RTX 4090", "L4", "MI300X"])
def test_the_range_encloses_the_prediction(name: str) -> None:
    low, high = spread(name, 32768, 512, costs=FIRST_GENERATION)
    assert low < predict(name, 32768, 512, costs=FIRST_GENERATION).seconds < high < 2 * low


def test_a_row_per_gpu_and_generation() -> None:
    table = step_table(all_gpus(), n=4096, d=256)
    assert len(table.splitlines()) == 2 + 2 * len(all_gpus())
    assert "prediction" in table.splitlines()[0]
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_terms_are_those_of_the_prediction() -> None:
    table = term_table(["H100"], n=32768, d=512)
    forward = predict("H100", 32768, 512, costs=FIRST_GENERATION).forward
    row = next(line for line in table.splitlines() if line.startswith("| H100-SXM | first | forward |"))
    assert f"| {forward.product * 1e3:.2f} | {forward.exp2 * 1e3:.2f} |" in row
    assert row.endswith(f"| {forward.seconds * 1e3:.2f} |")
    assert len({line.count("|") for line in table.splitlines()}) == 1

"""`contratile doctor` examines the kernels too where Triton interprets."""

import json

import pytest

from contratile.cli import main
from contratile.doctor import accuracy
from tests.engine.kernels import quick_interpreter  # noqa: F401 - half the time

# Excluded pairs have a product of -3e38: the interpreter as it is warns when it is multiplied by the scale.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")


def test_doctor_checks_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """By Triton's interpreter as it is, which knows no bf16."""
    assert main(["doctor", "--quick", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    covered = {*accuracy.CHECKED} - {*accuracy.NOT_IN_KERNELS}
    rows = [row for row in found["accuracy"] if row["backend"] == "triton"]
    assert {row["dtype"] for row in rows} == {"float32", "float16"} and {row["loss"] for row in rows} == covered
    assert all(row["ok"] for row in rows)
    (timing,) = (row for row in found["timing"] if row["backend"] == "triton")
    assert timing["seconds"] is None and "interpreted" in timing["note"]

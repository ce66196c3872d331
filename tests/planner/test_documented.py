"""The predictions in docs/kernels.md are those of the model."""

from pathlib import Path

from contratile.planner.table import step_table, term_table

DOCS = (Path(__file__).parents[2] / "docs/kernels.md").read_text()


def test_the_tables_of_the_documentation() -> None:
    names = ["A100", "H100", "B200", "RTX 4090", "L4", "MI300X"]
    for line in step_table(names, n=32768, d=512).splitlines() + term_table(names[:3], n=32768, d=512).splitlines():
        assert line in DOCS, line

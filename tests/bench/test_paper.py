"""The paper's tables: what is derived, against the printed figures and against models built from their definitions."""

import json
from pathlib import Path

import pytest

from contratile.bench import paper
from contratile.bench.paper import FITTED, rows
from contratile.bench.paper_estimate import CAPACITY, MODELS, PaperModel
from contratile.bench.paper_tables import LARGEST_BATCH, LOSS_MEMORY, PAPER_GB, PEAK_MEMORY

ROWS = rows()


def chosen(table: str, **wanted: object) -> list[paper.PaperRow]:
    found = [row for row in ROWS if row.table == table]
    return [row for row in found if all(getattr(row, name) == value for name, value in wanted.items())]


def test_every_figure_has_a_row_and_a_verdict() -> None:
    assert len(ROWS) == len(LOSS_MEMORY) + len(PEAK_MEMORY) + len(LARGEST_BATCH) + 4
    assert not [row for row in ROWS if row.verdict == "not reproduced"]
    assert sum(row.verdict == "fitted" for row in ROWS) == len(FITTED) == 2
    assert {row.method for row in ROWS if row.verdict == "explained"} == {"inf_cl"}


def test_loss_memory_is_within_its_limit() -> None:
    for row in chosen("loss memory"):
        assert abs(row.ours - row.paper) <= 0.15 * row.paper + 0.005
    # Quadratic rows to the last digit or two: the unit of the paper's GB is right.
    for method in ("clip", "open_clip"):
        for row in chosen("loss memory", method=method):
            assert abs(row.error_percent) < 0.5 or row.batch == 368 << 10


def test_units_other_than_1000_mib_do_not_fit() -> None:
    (row,) = chosen("loss memory", method="clip", batch=64 << 10, devices=8)
    for unit in (2**30, 10**9):
        assert abs(row.ours * PAPER_GB / unit / row.paper - 1) > 0.02


def test_fitted_constants_meet_their_rows() -> None:
    for row in (row for row in ROWS if row.verdict == "fitted"):
        assert abs(row.error_percent) < 0.2


def test_largest_batches_fit_and_the_next_do_not() -> None:
    for row in chosen("largest batch"):
        model, what = MODELS[row.model], {"method": row.method, "devices": row.devices, "offload": row.offload}
        batch = int(row.ours) << 10
        assert model.peak(batch=batch, **what) <= CAPACITY < model.peak(batch=batch + 1024, **what)  # type: ignore[arg-type]
        assert row.verdict == "explained" or abs(row.error_percent) <= 25


@pytest.mark.parametrize("name", MODELS)
def test_models_are_what_their_names_say(name: str) -> None:
    def blocks(width: int, layers: int) -> int:  # products, biases and norms of a transformer layer
        return layers * (12 * width**2 + 13 * width)

    model: PaperModel = MODELS[name]
    image, text = model.image, model.text
    patch = 14 if name == "ViT-L/14" else 16
    assert image.tokens == (224 // patch) ** 2 + 1
    seen = 3 * patch**2 * image.width + (image.tokens + 1) * image.width + 4 * image.width + image.width * model.width
    read = (49408 + 77) * text.width + 2 * text.width + text.width * model.width
    total = blocks(image.width, image.layers) + seen + blocks(text.width, text.layers) + read + 1
    assert total == model.parameters


def test_forward_flops_are_two_per_weight_and_token() -> None:
    tower = MODELS["ViT-L/14"].image
    weights = 12 * tower.width**2 * tower.layers
    assert 1 < tower.forward_flops / (2 * weights * tower.tokens) < 1.1  # attention adds a little


def test_record_writes_rows_and_tables(tmp_path: Path) -> None:
    data, text = paper.write_paper(tmp_path)
    written = json.loads(data.read_text())
    assert [row["paper"] for row in written["rows"]] == [row.paper for row in ROWS]
    assert written["command"] == "python -m contratile.bench.paper" and written["environment"]["commit"]
    lines = text.read_text().splitlines()
    assert "| ViT-L/14, 8 | CLIP | 64k | 66.11 | 66.11 | +0.0 % | reproduced |" in lines
    assert sum(line.startswith("| ViT") for line in lines) == len(ROWS)
    assert "18 rows, 2 explained, 16 reproduced" in paper.summary(ROWS)

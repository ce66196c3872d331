"""Batch size against accuracy, on random pairs and a grid that ends in a second."""

import json
from pathlib import Path

import pytest
import torch

from contratile.bench import batch_size
from contratile.bench.batch_size import BatchGrid, GridRun, chosen_rate, key_of, points, read_rows, run_all
from contratile.bench.batch_size_data import DataName, PairData, PairTensors, load_pairs
from contratile.bench.batch_size_run import rate, train
from contratile.bench.batch_size_table import batch_size_tables
from contratile.bench.plots.batch_size import by_point, draw_batch_size

GRIDS: dict[DataName, BatchGrid] = {
    "icons": BatchGrid((4, 8), (16, 32), 64),
    "wordnet": BatchGrid((4, 8), (16, 32), 64),
}


def pairs(name: DataName, folder: Path | None = None) -> PairData:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 50, (48, 6), generator=random, dtype=torch.int32)
    pixels = torch.randint(0, 256, (48, 1, 32, 32), generator=random, dtype=torch.uint8)
    all_pairs = PairTensors(pixels if name == "icons" else ids.flip(1), ids, torch.arange(48))
    return PairData(name, all_pairs.rows(slice(32)), all_pairs.rows(slice(32, None)), 50)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "load_pairs", pairs)
    monkeypatch.setattr(batch_size, "SEEDS", (0, 1))


def test_a_run_continues_where_it_ended(tmp_path: Path, quick: None) -> None:
    pytest.importorskip("matplotlib")
    rows = run_all(GRIDS, tmp_path, None, "command")
    assert len(rows) == 2 * (8 + 2 * 4) and len({key_of(row) for row in rows}) == len(rows)
    path = tmp_path / "rows.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:11]) + '\n{"purpose": "ra')  # killed while it wrote
    again = run_all(GRIDS, tmp_path, None, "other")
    assert [key_of(row) for row in again] == [key_of(row) for row in rows]
    assert {row["command"] for row in again[:11]} == {"command"} and again[11]["command"] == "other"
    assert [row["recall_10"] for row in again] == [row["recall_10"] for row in rows]
    assert read_rows(path) == again
    assert len(by_point(again)) == 8 and all(len(seeds) == 2 for seeds in by_point(again).values())
    assert draw_batch_size(again, tmp_path).stat().st_size > 10_000


def test_tables_tell_what_is_missing() -> None:
    row = {"purpose": "run", "data": "icons", "size": 16, "batch": 4, "lr": 1e-3}
    rows = [row | {"recall_10": recall} for recall in (0.25, 0.5, 0.75)] + [row | {"batch": 8, "recall_10": 0.5}]
    text = batch_size_tables(rows, {"icons": (4, 8, 16)}, {"icons": (16,)})
    assert "| icons, 16 | 0.500 (0.250 to 0.750) | 0.500 (0.500 to 0.500, 1 of 3 seeds) | not run |" in text
    assert "| learning rate | 0.001 | 0.001 | not run |" in text


def test_best_rate_of_a_batch_size_is_chosen() -> None:
    tried = [
        {"purpose": "rate", "data": data, "batch": batch, "lr": lr, "recall_10": recall}
        for data, batch, lr, recall in (
            ("icons", 64, 1e-3, 0.2),
            ("icons", 64, 3e-3, 0.3),
            ("icons", 512, 1e-2, 0.9),
            ("wordnet", 64, 1e-2, 0.9),
        )
    ]
    assert chosen_rate(tried, "icons", 64) == 3e-3


def test_every_run_sees_as_many_samples() -> None:
    for grid in batch_size.GRIDS.values():
        assert len(grid.batches) >= 5 and len(grid.sizes) == 3
        for batch in grid.batches:
            assert grid.samples % batch == 0 and batch <= min(grid.sizes)
    row = {"purpose": "rate", "lr": 1e-3, "recall_10": 0.2}
    known = [row | {"data": data, "batch": b} for data, grid in batch_size.GRIDS.items() for b in grid.batches]
    reported = [point for point in points(batch_size.GRIDS, known) if point.purpose == "run"]
    assert len(set(reported)) == len(reported) == 90 and isinstance(reported[0], GridRun)


def test_training_learns() -> None:
    torch.set_num_threads(1)
    data = pairs("wordnet")
    same = data._replace(test=data.train)
    found = train(same, size=32, batch=16, samples=3200, lr=1e-2, seed=0)
    assert found["recall_1"] > 0.5  # it has seen these pairs 100 times; by chance 1 / 32


def test_learning_rate_rises_and_falls() -> None:
    factors = [rate(step, 20) for step in range(20)]
    assert factors[:2] == [0.5, 1.0] and factors[2] == 1.0 and factors[-1] < 0.02
    assert factors[2:] == sorted(factors[2:], reverse=True)


def test_pairs_of_icons_are_read(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    pytest.importorskip("tokenizers")
    data = load_pairs("icons")
    assert data.train.left.shape[1:] == (1, 32, 32) and data.train.right.shape[1] == 24
    assert len(set(data.test.ids.tolist())) == len(data.test.left) <= 1024
    assert len(data.train.left) >= 12288


def test_damaged_rows_are_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{broken\n" + json.dumps({"purpose": "run"}) + "\n")
    with pytest.raises(ValueError):
        read_rows(path)

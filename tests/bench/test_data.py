"""`contratile bench data`: rows, plots, contestants that load the same pairs, and processes that fail."""

import csv
import json
import os
import sys
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from contratile.bench import data_point
from contratile.bench.contestants.data import DATA_CONTESTANTS, Bytes, DataProblem, tokenizer_of
from contratile.bench.data import BENCH, DataBenchConfig, DataSeries
from contratile.bench.data_files import SHARDS, Files, caption_of, jpeg, make_files
from contratile.bench.data_point import DataPoint, Unable
from contratile.bench.plots import draw
from contratile.bench.rows import DataRow, Recording, load_rows, save_rows
from contratile.cli import main
from contratile.cli.tables import notes
from contratile.data.shards import Shards
from contratile.data.tables import Table


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("data") / "small", pixels=40, images=12)


def problem(files: Files, **options: Any) -> DataProblem:
    place = {"shards": files.shards, "table": str(files.table), "edge": 16, "batch": 3, "workers": 0, "samples": 12}
    return DataProblem(**{**place, "crop_scale": (0.9, 1.0), "tokenizer": "bytes", **options})


def without_open_clip(name: str) -> Any:
    """Every process of a contestant and each of its workers would import it, for seconds."""
    raise ImportError(name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tyro")
    pytest.importorskip("matplotlib")
    pytest.importorskip("webdataset")
    folder = tmp_path_factory.mktemp("results")
    words = "--pixels 40 --workers 0 1 --samples 8 --images 8 --batch 2 --dims 16 --rounds 1".split()
    who = "--contestants contratile contratile_table somebody".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("contratile.bench.data.tokenizer_of", without_open_clip)
        assert main(["bench", "data", *words, *who, "--out", str(folder)]) == 0
    return folder


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_the_tokenizer_is_that_of_open_clip_where_it_is_installed() -> None:
    pytest.importorskip("open_clip")
    config = DataBenchConfig(samples=2, images=2, batch=2, contestants=("somebody",))
    series = DataSeries(config, 40, 16)
    series.failed["somebody"] = "unknown contestant"
    series.start()
    series.resources.close()
    assert series.tokenizer == "open_clip"
    assert tokenizer_of("open_clip")(["a cat", "two dogs"]).shape == (2, 77)


def test_rows(results: Path) -> None:
    rows = load_rows(results / "data.json").rows
    found = {(row.contestant, row.workers): row for row in rows}
    assert len(rows) == 6 and all(row.n == 8 and row.pixels == 40 and row.d == 16 and row.batch == 2 for row in rows)
    for workers in (0, 1):
        ours, table = found["contratile", workers], found["contratile_table", workers]
        assert ours.status == table.status == "ok" and ours.ratio_to_contratile == 1.0
        assert ours.samples_per_second == pytest.approx(8 / ours.seconds_best)
        assert ours.limit_seconds > 0 and ours.jpeg_kib > 0 and ours.tokenizer == "bytes"
        assert found["somebody", workers].status.startswith("unknown contestant")
        assert found["somebody", workers].samples_per_second is None
    if sys.platform == "linux":
        assert found["contratile", 1].peak_extra_mib >= 0 and found["contratile", 1].workers_mib > 10
    assert found["contratile", 0].workers_mib is None


def test_csv_and_json_agree_and_the_plot_can_be_drawn_again(results: Path, tmp_path: Path) -> None:
    recorded = json.loads((results / "data.json").read_text())["rows"]
    with (results / "data.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [{key: "" if value is None else str(value) for key, value in row.items()} for row in recorded]
    assert main(["bench", "plot", str(results / "data.json"), "--out", str(tmp_path)]) == 0
    for folder in (results, tmp_path):
        assert (folder / "data.png").read_bytes().startswith(b"\x89PNG")


def test_plots_take_gaps_and_notes_say_where(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facts: dict[str, Any] = {"commit": "c", "threads": 1, "torch": "t", "cpu": "p", "command": "x"}
    place: dict[str, Any] = {
        "d": 16,
        "dtype": "float32",
        "pixels": 40,
        "batch": 2,
        "jpeg_kib": 2.0,
        "tokenizer": "bytes",
    }
    rows = (
        DataRow(contestant="contratile", n=8, workers=1, status="ok", samples_per_second=9.0, **place, **facts),
        DataRow(contestant="open_clip", n=8, workers=1, status="not installed (x)", **place, **facts),
    )
    known = {"cpu": "p", "threads": "1", "torch": "t", "commit": "c", "memory_gib": "1.0"}
    recording = Recording(rows, known, "x", "data")
    assert load_rows(save_rows(recording, tmp_path)[1]) == recording
    assert draw(recording, tmp_path)[0].stat().st_size > 5000
    assert notes(recording) == ["open_clip, 40 pixels, 1 workers, D=16, N=8: not installed (x)"]


def test_files_hold_the_same_pairs(files: Files) -> None:
    pytest.importorskip("webdataset")
    table = Table(files.table, "train", test_share=None)
    shards = Shards(files.shards, "train", test_share=None)
    stream = [shards.sample(record) for record, _ in shards.records(seed=None, epoch=0, part=0, parts=1)]
    assert len(table) == len(stream) == 12 and len(shards.urls) == SHARDS
    mine, theirs = ({(x.right, x.left.tobytes()) for x in xs} for xs in ((table[i] for i in range(12)), stream))  # type: ignore[union-attr]
    assert mine == theirs and len(mine) == 12


def test_pictures_are_the_same_every_time_and_differ() -> None:
    assert jpeg(40, 1) == jpeg(40, 1) != jpeg(40, 2)
    with Image.open(BytesIO(jpeg(100, 3))) as image:
        assert image.size == (100, 100) and image.format == "JPEG"
    assert caption_of(1) == caption_of(1) and 6 <= len(caption_of(1).split()) <= 16


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DATA_CONTESTANTS)
def test_contestants_load_the_same_pairs(name: str, files: Files) -> None:
    """Batches of normalised floats and tokens: of 12 pairs 12 captions, and pictures with the same mean."""
    pytest.importorskip("webdataset")
    if name in ("webdataset", "open_clip"):
        pytest.importorskip("torchvision")
    if name == "open_clip":
        pytest.importorskip("open_clip_train.data")
    pairs = DATA_CONTESTANTS[name].load(problem(files, crop_scale=(1.0, 1.0)))
    images, tokens = map(torch.cat, zip(*islice(pairs, 4), strict=True))
    assert images.shape == (12, 3, 16, 16) and images.dtype == torch.float32 and tokens.shape == (12, 77)
    assert {tuple(row.tolist()) for row in tokens} == {tuple(Bytes()(caption_of(i))[0].tolist()) for i in range(12)}
    table = next(iter(DATA_CONTESTANTS["contratile_table"].load(problem(files, batch=12, crop_scale=(1.0, 1.0)))))[0]
    torch.testing.assert_close(images.mean((0, 2, 3)), table.mean((0, 2, 3)), atol=0.02, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3)), table.std((0, 2, 3)), atol=0.05, rtol=0)


def test_a_turn_discards_what_workers_prepared(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = data_point._count

    def noted(pairs: Any, samples: int) -> None:
        counted.append(samples)
        count(pairs, samples)

    monkeypatch.setattr(data_point, "_count", noted)
    turn = data_point.take_turn("contratile_table", problem(files))
    assert counted == [3, 12] and turn.seconds > 0


def test_failures_are_told(files: Files) -> None:
    with DataPoint("contratile_table", threads=1, silence=120) as point:
        asked = problem(files)._asdict()
        del asked["samples"]
        with pytest.raises(Unable, match="failed: ValueError: table: expected a CSV"):
            point.turn({**asked, "table": "/nowhere.csv"}, 3)
        assert point.turn(asked, 3).seconds > 0, "it goes on"
        point.process.kill()
        with pytest.raises(Unable, match="out of memory"):
            point.turn(asked, 3)
    with DataPoint("somebody", threads=1, silence=120) as point, pytest.raises(Unable, match="KeyError"):
        point.turn(asked, 3)
    with DataPoint("contratile_table", threads=1, silence=0.01) as point, pytest.raises(Unable, match="no word"):
        point.turn(asked, 3)
    assert point.process.returncode is not None and not os.path.exists(f"/proc/{point.process.pid}/exe")  # noqa: PTH110


@pytest.mark.parametrize(
    "changes",
    [
        {"pixels": ()},
        {"pixels": (4,)},
        {"workers": (-1,)},
        {"workers": (SHARDS + 1,)},
        {"samples": 0},
        {"images": 0},
        {"batch": 0},
        {"crop_scale": (0.5, 0.4)},
        {"crop_scale": (0.5, 1.4)},
    ],
    ids=str,
)
def test_bad_configs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        DataBenchConfig(**changes)


def test_larger_images_are_read_less_often() -> None:
    config = DataBenchConfig(samples=2048, batch=64)
    assert config.scaled(2048, 256) == config.scaled(2048, 100) == 2048
    assert config.scaled(2048, 1500) == 320
    assert config.scaled(2048, 100_000) == 64 * SHARDS and set(BENCH.quick.contestants) == set(DATA_CONTESTANTS)


def test_options_of_other_benchmarks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "data", "--memory-sizes", "3"])
    assert stop.value.code == 2 and "unknown option --memory-sizes" in capsys.readouterr().err

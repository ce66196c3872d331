"""`contratile bench cache`: rows, plots, and contestants that do the same work."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.bench.cache import BENCH, CacheBenchConfig
from contratile.bench.contestants.cache import CACHE_CONTESTANTS, CacheProblem
from contratile.bench.plots import draw
from contratile.bench.rows import CacheRow, Recording, load_rows, save_rows
from contratile.cli import main
from tests.grad_cache.towers import ROUNDING, gap


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tyro")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("cache")
    words = "--sizes 12 --memory-sizes 12 24 --chunk 4 --dims 32 --layers 1 --rounds 1 --threads 1".split()
    who = "--contestants contratile plain somebody".split()
    assert main(["bench", "cache", *words, *who, "--out", str(folder)]) == 0
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
def test_rows(results: Path) -> None:
    rows = load_rows(results / "cache.json").rows
    found = {(row.contestant, row.n): row for row in rows}
    assert len(rows) == 6 and all(row.chunk == 4 and row.layers == 1 and row.d == 32 for row in rows)
    ours, plain = found["contratile", 12], found["plain", 12]
    assert ours.status == plain.status == "ok" and ours.ratio_to_contratile == 1.0
    assert 0 < ours.loss_percent < 100 and plain.loss_percent is None
    assert ours.seconds_best > 0 and ours.limit_seconds > 0 and ours.peak_extra_mib >= 0
    assert found["contratile", 24].status == "memory only" and found["contratile", 24].seconds_best is None
    assert found["somebody", 12].status.startswith("unknown contestant")


def test_csv_and_json_agree_and_the_plot_can_be_drawn_again(results: Path, tmp_path: Path) -> None:
    recorded = json.loads((results / "cache.json").read_text())["rows"]
    with (results / "cache.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [{key: "" if value is None else str(value) for key, value in row.items()} for row in recorded]
    assert main(["bench", "plot", str(results / "cache.json"), "--out", str(tmp_path)]) == 0
    for folder in (results, tmp_path):
        assert (folder / "cache.png").read_bytes().startswith(b"\x89PNG")


def test_plots_take_gaps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facts: dict[str, Any] = {"commit": "c", "threads": 1, "torch": "t", "cpu": "p", "command": "x"}
    place: dict[str, Any] = {"d": 16, "dtype": "float32", "chunk": 4, "layers": 1, "tokens": 32}
    rows = (
        CacheRow(contestant="contratile", n=8, status="memory only", peak_extra_mib=3.0, **place, **facts),
        CacheRow(contestant="plain", n=8, status="out of memory (predicted 9.0 GiB)", **place, **facts),
    )
    known = {"cpu": "p", "threads": "1", "torch": "t", "commit": "c", "memory_gib": "1.0"}
    recording = Recording(rows, known, "x", "cache")
    assert load_rows(save_rows(recording, tmp_path)[1]) == recording
    assert draw(recording, tmp_path)[0].stat().st_size > 5000


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", CACHE_CONTESTANTS)
def test_contestants_agree(name: str) -> None:
    """With dropout those that work in chunks, in whose order they all draw; without it plain training as well."""
    found = []
    for contestant in (name, "contratile"):
        problem = CacheProblem(11, 4, width=32, layers=1, dropout=0.0 if name == "plain" else 0.1)
        torch.manual_seed(3)
        step = CACHE_CONTESTANTS[contestant].load(problem)
        torch.manual_seed(3)
        found.append((step().item(), [p.grad for p in problem.parameters]))
        assert (step.loss_seconds < float("inf")) == (contestant != "plain")
    (value, grads), (our_value, our_grads) = found
    assert value == pytest.approx(our_value, rel=ROUNDING) and gap(grads, our_grads) <= ROUNDING


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", CACHE_CONTESTANTS)
@pytest.mark.parametrize("lengths", ["wordnet", "long-tailed"])
def test_contestants_agree_about_texts(name: str, lengths: Any) -> None:
    """Without dropout: rows that are sorted draw in another order."""
    found = []
    for contestant in (name, "plain"):
        problem = CacheProblem(11, 4, width=32, layers=1, dropout=0.0, lengths=lengths)
        step = CACHE_CONTESTANTS[contestant].load(problem)
        found.append((step().item(), [p.grad for p in problem.parameters]))
        assert step.padding is not None and step.padding >= 1
        assert (step.kept > 0) == (contestant == "contratile_kept")
    (value, grads), (plain_value, plain_grads) = found
    assert value == pytest.approx(plain_value, rel=ROUNDING) and gap(grads, plain_grads) <= ROUNDING


def test_padding_of_the_contestants() -> None:
    """In the order that their names promise; chunks of definitions in random order hold three tokens for a real one."""
    problem = CacheProblem(512, 64, width=32, layers=1, lengths="wordnet")
    found = {}
    for name in ("contratile", "contratile_columns", "contratile_unsorted"):
        step = CACHE_CONTESTANTS[name].load(problem)
        step.cache.feed.agenda(problem.sides)  # type: ignore[attr-defined]
        found[name] = step.cache.feed.agenda(problem.sides).padding  # type: ignore[attr-defined]
    joint, columns = found["contratile"], found["contratile_columns"]
    assert 1 <= joint.encoded / joint.real < columns.encoded / columns.real < 1.4
    assert 2 < problem.padding_of(problem.chunks) < problem.padding_of(problem.sides)


def test_predictions() -> None:
    def predicted(name: str, n: int) -> float:
        return CACHE_CONTESTANTS[name].predicted_bytes(n, width=128, layers=4)

    assert predicted("plain", 2048) > 2 * predicted("plain", 1024) > 0
    assert predicted("grad_cache", 2048) == 12 * 2048**2
    assert predicted("contratile", 1 << 20) == 0
    assert set(BENCH.quick.contestants) < set(CACHE_CONTESTANTS)


@pytest.mark.parametrize("changes", [{"chunk": 0}, {"layers": 0}, {"sizes": (0,)}, {"lengths": "odd"}])
def test_bad_configs_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        CacheBenchConfig(**changes)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "cache", "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and "--chunk" in said and "grad_cache" in said


def test_options_of_other_benchmarks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The scale is fixed here, so there is no option for it."""
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "cache", "--scale", "3"])
    assert stop.value.code == 2 and "unknown option --scale" in capsys.readouterr().err

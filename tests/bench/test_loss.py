"""The command line and the benchmark, by a tiny real run of it."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile
from contratile import machine
from contratile.bench import harness, memory
from contratile.bench.clock import CpuClock
from contratile.bench.contestants import loss as cases
from contratile.bench.loss import BENCH, LossBenchConfig, LossSeries
from contratile.bench.plots import draw
from contratile.bench.rows import LossRow, Recording, load_rows, save_rows
from contratile.bench.runner import Measured, run
from contratile.cli import COMMANDS, main
from contratile.cli.bench import EXTRA


def shell(*words: str, prelude: str = "") -> "subprocess.CompletedProcess[str]":
    """The command line in a process of its own, after some Python that sets the scene."""
    code = f"import sys\n{prelude}\nfrom contratile.cli import main\nsys.exit(main({list(words)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


BLOCK_EXTRAS = f"""
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRA!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in EXTRA:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("bench")
    words = "--sizes 128 --memory-sizes 128 --dims 16 --rounds 1 --contestants dense contratile nobody"
    done = shell("bench", "loss", *words.split(), "--out", str(folder))
    assert done.returncode == 0, done.stderr
    assert "contratile" in done.stdout and str(folder / "loss.csv") in done.stdout.replace("\n", "")
    return folder


def test_run_measures_what_it_promises(results: Path) -> None:
    recording = load_rows(results / "loss.json")
    rows = {row.contestant: row for row in recording.rows}
    assert set(rows) == {"dense", "contratile", "nobody"}
    for name in ("dense", "contratile"):
        row = rows[name]
        assert (row.n, row.d, row.dtype, row.error_n) == (128, 16, "float32", 128)
        assert row.seconds_best and row.seconds_median and row.limit_seconds and row.percent_of_limit
        assert 0 < row.seconds_best <= row.seconds_median
        assert row.percent_of_limit == pytest.approx(100 * row.limit_seconds / row.seconds_best)
        assert row.error_value is not None and row.error_value < 1e-5
        assert row.error_grad is not None and 0 < row.error_grad < 1e-4
        if sys.platform == "linux":
            assert row.status == "ok"
            assert row.peak_extra_mib is not None and 0 <= row.peak_extra_mib < 1024
    assert rows["contratile"].ratio_to_contratile == 1
    assert rows["contratile"].limit_seconds == rows["dense"].limit_seconds
    assert "unknown contestant" in rows["nobody"].status
    assert rows["nobody"].seconds_best is None and rows["nobody"].peak_extra_mib is None
    assert recording.command.startswith("contratile bench loss --sizes 128")
    assert recording.environment["torch"] == rows["dense"].torch


def test_csv_and_json_agree(results: Path) -> None:
    recorded = json.loads((results / "loss.json").read_text())["rows"]
    with (results / "loss.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [{key: "" if value is None else str(value) for key, value in row.items()} for row in recorded]


def test_plots_are_images_and_can_be_drawn_again(results: Path, tmp_path: Path) -> None:
    assert not list(results.glob(".*"))
    assert main(["bench", "plot", str(results / "loss.json"), "--out", str(tmp_path)]) == 0
    for folder in (results, tmp_path):
        for name in ("loss_memory.png", "loss_time.png"):
            content = (folder / name).read_bytes()
            assert content.startswith(b"\x89PNG") and len(content) > 5000


def row(**changes: Any) -> LossRow:
    facts = {"commit": "c", "threads": 1, "torch": "t", "cpu": "p", "command": "x"}
    return LossRow(**{"contestant": "dense", "n": 128, "d": 16, "dtype": "float32", "status": "ok", **facts, **changes})


def test_rows_survive_the_disk_and_plots_take_gaps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = (
        row(peak_extra_mib=1.5),
        row(n=256, status="out of memory (predicted 9.0 GiB)"),
        row(contestant="contratile", n=256, d=32, seconds_best=0.5, limit_seconds=0.25, peak_extra_mib=0.25),
    )
    recording = Recording(rows, {"cpu": "p", "threads": "1", "torch": "t", "commit": "c", "memory_gib": "1.0"}, "x")
    _, path = save_rows(recording, tmp_path)
    assert load_rows(path) == recording
    for image in draw(recording, tmp_path):
        assert image.stat().st_size > 5000


def test_recorded_runs_still_load() -> None:
    recorded = list((Path(__file__).parents[2] / "benchmarks/results").glob("*/loss.json"))
    assert recorded
    for path in recorded:
        assert load_rows(path).kind == "loss" and load_rows(path).rows


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    other = tmp_path / "loss.json"
    for text in ('{"rows": [{"n": 1}]}', '{"kind": "flight", "rows": []}', "[]", "none"):
        other.write_text(text)
        assert main(["bench", "plot", str(other)]) == 2
        assert "expected a JSON file" in capsys.readouterr().err


@pytest.mark.parametrize(("m", "blocks", "products"), [(None, 3 * 3, 4), (40, 3 * 1, 4), (150, 3 * 4, 2)])
def test_limit_does_the_work_of_its_products(
    m: int | None, blocks: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.GemmLimit, "EDGE", 48)
    limit = harness.GemmLimit(100, 8, m, products=products)
    flops = []
    mm = torch.mm

    def counted(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        flops.append(2 * a.shape[1] * out.numel())
        return mm(a, b, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    limit()
    assert len(flops) == products * blocks and sum(flops) == products * 2 * 100 * (m or 100) * 8


def test_everybody_is_compared_with_the_best_limit_of_all_turns() -> None:
    seconds = iter([4.0, 10.0, 2.0, 5.0])  # the limit and a step, twice
    steps = {"first": lambda: None, "second": lambda: None}
    timings = harness.interleave(steps, harness.GemmLimit(8, 4), rounds=1, clock=lambda step: next(seconds))
    assert [timing.limit for timing in timings.values()] == [2.0, 2.0]
    measured = [Measured() for _ in steps]
    for found, turns in zip(measured, timings.values(), strict=True):
        found.add(turns)
    assert [found.columns(None)["percent_of_limit"] for found in measured] == [20.0, 40.0]
    assert measured[1].columns(measured[0])["ratio_to_contratile"] == 0.5


def test_a_contestant_that_fails_is_out_with_its_reason() -> None:
    calls: list[int] = []

    def fail() -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    timings = harness.interleave({"bad": fail, "good": lambda: calls.append(1)}, harness.GemmLimit(8, 4), rounds=2)
    assert timings["bad"].failure == "out of memory" and not timings["bad"].steps
    assert timings["good"].failure is None and len(calls) == len(timings["good"].steps) >= 2


def test_what_does_not_fit_is_predicted_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuClock, "available", lambda self: machine.GiB)
    monkeypatch.setattr(memory, "point", None)
    peak = LossSeries(LossBenchConfig(), cases.CLIP, ("dense",), 64).peak("dense", 32768)
    assert peak.status.startswith("out of memory (predicted 16.") and peak.mib is None
    assert memory.no_room(cases.LOSS_CONTESTANTS["contratile"].predicted_bytes(32768, 64), CpuClock()) is None


def test_contestants_of_this_package_agree_with_the_reference() -> None:
    problem = cases.LossProblem.make(70, 8, scale=5.0)
    truth = contratile.reference.clip_loss(*problem.args).item()
    for name in ("contratile", "contratile_cached", "dense"):
        problem.clear()
        value = cases.LOSS_CONTESTANTS[name].load()(*problem.args)
        assert value.item() == pytest.approx(truth, rel=1e-5)
        assert all(leaf.grad is not None for leaf in problem.args)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", ["open_clip", "inf_cl_ring", "sentence_transformers"])
def test_peers_compute_the_same_loss(name: str) -> None:
    with harness.quiet():
        problem = cases.LossProblem.make(100, 256, scale=14.3)
        value = cases.LOSS_CONTESTANTS[name].load()(*problem.args)
        got = [x.grad for x in problem.features]
        problem.clear()
        truth = cases.LOSS_CONTESTANTS["dense"].load()(*problem.args)
    torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got, [x.grad for x in problem.features], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"sizes": (0,)}, "sizes"), ({"rounds": 0}, "rounds"), ({"scale": 0.0}, "scale"), ({"dims": ()}, "dims")],
)
def test_bad_configs_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LossBenchConfig(**changes)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    for command in COMMANDS:
        assert command.name in page and command.summary in page and command.example in page
    assert main(["bench", "--help"]) == 0
    assert "tiles" not in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"contratile {contratile.__version__}\n"


@pytest.mark.parametrize("words", [["fly"], ["bench", "fly"], ["fly", "--help"]])
def test_unknown_commands_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "unknown command" in said and " ".join(words) in said and "bench loss" in said


def test_a_group_without_a_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    said = capsys.readouterr().out
    assert "bench loss" in said and "bench ring" in said and "tiles" not in said


def test_tiles_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("tiles --n 100 --d 8 --tile 50".split()) == 0
    said = capsys.readouterr().out
    assert "100 x 100 x 8 in 4 tiles of 50 x 50" in said and "0.0 MiB" in said
    with pytest.raises(SystemExit) as stop:
        main("tiles --n 0 --d 8".split())
    assert stop.value.code == 2


def test_the_core_alone_has_help_and_says_what_to_install() -> None:
    lines = "for words in ('--help', 'tiles --n 64 --d 8'): assert main(words.split()) == 0"
    done = shell("bench", "loss", "--quick", prelude=f"{BLOCK_EXTRAS}\nfrom contratile.cli import main\n{lines}")
    assert done.returncode == 1 and "64 x 64 x 8 in" in done.stdout
    assert len(done.stderr.splitlines()) == 1 and 'pip install ".[bench]"' in done.stderr


def test_a_run_that_is_broken_off_leaves_its_rows(tmp_path: Path) -> None:
    config = LossBenchConfig(
        sizes=(32, 64), memory_sizes=(), dims=(8,), contestants=("dense", "nobody"), rounds=1, threads=1
    )

    def keep(recording: Recording[LossRow]) -> None:
        save_rows(recording, tmp_path)
        if len(recording.rows) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(BENCH, config, command="x", keep=keep)
    left = load_rows(tmp_path / "loss.json")
    assert [(row.contestant, row.n) for row in left.rows] == [("dense", 32), ("nobody", 32), ("dense", 64)]

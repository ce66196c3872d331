"""The benchmark of the family, by a tiny real run of it, and its contestants against the reference."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.bench.contestants.family import CASES, FAMILY
from contratile.bench.contestants.loss import Case, LossContestant, quiet
from contratile.bench.family import BENCH, FAMILY_CONTESTANTS, LOSSES, FamilyBenchConfig
from contratile.bench.plots import draw
from contratile.bench.rows import FamilyRow, Recording, load_rows, save_rows
from contratile.cli import main
from contratile.cli.bench import EXTRA
from tests.bench.test_loss import shell

LINUX = sys.platform == "linux"
N, D = 64, 16
EVERYBODY = [
    pytest.param(case, who, id=f"{case.name}-{name}")
    for case in FAMILY
    for name, who in case.contestants.items()
    if not who.needs_cuda
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in EXTRA:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("family")
    words = f"--losses nt_xent info_nce --sizes {N} --memory-sizes {N} --dims {D} --rounds 1 --threads 1"
    who = "--contestants contratile open_clip info_nce_pytorch nobody"
    done = shell("bench", "family", *words.split(), *who.split(), "--out", str(folder))
    assert done.returncode == 0, done.stderr
    assert "limit: 2 products of 2N x 2N x D" in done.stdout and "against their peers" in done.stdout
    assert "nobody, info_nce, D=16, N=64: unknown contestant" in done.stdout
    return folder


@pytest.mark.peers
def test_run_measures_what_it_promises(results: Path) -> None:
    recording: Recording[FamilyRow] = load_rows(results / "family.json")
    rows = {(row.loss, row.contestant): row for row in recording.rows}
    measured = {("nt_xent", "contratile"), ("info_nce", "contratile"), ("info_nce", "info_nce_pytorch")}
    assert set(rows) == measured | {("nt_xent", "nobody"), ("info_nce", "nobody")}  # each in the losses that it has
    assert recording.kind == "family" and recording.environment["version_lightly"]
    for key in measured:
        row = rows[key]
        assert (row.n, row.d, row.dtype, row.error_n) == (N, D, "float32", N)
        assert row.seconds_best and row.limit_seconds and row.percent_of_limit
        assert row.percent_of_limit == pytest.approx(100 * row.limit_seconds / row.seconds_best)
        assert row.error_value is not None and row.error_value < 1e-5
        assert row.error_grad is not None and 0 < row.error_grad < 1e-4
        assert not LINUX or (row.status == "ok" and row.peak_extra_mib is not None)
    ours, peer = rows["info_nce", "contratile"], rows["info_nce", "info_nce_pytorch"]
    assert ours.ratio_to_contratile == 1 and ours.limit_seconds == peer.limit_seconds
    assert peer.ratio_to_contratile == pytest.approx((peer.seconds_best or 0) / (ours.seconds_best or 1))
    assert (ours.package, peer.package) == (None, "info-nce-pytorch")
    assert [
        (rows[loss, "contratile"].views, rows[loss, "contratile"].products) for loss in ("nt_xent", "info_nce")
    ] == [
        (2, 2),
        (1, 4),
    ]


@pytest.mark.peers
def test_csv_and_json_agree_and_the_plot_can_be_drawn_again(results: Path, tmp_path: Path) -> None:
    recorded = json.loads((results / "family.json").read_text())["rows"]
    with (results / "family.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [{key: "" if value is None else str(value) for key, value in row.items()} for row in recorded]
    assert main(["bench", "plot", str(results / "family.json"), "--out", str(tmp_path)]) == 0
    for folder in (results, tmp_path):
        assert (folder / "family.png").read_bytes().startswith(b"\x89PNG")


def row(**changes: Any) -> FamilyRow:
    facts = {"commit": "c", "threads": 1, "torch": "t", "cpu": "p", "command": "x"}
    place = {"loss": "siglip", "views": 1, "products": 4, "n": 128, "d": 16, "dtype": "float32", "status": "ok"}
    return FamilyRow(**{"contestant": "contratile", **place, **facts, **changes})


def test_rows_survive_the_disk_and_plots_take_gaps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = (
        row(seconds_best=0.5, limit_seconds=0.25, percent_of_limit=50.0, ratio_to_contratile=1.0),
        row(n=256, peak_extra_mib=0.0),
        row(contestant="dense", status="out of memory (predicted 9.0 GiB)"),
        row(loss="nt_xent", contestant="lightly", package="lightly", d=32, peak_extra_mib=2.5),
    )
    facts = {"cpu": "p", "threads": "1", "torch": "t", "commit": "c", "memory_gib": "1.0"}
    recording = Recording(rows, facts, "x", "family")
    _, path = save_rows(recording, tmp_path)
    assert load_rows(path) == recording
    (image,) = draw(recording, tmp_path)
    assert image.stat().st_size > 5000


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize(("case", "contestant"), EVERYBODY)
def test_contestants_agree_with_the_reference(case: Case, contestant: LossContestant) -> None:
    problem = case.problem(N, D, scale=14.3)
    exact = problem.double()
    with quiet():
        value = contestant.load()(*problem.args)
    truth = (contestant.oracle or case.oracle)(*exact.args)
    truth.backward()
    assert value.item() == pytest.approx(truth.item(), rel=1e-5)
    for got, true in zip(problem.features, exact.features, strict=True):
        assert got.grad is not None and true.grad is not None
        assert (got.grad - true.grad).abs().max() <= 1e-5 * true.grad.abs().max()
    if contestant.oracle and contestant.package:  # it normalises: on unit features the value is that of the case
        assert truth.item() == pytest.approx(case.oracle(*exact.args).item(), rel=1e-6)


def test_options_have_something_to_do() -> None:
    case = CASES["info_nce"]
    problem = case.problem(N, D, scale=14.3)
    plain = case.oracle(*problem.args)
    for name in ("ids", "positives", "key_bias", "hardness", "margin"):
        option = case.contestants[f"contratile_{name}"].oracle
        assert option is not None and not torch.isclose(option(*problem.args), plain, rtol=1e-4)


def test_every_contestant_has_a_loss() -> None:
    for loss in LOSSES:
        names = FamilyBenchConfig().contestants_of(loss)
        kept = {"matryoshka": {"contratile_loop"}, "distill": set(), "gist": set()}  # no tiles
        ours = {"contratile"} | kept.get(loss, {"contratile_cached"})
        assert set(names) == set(CASES[loss].contestants) and ours | {"dense"} < set(names)
        assert any(CASES[loss].contestants[name].package for name in names)
    assert set(BENCH.quick.contestants) < set(FAMILY_CONTESTANTS) and set(BENCH.quick.losses) < set(LOSSES)


@pytest.mark.parametrize(("changes", "said"), [({"losses": ("triplet",)}, "triplet"), ({"losses": ()}, "losses")])
def test_bad_configs_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FamilyBenchConfig(**changes)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "family", "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and "--losses" in said and "nt_xent" in said and "--memory-sizes" in said

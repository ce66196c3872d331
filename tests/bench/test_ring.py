"""The benchmark over ranks, by a tiny real run of it, and by ranks that fail."""

import contextlib
import csv
import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from contratile import machine
from contratile.bench import launch, ring
from contratile.bench.clock import CpuClock
from contratile.bench.contestants.loss import LossProblem, quiet
from contratile.bench.contestants.ring import RING_CONTESTANTS
from contratile.bench.plots import draw
from contratile.bench.ring import BENCH, RingBenchConfig
from contratile.bench.rows import Recording, RingRow, load_rows, save_rows
from contratile.bench.runner import run
from contratile.bench.traffic import bytes_sent
from contratile.cli import main
from contratile.cli.bench import EXTRA
from tests.ranks import pool
from tests.torchvision_repair import repair_torchvision

LINUX = sys.platform == "linux"
N, D = 64, 16


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in EXTRA:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("ring")
    words = f"bench ring --worlds 1 2 --batches {N} --memory-batches {N} --dims {D} --rounds 1"
    who = "--contestants contratile disco nobody"  # of the peers the one that every rank imports in no time
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*words.split(), *who.split(), "--out", str(folder)]) == 0
    assert "GiB per rank" in said.getvalue() and "nobody, D=16, P=2, N=64: unknown" in said.getvalue()
    return folder


@pytest.mark.peers
def test_run_measures_what_it_promises(results: Path) -> None:
    recording: Recording[RingRow] = load_rows(results / "ring.json")
    rows = {(row.contestant, row.world): row for row in recording.rows}
    names = ("contratile", "disco")
    assert len(rows) == 3 * 2 and recording.kind == "ring" and recording.environment["threads"] == "1"
    for name in names:
        for world in (1, 2):
            row = rows[name, world]
            assert row.status == "ok" or not LINUX
            assert (row.n, row.local, row.d) == (N, N // world, D)
            assert row.seconds_best and row.seconds_median and 0 < row.seconds_best <= row.seconds_median
            assert row.limit_seconds == rows["contratile", world].limit_seconds
            assert row.percent_of_limit == pytest.approx(100 * (row.limit_seconds or 0) / row.seconds_best)
            overlap = row.transfer_seconds, row.waited_seconds, row.exposed_seconds, row.hidden_percent
            assert all(x is not None for x in overlap) == (name == "contratile" and world == 2)
    assert rows["contratile", 2].ratio_to_contratile == 1
    ours = rows["contratile", 2]
    assert 0 <= (ours.exposed_seconds or 0) <= (ours.waited_seconds or 0)
    assert 0 <= (ours.hidden_percent or 0) <= (ours.hidden_percent_at_most or 0) <= 100
    assert "unknown contestant" in rows["nobody", 2].status and rows["nobody", 2].seconds_best is None


@pytest.mark.peers
@pytest.mark.skipif(not LINUX, reason="the kernel's counters are read from Linux")
def test_memory_and_bytes_are_counted(results: Path) -> None:
    for row in load_rows(results / "ring.json").rows:
        if row.contestant == "nobody":
            continue
        assert 0 <= row.peak_extra_mib < 1024
        block = 4 * row.local * D
        assert row.peak_blocks == pytest.approx(row.peak_extra_mib * 2**20 / block)
        assert row.sent_blocks == pytest.approx(row.sent_mib * 2**20 / block)
        sent, p, n = row.sent_mib * 2**20, row.world, row.local
        if p == 1:
            assert sent == 0
        elif row.contestant == "contratile":
            elements = (3 * p - 2) * n * D + 2 * p * n + 2 * (p - 1) * n
            assert 4 * elements <= sent <= 4 * elements + 4096  # a handshake, and gloo's headers
        elif row.contestant == "disco":
            # Both sides gathered; what belongs to the other rank returned, or received and answered with nothing.
            assert sent >= 2 * (p - 1) * block


def test_csv_json_and_picture(results: Path, tmp_path: Path) -> None:
    recorded = json.loads((results / "ring.json").read_text())["rows"]
    with (results / "ring.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert table == [{key: "" if value is None else str(value) for key, value in row.items()} for row in recorded]
    assert main(["bench", "plot", str(results / "ring.json"), "--out", str(tmp_path)]) == 0
    for folder in (results, tmp_path):
        content = (folder / "ring.png").read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 5000
    assert not list(results.glob(".*"))


def row(**changes: Any) -> RingRow:
    facts = {"commit": "c", "threads": 1, "torch": "t", "cpu": "p", "command": "x"}
    point = {"contestant": "disco", "world": 2, "n": 128, "local": 64, "d": 16, "dtype": "float32", "status": "ok"}
    return RingRow(**{**point, **facts, **changes})


@pytest.mark.parametrize("measured", [True, False])
def test_rows_survive_the_disk_and_the_picture_takes_gaps(measured: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = (
        row(status="out of memory (predicted 9.0 GiB)"),
        row(d=32, status="memory only", peak_extra_mib=1.0 if measured else None),
        row(contestant="contratile", seconds_best=0.5 if measured else None, sent_mib=2.0 if measured else None),
    )
    facts = {"cpu": "p", "threads": "1", "torch": "t", "commit": "c", "memory_gib": "1.0"}
    recording = Recording(rows, facts, "x", "ring")
    _, path = save_rows(recording, tmp_path)
    assert path.name == "ring.json" and load_rows(path) == recording
    (image,) = draw(recording, tmp_path)
    assert image.stat().st_size > 5000


# --- contestants ------------------------------------------------------------------------------------------------


def steps(names: tuple[str, ...]) -> list[tuple[Tensor, ...]]:
    """The mean over ranks of the values, and this rank's gradients, of each contestant."""
    repair_torchvision()  # other tests may have started this rank
    answers = []
    with quiet():
        for name in names:
            problem = LossProblem.make(9, 24, scale=5.0, seed=dist.get_rank())
            value = RING_CONTESTANTS[name].load()(*problem.args).clone()
            dist.all_reduce(value)
            grads = (x.grad for x in problem.features)
            answers.append((value / dist.get_world_size(), *(x for x in grads if x is not None)))
    return answers


@pytest.mark.peers
def test_contestants_compute_the_same_loss_and_gradients() -> None:
    """All but open_clip's default mode, in which other ranks' features are constants."""
    names = tuple(name for name in RING_CONTESTANTS if name != "open_clip")
    for ours, *others in pool(2).run(steps, names):
        assert len(others) == 4 and len(ours) == 3
        for theirs in others:
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)


# --- traffic ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not LINUX, reason="the kernel's counters are read from Linux")
def test_bytes_sent_are_those_of_tcp_and_of_this_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as there, server.accept()[0] as here:
            near, far = socket.socketpair()
            before = bytes_sent()
            there.sendall(b"x" * 1000)
            here.sendall(b"y" * 10)
            near.sendall(b"z" * 77)
            assert len(here.recv(1000, socket.MSG_WAITALL)) == 1000 and len(there.recv(10, socket.MSG_WAITALL)) == 10
            after = bytes_sent()
            there.sendall(b"still open")
            near.close()
            far.close()
    assert before is not None and after == before + 1010


# --- what goes wrong --------------------------------------------------------------------------------------------

BROKEN = """
import os, signal, sys
if sys.argv[sys.argv.index("--rank") + 1] == "1":
    {deed}
"""


@pytest.mark.parametrize(
    ("deed", "said", "others"),
    [
        ("raise RuntimeError('broken on purpose')", "failed: RuntimeError: broken on purpose", ("contratile", "disco")),
        ("os.kill(os.getpid(), signal.SIGKILL)", "out of memory (killed by the system)", ()),
    ],
)
def test_one_that_fails_on_one_rank_is_a_row_and_the_others_go_on(
    deed: str, said: str, others: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open_clip").mkdir()
    (tmp_path / "open_clip/__init__.py").write_text(BROKEN.format(deed=deed))
    (tmp_path / "open_clip/loss.py").write_text("def ClipLoss(**modes): ...")  # the other rank loads it and waits
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(ring, "version", lambda package: "1.0")
    config = RingBenchConfig(
        worlds=(2,), batches=(), memory_batches=(N,), dims=(D,), contestants=("open_clip", *others), rounds=1
    )
    heard: list[str] = []
    rows = {row.contestant: row for row in run(BENCH, config, command="x", notify=heard.append).rows}
    assert rows["open_clip"].status == said and rows["open_clip"].peak_extra_mib is None
    for name in others:
        assert not LINUX or (rows[name].status == "memory only" and rows[name].peak_extra_mib is not None)
    assert sum("starting 2 ranks" in text for text in heard) == (2 if others else 1)


def test_ranks_that_say_nothing_or_cannot_start_are_ended() -> None:
    heard: list[launch.Event] = []
    words = f"--batch {N} --d {D} --scale 1 --rounds 0 --threads 1 --contestants contratile".split()
    assert launch.launch(2, words, threads=1, silence=0, hear=heard.append) == "failed: no word after 0 s"
    status = launch.launch(1, [*words, "nobody"], threads=1, silence=60, hear=heard.append)
    assert status is not None and status.startswith("failed: rank 0 ended with code 2") and "invalid choice" in status
    assert not heard


def test_what_does_not_fit_is_predicted_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuClock, "available", lambda self: 6 * machine.GiB)
    config = RingBenchConfig(
        worlds=(4,), batches=(16384,), memory_batches=(), contestants=("open_clip", "open_clip_grad")
    )
    monkeypatch.setattr(ring, "version", lambda package: "1.0")
    rows = run(BENCH, config, command="x").rows
    assert all(row.status.startswith("out of memory (predicted 1") for row in rows)
    ranks = ring.RingSeries(config, 4, 512)
    assert ranks.obstacle("contratile", 16384) is None
    ranks.pace["contratile"] = 1e-6
    assert ranks.obstacle("contratile", 16384) == "skipped (a step would take about 268 s)"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batches": (100,)}, "batches: expected multiples of 8"),
        ({"worlds": (3,), "memory_batches": (64,)}, "multiples of 3"),
        ({"worlds": (0,)}, "worlds"),
        ({"worlds": ()}, "worlds"),
        ({"batches": (), "memory_batches": ()}, "batches"),
        ({"rounds": 0}, "rounds"),
        ({"contestants": ()}, "contestants"),
    ],
)
def test_bad_configs_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RingBenchConfig(**changes)


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit) as stop:
        main("bench ring --worlds 2 --batches 7".split())
    assert stop.value.code == 2 and "expected multiples of 2" in capsys.readouterr().err

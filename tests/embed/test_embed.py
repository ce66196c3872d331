"""`contratile embed`: the features of `encode`, however often it is interrupted and however many processes share it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from contratile.cli import main
from contratile.data.sample import Broken, Kinds, Sample
from contratile.data.shards import Shards
from contratile.data.tables import Table
from contratile.embed.embed import Ranks, embed_source
from contratile.embed.output import Output
from contratile.embed.table import check_table
from contratile.models.encoding import encode
from contratile.train.load import load_run
from contratile.train.loop import Trainer
from tests.data.files import encoded, write_tar
from tests.ranks import launch_environment, pool, torchrun
from tests.train.runs import COLOURS, shapes, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and the pictures that it was trained on."""
    folder = tmp_path_factory.mktemp("embed")
    Trainer(small(shapes(folder / "shapes"), folder / "run")).run()
    return folder


def table(folder: Path) -> Table:
    return Table(folder / "shapes" / "pairs.csv", "train", test_share=None)


def shards(folder: Path) -> Shards:
    """Two tars of 13 and 10 pictures, one of which is damaged."""
    target = folder / "shards"
    if not target.exists():
        target.mkdir()
        for tar, numbers in enumerate((range(13), range(13, 23))):
            members = []
            for n in numbers:
                picture = encoded(Image.new("RGB", (16, 16), COLOURS[n % len(COLOURS)]))
                members += [(f"{n:04d}.png", picture if n != 5 else picture[:40]), (f"{n:04d}.txt", b"a %d" % n)]
            write_tar(target / f"{tar}.tar", members)
    return Shards(str(target / "{0..1}.tar"), "train", test_share=None)


def keys(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_the_features_of_encode(folder: Path, tmp_path: Path, side: Any) -> None:
    towers, source = load_run(folder / "run").towers, table(folder)
    want = encode(towers, source, chunk=10)
    found = embed_source(towers, source, tmp_path / "f.npy", side=side, chunk=10, save_every=2)
    assert (found.rows, found.width, found.broken) == (96, 32, 0)
    sides = ("left", "right") if side == "both" else (side,)
    for each in sides:
        array = np.load(tmp_path / ("f.npy" if len(sides) == 1 else f"f.{each}.npy"))
        assert array.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(array), getattr(want, each), rtol=0, atol=0)
    rows = keys(tmp_path / "f.keys.jsonl")
    assert [row["key"] for row in rows] == want.keys and [row["text"] for row in rows] == want.texts
    assert [row["name"] for row in rows] == want.names and [row["index"] for row in rows] == list(range(96))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in found.files)


def test_parquet(folder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    towers, source = load_run(folder / "run").towers, table(folder)
    want = encode(towers, source, chunk=10)
    embed_source(towers, source, tmp_path / "f.parquet", side="both", chunk=10, save_every=2)
    found = parquet.read_table(tmp_path / "f.parquet").to_pydict()
    assert list(found) == ["key", "name", "text", "index", "left", "right"]
    assert found["key"] == want.keys and found["text"] == want.texts and found["index"] == list(range(96))
    for side in ("left", "right"):
        torch.testing.assert_close(torch.tensor(found[side]), getattr(want, side), rtol=0, atol=0)
    assert parquet.ParquetFile(tmp_path / "f.parquet").num_row_groups == 5, "one for each unit"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.parquet", "f.parquet.embedded.json"]


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needed to write Parquet: pip install pyarrow, or write NAME.npy"):
        Output.of(tmp_path / "f.parquet", ("left",))
    with pytest.raises(ImportError, match=r"needed to write Parquet: pip install pyarrow, or write NAME.jsonl"):
        check_table(tmp_path / "f.parquet")


@pytest.mark.parametrize("limit", [0, 1, 9, 12, 17])
def test_broken_samples_of_a_stream_are_listed_and_left_out(folder: Path, tmp_path: Path, limit: int) -> None:
    pytest.importorskip("webdataset")
    towers, source = load_run(folder / "run").towers, shards(folder)
    want = encode(towers, source, chunk=3, limit=limit)
    found = embed_source(towers, source, tmp_path / "f.npy", chunk=3, save_every=2, limit=limit)
    broken = int(limit == 0 or limit > 5)
    assert (found.rows, found.broken) == ((limit or 23) - broken, broken)
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "f.npy")), want.left, rtol=0, atol=0)
    assert [row["key"] for row in keys(tmp_path / "f.keys.jsonl")] == want.keys
    assert (tmp_path / "f.npy.broken.jsonl").exists() == bool(broken)
    if broken:
        assert [row["key"] for row in keys(tmp_path / "f.npy.broken.jsonl")] == ["0.tar/0005"]


class Stopped(Exception):
    pass


def stop_after(samples: int) -> Any:
    def notify(done: int) -> None:
        if done >= samples:
            raise Stopped

    return notify


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_an_interrupted_call_is_continued(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "stream":
        pytest.importorskip("webdataset")
    towers = load_run(folder / "run").towers
    source: Any = table(folder) if kind == "indexed" else shards(folder)
    options: dict[str, Any] = {"chunk": 3, "save_every": 2}
    whole = embed_source(towers, source, tmp_path / "whole.npy", **options)
    for _ in range(2):  # each time a unit and a half
        with pytest.raises(Stopped):
            embed_source(towers, source, tmp_path / "f.npy", **options, notify=stop_after(8))
        assert not (tmp_path / "f.npy").exists()
    seen: list[int] = []
    found = embed_source(towers, source, tmp_path / "f.npy", **options, notify=seen.append)
    assert seen[-1] == (96 if kind == "indexed" else 23) - 2 * 6, "two units were not made again"
    assert found[:3] == whole[:3]
    for name in ("npy", "keys.jsonl"):
        assert (tmp_path / f"f.{name}").read_bytes() == (tmp_path / f"whole.{name}").read_bytes()


def test_a_finished_stream_that_was_not_assembled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All units are there, and the last one is short: nothing is read again."""
    pytest.importorskip("webdataset")
    towers, source = load_run(folder / "run").towers, shards(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "write", lambda *given: stop_after(0)(0))
        with pytest.raises(Stopped):
            embed_source(towers, source, tmp_path / "f.npy", chunk=3)
    with pytest.raises(
        ValueError, match="save_every of an unfinished --out: expected 8, as when it was started, got 2"
    ):
        embed_source(towers, source, tmp_path / "f.npy", chunk=3, save_every=2)
    with pytest.raises(ValueError, match=r"at most 0 broken, got 1 of 23 \(first 0.tar/0005"):
        embed_source(towers, source, tmp_path / "f.npy", chunk=3, broken_limit=0)
    seen: list[int] = []
    assert embed_source(towers, source, tmp_path / "f.npy", chunk=3, notify=seen.append).rows == 22
    assert seen == []


def test_damaged_units_are_made_again(folder: Path, tmp_path: Path) -> None:
    towers, source = load_run(folder / "run").towers, table(folder)
    with pytest.raises(Stopped):
        embed_source(towers, source, tmp_path / "f.npy", chunk=8, save_every=1, notify=stop_after(40))
    (tmp_path / ".f.npy.unfinished" / "00000001.left").write_bytes(b"")
    seen: list[int] = []
    embed_source(towers, source, tmp_path / "f.npy", chunk=8, save_every=1, notify=seen.append)
    assert seen[-1] == 96 - 5 * 8 + 8
    want = encode(towers, source, chunk=8).left
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "f.npy")), want, rtol=0, atol=0)


def test_another_model_does_not_continue(folder: Path, tmp_path: Path) -> None:
    towers, source = load_run(folder / "run").towers, table(folder)
    with pytest.raises(Stopped):
        embed_source(towers, source, tmp_path / "f.npy", chunk=8, notify=stop_after(8))
    with torch.no_grad():
        next(towers.parameters()).add_(1)
    with pytest.raises(ValueError, match="weights of an unfinished --out"):
        embed_source(towers, source, tmp_path / "f.npy", chunk=8)


def test_changed_data_does_not_continue(folder: Path, tmp_path: Path) -> None:
    """The same name and number of rows, but other contents."""
    towers, data, lines = load_run(folder / "run").towers, tmp_path / "pairs.csv", ["path,caption"]
    lines += [f"{folder}/shapes/red-line-{1 + n % 3}.png,text {n}" for n in range(20)]

    def call(**options: Any) -> Any:
        source = Table(data, "train", test_share=None)
        facts = {"data": str(data)}
        return embed_source(towers, source, tmp_path / "f.npy", chunk=4, save_every=1, facts=facts, **options)

    data.write_text("\n".join(lines))
    with pytest.raises(Stopped):
        call(notify=stop_after(9))
    data.write_text("\n".join([lines[0], *lines[:0:-1]]))
    os.utime(data, ns=(0, 0))  # also where clocks are coarse
    with pytest.raises(ValueError, match="files of an unfinished --out: expected '1 file of"):
        call()


def share_of_rank(folder: Path, out: Path, kind: str) -> int:
    source: Any = table(folder) if kind == "indexed" else shards(folder)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.barrier)
    seen: list[int] = []
    embed_source(load_run(folder / "run").towers, source, out, chunk=3, save_every=2, ranks=ranks, notify=seen.append)
    return seen[-1]


@pytest.mark.parametrize("kind", ["indexed", "stream"])
def test_ranks_share_the_work(folder: Path, tmp_path: Path, kind: str) -> None:
    if kind == "stream":
        pytest.importorskip("webdataset")
    towers = load_run(folder / "run").towers
    source: Any = table(folder) if kind == "indexed" else shards(folder)
    embed_source(towers, source, tmp_path / "alone.npy", chunk=3, save_every=2)
    with pytest.raises(Stopped):  # one process begins, two continue
        embed_source(towers, source, tmp_path / "f.npy", chunk=3, save_every=2, notify=stop_after(6))
    done = pool(2).run(share_of_rank, folder, tmp_path / "f.npy", kind)
    assert sum(done) == (96 if kind == "indexed" else 23) - 6 and min(done) > 0
    assert (tmp_path / "f.keys.jsonl").read_bytes() == (tmp_path / "alone.keys.jsonl").read_bytes()
    found, alone = (np.load(tmp_path / f"{name}.npy") for name in ("f", "alone"))
    assert np.abs(found - alone).max() < 1e-6  # ranks may have another number of threads, which round differently


def test_the_command_is_killed_and_continued_by_two_processes(folder: Path, tmp_path: Path) -> None:
    """From another folder than where training ran."""
    command = ["-m", "contratile", "embed", str(folder / "run"), str(folder / "shapes" / "pairs.csv")]
    options = ["--out", "f.npy", "--chunk", "1", "--save-every", "4"]
    process = subprocess.Popen([sys.executable, *command, *options], cwd=tmp_path, env=launch_environment())
    unfinished = tmp_path / ".f.npy.unfinished"
    deadline = time.monotonic() + 300
    while len(list(unfinished.glob("*.json"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert unfinished.exists() and not (tmp_path / "f.npy").exists(), "it was killed too late"
    started = [*torchrun(2, tmp_path), *command, *options]
    done = subprocess.run(
        started, cwd=tmp_path, env=launch_environment(), capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "96 rows of 32 features, weights of step 6: f.npy, f.keys.jsonl" in done.stdout
    want = encode(load_run(folder / "run").towers, table(folder), chunk=1).left
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "f.npy")), want, rtol=0, atol=1e-6)
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out f.txt", "--out: expected a name that ends in .npy or .parquet"),
        ("--out missing/f.npy", "whose folder does not exist"),
        ("--out f.npy --chunk 0", "--chunk: expected at least 1"),
        ("--out f.npy --left nothing", "column left of pairs.csv: expected one of path, caption"),
    ],
)
def test_refused(
    folder: Path,
    tmp_path: Path,
    words: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["embed", str(folder / "run"), str(folder / "shapes" / "pairs.csv"), *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_data_of_another_kind(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The captions of text pairs can be embedded, their left sides cannot."""
    (tmp_path / "texts.csv").write_text("anchor,positive\na red dot,red\na blue line,blue\n")
    command = ["embed", str(folder / "run"), str(tmp_path / "texts.csv"), "--out", str(tmp_path / "f.npy")]
    assert main(command) == 2
    assert "expected images, as the left encoder of the run takes them, got texts" in capsys.readouterr().err
    assert main([*command, "--side", "right"]) == 0
    assert np.load(tmp_path / "f.npy").shape == (2, 32)


def test_splits(folder: Path, tmp_path: Path) -> None:
    for split in ("all", "train", "test"):
        command = ["embed", str(folder / "run"), str(folder / "shapes" / "pairs.csv"), "--split", split]
        assert main([*command, "--out", str(tmp_path / f"{split}.npy")]) == 0
    rows = {split: len(np.load(tmp_path / f"{split}.npy")) for split in ("all", "train", "test")}
    assert rows["all"] == 96 == rows["train"] + rows["test"] and rows["test"] > 5


class Many:
    """Many short texts with large names beside one picture."""

    kinds: Kinds = ("image", "text")
    name = "many"

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Sample:
        if index % 5000 == 7:
            raise Broken(f"{index}", "made so")
        return Sample(Image.new("RGB", (1, 1)), "red dot", f"{index}" + "x" * 2000, name="y" * 2000)

    def texts(self) -> Any:
        return iter(())


EMBED = """
import sys
from pathlib import Path
from contratile.embed.embed import embed_source
from contratile.host_memory import peak_growth
from contratile.train.load import load_run
from tests.embed.test_embed import Many
towers = load_run(Path(sys.argv[1])).towers
for n in (500, 2000, 12000):
    out = Path(sys.argv[2]) / f"{n}{sys.argv[3]}"
    print(peak_growth(lambda: embed_source(towers, Many(n), out, side="right", chunk=128, save_every=4)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_memory_does_not_grow_with_the_rows(folder: Path, tmp_path: Path, suffix: str) -> None:
    """Rows of 4 KB each: those of the larger data take 48 MiB, of which 8 MiB could be left of the smaller."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, "-c", EMBED, str(folder / "run"), str(tmp_path), suffix]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, smaller, larger = map(int, done.stdout.split())
    assert larger - smaller < 12 << 20, (smaller, larger)

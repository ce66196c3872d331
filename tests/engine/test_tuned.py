"""What was tuned: kept in one file that survives damage, other versions and other writers, and used by later runs."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import contratile as ct
from contratile.cli import main
from contratile.engine import cuts, tuned
from contratile.engine.plan import WORKSPACE_LIMIT, TilePlan, plan_tiles
from contratile.engine.spec import Inputs, Spec
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE
from tests.helpers import features

HERE: dict[str, Any] = {"device": "a machine", "dtype": "float32"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path))
    monkeypatch.delenv(tuned.SWITCH, raising=False)
    tuned.forget()
    yield tmp_path
    tuned.forget()


def record(d: int, *choice: int, kind: str = tuned.TILES) -> Path:
    path = tuned.record(kind, **HERE, d=d, choice=choice or None, seconds=1.0, default_seconds=2.0)
    tuned.forget()
    return path


def found(d: int, kind: str = tuned.TILES) -> tuple[int, ...] | None:
    return tuned.lookup(kind, **HERE, d=d)


# --- the file -----------------------------------------------------------------------------------------------------


def test_what_was_recorded_is_found() -> None:
    assert found(512) is None
    record(512, 1024, 256)
    record(512, 64, 32, 16, 4, 2, kind="gradient")
    assert found(512) == (1024, 256) and found(512, "gradient") == (64, 32, 16, 4, 2) and found(512, "forward") is None
    assert tuned.lookup(tuned.TILES, device="another", dtype="float32", d=512) is None
    assert tuned.lookup(tuned.TILES, device="a machine", dtype="float64", d=512) is None
    record(512, 2048, 512)
    assert found(512) == (2048, 512)
    record(512)
    assert found(512) is None and found(512, "gradient") == (64, 32, 16, 4, 2)


def test_the_nearest_tuned_width_of_the_same_power_of_two() -> None:
    record(768, 16, 48)
    record(1024, 16, 64)
    assert [found(d) for d in (512, 513, 800, 896, 897, 1024, 1025)] == [
        *(None, (16, 48), (16, 48), (16, 48), (16, 64), (16, 64), None)
    ]


def test_a_process_reads_the_file_once() -> None:
    """Else a backward pass could cut other tiles than its forward pass."""
    assert found(512) is None
    tuned.record(tuned.TILES, **HERE, d=512, choice=(32, 32))
    assert found(512) is None
    tuned.forget()
    assert found(512) == (32, 32)


BROKEN = {
    "no JSON": "{",
    "bytes": "\x00\xff",
    "a list": "[]",
    "without entries": '{"format": 1}',
    "entries of another type": '{"format": 1, "entries": 3}',
    "an entry of another type": '{"format": 1, "entries": ["x"]}',
    "an older format": '{"format": 0, "entries": []}',
    "deep": "[" * 100_000,
    "large": " " * (tuned.LARGEST + 1),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_not_ours_is_ignored_with_one_warning(text: str, folder: Path) -> None:
    (folder / tuned.NAME).write_text(text, encoding="latin-1")
    with pytest.warns(UserWarning, match=r"ignores .*tuned\.json \(.*doctor --tune") as caught:
        assert found(512) is None and found(128) is None
    assert len(caught) == 1
    tuned.record(tuned.TILES, **HERE, d=512, choice=(32, 32))  # replaces it, and does not warn again
    tuned.forget()
    assert found(512) == (32, 32)


@pytest.mark.parametrize(
    "changes",
    [
        {"choice": "1024"},
        {"choice": [1024, 0]},
        {"choice": [1024.5, 16]},
        {"choice": [True, 16]},
        {"choice": [1 << 40, 16]},
        {"choice": None},
        {"d": "512"},
        {"d": -1},
        {"device": 3},
        {"versions": None},
        {"seconds": "fast"},
    ],
    ids=str,
)
def test_entries_of_wrong_types_are_ignored(changes: dict[str, Any]) -> None:
    path = record(512, 1024, 256)
    content = json.loads(path.read_text())
    content["entries"][0] |= changes
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="ignores"):
        assert found(512) is None


def test_entries_of_other_versions_are_kept_but_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    record(512, 1024, 256)
    usual = tuned.versions
    monkeypatch.setattr(tuned, "versions", lambda kind: f"newer than {usual(kind)}")
    assert found(512) is None
    record(512, 64, 64)
    assert found(512) == (64, 64)
    monkeypatch.setattr(tuned, "versions", usual)
    assert found(512) == (1024, 256)


def test_versions_name_what_the_time_depends_on() -> None:
    assert torch.__version__ in tuned.versions(tuned.TILES) and ct.__version__ in tuned.versions(tuned.TILES)
    kernels = tuned.versions("forward")
    assert torch.__version__ in kernels and " triton " in kernels and len(kernels.split("kernels ")[1]) == 12


def test_the_file_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    record(512, 1024, 256)
    monkeypatch.setenv(tuned.SWITCH, "0")
    tuned.forget()
    assert found(512) is None


def test_writers_at_the_same_time_lose_nothing(folder: Path) -> None:
    code = (
        "import sys\nfrom contratile.engine import tuned\n"
        "for d in range(20): tuned.record('tiles', device=sys.argv[1], dtype='float32', d=1 + d, choice=(16, 16))"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, f"machine {i}"]) for i in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(tuned.entries()) == 60
    assert [path.name for path in folder.iterdir() if path.name.endswith("json")] == [tuned.NAME]
    assert len(list(folder.iterdir())) == 2, "the file and its lock"


def test_a_failed_write_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(512, 1024, 256)
    before = path.read_text()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        record(512, 32, 32)
    assert path.read_text() == before and len(list(folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in its place: permissions do not stop a superuser."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path / "file" / "cache"))
    tuned.forget()
    with pytest.warns(UserWarning, match="ignores"):
        assert found(512) is None  # steps go on
    with pytest.raises(OSError, match=r"cannot be written \(.*another folder in the variable CONTRATILE_CACHE"):
        tuned.prepare()


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned.folder() == tmp_path
    monkeypatch.setenv(tuned.FOLDER, "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert tuned.folder() == tmp_path / "caches" / "contratile"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unusable in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert tuned.folder() == tmp_path / ".cache" / "contratile"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert tuned.folder() == tmp_path / "contratile"
    monkeypatch.delenv("LOCALAPPDATA")
    assert tuned.folder() is None


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(tuned.FOLDER)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", nobody)
    assert tuned.folder() is None and found(512) is None
    with pytest.raises(OSError, match="Name one in the variable CONTRATILE_CACHE"):
        tuned.prepare()


# --- tiles on a CPU -----------------------------------------------------------------------------------------------


def tune_tiles(d: int, *choice: int, dtype: str = "float32") -> None:
    tuned.record(tuned.TILES, device=tuned.cpu(), dtype=dtype, d=d, choice=choice)
    tuned.forget()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[TilePlan]:
    """The plans that steps are made with."""
    made: list[TilePlan] = []

    def noted(*sizes: int, **options: Any) -> TilePlan:
        made.append(plan_tiles(*sizes, **options))
        return made[-1]

    monkeypatch.setattr(cuts, "plan_tiles", noted)
    cuts._cuts.cache_clear()
    return made


def shapes(made: list[TilePlan]) -> set[tuple[int, int]]:
    found = {(one.rows, one.cols) for one in made}
    made.clear()
    cuts._cuts.cache_clear()  # the next step plans again
    return found


def test_steps_use_tuned_tiles(plans: list[TilePlan]) -> None:
    tune_tiles(8, 48, 32)
    q, k = (features(96, 8, seed=i).requires_grad_() for i in range(2))
    truth = ct.reference.clip_loss(q.double(), k.double(), 5.0)
    grads = torch.autograd.grad(truth, (q, k))
    for cache_bytes in (0, 1 << 20):
        value = ct.clip_loss(q, k, 5.0, group=None, cache_bytes=cache_bytes)
        got = torch.autograd.grad(value, (q, k))
        assert shapes(plans) == {(48, 32)}
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=0)
        torch.testing.assert_close(got, grads, rtol=1e-4, atol=1e-6)


def test_where_tuned_tiles_are_not_used(plans: list[TilePlan]) -> None:
    """A tile that is asked for, other widths and dtypes, one set of views."""
    tune_tiles(8, 48, 32)
    q, k = features(96, 8, seed=0), features(96, 8, seed=1)
    ct.clip_loss(q, k, 5.0, group=None, tile=64)
    assert shapes(plans) == {(64, 64)}
    ct.clip_loss(q.double(), k.double(), 5.0, group=None)
    ct.clip_loss(q[:, :4], k[:, :4], 5.0, group=None)
    assert shapes(plans) == {(96, 96)}
    ct.nt_xent(q, k, group=None)
    assert shapes(plans) == {(192, 192)}


def test_ranks_do_not_use_them() -> None:
    tune_tiles(8, 48, 32)
    x = Inputs(features(96, 8, seed=0), features(96, 8, seed=1), torch.tensor(1.0))
    ring = Ring.flat(ALONE, (96,), total=96)
    assert cuts.cuts_of(ring, x, Spec())[0].plan.rows == 48
    two = Ring.flat(replace(ALONE, size=2), (96, 96), total=192)
    assert cuts.cuts_of(two, x, Spec())[0].plan.rows == 96


def test_tuned_tiles_keep_the_workspace() -> None:
    for d in (64, 4096, 50_000):
        made = plan_tiles(10**6, 10**6, d, shape=(1 << 20, 1 << 14))
        assert made.workspace_bytes <= WORKSPACE_LIMIT and made.rows % 16 == made.cols % 16 == 0
    assert plan_tiles(100, 70, 8, shape=(64, 32), tile=16).rows == 16
    square = plan_tiles(500, 500, 8, shape=(64, 32), symmetric=True)
    assert square == plan_tiles(500, 500, 8, symmetric=True)


def test_a_forced_choice_lasts_as_long_as_its_block() -> None:
    tune_tiles(8, 48, 32)
    with tuned.forced(tuned.TILES, (64, 16)):
        assert tuned.tiles(8, 4) == (64, 16)
        with tuned.forced(tuned.TILES, (80, 16)):
            assert tuned.tiles(8, 4) == (80, 16)
        assert tuned.tiles(8, 4) == (64, 16)
    assert tuned.tiles(8, 4) == (48, 32)


def test_tiles_too_small_or_of_other_shape_are_not_used() -> None:
    for choice in ((8, 32), (32,), (32, 32, 32)):
        tune_tiles(8, *choice)
        assert tuned.tiles(8, 4) is None


def test_contratile_tiles_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    tune_tiles(512, 1024, 512)
    assert main("tiles --n 8192 --d 512".split()) == 0
    said = capsys.readouterr().out
    assert "tiles of 1024 x 512" in said and "as tuned by `contratile doctor --tune`" in said
    assert main("tiles --n 8192 --d 512 --symmetric".split()) == 0
    assert "tuned" not in capsys.readouterr().out

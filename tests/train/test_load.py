"""Runs that cannot be used: damaged checkpoints and weights that are not finite, with what one can do about it."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import contratile as ct
from contratile.cli import main
from contratile.train import checkpoint
from contratile.train.export import export_run
from contratile.train.load import load_run
from contratile.train.resume import find_checkpoint
from tests.train.runs import shapes, small, unlike_pretrained


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    return unlike_pretrained(small(shapes(folder / "shapes", sizes=1), folder / "run"))


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A run with one checkpoint, the best one, of step 7."""
    return Path(shutil.copytree(made, tmp_path / "run", symlinks=True))


def saved(run: Path, step: int, *, best: int, value: float | None = None, name: str = "") -> Path:
    """Save the weights of step 7 again, with one number changed; and which step is the best."""
    state, facts = checkpoint.load(run / "checkpoints" / checkpoint.step_name(7))
    if value is not None:
        state["model"][name].view(-1)[-1] = value
    checkpoint.save(run / "checkpoints" / checkpoint.step_name(step), state, facts | {"step": step, "best_step": best})
    return run / "checkpoints" / checkpoint.step_name(step)


def a_weight(run: Path) -> str:
    return next(name for name, _ in load_run(run).towers.right.named_parameters(prefix="right"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite(run: Path, value: float, tmp_path: Path, capsys: Any) -> None:
    """Nothing is exported or embedded with them. The remedy names weights that are finite."""
    name = a_weight(run)
    bad = saved(run, 9, best=7, value=value, name=name)
    assert ct.load(run).step == 7
    told = f"weights of {bad}: expected finite numbers, got NaN or infinity in {name}. Training has diverged"
    remedy = "or choose weights that are finite with --weights: best."
    with pytest.raises(ValueError) as refused:
        ct.load(run, "last")
    assert told in str(refused.value) and remedy in str(refused.value)
    with pytest.raises(ValueError, match="expected finite numbers, got NaN or infinity"):
        export_run(run, "transformers", tmp_path / "out", "last")
    assert main(["embed", str(run), "icons", "--out", str(tmp_path / "x.npy"), "--weights", "last"]) == 2
    err = capsys.readouterr().err
    assert told in err and remedy in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_the_remedy_names_no_weights_where_there_are_none(run: Path) -> None:
    saved(run, 7, best=7, value=float("nan"), name=a_weight(run))
    with pytest.raises(ValueError, match=r"train the run again with a lower learning rate\.$"):
        ct.load(run)
    saved(run, 9, best=7, value=float("nan"), name="log_scale")
    with pytest.raises(ValueError, match=r"in .* and 1 more\. .* lower learning rate\.$"):
        ct.load(run, "last")


def test_other_finite_weights_are_named_by_step(run: Path) -> None:
    name = a_weight(run)
    for step in (8, 9, 10):
        saved(run, step, best=10, value=float("nan") if step != 8 else None, name=name)
    with pytest.raises(ValueError, match=r"with --weights: step-00000008 or step-00000007\."):
        ct.load(run)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut, r"expected model\.safetensors of \d+ bytes, got \d+ bytes"),
        (flip, r"expected model\.safetensors with checksum \w+, got \w+"),
        (Path.unlink, r"expected model\.safetensors of \d+ bytes, got no such file"),
    ],
)
@pytest.mark.filterwarnings("ignore:passed over")
def test_the_only_checkpoint_is_damaged(run: Path, damage: Any, told: str) -> None:
    folder = run / "checkpoints" / "step-00000007"
    damage(folder / "model.safetensors")
    remedy = "The file is damaged, and the run has no other checkpoint. Copy the file again from where .* train the run"
    for weights in ("best", "last", "step-00000007"):
        with pytest.raises(ValueError, match=rf"^checkpoint {folder}: {told}\. {remedy}"):
            ct.load(run, weights)
    with pytest.raises(ValueError, match=rf"{told}\. Restore .* from a copy, or remove {folder.parent} to start again"):
        find_checkpoint("auto", run)


def test_a_damaged_checkpoint_beside_a_sound_one(run: Path) -> None:
    flip(saved(run, 9, best=9) / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"step-00000009: .* choose another checkpoint with --weights: step-00000007\."
    ):
        ct.load(run)


def test_a_step_that_is_not_there(run: Path) -> None:
    with pytest.raises(ValueError, match=r"The run has step-00000007: choose one of them with --weights, or best or"):
        ct.load(run, "step-00000008")


def test_features_whose_weights_are_gone(run: Path, tmp_path: Path, capsys: Any) -> None:
    """The remedy is an option of the command: `search` and `serve` have no --weights."""
    out = tmp_path / "x.npy"
    table = shapes(tmp_path / "shapes", sizes=1)
    assert main(["embed", str(run), str(table), "--out", str(out)]) == 0
    saved(run, 9, best=9)
    shutil.move(run / "checkpoints" / "step-00000007", tmp_path / "kept")
    for command in (["search", str(out), "red"], ["serve", str(out), "--port", "0"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert "step-00000007: expected a folder, got none. The run has step-00000009. Name a copy of the run" in err
        assert "with --run, or embed the data again" in err and "--weights" not in err and "gallery" not in err


def test_an_export_says_what_a_package_is_needed_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["export", str(run), "--to", "transformers", "--out", str(tmp_path / "out")]) == 2
    assert "transformers is needed for export to transformers: pip install transformers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""Where a run goes on, and what it refuses: another checkpoint than its newest, and options that do not fit."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.cli.train import _used
from contratile.report.tracking import history
from contratile.train import checkpoint
from contratile.train.load import load_run
from contratile.train.loop import BEST, Trainer
from contratile.train.resume import find_checkpoint
from tests.train.runs import losses, shapes, small, weights


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps, with all its checkpoints."""
    out = tmp_path_factory.mktemp("run")
    Trainer(small(table, out, **FOUR)).run()
    return out


FOUR: dict[str, Any] = {"steps": 4, "eval_every": 4, "save_every": 1, "keep": 9}


def test_an_older_checkpoint_begins_a_run_of_its_own(table: Path, run: Path, tmp_path: Path) -> None:
    older = run / "checkpoints" / "step-00000002"
    before = sorted((run / "checkpoints").iterdir())
    refused = r"resume: expected .*step-00000004, the newest in --out, got .*step-00000002. Pass --resume auto .* --out"
    with pytest.raises(ValueError, match=refused):
        Trainer(small(table, run, resume=str(older), **FOUR))
    branch = small(table, tmp_path / "branch", resume=str(older), **FOUR)
    trainer = Trainer(branch)
    assert (trainer.step, (tmp_path / "branch" / "tokenizer.json").exists()) == (2, True)
    trainer.run()
    a, b = weights(run), weights(tmp_path / "branch")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert losses(tmp_path / "branch") == losses(run)[2:]
    assert sorted((run / "checkpoints").iterdir()) == before
    with pytest.raises(ValueError, match="the newest in --out"):  # the branch has steps of its own now
        Trainer(branch)
    assert find_checkpoint("auto", tmp_path / "branch") == checkpoint.latest(tmp_path / "branch")


def test_the_tokenizer_comes_with_the_checkpoint(run: Path, tmp_path: Path) -> None:
    """Also where the texts of the new run would teach it other words."""
    other = shapes(tmp_path)
    other.write_text(other.read_text().replace(",red", ",crimson").replace(",blue", ",azure"))
    tokenizers = []
    for name, resume in (("fresh", "auto"), ("branch", str(run / "best"))):
        Trainer(small(other, tmp_path / name, resume=resume, **FOUR))
        tokenizers.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert tokenizers[1] == (run / "tokenizer.json").read_bytes() != tokenizers[0]


def test_the_newest_may_be_named(run: Path) -> None:
    newest = run / "checkpoints" / "step-00000004"
    assert find_checkpoint(str(newest), run) == newest.resolve()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 64}, r"width: expected 32, as in the checkpoint, got 64. Pass --width 32 to continue the run"),
        ({"head": "linear"}, r"head: expected none, as in the checkpoint, got linear"),
        ({"optimizer": "sgd"}, r"optimizer: expected adamw, as in the checkpoint, got sgd"),
        ({"loss": "siglip"}, r"loss: expected clip, as in the checkpoint, got siglip"),
        ({"batch": 16}, r"batch of a resumed run: expected 32, as in the checkpoint, got 16. Resume with the data"),
        ({"resume": "lastest"}, r"resume: expected auto, never or the folder of a checkpoint, got lastest"),
        ({"resume": "never"}, r"out: expected a folder without a run, got .* Pass --resume auto"),
    ],
)
def test_what_does_not_fit_is_refused(table: Path, run: Path, changes: dict[str, Any], told: str) -> None:
    before = (run / "config.toml").read_bytes()
    with pytest.raises(ValueError, match=told):
        Trainer(small(table, run, **{**FOUR, **changes}))
    assert (run / "config.toml").read_bytes() == before


def test_what_may_change_between_two_parts_of_a_run(table: Path, run: Path) -> None:
    trainer = Trainer(small(table, run, **{**FOUR, "chunk": 7, "loss": "infonce", "checkpointing": True, "steps": 9}))
    assert (trainer.step, trainer.steps) == (4, 9)


# --- damaged checkpoints ------------------------------------------------------------------------------------------


def harm(folder: Path) -> None:
    """One bit of the weights: the sizes stay what they were."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_auto_goes_on_from_the_one_before_a_damaged_one(table: Path, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    for number in (3, 4):
        harm(copy / "checkpoints" / f"step-{number:08d}")
    told = r"step-0000000[34]: expected model.safetensors with checksum .* set aside as .* resuming from step-00000002"
    with pytest.warns(UserWarning, match=told) as warned:
        trainer = Trainer(small(table, copy, **FOUR))
    assert (len(warned), trainer.step) == (2, 2)
    names = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert names == ["damaged-step-00000003", "damaged-step-00000004", "step-00000001", "step-00000002"]
    assert trainer.best == -math.inf and not (copy / "best").is_symlink(), "the best was the damaged one"
    trainer.run()
    a, b = weights(run), weights(copy)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert losses(copy) == losses(run) and (copy / "best").resolve().name == "step-00000004"
    assert find_checkpoint("auto", copy) == copy / "checkpoints" / "step-00000004"  # without a warning
    harm(copy / "checkpoints" / "step-00000004")
    with pytest.warns(UserWarning, match="set aside as damaged-step-00000004"):  # which makes room
        assert find_checkpoint("auto", copy) == copy / "checkpoints" / "step-00000003"


def test_a_damaged_one_that_is_named_is_refused(table: Path, run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    newest = copy / "checkpoints" / "step-00000004"
    harm(newest)
    for out in (copy, tmp_path / "branch"):
        with pytest.raises(ValueError, match=r"step-00000004: expected model.safetensors with checksum .* damaged"):
            Trainer(small(table, out, resume=str(newest), **FOUR))
    with pytest.raises(
        ValueError, match=r"step-00000004, the newest in --out, got .*step-00000003. Pass --resume auto"
    ):
        find_checkpoint(str(copy / "checkpoints" / "step-00000003"), copy)
    assert newest.is_dir() and not (tmp_path / "branch" / "tokenizer.json").exists()


def test_nothing_but_damaged_ones(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    for folder in checkpoint.steps(copy):
        (folder / "manifest.json").write_text("rubbish")
    with pytest.raises(ValueError, match=r"resume: expected a checkpoint that is not damaged, got .* to start again"):
        find_checkpoint("auto", copy)
    with pytest.raises(ValueError, match="out: expected a folder without a run"):
        find_checkpoint("never", copy)
    assert len(checkpoint.steps(copy)) == 4


def test_one_of_another_version_is_not_damaged(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    manifest = copy / "checkpoints" / "step-00000004" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(checkpoint.FORMAT, "contratile checkpoint 9"))
    with pytest.raises(ValueError, match="written by another version of contratile: use that one"):
        find_checkpoint("auto", copy)


# --- the best -----------------------------------------------------------------------------------------------------


def test_the_best_is_what_the_newest_checkpoint_says(table: Path, run: Path, tmp_path: Path) -> None:
    """Whatever the link says: a kill may have come before it was made."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    expected = checkpoint.best(run)
    assert expected is not None and expected.samefile(run / "best")
    (copy / "best").unlink()
    (copy / "best").symlink_to("checkpoints/step-00000001")
    found = checkpoint.best(copy)
    assert found is not None and found.name == expected.name == f"step-{load_run(copy).step:08d}"
    trainer = Trainer(small(table, copy, **FOUR))
    assert (copy / "best").resolve().name == expected.name == f"step-{trainer.best_step:08d}"
    assert trainer.best == checkpoint.load(expected)[1]["best"]


@pytest.mark.parametrize("place", ["link", "folder", "gone"])
def test_the_best_of_a_run_of_an_earlier_version(table: Path, run: Path, tmp_path: Path, place: str) -> None:
    """Their checkpoints do not name it; and a copy may have a folder instead of the link."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=place != "folder")
    for folder in checkpoint.steps(copy):
        state, facts = checkpoint.load(folder)
        del facts["best_step"]
        checkpoint.save(folder, state, facts)
    if place == "gone":
        (copy / "best").unlink()
    elif place == "link":
        (copy / "best").unlink()
        (copy / "best").symlink_to("checkpoints/step-00000002")
    trainer = Trainer(small(table, copy, **{**FOUR, "steps": 5}))
    assert trainer.best_step == (2 if place == "link" else 0)
    trainer.best = -math.inf
    trainer.run()
    assert (copy / "best").is_symlink() and (copy / "best").resolve().name == "step-00000005"
    assert checkpoint.load(copy / "best")[1]["best_step"] == 5


def test_a_branch_looks_for_a_best_of_its_own(table: Path, run: Path, tmp_path: Path) -> None:
    trainer = Trainer(small(table, tmp_path, **{**FOUR, "steps": 5}, resume=str(run / "checkpoints" / "step-00000004")))
    assert trainer.best == -math.inf
    trainer.run()
    assert (tmp_path / "best").resolve().name == "step-00000005"


def test_a_run_that_was_stopped_at_its_end_counts_its_last_evaluation(table: Path, run: Path, tmp_path: Path) -> None:
    """Restarted with no steps left: metrics.jsonl, the best checkpoint and the closing sentence know of it."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    shutil.rmtree(copy / "checkpoints" / "step-00000003")
    shutil.rmtree(copy / "checkpoints" / "step-00000004")
    (copy / "best").unlink()
    before = weights(copy)
    ended = {**FOUR, "steps": 2}
    trainer = Trainer(small(table, copy, **ended))
    outcome = trainer.run()
    assert (outcome.finished, trainer.best_step) == (True, 2) and trainer.best == outcome.metrics[BEST]
    recorded = [entry for entry in history(copy) if BEST in entry and entry["step"] > 0]
    assert [(entry["step"], entry[BEST]) for entry in recorded] == [(2, trainer.best)]
    assert max(entry["step"] for entry in history(copy)) == 2, "nothing of steps whose checkpoints are gone"
    assert (copy / "best").resolve().name == "step-00000002" and load_run(copy).step == 2
    assert all(torch.equal(x, before[name]) for name, x in weights(copy).items())
    assert _used(trainer, 2) == "the best ones, which `contratile eval` uses too"
    # Lines of later steps, whose checkpoints are gone, go also if the evaluation itself is recorded already.
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "loss": 1.0}\n' + json.dumps({"step": 4, BEST: 1.0}) + "\n")
    Trainer(small(table, copy, **ended)).run()
    assert [entry["step"] for entry in history(copy) if BEST in entry and entry["step"] > 0] == [2]
    assert max(entry["step"] for entry in history(copy)) == 2


@pytest.mark.parametrize("wrong", ["", None, 3, "step-00000004/../step-00000004"])
def test_weights_are_named_as_the_checkpoints_are(run: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"weights: expected best, last or step-\.\.\., got"):
        load_run(run, wrong)

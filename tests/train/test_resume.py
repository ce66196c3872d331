"""Where a run goes on, and what it refuses: another checkpoint than its newest, and options that do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.train import checkpoint
from contratile.train.loop import Trainer
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
        ({"batch": 16}, r"data position, batch: expected 32, got 16. Resume with the data and options"),
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

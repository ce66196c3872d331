"""Broken samples in training, evaluation and kept outputs: counted, left out, and nothing is mixed up by it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.cli import main
from contratile.data import Broken, Indexed
from contratile.data.catalog import open_source
from contratile.models.encoding import encode
from contratile.models.locked import kept_outputs, rows_of
from contratile.report.gallery import load_gallery
from contratile.report.tracking import history
from contratile.train.config import TrainConfig
from contratile.train.config_file import to_toml
from contratile.train.loop import Trainer
from tests.ranks import launch_environment, torchrun
from tests.train.runs import losses, shapes, small

LIMIT = 100
"""More than are broken, in each split; the limit that runs have without being told is 10 of so few."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """192 pictures; every other one is missing, empty, torn or no picture."""
    found = shapes(tmp_path_factory.mktemp("shapes"), sizes=6)
    pictures = sorted(found.parent.glob("*.png"))
    for place, path in enumerate(pictures[::2]):
        data = {0: b"", 1: path.read_bytes()[:-20], 2: b"<html>"}.get(place % 4)
        path.unlink() if data is None else path.write_bytes(data)
    return found


def broken(source: object) -> set[int]:
    """The places that cannot be used."""
    assert isinstance(source, Indexed)
    found = set()
    for place in range(len(source)):
        try:
            source[place]
        except Broken:
            found.add(place)
    return found


def made(table: Path, out: Path, **changes: Any) -> TrainConfig:
    return small(table, out, **{"broken_limit": LIMIT, "test_share": 0.35, **changes})


def run(config: TrainConfig) -> int:
    recipe = config.run.out.with_suffix(".toml")
    recipe.write_text(to_toml(config), encoding="utf-8")
    return main(["train", "--config", str(recipe)])


@pytest.mark.parametrize(("lock", "workers"), [("none", 0), ("image", 0), ("text", 0), ("image", 2)])
def test_a_run_with_broken_samples(table: Path, tmp_path: Path, lock: str, workers: int) -> None:
    trainer = Trainer(made(table, tmp_path, lock=lock, workers=workers))
    bad = broken(trainer.held_out)
    assert isinstance(trainer.held_out, Indexed) and len(bad) > 10 and len(broken(trainer.source)) > 40
    outcome = trainer.run()
    found = outcome.held_out
    assert outcome.finished and found is not None
    assert found.places.tolist() == [n for n in range(len(trainer.held_out)) if n not in bad]
    assert found.broken == outcome.metrics["skipped"] == len(bad)
    samples = [trainer.held_out[n] for n in found.places.tolist()]
    assert found.texts == [sample.right for sample in samples] and found.keys == [sample.key for sample in samples]
    towers = trainer.towers.eval()
    with torch.no_grad():
        left = towers.left(towers.left.prepare([sample.left for sample in samples]))
        right = towers.right(towers.right.prepare(found.texts))
    torch.testing.assert_close(found.left, left, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.right, right, atol=1e-5, rtol=1e-5)
    steps = [entry for entry in history(tmp_path) if "loss" in entry]
    assert len(steps) == 6 and steps[-1]["broken"] > 40


@pytest.mark.parametrize(("lock", "side"), [("image", "left"), ("text", "right")])
def test_kept_outputs_are_those_of_their_samples(table: Path, tmp_path: Path, lock: str, side: str) -> None:
    said: list[str] = []
    trainer = Trainer(made(table, tmp_path, lock=lock), say=said.append)
    kept, tower, bad = trainer.kept[side], getattr(trainer.towers, side), broken(trainer.source)
    assert isinstance(trainer.source, Indexed) and len(kept) == len(trainer.source)
    assert set(kept.isnan().any(1).nonzero().flatten().tolist()) == bad
    usable = [n for n in range(len(kept)) if n not in bad]
    with torch.no_grad():
        inputs = tower.prepare([getattr(trainer.source[n], side) for n in usable])
        torch.testing.assert_close(rows_of(kept, torch.tensor(usable), side, tmp_path), tower.backbone(inputs))
    assert len(said) == 1 and said[0].startswith(f"{side} features: {len(bad)} broken samples of pairs.csv (train)")
    with pytest.raises(ValueError, match=rf"kept {side} features: .*can be read now: delete .*kept-{side}.safetensors"):
        rows_of(kept, torch.tensor([usable[0], min(bad)]), side, tmp_path)
    Trainer(made(table, tmp_path, lock=lock), say=said.append)
    assert len(said) == 1, "the file is read again, which leaves nothing out"


def test_beyond_the_limit(table: Path, tmp_path: Path) -> None:
    """By the rule of training: the default forgives 10."""
    trainer = Trainer(made(table, tmp_path))
    towers, n = trainer.towers, len(broken(trainer.held_out))
    for limit, shown in ((0.01, "1.00%"), (0, "0"), (n - 1, f"{n - 1}")):
        message = f"samples of pairs.csv .test.: expected at most {shown} broken, got .*--broken-limit"
        with pytest.raises(ValueError, match=message):
            encode(towers, trainer.held_out, chunk=8, broken_limit=limit)
    assert encode(towers, trainer.held_out, chunk=8, broken_limit=n).broken == n
    options = {"of": {}, "chunk": 8, "main": True, "wait": lambda: None}
    with pytest.raises(ValueError, match=r"samples of pairs.csv .train., .*: expected at most 3 broken, got"):
        kept_outputs(towers.left, trainer.source, "left", tmp_path, broken_limit=3, **options)  # type: ignore[arg-type]


def test_nothing_but_broken_samples(tmp_path: Path) -> None:
    file = tmp_path / "none.csv"
    file.write_text("path,caption\n" + "".join(f"{n}.png,a\n" for n in range(5)))
    config = small(shapes(tmp_path / "shapes", sizes=1), tmp_path / "run", batch=8, test_data=str(file))
    with pytest.raises(ValueError, match=r"data: expected samples to evaluate on, got none. All 5 .* no such file"):
        Trainer(config).run()


def test_the_commands(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    config = made(table, folder, lock="image")
    n = len(broken(open_source(config.data, "test")))
    assert run(config) == 0
    told = capsys.readouterr()
    assert f"({n} broken ones are left out)" in told.out and "left features: " in told.err
    assert f"({n} broken ones are left out)" in (folder / "report.html").read_text(encoding="utf-8")
    gallery = load_gallery(folder)
    captions = dict(line.split(",") for line in table.read_text().splitlines()[1:])
    assert [gallery.caption(item) for item in range(len(gallery.names))] == [
        captions[Path(name).name] for name in gallery.names
    ]

    assert main(["eval", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["broken"] == n and found["pairs"] == int((~gallery.trained).sum())
    assert main(["eval", str(folder)]) == 0
    assert f"{found['pairs']} pairs of pairs.csv (test) ({n} broken ones are left out)" in capsys.readouterr().out
    assert main(["eval", str(folder), "--broken-limit", "3"]) == 2
    assert "expected at most 3 broken" in capsys.readouterr().err
    assert main(["eval", str(folder), "--broken-limit", "-1"]) == 2
    assert "broken_limit: expected 0 or more, got -1.0" in capsys.readouterr().err
    assert main(["search", str(folder), "red", "--k", "3"]) == 0

    assert run(made(table, tmp_path / "strict", broken_limit=5)) == 2
    assert "expected at most 5 broken" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("lock", ["none", "image"])
def test_two_processes_leave_out_what_one_does(table: Path, tmp_path: Path, lock: str) -> None:
    Trainer(made(table, tmp_path / "one", lock=lock)).run()
    recipe = tmp_path / "two.toml"
    recipe.write_text(to_toml(made(table, tmp_path / "two", lock=lock)), encoding="utf-8")
    words = [*torchrun(2, tmp_path), "-m", "contratile", "train", "--config", str(recipe)]
    done = subprocess.run(words, env=launch_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-4, atol=1e-4)
    assert history(tmp_path / "one")[-1]["skipped"] == history(tmp_path / "two")[-1]["skipped"] > 10


def test_a_share_without_a_readable_sample_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    table = shapes(tmp_path / "shapes")
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0], *(f"gone-{i}.png,nothing {i}" for i in range(400)), *lines[1:]]))
    config = small(table, tmp_path / "run", batch=2, steps=200, broken_limit=1e6, eval_every=1000)
    with pytest.raises(ValueError, match=r"step \d+: expected a readable sample in every share .* \(no such file\)"):
        Trainer(config).run()

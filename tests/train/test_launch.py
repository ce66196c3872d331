"""Several processes: the commands of the documentation, word for word, and launchers whose processes do not meet."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from contratile.cli import main
from contratile.recipes import find_recipe, recipe_names
from contratile.train.config_file import to_toml
from contratile.train.launch import processes_started
from contratile.train.loop import Trainer
from tests.processes import members, until
from tests.ranks import free_port, launch_environment
from tests.train.runs import losses, shapes, small

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^[# ]*((?:torchrun|accelerate launch)\b.* -m contratile train\b.*)$", re.MULTILINE)


def documented() -> list[str]:
    """All commands by which the documentation starts several processes."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *map(find_recipe, recipe_names())]
    found = [command for page in sorted(pages) for command in COMMAND.findall(page.read_text(encoding="utf-8"))]
    return list(dict.fromkeys(found))


def alone(table: Path, out: Path) -> float:
    """The loss of the first step, by one process."""
    Trainer(small(table, out, steps=1)).run()
    return losses(out)[0]


def tiny(table: Path, out: Path) -> list[str]:
    """Options that make a recipe's run as small as `small`, without a word about devices."""
    options = to_toml(small(table, out, steps=1, cpu=False))
    named = re.findall(r"^(\w+) = (.*)$", options, re.MULTILINE)
    words: list[str] = []
    for name, value in named:
        option = name.replace("_", "-")
        if value in ("true", "false"):
            words.append(f"--{option}" if value == "true" else f"--no-{option}")
        else:
            words += [f"--{option}", *shlex.split(value.strip("[]").replace(",", " "))]
    assert "--no-cpu" in words
    words.remove("--no-cpu")
    return words


def test_the_documentation_shows_both_launchers() -> None:
    assert {command.split()[0] for command in documented()} == {"torchrun", "accelerate"}


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        pytest.param(command, count, marks=() if number == 0 and count else pytest.mark.slow, id=f"{number}-{count}")
        for number, command in enumerate(sorted(documented(), key=lambda text: text.startswith("accelerate")))
        for count in ((2, 0) if number == 0 else (0,))
    ],
)
def test_documented_commands(command: str, processes: int, tmp_path: Path) -> None:
    """As they stand, on a machine without an accelerator; `processes` replaces their number, which takes a while."""
    words = shlex.split(command)
    if words[:2] == ["accelerate", "launch"]:
        # The same program: the command that stands before it also imports timm, for which torchvision must fit torch.
        words[:2] = [sys.executable, "-m", "accelerate.commands.launch"]
    if processes:
        words[words.index("--nproc-per-node") + 1] = str(processes)
    table, run = shapes(tmp_path / "shapes"), tmp_path / "run"
    (tmp_path / "recipes").symlink_to(find_recipe("icons").parent)
    environment = {name: value for name, value in launch_environment().items() if name != "WORLD_SIZE"}
    words += tiny(table, run)
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(run) == pytest.approx([alone(table, tmp_path / "alone")], rel=1e-6)
    assert (run / "report.html").exists() and done.stdout.count("report: ") == 1


def test_processes_that_do_not_meet_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An accelerator for which accelerate has no way to connect processes."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(small(shapes(tmp_path / "shapes"), tmp_path / "run", cpu=False)), encoding="utf-8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("accelerate.Accelerator", lambda **options: SimpleNamespace(num_processes=1, device="mps"))
    assert main(["train", "--config", str(recipe)]) == 2
    told = capsys.readouterr().err
    assert "processes: expected the 2 that the launcher started, got 1 on mps. Pass --cpu" in told
    assert not (tmp_path / "run").exists()


def test_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert processes_started() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert processes_started() == 3
    for rubbish in ("0", "-1", "two", "²"):
        monkeypatch.setenv("WORLD_SIZE", rubbish)
        with pytest.raises(ValueError, match=r"WORLD_SIZE: expected a number of processes, got .* Unset WORLD_SIZE"):
            processes_started()


STOPS = """
import os, signal, sys
from contratile.cli import main
from contratile.train.loop import Trainer
step = Trainer.train_step
def stopping(self, batch):
    if self.step == 1 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), getattr(signal, sys.argv.pop()))
    return step(self, batch)
Trainer.train_step = stopping
sys.exit(main(sys.argv[1:5] + ["--timeout", "40"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_is_gone_ends_the_others(number: str, tmp_path: Path) -> None:
    """Rank 0 hosts the store, as nobody else does without torchrun."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(small(shapes(tmp_path / "shapes"), tmp_path / "run")), encoding="utf-8")
    group = {**launch_environment(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    words = [sys.executable, "-c", STOPS, "train", "--config", str(recipe), "--no-tensorboard", number]
    ranks = [
        subprocess.Popen(words, env={**group, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    try:
        _, errors = ranks[1].communicate(timeout=600)
        assert ranks[1].returncode == 1, errors
        assert "contratile train: rank 1 of 2 gave up waiting for another rank" in errors
        assert "resumes from the last checkpoint" in errors and "Traceback" not in errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ((), signal.SIGINT),
        pytest.param((), signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(("torchrun", "--standalone", "--nproc-per-node", "2"), signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(("torchrun", "--standalone", "--nproc-per-node", "2"), signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_whole_group(launcher: tuple[str, ...], number: signal.Signals, tmp_path: Path) -> None:
    """With loader workers: a checkpoint of the step under way, a line that says so, and nobody is left."""
    run, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    config = small(shapes(tmp_path / "shapes"), run, steps=100_000, eval_every=100_000, save_every=100_000, workers=2)
    recipe.write_text(to_toml(config), encoding="utf-8")
    words = [*(launcher or (sys.executable,)), "-m", "contratile", "train", "--config", str(recipe)]
    with subprocess.Popen(
        words, env=launch_environment(), start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        metrics = run / "metrics.jsonl"
        assert until(lambda: process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 3))
        assert process.poll() is None, process.communicate()[1]
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=600)
    (stopped,) = re.findall(r"stopped at step (\d+); the same command continues from there", errors)
    assert errors.count("finishing this step, then saving") == 1
    assert (run / "checkpoints" / f"step-{int(stopped):08d}").is_dir()
    assert "DataLoader" not in errors and "Errno" not in errors
    if not launcher:
        assert process.returncode == 0 and "Traceback" not in errors  # torchrun has its own opinion of signals
    assert until(lambda: not members(process.pid)), members(process.pid)

"""The project's frame: examples run, pins agree, the documentation names what exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import contratile as ct

ROOT = Path(__file__).parent.parent


def run(*words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_example_clip_step() -> None:
    lines = run(sys.executable, "examples/clip_step.py", "3000").splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_example_retrieval_labels() -> None:
    found = re.match(r"loss (\S+), dense (\S+), gradient", run(sys.executable, "examples/retrieval_labels.py"))
    assert found and float(found[1]) == pytest.approx(float(found[2]), rel=1e-4)


def gap(output: str) -> float:
    """What the example prints last: by how much the parameters differ from those of one process."""
    return float(output.strip().rsplit(" ", 1)[1])


def test_example_ddp_alone_and_under_torchrun() -> None:
    assert gap(run(sys.executable, "examples/ddp_clip.py")) == 0.0
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "examples/ddp_clip.py"]
    output = run(sys.executable, *words)
    assert "2 ranks against one process" in output and gap(output) < 1e-5


@pytest.mark.peers
def test_example_sentence_transformers_trainer() -> None:
    output = run(sys.executable, "examples/sentence_transformers_trainer.py", "--quick")
    assert "the loss alone, 1024 pairs, both ways" in output and gap(output) < 1e-4


@pytest.mark.peers
@pytest.mark.parametrize("name", ["hf_trainer", "lightning_simclr"])
def test_examples_of_trainers_learn(name: str) -> None:
    before = set(ROOT.iterdir())
    lines = run(sys.executable, f"examples/{name}.py").splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0]
    assert set(ROOT.iterdir()) == before


def test_one_ruff() -> None:
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = re.findall(r"ruff==([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned and set(hooks) == {pinned[1]}


def test_ci_runs_make_test() -> None:
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")


def test_every_public_name_is_documented() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    public = [name for name, value in vars(ct).items() if callable(value)]
    assert {"clip_loss", "info_nce", "pair_lse", "ClipLoss", "InfoNCE", "plan_tiles"} <= set(public)
    for name in public:
        assert f"contratile.{name}" in pages or f"ct.{name}" in pages, name

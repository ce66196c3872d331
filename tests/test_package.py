"""Wheel and sdist: built, installed into clean environments, and used."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from contratile.recipes import recipe_names

ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NOT_NEEDED = ("transformers", "datasets", "webdataset", "open_clip_torch", "sentence-transformers", "triton", "ruff")
"""Packages that neither the core nor the demo needs."""


def run(*words: str | Path, cwd: Path, code: int = 0, **variables: str) -> str:
    """The output of a command outside the checkout, with the pinned versions and without its sources."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**known, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of this checkout, and with a wheel that was made from the sdist."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sources(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    (archive,) = built.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and what the core requires."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    run(folder / "venv/bin/pip", "install", wheel, cwd=folder)
    return folder / "venv/bin"


def test_the_wheel_has_recipes_and_types(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"contratile/recipes/{name}.toml" for name in recipe_names()} <= set(names)
    assert {f"contratile/serve/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert "contratile/py.typed" in names
    assert all(name.startswith(("contratile/", "contratile-")) for name in names)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git tells which files there are")
def test_the_sdist_has_every_file(sources: Path) -> None:
    tracked = run("git", "ls-files", cwd=ROOT).split()
    assert [name for name in tracked if (ROOT / name).exists() and not (sources / name).exists()] == []


def test_the_core_alone(clean: Path, tmp_path: Path) -> None:
    """Losses, help and the checks of the machine; a command that needs more says what to install."""
    installed = run(clean / "pip", "list", cwd=tmp_path).lower()
    assert not [name for name in (*NOT_NEEDED, "accelerate", "rich") if re.search(rf"^{name}\s", installed, re.M)]
    assert "contratile train" in run(clean / "contratile", "--help", cwd=tmp_path)
    loss = (
        "import torch, contratile as ct; x = torch.nn.functional.normalize(torch.randn(100, 16)).requires_grad_();"
        "loss = ct.clip_loss(x, x, 10.0); loss.backward(); print('loss', float(loss), 'of', ct.__file__)"
    )
    found = re.search(r"^loss (\S+) of (\S+)$", run(clean / "python", "-c", loss, cwd=tmp_path), re.M)
    assert found and float(found[1]) > 0 and str(clean.parent) in found[2]
    assert "verdict: healthy" in run(clean / "contratile", "doctor", "--quick", "--device", "cpu", cwd=tmp_path)
    told = run(clean / "contratile", "train", "--config", "icons", cwd=tmp_path, code=1)
    assert 'pip install ".[train]"' in told


def test_the_demo_from_the_wheel(clean: Path, wheel: Path, tmp_path: Path) -> None:
    """A few steps of it, with what the extra `demo` installs."""
    run(clean / "pip", "install", f"{wheel}[demo]", cwd=tmp_path)
    installed = run(clean / "pip", "list", cwd=tmp_path).lower()
    assert not [name for name in NOT_NEEDED if re.search(rf"^{name}\s", installed, re.M)]
    little = "--steps 2 --batch 64 --chunk 32 --eval-every 2 --limit 400 --out demo".split()
    run(clean / "contratile", "train", "--config", "icons", *little, cwd=tmp_path)
    assert (tmp_path / "demo/report.html").exists()
    assert 'nearest to "arrow left"' in run(clean / "contratile", "search", "demo", "arrow left", cwd=tmp_path)


def test_the_tests_of_the_sdist(sources: Path, clean: Path) -> None:
    """They can all be collected here, and a few run against the sdist as it is installed elsewhere."""
    collect = ("-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q")
    listed = run(sys.executable, *collect, cwd=sources, PYTHONPATH=str(sources / "src"))
    here = run(sys.executable, *collect, cwd=ROOT, PYTHONPATH=str(ROOT / "src"))
    assert re.findall(r"(\d+) tests collected", listed) == re.findall(r"(\d+) tests collected", here) != []
    run(clean / "pip", "install", f"{sources}[test]", cwd=sources)
    few = "tests/test_reference.py tests/test_keywords.py tests/losses/test_errors.py tests/engine/test_plan.py".split()
    told = run(clean / "python", "-m", "pytest", "-p", "no:cacheprovider", "-q", *few, cwd=sources)
    assert " passed" in told

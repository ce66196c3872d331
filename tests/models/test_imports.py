"""Which packages towers import: `tiny` and `doctor` run beside a broken torchvision, other towers name it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from contratile.train.config_file import to_toml
from tests.train.runs import shapes, small

ROOT = Path(__file__).parents[2]
BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')\n"


@pytest.fixture(scope="module")
def broken_torchvision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that shadows the installed torchvision, if any, with one that cannot be imported."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(BROKEN, encoding="utf-8")
    # What importlib.metadata reads: transformers asks for a version before it imports the package.
    (folder / "torchvision-0.99.0.dist-info").mkdir()
    (folder / "torchvision-0.99.0.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.99.0\n")
    return folder


def run(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def imported(folder: Path, *commands: list[str]) -> set[str]:
    """The packages that commands have imported."""
    done = run(
        folder,
        "import sys\nfrom contratile.cli import main\n"
        f"for argv in {commands!r}: assert main(argv) == 0, argv\n"
        "print('\\nPACKAGES', *{name.partition('.')[0] for name in sys.modules})\n",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.rpartition("PACKAGES ")[2].split())


def test_tiny_runs_beside_a_broken_torchvision(broken_torchvision: Path, tmp_path: Path) -> None:
    config = small(shapes(tmp_path / "shapes", sizes=1), tmp_path / "run", batch=16, steps=2)
    (tmp_path / "recipe.toml").write_text(to_toml(config), encoding="utf-8")
    found = imported(
        broken_torchvision,
        ["train", "--config", str(tmp_path / "recipe.toml")],
        ["eval", str(tmp_path / "run")],
        ["search", str(tmp_path / "run"), "red circle"],
    )
    assert not found & {"torchvision", "transformers", "timm", "open_clip", "sentence_transformers"}


def test_doctor_runs_beside_a_broken_torchvision(broken_torchvision: Path) -> None:
    """It tries the import in another process, and tells what is wrong."""
    assert "torchvision" not in imported(broken_torchvision, ["doctor", "--quick"])


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_other_towers_name_the_broken_torchvision(broken_torchvision: Path) -> None:
    code = "from contratile.models.towers import *\nbuild_towers(TowerConfig(towers='hf:openai/clip'))\n"
    done = run(broken_torchvision, code)
    assert done.returncode == 1
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith("ImportError: transformers is needed for hf: towers. torchvision 0.99.0 is installed but")
    assert "(RuntimeError: operator torchvision::nms does not exist). It breaks transformers. " in told
    assert "Install the torchvision that belongs to torch" in told and "or uninstall it" in told

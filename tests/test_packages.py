"""Packages that are installed and cannot be imported: found in another process, with those that they break."""

import sys
from pathlib import Path

import pytest

from contratile import packages
from contratile.packages import BrokenPackage, broken_packages, why_not


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages of all kinds, on the path of this process and of those it starts."""
    files = {
        "cp_good": "",
        "cp_vision": "from cp_vision import ops",
        "cp_vision/ops": "import torch\ntorch.ops.cp.missing_operator",
        "cp_models": "import cp_vision",
        "cp_lazy": "try:\n    import cp_vision\nexcept Exception as error:\n    raise ImportError('late') from error",
        "cp_dies": "import os\nos._exit(3)",
        "cp_after": "raise OSError('no \\x1b[2Jlibrary\\nsecond line')",
    }
    for name, text in files.items():
        path = tmp_path / (f"{name}.py" if "/" in name else f"{name}/__init__.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(packages.__file__).parents[1]}")
    return tmp_path


def test_broken_packages_are_found(installed: Path) -> None:
    names = ["cp_good", "cp_models", "cp_vision", "cp_lazy", "cp_dies", "cp_after", "cp_not_installed"]
    found = {broken.name: broken for broken in broken_packages(names)}
    assert sorted(found) == ["cp_after", "cp_dies", "cp_vision"]
    assert found["cp_vision"].breaks == ["cp_lazy", "cp_models"]
    assert "missing_operator" in found["cp_vision"].error
    assert found["cp_dies"].error == "the process ended with code 3"
    assert "second line" not in found["cp_after"].error
    assert not {"cp_vision", "cp_models"} & set(sys.modules), "nothing is imported here"


def test_the_sentence_names_the_package_at_fault(installed: Path) -> None:
    for name in ("cp_models", "cp_lazy"):
        with pytest.raises(Exception) as raised:
            __import__(name)
        told = why_not(name, raised.value)
        assert told.startswith("cp_vision ") and "is installed but cannot be imported (AttributeError" in told
        assert f"It breaks {name}. Reinstall it: pip install" in told
    assert "pip install --force-reinstall --no-deps x" in str(BrokenPackage("x", "1", "no"))


def test_towers_that_need_a_broken_package(installed: Path) -> None:
    from contratile.models.base import import_needed

    with pytest.raises(ImportError, match=r"cp_models is needed for a test. cp_vision is installed but cannot"):
        import_needed("cp_models", "cp-models", needed_for="a test")

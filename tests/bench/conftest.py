"""Benchmarks import other packages, also in processes of their own: with a torchvision that works."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.torchvision_repair import repair_torchvision

REPAIR = Path(__file__).parents[1] / "repair"


@pytest.fixture(autouse=True, scope="package")
def working_torchvision() -> Iterator[None]:
    repair_torchvision()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(REPAIR), os.environ.get("PYTHONPATH")])))
        yield

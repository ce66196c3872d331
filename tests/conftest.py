"""One thread per process, no network, and an end for the ranks that tests started."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import close_pools

# The tensors of the tests are small: more threads would only wait for each other, on a busy machine most of all.
# `python -m tests.instruction_sets` asks for more, to see that nothing depends on their number.
torch.set_num_threads(int(os.environ.get("CONTRATILE_TEST_THREADS", "1")))

# Read when huggingface_hub is imported: models of the tests come from installed packages.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `pytest -n 2` the tests of a file stay on one worker, unless they are marked with another group."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.location[0]))


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    close_pools()

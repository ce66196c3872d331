"""One thread per process, no network, which tests share a worker, and an end for the ranks that tests started."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import close_pools, pool

# The tensors of the tests are small: more threads would only wait for each other, on a busy machine most of all.
# `python -m tests.instruction_sets` asks for more, to see that nothing depends on their number.
torch.set_num_threads(int(os.environ.get("CONTRATILE_TEST_THREADS", "1")))

# Read when huggingface_hub is imported: models of the tests come from installed packages.
os.environ["HF_HUB_OFFLINE"] = "1"


LONGEST = (
    "ranks",
    "tests/engine/kernels/test_interpreted.py",
    "tests/train/test_loop.py",
    "tests/test_project.py",
    "tests/losses/test_family.py",
    "tests/train/test_launch.py",
    "tests/grad_cache/test_memory.py",
)
"""Groups that start first, longest first, so that no worker is left with one of them at the end."""


def _group(item: pytest.Item) -> str:
    """Which tests `pytest -n 2` runs on one worker: those of a file, and all that share a pool of ranks."""
    marked = item.get_closest_marker("xdist_group")
    if marked is not None:
        return str(marked.args[0])
    group = "ranks" if getattr(getattr(item, "module", None), "pool", None) is pool else item.location[0]
    item.add_marker(pytest.mark.xdist_group(group))
    return group


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {group: place for place, group in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(_group(item), len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    close_pools()

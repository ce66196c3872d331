"""Settings of all tests: one thread per process, no network, which tests share a worker, and the end of the ranks."""

import functools
import gc
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import close_pools

# The tests use small tensors, for which more threads are slower, most of all on a busy machine: also in processes that
# tests start. `python -m tests.instruction_sets` sets more, to check that no result depends on their number.
THREADS = os.environ.get("CONTRATILE_TEST_THREADS", "1")
torch.set_num_threads(int(THREADS))
os.environ.update(OMP_NUM_THREADS=THREADS, TOKENIZERS_PARALLELISM="false")

# A shell starts what it runs in the background with interrupts ignored, and commands that tests interrupt inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# huggingface_hub reads it when it is imported. The tests use models of installed packages only.
os.environ["HF_HUB_OFFLINE"] = "1"

# Nothing that this machine was tuned for, also in processes that tests start.
_CACHE = tempfile.TemporaryDirectory(prefix="contratile-tests-")
os.environ["CONTRATILE_CACHE"] = _CACHE.name


LONGEST = (
    "ranks",
    "tests/engine/kernels/test_interpreted.py",
    "ranks that train",
    "tests/test_project.py",
    "tests/data/test_workers.py",
    "tests/engine/kernels/test_instructions.py",
    "tests/engine/kernels/test_ahead_of_time.py",
    "tests/test_citizenship.py",
    "tests/train/test_export.py",
    "tests/train/test_launch.py",
    "tests/engine/kernels/test_compiled_code.py",
    "tests/bench/test_plan.py",
    "tests/train/test_loop.py",
    "tests/train/test_clip_benchmark.py",
    "tests/grad_cache/test_memory.py",
    "tests/bench/test_data.py",
    "tests/bench/test_cache.py",
    "tests/bench/test_loss.py",
    "tests/losses/test_memory.py",
    "tests/losses/test_family.py",
    "tests/losses/test_peers.py",
    "tests/train/test_options.py",
    "tests/train/test_checkpoint.py",
    "tests/train/test_claim.py",
)
"""Groups that start first, so that no worker is left with one of them at the end."""


@functools.cache
def group_of(file: str) -> str:
    """What `pytest -n 2` runs on one worker: the tests of a file, and of all files that share the pools of ranks."""
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    if not re.search(r"^from tests\.ranks import .*\bpool\b", text, re.MULTILINE):
        return file
    return "ranks that train" if file.startswith("tests/train/") else "ranks"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {group: place for place, group in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(group_of(item.nodeid.split("::")[0]), len(LONGEST)))


def pytest_collection_finish() -> None:
    """What was imported stays: full collections, which many tests ask for, need not walk through all of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep groups together. The marks of `--dist loadgroup` have no effect with pytest 9.2 and pytest-xdist 3.8."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc]  # without annotations
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.split("::")[0])

    config.option.loadscopereorder = False  # keep the order of the collection
    return Groups(config, log)


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    close_pools()


@pytest.fixture(autouse=True)
def _end_group() -> Iterator[None]:
    """A process group that a test left (the paper's ring wants one) would tell later tests how many ranks there are."""
    before = dist.is_available() and dist.is_initialized()
    yield
    if dist.is_available() and dist.is_initialized() and not before:
        dist.destroy_process_group()

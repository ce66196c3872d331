"""Peak memory of a whole step, measured from outside in a process of its own."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest

from contratile.engine.plan import WORKSPACE_LIMIT, MiB

STEP = """
import sys, torch, contratile as ct

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))

def step(n, d, dtype, backend):
    n, d, dtype = int(n), int(d), getattr(torch, dtype)
    image, text = (torch.nn.functional.normalize(torch.randn(n, d)).to(dtype).requires_grad_() for _ in range(2))
    scale = torch.tensor(14.3, requires_grad=True)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts again from here
    before = status("VmRSS")
    ct.clip_loss(image, text, scale, backend=backend).backward()
    gradients = sum(x.grad.numel() * x.grad.element_size() for x in (image, text))
    return status("VmHWM") - before - gradients

calls = [words.split() for words in sys.argv[1:]]
for call in calls:
    step(256, *call[1:])  # libraries and threads start up
for call in calls:
    print(step(*call))
"""


def extra_bytes(*calls: str) -> list[int]:
    """Memory that steps of clip_loss need beyond inputs and gradients; a call is "rows features dtype backend"."""
    command = [sys.executable, "-c", STEP, *calls]
    # A fixed threshold: what is freed goes back to the system, so that no reused memory hides from the measurement.
    # One thread: each has buffers of its own, and other machines have many.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(900)  # seconds alone, minutes on a busy machine
def test_memory_does_not_grow_with_the_scores() -> None:
    """The scores would take 64 MiB, 256 MiB and 1 GiB."""
    extra = extra_bytes(*(f"{n} 64 float32 torch" for n in (4096, 8192, 16384)))
    assert max(extra) < WORKSPACE_LIMIT + 8 * MiB, extra
    for smaller, larger in pairwise(extra):
        assert larger - smaller < 6 * MiB, extra  # the statistics: some vectors over the rows


def test_16_bit_features_add_one_accumulator() -> None:
    """The keys' gradient in fp32 and a block of keys, but no fp32 copy of an input."""
    n, d = 4096, 1024
    accumulator = n * d * 4
    full, half = extra_bytes(*(f"{n} {d} {dtype} torch" for dtype in ("float32", "bfloat16")))
    added = half - full
    assert accumulator // 2 < added < accumulator * 3 // 2, added


def test_dense_scores_would_be_noticed() -> None:
    tiled, dense = extra_bytes("4096 16 float32 torch", "4096 16 float32 dense")
    assert dense > 64 * MiB
    assert tiled < WORKSPACE_LIMIT + 8 * MiB  # tiles are larger where caches are


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", [65536, 131072])
def test_memory_at_full_size(n: int) -> None:
    """The scores would take 16 GiB and 64 GiB."""
    assert extra_bytes(f"{n} 512 float32 torch")[0] < 64 * MiB

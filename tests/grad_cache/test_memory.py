"""Offload, temporary files, chunk sizes found by trying, and memory."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import contratile as ct
from contratile.grad_cache.auto import Trial, largest_chunk
from contratile.grad_cache.chunks import repeat_rows
from contratile.grad_cache.encoded import EncoderSide
from contratile.grad_cache.offload import DiskStore, HostStore
from tests.grad_cache.test_cache import PAIR, clip
from tests.grad_cache.towers import Normed, Tower, gap, gradients, ids_of, padded, twins

MiB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# --- offload --------------------------------------------------------------------------------------------------------

WAYS: list[dict[str, Any]] = [
    {"offload": "host"},
    {"offload": "disk"},
    {"offload": "host", "offload_features": True},
    {"offload": "disk", "offload_features": True},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("iterator", [False, True])
def test_offload_changes_nothing(options: dict[str, Any], iterator: bool, tmp_path: Path) -> None:
    """Bitwise."""
    ours, plain = twins(Normed(1), Tower(2))
    inputs = PAIR[0], padded(23, 7)
    values = []
    place = {"directory": tmp_path} if options["offload"] == "disk" else {}
    for encoders, how in ((ours, {**options, **place}), (plain, {})):
        torch.manual_seed(3)
        given: Any = inputs
        if iterator:
            pieces = [{name: x[at : at + 5] for name, x in inputs[1].items()} for at in range(0, 23, 5)]
            given = iter(inputs[0].split(5)), iter(pieces)
        values.append(ct.GradCache(encoders, clip, 5, **how).step(*given))
    assert torch.equal(*values) and gap(gradients(*ours), gradients(*plain)) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [HostStore, lambda: DiskStore(None)], ids=["host", "disk"])
def test_shelves_return_what_was_put(kind: Any) -> None:
    nest = {
        "bytes": torch.randint(0, 255, (3, 5), dtype=torch.uint8),
        "half": (torch.randn(4).bfloat16(), [torch.randn(2, 3).T, None, 7]),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 7),
    }
    with kind() as store:
        slots = [store.put(nest), store.put(torch.arange(1000)), store.put(nest)]
        got = list(store.fetch(slots, store.get))
    torch.testing.assert_close(got, [nest, torch.arange(1000), nest], rtol=0, atol=0)
    assert got[0]["half"][0].dtype == torch.bfloat16 and got[0]["flags"].dtype == torch.bool


def test_chunks_are_read_one_ahead() -> None:
    loaded: list[int] = []
    ahead = []

    def load(x: int) -> int:
        loaded.append(x)
        return x

    for index in HostStore().fetch(range(5), load):
        deadline = time.monotonic() + 600
        while len(loaded) < min(5, index + 2) and time.monotonic() < deadline:
            time.sleep(0.001)
        ahead.append(len(loaded) - index)
    assert ahead == [2, 2, 2, 2, 1]


def test_what_a_full_disk_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(DiskStore):
        def __init__(self) -> None:
            self.file, self.end = open("/dev/full", "wb", buffering=0), 0  # noqa: PTH123

    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match="No space left"), Full() as store:
        store.put(torch.ones(3))


class Looking(Tower):
    """Counts the files without a name that the process has open in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self.folder, self.seen = str(folder), set[int]()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.seen.add(open_files(self.folder))
        if input_ids[0, 0] < 0:
            raise OSError("the encoder fails")
        return super().forward(input_ids)


def open_files(folder: str) -> int:
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(link.readlink()))
        except OSError:
            continue  # that of the listing itself
    return sum(target.startswith(folder) for target in targets)


@LINUX
@pytest.mark.parametrize("fails", [False, True])
def test_no_file_remains(fails: bool, tmp_path: Path) -> None:
    encoder, images = Looking(tmp_path), PAIR[0].clone()
    if fails:
        images[-1, 0] = -1
    cache = ct.GradCache(encoder, clip, 22, offload="disk", directory=tmp_path)
    if fails:
        with pytest.raises(OSError, match="the encoder fails"):
            cache.step(images, PAIR[1])
    else:
        cache.step(images, PAIR[1])
    assert encoder.seen == {1} and open_files(str(tmp_path)) == 0
    assert not list(tmp_path.iterdir())


@LINUX
def test_a_loss_that_is_dropped_closes_its_file(tmp_path: Path) -> None:
    loss = ct.GradCache(Tower(1), clip, 5, offload="disk", directory=tmp_path)(*PAIR)
    assert open_files(str(tmp_path)) == 1
    del loss
    assert open_files(str(tmp_path)) == 0


STUCK = """
import signal, sys, time, torch, contratile as ct
from tests.grad_cache.towers import Tower, ids_of

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background

class Slow(Tower):
    def forward(self, input_ids, attention_mask=None):
        if torch.is_grad_enabled() and self.count > 5:
            print("in the second pass", flush=True)
            time.sleep(3600)
        self.count += 1
        return super().forward(input_ids)

encoder = Slow(1)
encoder.count = 0
ct.GradCache(encoder, ct.NTXent(), 5, offload="disk", directory=sys.argv[1]).step(ids_of(20, 1), ids_of(20, 2))
"""


@LINUX
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_file_remains_after_a_signal(how: signal.Signals, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    command = [sys.executable, "-c", STUCK, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "in the second pass\n"
        process.send_signal(how)
        assert process.wait(600) != 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert not list(tmp_path.iterdir())


# --- chunk sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 5, 64, 1000])
@pytest.mark.parametrize("room", [1, 3, 37, 64, 700, 5000])
def test_largest_chunk(most: int, room: int) -> None:
    """To an eighth, and without trying what must be expected not to fit."""
    tried = []

    def cost(size: int) -> float:
        tried.append(size)
        return 100.0 + 10 * size

    found = largest_chunk(cost, most=most, limit=100 + 10 * room)
    best = min(most, room)
    assert best - best // 8 - 1 <= found <= best
    assert max(tried) <= max(8, best)


def test_largest_chunk_where_memory_is_full_or_not() -> None:
    found = largest_chunk(lambda size: math.inf if size > 37 else 0.0, most=1000, limit=1.0)
    assert 33 <= found <= 37


def test_no_room_for_one_row() -> None:
    with pytest.raises(ValueError, match="chunk_size='auto': expected room for a chunk of one row, got 8: 1600 MiB"):
        largest_chunk(lambda size: 200 * MiB * size, most=10, limit=100 * MiB)


class Wide(nn.Module):
    """Activations of half a megabyte per row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 1 << 16), nn.Linear(1 << 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(self.second(self.first(x).sigmoid()))


WITHIN = """
import torch, contratile as ct
from contratile.host_memory import peak_growth
from tests.grad_cache.test_memory import Wide, clip

torch.manual_seed(3)
encoder, x = Wide(), torch.randn(120, 8)
cache = ct.GradCache(encoder, clip, "auto", memory_limit=40 << 20)
loss = cache.step(x, x.flip(0))
sizes = cache.feed.found[0], cache.feed.found[1]
growth = peak_growth(lambda: cache.step(x, x.flip(0)))
fixed = ct.GradCache(encoder, clip, sizes).step(x, x.flip(0))
print(sizes[0], growth, loss.item() == fixed.item())
"""


@LINUX
def test_auto_stays_within_the_limit() -> None:
    """In a process of its own, whose heap holds nothing that others freed."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": f"{root / 'src'}:{root}"}
    environment["OMP_NUM_THREADS"] = "1"  # each thread has buffers of its own
    command = [sys.executable, "-c", WITHIN]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    size, growth, same = done.stdout.split()
    assert 2 <= int(size) <= 40 and int(growth) < 50 * MiB and same == "True", done.stdout


@LINUX
def test_trials_leave_no_trace() -> None:
    encoder = Normed(1)
    encoder.tower.out.weight.grad = torch.ones(16, 16)
    before = {name: x.clone() for name, x in encoder.state_dict().items()}
    state = torch.get_rng_state()
    side = EncoderSide(0, encoder, None, encoder, [], 23)
    assert Trial(side, PAIR[0]).cost(23) >= 0
    assert torch.equal(torch.get_rng_state(), state) and encoder.tower.out.weight.grad.eq(1).all()
    assert encoder.tower.out.bias.grad is None
    for name, x in encoder.state_dict().items():
        assert torch.equal(x, before[name])


@LINUX
def test_a_trial_holds_no_second_set_of_gradients() -> None:
    """A step adds to the gradients that there are. A trial leaves them alone, and does not count them."""
    encoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    parameters = list(encoder.parameters())
    alive = []
    for p in parameters:
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(q.grad is not None for q in parameters)))
    trial = Trial(EncoderSide(0, encoder, None, encoder, [], 4), torch.randn(4, 8))
    trial.cost(4)
    assert max(alive) == len(parameters), "without gradients, a step creates all"
    for p in parameters:
        p.grad = torch.ones_like(p)
    alive.clear()
    trial.cost(4)
    assert max(alive) == 1
    assert all(p.grad is not None and torch.equal(p.grad, torch.ones_like(p)) for p in parameters)


def test_an_accelerator_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """An out-of-memory error of an accelerator is the end of the search, not of the step."""
    emptied = []

    class Device:
        def empty_cache(self) -> None:
            emptied.append(1)

    class Fake(Trial):
        def _run(self, size: int) -> None:
            if size > 20:
                raise torch.OutOfMemoryError("CUDA out of memory")

    encoder = Tower(1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device())
    monkeypatch.setattr(EncoderSide, "device", torch.device("cuda"))
    trial = Fake(EncoderSide(0, encoder, None, encoder, [], 100), ids_of(100, 1))
    assert 18 <= largest_chunk(trial.cost, most=100, limit=trial.limit(None)) <= 20
    assert len(emptied) > 5


def test_the_peak_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured where the device can tell, from what was allocated before."""
    peak = []

    class Device:
        def empty_cache(self) -> None: ...

        def reset_peak_memory_stats(self, device: torch.device) -> None:
            peak.append(0)

        def memory_allocated(self, device: torch.device) -> int:
            return 1000

        def max_memory_allocated(self, device: torch.device) -> int:
            return 1000 + peak[-1]

    class Fake(Trial):
        def _run(self, size: int) -> None:
            if size > 20:
                raise torch.OutOfMemoryError("CUDA out of memory")
            peak[-1] = 10 * size

    encoder = Tower(1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device())
    monkeypatch.setattr(EncoderSide, "device", torch.device("cuda"))
    trial = Fake(EncoderSide(0, encoder, None, encoder, [], 100), ids_of(100, 1))
    assert [trial.cost(size) for size in (8, 20, 21)] == [80, 200, math.inf]
    assert largest_chunk(trial.cost, most=100, limit=100) == 10
    assert 18 <= largest_chunk(trial.cost, most=100, limit=trial.limit(1)) <= 20, "memory_limit is that of the CPU"


def test_rows_are_repeated() -> None:
    nest = {"ids": torch.arange(3), "mask": (torch.arange(6).view(3, 2), torch.tensor(5))}
    assert repeat_rows(nest, 2)["ids"].tolist() == [0, 1]
    more = repeat_rows(nest, 7)
    assert more["ids"].tolist() == [0, 1, 2, 0, 1, 2, 0] and more["mask"][0].shape == (7, 2) and more["mask"][1] == 5


# --- memory ---------------------------------------------------------------------------------------------------------

STEP = """
import sys, torch, contratile as ct
from contratile.bench.contestants.cache_model import Encoder, tokens
from contratile.host_memory import status_bytes

chunk, offload, layers = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(int(sys.argv[4]))
encoders = Encoder(layers=layers), Encoder(layers=layers)

def pairs(n):
    for start in range(0, n, chunk):
        rows = min(chunk, n - start)
        yield tokens(rows, seed=start), tokens(rows, seed=start + 1)

cache = ct.GradCache(encoders, ct.ClipLoss(), chunk, offload=offload)
cache.step(pairs(2 * chunk), logit_scale=14.3)
for n in map(int, sys.argv[5:]):
    cache.step(pairs(n), logit_scale=14.3)
    print(status_bytes("VmHWM"))
"""


def peak_bytes(*sizes: int, chunk: int, offload: str = "disk", layers: int = 4, threads: int = 1) -> list[int]:
    """Resident memory of a whole process that does steps of growing sizes, at its highest until the end of each."""
    command = [sys.executable, "-c", STEP, str(chunk), offload, str(layers), str(threads), *map(str, sizes)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines()]


def feature_bytes(n: int, width: int = 128) -> int:
    """Of both sides."""
    return 2 * n * width * 4


@LINUX
def test_memory_is_that_of_a_chunk() -> None:
    """With inputs on disk only features and their gradients grow, here by 1 MiB; activations would by hundreds."""
    small, large = peak_bytes(256, 1024, chunk=32, layers=1)
    assert large - small < 2 * feature_bytes(1024) + 16 * MiB, (small, large)


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_memory_at_full_size(offload: str) -> None:
    """Two transformers of 4 layers, width 128, 32 tokens: about half an hour on two cores."""
    small, large = peak_bytes(8192, 65536, chunk=256, offload=offload, threads=2)
    print(f"{offload}: {small / MiB:.0f} MiB at 8,192, {large / MiB:.0f} MiB at 65,536")
    assert large <= 1.2 * small + feature_bytes(65536), (small, large)

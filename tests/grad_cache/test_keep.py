"""Graphs that are kept: the same gradients to the last bit, fewer forward passes, memory within its limit."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contratile as ct
from contratile.grad_cache.encoded import ChunkRecord, EncoderSide
from contratile.grad_cache.keep import GraphTrial, Keeper, MeasuredShelf
from contratile.grad_cache.plan import Piece
from tests.grad_cache.test_cache import PAIR, clip, count_calls
from tests.grad_cache.test_ranks import counted, mine
from tests.grad_cache.towers import Normed, Tower, gap, gradients, padded, twins
from tests.ranks import pool

MiB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def step(encoders: Any, inputs: tuple[Any, ...], **options: Any) -> Any:
    torch.manual_seed(5)
    cache = ct.GradCache(encoders, clip, 5, **options)
    value = cache.step(*inputs)
    return value, torch.get_rng_state(), cache.kept_chunks


GIVEN: dict[str, Callable[[], tuple[Any, ...]]] = {
    "tensors": lambda: PAIR,
    "by length": lambda: (padded(23, 1), padded(23, 3)),
    "iterators": lambda: tuple(iter(x.split(5)) for x in PAIR),
    "pairs": lambda: (zip(*(x.split(5) for x in PAIR), strict=True),),
}


@pytest.mark.parametrize("kept", [1, 3, 100])
@pytest.mark.parametrize("kind", GIVEN)
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_bitwise_the_same(kind: str, kept: int, offload: str) -> None:
    """With dropout: values, gradients and the random state afterwards."""
    plain, keeping = twins(Tower(1), Tower(2))
    want, state, none = step(plain, GIVEN[kind](), offload=offload)
    got, same, count = step(keeping, GIVEN[kind](), offload=offload, keep_graphs=kept)
    assert torch.equal(want, got) and torch.equal(state, same) and (none, count) == (0, min(kept, 10))
    assert gap(gradients(*keeping), gradients(*plain)) == 0


@pytest.mark.parametrize("kept", [0, 1, 3, 100])
def test_the_last_chunks_are_encoded_once(kept: int) -> None:
    encoder = Tower(1)
    calls = count_calls(encoder)
    ct.GradCache(encoder, clip, 5, keep_graphs=kept).step(*PAIR)
    kept = min(kept, 10)
    assert len(calls) == 20 - kept
    looked = [True, False, False, False, False] * 2  # the first chunk of each side is looked at
    assert calls[:10] == [a or b for a, b in zip(looked, [False] * (10 - kept) + [True] * kept, strict=True)]


def test_iterators_keep_a_window() -> None:
    """The number of chunks is not known beforehand: older graphs give way, before the next chunk is encoded."""
    alive = []

    class Counted(Tower):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            alive.append(len(cache_records()))
            return super().forward(input_ids)

    def cache_records() -> list[ChunkRecord]:
        return [] if shelf is None else [record for record, _ in shelf.kept]

    shelf: Any = None
    cache = ct.GradCache(Counted(1), clip, 5, keep_graphs=2)
    make = cache.keeper.shelf

    def watched(agenda: Any) -> Any:
        nonlocal shelf
        shelf = make(agenda)
        return shelf

    cache.keeper.shelf = watched  # type: ignore[method-assign]
    cache.step(*(iter(x.split(5)) for x in PAIR))
    assert max(alive[:10]) == 1 and cache.kept_chunks == 2, "one is released before the next is made"


@pytest.mark.parametrize("make", [Normed, Tower])
@pytest.mark.parametrize("autocast", [False, True])
def test_buffers_and_autocast(make: Any, autocast: bool) -> None:
    plain, keeping = twins(make(1), make(2))
    for encoders, kept in ((plain, 0), (keeping, 3)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            step(encoders, PAIR, keep_graphs=kept)
    assert gap(gradients(*keeping), gradients(*plain)) == 0
    for a, b in zip(*([x for m in ms for x in m.buffers()] for ms in (plain, keeping)), strict=True):
        assert torch.equal(a, b)


def test_frozen_encoders_take_no_room() -> None:
    encoders = Tower(1), Tower(2).requires_grad_(False)
    calls = [count_calls(encoder) for encoder in encoders]
    ct.GradCache(encoders, clip, 5, keep_graphs=5).step(*PAIR)
    assert [len(x) for x in calls] == [5, 5]


def test_a_loss_with_a_backward_of_its_own() -> None:
    plain, keeping = twins(Tower(1))
    for (encoder,), kept in ((plain, 0), (keeping, 4)):
        torch.manual_seed(5)
        (ct.GradCache(encoder, clip, 5, keep_graphs=kept)(*PAIR) / 4).backward()
    assert gap(gradients(*keeping), gradients(*plain)) == 0


def test_graphs_are_released_with_the_encoded_batch() -> None:
    cache = ct.GradCache(Tower(1), clip, 5, keep_graphs=4)
    with cache.encode(*PAIR) as encoded:
        assert sum(record.kept is not None for record in encoded.records) == 4
    assert not encoded.records
    with torch.no_grad():
        cache.step(*PAIR)
    assert cache.kept_chunks == 0


# --- ranks ----------------------------------------------------------------------------------------------------------


def ddp_gap(sizes: tuple[int, ...], kept: int, shared: bool, only_second: bool) -> Any:
    """Kept against not kept under DDP, and reductions per wrapper."""
    plain, keeping = twins(*((Normed(1),) if shared else (Normed(1), Normed(2))))
    inputs, counters = mine(sizes), []
    loss = (lambda a, b: ct.sup_con(b, torch.arange(len(b)) % 2)) if only_second else ct.ClipLoss()
    for modules, number in ((plain, 0), (keeping, kept)):
        wrapped = [DistributedDataParallel(module) for module in modules]
        counters.append([counted(ddp) for ddp in wrapped])
        torch.manual_seed(dist.get_rank())
        cache = ct.GradCache(wrapped[0] if shared else wrapped, loss, 4, keep_graphs=number)
        for _ in range(2):
            cache.step(*inputs, **({} if only_second else {"logit_scale": 7.0}))
    return gap(gradients(*keeping), gradients(*plain)), [[len(x) for x in found] for found in counters]


@pytest.mark.parametrize("shared", [True, False], ids=["one encoder", "two encoders"])
@pytest.mark.parametrize("kept", [2, 100])
@pytest.mark.parametrize("only_second", [False, True], ids=["all", "second side"])
def test_ddp(kept: int, shared: bool, only_second: bool) -> None:
    """Gradients are synchronised once, and as without kept graphs, with uneven ranks too."""
    for same, (without, with_kept) in pool(2).run(ddp_gap, (14, 6), kept, shared, only_second):
        assert same == 0 and with_kept == without


def fsdp_refusal() -> str:
    from torch.distributed.fsdp import fully_shard

    encoder = Tower(1)
    fully_shard(encoder)
    try:
        ct.GradCache(encoder, ct.ClipLoss(), 4, keep_graphs=2).step(*mine((8, 8)), logit_scale=7.0)
    except ValueError as error:
        return str(error)
    return ""


def test_fsdp_is_refused() -> None:
    for text in pool(2).run(fsdp_refusal):
        assert text.startswith("keep_graphs: expected 0 for encoders under FSDP or ZeRO 3, got 2")


# --- as many as fit -------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Activations of half a megabyte per row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 1 << 16), nn.Linear(1 << 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(self.second(self.first(x).sigmoid()))


@LINUX
def test_auto() -> None:
    """All, none, or some, with the same gradients."""
    plain, keeping = twins(Wide())
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    ct.GradCache(plain[0], clip, 10).step(x, x.flip(0))
    cache = ct.GradCache(keeping[0], clip, 10, keep_graphs="auto", memory_limit=8 << 30)
    cache.step(x, x.flip(0))
    assert gap(gradients(*keeping), gradients(*plain)) == 0 and cache.kept_chunks == 12
    (cost,) = cache.keeper.costs.values()
    for limit, least, most in ((1, 0, 0), (cost.passing + 10 * (5 * cost.graph), 1, 5)):
        keeping[0].zero_grad()
        cache.keeper.memory_limit = int(limit)
        cache.step(x, x.flip(0))
        assert gap(gradients(*keeping), gradients(*plain)) == 0 and least <= cache.kept_chunks <= most


@LINUX
def test_what_a_graph_holds() -> None:
    """The output of the first layer's sigmoid; the rest is small or there anyway."""
    encoder = Wide()
    trial = GraphTrial(EncoderSide(0, encoder, None, encoder, [], 10), torch.randn(10, 8))
    trial.cost(10)
    assert trial.held == pytest.approx(10 * (4 << 16), rel=0.02)
    assert all(p.grad is None for p in encoder.parameters())


LIMITED = """
import sys, torch, contratile as ct
from contratile.host_memory import peak_growth
from tests.grad_cache.test_keep import Wide, clip

torch.manual_seed(int(sys.argv[1]))
encoder, x = Wide(), torch.randn(200, 8)
plain = ct.GradCache(encoder, clip, 10)
plain.step(x, x.flip(0))
limit = int(sys.argv[2]) << 20
cache = ct.GradCache(encoder, clip, 10, keep_graphs="auto", memory_limit=limit)
cache.step(x, x.flip(0))
growth = peak_growth(lambda: cache.step(x, x.flip(0)))
print(cache.kept_chunks, growth)
"""


def within_limit(seed: int, limit: int) -> tuple[int, int]:
    """Chunks kept and growth of a process, in MiB."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, str(seed), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    kept, growth = map(int, done.stdout.split())
    return kept, growth // MiB


@LINUX
def test_auto_stays_within_the_limit() -> None:
    kept, growth = within_limit(0, 120)
    assert kept >= 4 and growth <= 120


@LINUX
@pytest.mark.slow
def test_auto_stays_within_every_limit() -> None:
    for seed, limit in enumerate(range(60, 160, 5)):
        kept, growth = within_limit(seed, limit)
        print(f"limit {limit} MiB: {kept} of 40 chunks, {growth} MiB")
        assert growth <= limit


class Device:
    """The memory functions of an accelerator."""

    emptied = 0

    def __init__(self, free: int) -> None:
        self.free = free

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 10 * self.free

    def memory_reserved(self, device: torch.device) -> int:
        return 300

    def memory_allocated(self, device: torch.device) -> int:
        return 100

    def empty_cache(self) -> None:
        Device.emptied += 1


def test_limit_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free or reserved and unused; not run on a GPU."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device(1000))
    assert Keeper("auto", None)._limit(torch.device("cuda")) == 0.8 * 1200
    assert Keeper("auto", 7)._limit(torch.device("cuda")) == 7
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    with pytest.raises(ValueError, match="memory_limit: expected a number: mps does not tell"):
        Keeper("auto", None)._limit(torch.device("mps"))


def test_a_chunk_that_is_much_longer_or_larger_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def cost(self: GraphTrial, rows: int) -> float:
        self.held = 100 * rows
        measured.append(rows)
        return 150.0 * rows

    monkeypatch.setattr(GraphTrial, "cost", cost)
    encoder = Tower(1)
    side = EncoderSide(0, encoder, None, encoder, [], 4)

    class Planned:
        def __init__(self, length: int, rows: int = 4) -> None:
            self.side, self.piece = side, Piece(torch.arange(rows), length)

        def chunk(self) -> Tensor:
            return PAIR[0][:4]

    keeper: Any = Keeper("auto", 10_000)
    assert keeper.cost(Planned(10)) == (10.0, 200.0, 10, 40)
    keeper.cost(Planned(12))
    keeper.cost(Planned(5))
    assert measured == [4, 4], "the first of two calls allocates what is allocated once"
    keeper.cost(Planned(13))
    assert len(measured) == 4
    assert keeper.cost(Planned(9, 8)) == (pytest.approx(800 / 72), 400.0, 13, 72), "has more tokens"
    shelf = MeasuredShelf(1000.0, known=None, keeper=keeper)
    assert [shelf.weight(Planned(n)) for n in (13, 5)] == [pytest.approx(52 * 100 / 9), pytest.approx(20 * 100 / 9)]  # type: ignore[arg-type]


class Small(Tower):
    """Runs out of memory in a forward pass with gradients, of a given number."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(1)
        self.fails_at, self.graphs = fails_at, 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        torch.rand(3)  # what is drawn before the failure is drawn again
        self.graphs += torch.is_grad_enabled()
        if self.graphs == self.fails_at:
            self.graphs += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(input_ids)


def test_out_of_memory_releases_graphs() -> None:
    """The step goes on without them, with the same gradients, and later steps keep half as many."""
    encoder, reference = Small(4), Small(0)
    for x in (encoder, reference):
        torch.manual_seed(5)
        cache = ct.GradCache(x, clip, 5, keep_graphs=8 if x is encoder else 0)
        cache.step(*PAIR)
        if x is encoder:
            assert cache.kept_chunks == 0 and cache.keeper.share == 0.5
            small = cache
    assert gap(gradients(encoder), gradients(reference)) == 0
    small.step(*PAIR)
    assert small.kept_chunks == 4


def test_out_of_memory_without_kept_graphs_is_raised() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        ct.GradCache(Small(1), clip, 5).step(*PAIR)
    cache = ct.GradCache(Small(10), clip, 5, keep_graphs=8)
    with pytest.raises(torch.OutOfMemoryError):
        cache.step(*PAIR)  # in the second pass, where gradients have changed
    assert cache.keeper.share == 0.5


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch, "get_device_module", lambda device: Device(1000))
    yield


def test_the_cache_of_an_accelerator_is_emptied(on_cuda: None) -> None:
    from contratile.grad_cache.keep import empty_cache

    before = Device.emptied
    empty_cache(torch.device("cpu"))
    empty_cache(torch.device("cuda"))
    assert Device.emptied == before + 1


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [(ValueError, "keep_graphs: expected one of 'auto'", "all"), (ValueError, "keep_graphs: expected at least 0", -1)],
)
def test_errors(kind: type[Exception], text: str, value: Any) -> None:
    with pytest.raises(kind, match=text):
        ct.GradCache(Tower(1), clip, 5, keep_graphs=value)

"""Terms of memory: what they are, in which phase, and where they go."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from contratile.grad_cache.chunks import RowBuffer
from contratile.host_memory import returns_freed
from contratile.losses.directions import Direction
from contratile.planner.devices import Devices, parse_devices
from contratile.planner.encoder_cost import encoder_cost
from contratile.planner.memory import Memory, buffer_rows, device_memory, disk_memory, host_memory
from contratile.planner.peers import peer_loss_bytes
from contratile.planner.search import best_chunk, fits, largest_batches, smallest_change
from contratile.planner.step_seconds import step_seconds
from contratile.planner.workload import LossFacts, Workload, by_name, count_optimizer

GPUS, CPU = parse_devices("8xA800-80G"), parse_devices("cpu", memory=8e9)


@pytest.fixture(scope="module")
def work() -> Workload:
    module = nn.Sequential(nn.Linear(1000, 2000), nn.ReLU(), nn.Linear(2000, 64))
    cost = encoder_cost(module, torch.empty(1, 1000), rows=(32, 64))
    optimizer = count_optimizer([module], by_name("adamw"), "adamw")
    return Workload(batch=8192, chunk=64, ranks=8, sides=(cost, cost), optimizer=optimizer)


def term(memory: Memory, name: str) -> float:
    return next((term.bytes for term in memory.terms if term.name == name), 0.0)


def test_terms_of_a_step(work: Workload) -> None:
    memory = device_memory(work, GPUS)
    weights = 4 * (1000 * 2000 + 2000 + 2000 * 64 + 64)
    assert term(memory, "weights") == term(memory, "gradients") == term(memory, "DDP buckets") == weights
    assert term(memory, "optimiser state") == pytest.approx(2 * weights, rel=1e-4)
    assert term(memory, "gradients of features") == 2 * 1024 * 64 * 4
    assert term(memory, "inputs waiting") == 2 * 1024 * 1000 * 4
    assert memory.peak == max(memory.at(phase) for phase in ("encode", "loss", "backward", "update"))
    assert memory.left == memory.available - memory.peak


def test_a_peak_is_of_one_phase(work: Workload) -> None:
    """Features and activations are never held together, so that they do not add up."""
    memory = device_memory(work, GPUS)
    assert memory.peak < sum(term.bytes for term in memory.terms)


ALL: tuple[Direction, ...] = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def test_directions_are_counted(work: Workload) -> None:
    """Each set that is compared with itself: its statistics, and a gradient before it is added to the others."""
    both = replace(work, loss=LossFacts(directions=("query_to_doc", "doc_to_query")))
    assert device_memory(both, GPUS) == device_memory(work, GPUS)
    four = device_memory(replace(work, loss=LossFacts(directions=ALL)), GPUS)
    assert term(four, "gradients of directions") == 2 * 1024 * 64 * 4
    assert term(four, "statistics") - term(device_memory(work, GPUS), "statistics") == 2 * 2 * 1024 * 4


@pytest.mark.parametrize(
    ("facts", "alone", "of_four"),
    [
        (LossFacts(), 1, 4),
        (LossFacts(views=2), 0.5, 3),
        (LossFacts(directions=ALL), 2, 4 + 2 * 3),
        (LossFacts(directions=("query_to_doc", "doc_to_query")), 1, 4),
        (LossFacts(negatives=2), 3, 12),
        (LossFacts(negatives=2, shared_negatives=False), 1, 4),
        (LossFacts(negatives=2, directions=("query_to_doc", "doc_to_doc")), 5.5, 4 * 5.75),
    ],
)
def test_blocks_that_a_rank_computes(facts: LossFacts, alone: float, of_four: float) -> None:
    """The limits of benchmarks: four products for pairs, eight for four directions, half of it for one set."""
    assert (facts.blocks(1), facts.blocks(4)) == (alone, of_four)


def test_what_travels_for_a_loss(work: Workload) -> None:
    """Keys twice and their gradients once, (3P - 2) blocks; a set with itself travels twice, without gradients."""
    block, ranks = 1024 * 64 * 4, 8
    for facts, blocks in (
        (LossFacts(), 3 * ranks - 2),
        (LossFacts(views=2), 2 * 2 * (ranks - 1)),
        (LossFacts(directions=ALL), 3 * ranks - 2 + 2 * 2 * (ranks - 1)),
        (LossFacts(negatives=1), 2 * (3 * ranks - 2)),
    ):
        assert step_seconds(replace(work, loss=facts), GPUS).sent_bytes == blocks * block


def test_prefixes_have_a_tile_and_statistics_each(work: Workload) -> None:
    one = replace(work, batch=32768, ranks=1)
    plain, nested = (device_memory(replace(one, loss=LossFacts(prefixes=count)), CPU) for count in (0, 5))
    assert term(nested, "statistics") > term(plain, "statistics")
    assert term(nested, "loss workspace") != term(plain, "loss workspace")
    assert step_seconds(replace(one, loss=LossFacts(prefixes=5)), CPU).seconds == step_seconds(one, CPU).seconds


def test_sharding_divides_weights_and_state(work: Workload) -> None:
    whole, sharded = (device_memory(replace(work, fsdp=fsdp), GPUS) for fsdp in (False, True))
    for name in ("weights", "optimiser state"):
        assert term(sharded, name) == term(whole, name) / 8
    assert term(sharded, "DDP buckets") == 0 and term(sharded, "gathered blocks") > 0


def test_inputs_wait_where_they_are_told(work: Workload) -> None:
    size = 2 * 1024 * 1000 * 4
    host, disk = (replace(work, offload=place) for place in ("host", "disk"))
    assert term(host_memory(host, GPUS), "inputs waiting") == 8 * size
    assert term(disk_memory(disk, GPUS), "inputs waiting") == 8 * size
    for here in (host, disk):
        assert term(device_memory(here, GPUS), "inputs waiting") == 0
        assert term(device_memory(here, GPUS), "inputs in use") == size / 1024 * 128
    assert not host_memory(work, GPUS).terms and not disk_memory(work, GPUS).terms


def test_host_memory_is_the_memory_of_a_cpu(work: Workload) -> None:
    alone = replace(work, ranks=1)
    kept, host = (device_memory(replace(alone, offload=place), CPU) for place in ("none", "host"))
    assert term(kept, "inputs waiting") == term(host, "inputs waiting") > 0
    assert not host_memory(replace(alone, offload="host"), CPU).terms


def test_what_malloc_keeps_counts_unless_it_is_told_to_return_it(work: Workload) -> None:
    alone = replace(work, ranks=1)
    keeping, returning = (device_memory(alone, replace(CPU, keeps_freed=keeps)) for keeps in (True, False))
    for name in ("freed, not reused", "not given back"):
        assert term(keeping, name) > 0 == term(returning, name)
    assert term(keeping, "activations of a chunk") == term(returning, "activations of a chunk")
    assert returns_freed({"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert not returns_freed({}) and not returns_freed({"MALLOC_MMAP_THRESHOLD_": str(32 << 20)})


def test_ring_buffers_are_four_blocks(work: Workload) -> None:
    memory = device_memory(work, GPUS)
    assert term(memory, "ring buffers") == 4 * 1024 * 64 * 4
    assert term(device_memory(replace(work, ranks=1), CPU), "ring buffers") == 0


def test_a_ring_over_nodes_has_buffers_and_transfers_of_its_own(work: Workload) -> None:
    """As docs/distributed.md counts: 3KL - 2K blocks inside, 3K - 2 between K nodes of L, and four buffers more."""
    nodes, block = parse_devices("2x4xA800-80G"), 1024 * 64 * 4
    flat = replace(work, loss=LossFacts(ring="flat"))
    assert term(device_memory(work, nodes), "buffers between nodes") == 4 * block
    for where, step in ((GPUS, work), (nodes, flat)):
        assert term(device_memory(step, where), "buffers between nodes") == 0
        assert step_seconds(step, where).sent_bytes == (3 * 8 - 2) * block
    slow = step_seconds(work, replace(nodes, network=1e6, link=1e6))
    seconds = {one.name: one.seconds for one in slow.terms}
    assert seconds["ring"] == pytest.approx((3 * 8 - 2 * 2) * block / 1e6, rel=0.01)
    assert seconds["ring between nodes"] == pytest.approx((3 * 2 - 2) * block / 1e6, rel=0.01)
    assert seconds["ring"] + seconds["ring between nodes"] == pytest.approx(slow.sent_bytes / 1e6, rel=0.01)


def test_dense_scores_and_other_losses(work: Workload) -> None:
    dense = device_memory(replace(work, loss=LossFacts(dense=True)), GPUS)
    assert term(dense, "all scores") == 4 * 4 * 8192**2
    theirs = device_memory(work, GPUS, "open_clip")
    assert term(theirs, "loss of open_clip") == peer_loss_bytes("open_clip", batch=8192, ranks=8, width=64, itemsize=4)


@pytest.mark.parametrize(("rows", "chunk"), [(1, 1), (7, 2), (64, 64), (100, 16), (1000, 24)])
def test_room_for_features_is_what_the_buffer_takes(rows: int, chunk: int) -> None:
    buffer = RowBuffer(None)
    for start in range(0, rows, chunk):
        stop = min(start + chunk, rows)
        buffer.place(slice(start, stop), torch.zeros(stop - start, 1))
    assert buffer_rows(rows, chunk) == len(buffer.room)


# --- searches -------------------------------------------------------------------------------------------------------


def test_the_largest_batch_fits_and_a_larger_one_does_not(work: Workload) -> None:
    found = {one.method: one for one in largest_batches(work, GPUS)}
    ours = found["Contratile"].batch
    assert fits(replace(work, batch=ours), GPUS) and not fits(replace(work, batch=ours + 8), GPUS)
    assert found["dense CLIP"].batch < found["open_clip, local loss"].batch < found["Inf-CL"].batch
    assert ours < found["Contratile, inputs on host"].batch <= found["Contratile, inputs on disk"].batch
    assert found["Contratile, inputs on host"].limit == "host memory"
    assert all(one.batch % 8 == 0 for one in found.values())


def test_the_best_chunk_fits_and_is_about_as_fast_as_any(work: Workload) -> None:
    chunk = best_chunk(work, GPUS)
    assert fits(replace(work, chunk=chunk), GPUS)
    times = {size: step_seconds(replace(work, chunk=size), GPUS).seconds for size in (1, chunk, 1024)}
    assert times[chunk] <= 1.021 * times[1024] < times[1]


def small(devices: Devices, memory: float) -> Devices:
    return replace(devices, memory=memory, reserve=0.0)


def test_the_smallest_change_is_a_smaller_chunk(work: Workload) -> None:
    larger = replace(work, chunk=1024)
    change = smallest_change(larger, small(GPUS, device_memory(larger, GPUS).peak - 1))
    assert change is not None and change.options == "--chunk 512"


def test_inputs_go_elsewhere_before_the_batch_shrinks(work: Workload) -> None:
    large = replace(work, batch=1 << 20, chunk=1)
    need = device_memory(replace(large, offload="host"), GPUS).peak
    change = smallest_change(large, small(GPUS, need + 1))
    assert change is not None and change.options == "--offload host"


def test_the_last_resort_is_a_smaller_batch(work: Workload) -> None:
    alone = replace(work, ranks=1, offload="disk", chunk=1, batch=1 << 20)
    need = device_memory(replace(alone, batch=1 << 19), CPU).peak
    change = smallest_change(alone, small(CPU, need))
    assert change is not None and change.options == f"--batch {1 << 19}"
    assert smallest_change(alone, small(CPU, 1e6)) is None


# --- time -----------------------------------------------------------------------------------------------------------


def test_terms_of_the_time(work: Workload) -> None:
    found = step_seconds(work, GPUS)
    times = {term.name: term.seconds for term in found.terms}
    assert times["encode"] == times["encode again"] < times["backward"]
    assert found.seconds == pytest.approx(sum(times.values()))
    assert found.sent_bytes == (3 * 8 - 2) * 1024 * 64 * 4
    assert 0 <= found.hidden <= 1 and 0 < found.utilisation < 1


def test_a_slow_link_is_not_hidden(work: Workload) -> None:
    slow = step_seconds(work, replace(GPUS, link=1e6))
    assert slow.hidden < 0.5
    ring = next(term.seconds for term in slow.terms if term.name == "ring")
    assert ring == pytest.approx(slow.sent_bytes / 1e6, rel=0.01)

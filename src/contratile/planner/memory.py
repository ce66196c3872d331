"""Bytes that a training step needs, term by term: on each device, in host memory, on disk.

    found = device_memory(workload, devices)
    found.peak, found.phase                         # the phase of a step that needs most
    for term in found.terms: print(term.name, term.bytes, term.how)

A step has four phases, and a term belongs to those that hold it:

    encode     features of all chunks, without gradients; the first chunk of a side with them
    loss       the loss of all features, and their gradients
    backward   chunk by chunk, forward again and backward
    update     the optimiser

What a process has before it builds anything (Python, PyTorch, libraries) is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from contratile.engine.backends.triton_configs import WORKSPACE_BYTES
from contratile.engine.plan import plan_tiles
from contratile.planner.devices import UNREUSED_SHARE, Devices
from contratile.planner.loss_memory import dense_loss_bytes
from contratile.planner.peers import Peer, peer_loss_bytes
from contratile.planner.workload import Workload

Phase = Literal["encode", "loss", "backward", "update"]
PHASES: tuple[Phase, ...] = ("encode", "loss", "backward", "update")
FP32 = 4
LossMethod = Literal["ours"] | Peer


@dataclass(frozen=True, kw_only=True)
class Term:
    """One item of the memory, such as weights or activations."""

    name: str
    bytes: float
    phases: tuple[Phase, ...] = PHASES
    """The phases that hold it."""

    how: str
    """How the number was derived."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The terms of one kind of memory: device, host or disk."""

    terms: tuple[Term, ...]
    available: float
    """Bytes available; inf if unknown."""

    def at(self, phase: Phase) -> float:
        """Bytes held in a phase."""
        return sum(term.bytes for term in self.terms if phase in term.phases)

    @property
    def phase(self) -> Phase:
        """The phase that needs most."""
        return max(PHASES, key=self.at)

    @property
    def peak(self) -> float:
        return self.at(self.phase)

    @property
    def left(self) -> float:
        """`available` minus the peak; negative if the step does not fit."""
        return self.available - self.peak

    @property
    def fits(self) -> bool:
        return self.left >= 0


def device_memory(work: Workload, devices: Devices, loss: LossMethod = "ours") -> Memory:
    """The memory of one device.

    Args:
        work: The step.
        devices: Where it runs.
        loss: Whose loss: ours, or what other packages hold.
    """
    terms = [*_model_terms(work), *_chunk_terms(work, devices), *_batch_terms(work, devices)]
    terms += _second_terms(work, devices)
    terms += _loss_terms(work, devices) if loss == "ours" else _peer_terms(work, loss)
    return Memory(terms=tuple(term for term in terms if term.bytes), available=devices.usable)


def _model_terms(work: Workload) -> Sequence[Term]:
    encoders, shards = work.encoders, work.ranks if work.fsdp else 1
    weights = sum(x.weight_bytes for x in encoders)
    trained = sum(x.trained_bytes for x in encoders)
    per = f", a {shards}th of them" if shards > 1 else ""
    found = [
        Term(name="weights", bytes=weights / shards, how=f"parameters and buffers{per}"),
        Term(
            name="gradients",
            bytes=trained,
            phases=("backward", "update"),
            how="trained parameters" + (", whole until the last chunk" if shards > 1 else ""),
        ),
        Term(
            name="optimiser state",
            bytes=work.optimizer.state_bytes / shards,
            how=f"{work.optimizer.name}, one update counted on fake tensors{per}",
        ),
        Term(
            name="update",
            bytes=work.optimizer.temporary_bytes / shards,
            phases=("update",),
            how="temporaries of one update",
        ),
    ]
    if work.fsdp and work.ranks > 1:
        gathered = 2 * max(x.largest_bytes for x in encoders)
        how = "two blocks of weights, gathered from all ranks"
        found.append(Term(name="gathered blocks", bytes=gathered, phases=("encode", "backward"), how=how))
    elif work.ranks > 1:
        found.append(Term(name="DDP buckets", bytes=trained, how="a second copy of the gradients, to be summed"))
    return found


def _chunk_terms(work: Workload, devices: Devices) -> Sequence[Term]:
    chunks = {id(cost): cost.at(min(work.chunk, rows)) for cost, rows in work.rows}
    largest = max(chunks.values(), key=lambda one: one.peak)
    first = max(one.encode_peak for one in chunks.values())
    frozen = [cost.at(min(work.chunk, rows)).encode_peak for cost, rows in work.second_rows]
    counted = f"forward and backward of {work.chunk:,} rows, operator by operator on fake tensors"
    if devices.on_cpu and not devices.keeps_freed:
        lost, why = 0.0, ""
    elif devices.on_cpu:
        others = [one.peak for one in chunks.values() if one is not largest]
        lost = max(largest.unreused, *others, 0.0)
        why = "blocks of one encoder, kept by the allocator" if others else "holes between saved tensors"
    else:
        lost, why = UNREUSED_SHARE * largest.peak, f"{UNREUSED_SHARE:.0%} of activations (assumed)"
    held = largest.peak
    if work.measured is not None:
        held, lost = work.measured(held + lost), 0.0
        first, counted = first * held / largest.peak, "line through two small chunks that were run here"
    why_first = "its forward pass with gradients, to see what is trained"
    if work.second is not None and max(frozen) > first:
        first, why_first = max(frozen), f"forward pass of the {work.second.role}"
    kept = held + lost if devices.keeps_freed else 0.0
    return [
        Term(
            name="not given back",
            bytes=kept,
            phases=("update",),
            how="chunks are freed, but malloc keeps their memory; large blocks of the update come on top",
        ),
        Term(name="activations of a chunk", bytes=held, phases=("backward",), how=counted),
        Term(
            name="first chunk",
            bytes=first,
            phases=("encode",),
            how=why_first,
        ),
        Term(name="freed, not reused", bytes=lost, phases=("backward",), how=why),
    ]


def buffer_rows(rows: int, chunk: int) -> int:
    """Rows that the buffer of features has room for. It doubles as it fills, because the total is not known."""
    room = 0
    while room < rows:
        room = 2 * min(rows, (room // chunk + 1) * chunk)  # the first chunk that does not fit doubles it
    return room


def input_bytes(work: Workload, rows: float = 1.0) -> float:
    """Bytes of the inputs of some pairs."""
    per_row = [(cost.large.input_bytes / cost.large.rows, n / work.share) for cost, n in work.rows]
    return rows * sum(size * times for size, times in per_row)


def _batch_terms(work: Workload, devices: Devices) -> Sequence[Term]:
    n, chunk = work.share, work.chunk
    one = work.width * work.feature_itemsize
    rows = sum(many for _, many in work.rows)
    # A CPU's pages that nothing was written to take no memory.
    room = rows if devices.on_cpu else sum(buffer_rows(many, chunk) for _, many in work.rows)
    found = [
        Term(
            name="features",
            bytes=room * one,
            phases=("encode", "loss"),
            how=f"{rows:,} x {work.width} of {work.feature_itemsize:.0f} bytes"
            + ("" if room == rows else f", room for {room:,}"),
        ),
        Term(name="gradients of features", bytes=rows * one, phases=("loss", "backward"), how="as many"),
    ]
    held: tuple[Phase, ...] = ("encode", "loss", "backward")
    if work.offload == "none" or (work.offload == "host" and devices.on_cpu):
        how = f"{n:,} pairs of {input_bytes(work):,.0f} bytes, kept for the second pass"
        found.append(Term(name="inputs waiting", bytes=input_bytes(work, n), phases=held, how=how))
    else:
        how = f"two chunks; the others are on the {work.offload}"
        size = input_bytes(work, min(n, 2 * chunk))
        found.append(Term(name="inputs in use", bytes=size, phases=("encode", "backward"), how=how))
    if devices.on_cpu and work.host_bytes:
        found.append(Term(name="kept outputs", bytes=work.host_bytes, how="outputs of locked backbones"))
    return found


def _second_terms(work: Workload, devices: Devices) -> Sequence[Term]:
    """A frozen model: each rank holds all of it, and its features until the loss is done."""
    if work.second is None:
        return []
    role, sides = work.second.role, work.second.sides
    weights = sides[0].weight_bytes + (0 if sides[1] is sides[0] else sides[1].weight_bytes)
    size = width = 0.0
    for cost, rows in work.second_rows:
        one = cost.large.feature_bytes / cost.large.rows
        size += one * (rows if devices.on_cpu else buffer_rows(rows, work.chunk))
        width += cost.width * rows
    found = [
        Term(name=f"{role} weights", bytes=weights, how="frozen, whole on every device"),
        Term(name=f"{role} features", bytes=size, phases=("encode", "loss"), how=f"{width:,.0f} numbers"),
    ]
    if work.ranks > 1:
        keys = 1 + (work.loss.negatives if work.loss.shared_negatives else 0)
        visiting = 2 * keys * work.share * sides[1].large.feature_bytes / sides[1].large.rows
        how = "two visiting blocks, in addition to those of the keys"
        found.append(Term(name=f"{role} ring buffers", bytes=visiting, phases=("loss",), how=how))
    if devices.on_cpu:
        rows = work.loss.views * work.share
        tiles = plan_tiles(rows, rows, sides[0].width)
        size = 2.0 * tiles.rows * tiles.cols * FP32
        how = f"its products of a tile of {tiles.rows} x {tiles.cols}, and what they say"
        found.append(Term(name=f"{role} tiles", bytes=size, phases=("loss",), how=how))
    return found


def _loss_terms(work: Workload, devices: Devices) -> Sequence[Term]:
    loss, ranks, d = work.loss, work.ranks, work.width
    rows = loss.views * work.share
    block = rows * d
    keys = loss.key_sets
    itemsize = work.feature_itemsize
    found = []

    def add(name: str, size: float, how: str) -> None:
        found.append(Term(name=name, bytes=size, phases=("loss",), how=how))

    if loss.dense:
        size = dense_loss_bytes(work.batch, views=loss.views, negatives=loss.negatives)
        add("all scores", size, "four N x N matrices (--backend dense)")
        return found
    if devices.on_cpu:
        tiles = plan_tiles(rows, rows, d, symmetric=loss.views == 2, prefixes=loss.prefixes)
        add("loss workspace", tiles.workspace_bytes, f"tiles of {tiles.rows} x {tiles.cols} and their operands")
    else:
        add("loss workspace", WORKSPACE_BYTES, "tiles of weights between kernel and products")
    columns = 6 + 2 * keys + 2 * loss.same_type + 8 * loss.prefixes
    add("statistics", columns * rows * FP32, "log-sum-exps, positives, ids and their gradients")
    if loss.same_type:
        size = loss.same_type * block * FP32
        add("gradients of directions", size, "of queries or documents compared with themselves, before they add up")
    if loss.views == 2:
        add("both sides in one", 2 * block * itemsize, "features and gradients of all views, side by side")
    if ranks > 1:
        carried, gathered = 2 * keys * block * itemsize, (0 if loss.views == 2 else 2 * keys * block * FP32)
        add("ring buffers", carried + gathered, "two visiting blocks of keys, two of their gradients on the way")
        if over_nodes(work, devices):
            add("buffers between nodes", carried + gathered, "as many, on their way to the next node")
    if itemsize < FP32:
        add("accumulators", 2 * block * FP32, "gradients of features in fp32 until they are complete")
    if loss.cache_bytes:
        kept = min(loss.cache_bytes, keys * rows * rows * ranks * FP32)
        add("kept scores", kept, "--cache-mib")
    return found


def over_nodes(work: Workload, devices: Devices) -> bool:
    """Whether the loss uses the ring over nodes."""
    return work.loss.ring != "flat" and devices.nodes > 1 and devices.per_node > 1


def _peer_terms(work: Workload, loss: Peer) -> Sequence[Term]:
    size = peer_loss_bytes(
        loss,
        batch=work.loss.views * work.batch,
        ranks=work.ranks,
        width=work.width,
        itemsize=int(work.feature_itemsize),
    )
    return [Term(name=f"loss of {loss}", bytes=size, phases=("loss",), how="the tensors that its code holds")]


def host_memory(work: Workload, devices: Devices) -> Memory:
    """The host memory of a node, for all of its devices. Empty on a CPU, where it is the devices' memory."""
    terms = []
    if not devices.on_cpu:
        many = devices.per_node
        if work.offload == "host":
            how = f"inputs of {work.share * many:,} pairs, pinned"
            terms.append(Term(name="inputs waiting", bytes=many * input_bytes(work, work.share), how=how))
        elif work.offload == "disk":
            size = many * input_bytes(work, min(work.share, 2 * work.chunk))
            terms.append(Term(name="inputs on their way", bytes=size, how="two chunks of each device"))
        if work.host_bytes:
            terms.append(Term(name="kept outputs", bytes=many * work.host_bytes, how="of locked backbones"))
    return Memory(terms=tuple(terms), available=devices.host_memory)


def disk_memory(work: Workload, devices: Devices) -> Memory:
    """The disk space of a node during a step."""
    terms = []
    if work.offload == "disk":
        size = devices.per_node * input_bytes(work, work.share)
        terms.append(Term(name="inputs waiting", bytes=size, how=f"{work.share * devices.per_node:,} pairs"))
    return Memory(terms=tuple(terms), available=float("inf"))

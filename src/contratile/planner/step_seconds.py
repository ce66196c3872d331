"""Predicts the seconds of a training step, term by term.

    found = step_seconds(workload, devices)
    found.seconds, [(term.name, term.seconds) for term in found.terms]

On a GPU, matrix products run at the rate of large products, or at the speed of memory if that is slower. Every other
operator reads and writes its tensors once, at the speed of memory. Each operator also costs a fixed time. On a CPU the
time of every operator is estimated from its shape and measured rates when it is counted (`cpu_rates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from contratile.planner.devices import Devices
from contratile.planner.encoder_cost import PassCost
from contratile.planner.memory import FP32, input_bytes, over_nodes
from contratile.planner.step_time import predict
from contratile.planner.workload import Workload

LOSS_SHARE = 0.85
"""Share of the rate of large products that the loss on a CPU reaches (benchmarks/results: 0.79 to 0.95)."""
HOST_LINK = 20e9
"""Assumed: bytes per second between a device and its host, PCIe 4 in practice."""
DISK = 2e9
"""Assumed: bytes per second of the disk that chunks are offloaded to, per node."""


@dataclass(frozen=True, kw_only=True)
class TimeTerm:
    """Part of a step."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """The predicted time of a step."""

    terms: tuple[TimeTerm, ...]
    batch: int
    sent_bytes: float
    """Bytes that a rank sends in the ring of the loss."""

    hidden: float
    """Share of the transfer time that is hidden behind compute, from 0 to 1."""

    utilisation: float
    """Share of the rate of large products that the encoders reach."""

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def samples_per_second(self) -> float:
        return self.batch / self.seconds


def step_seconds(work: Workload, devices: Devices) -> StepSeconds:
    """Predict the seconds of a step.

    Args:
        work: The step.
        devices: Where it runs.
    """
    first = second = backward = products = 0.0
    for cost, rows in work.rows:
        chunk = cost.at(min(work.chunk, rows))
        times = rows / chunk.rows
        encode, ahead, back = pass_seconds(chunk, devices, work.precision)
        first += times * encode
        products += times * chunk.forward_flops
        if cost.trained:
            second += times * ahead
            backward += times * back
            products += times * (chunk.forward_flops + chunk.backward_flops)
    frozen = 0.0
    for cost, rows in work.second_rows:
        chunk = cost.at(min(work.chunk, rows))
        frozen += rows / chunk.rows * pass_seconds(chunk, devices, work.precision)[0]
    if devices.cpu is not None and work.ranks == 1:  # gradients are new tensors in every step
        clock = devices.clock(work.precision)
        assert clock is not None
        backward += clock.faults(sum(cost.trained_bytes for cost in work.encoders))
    encoders = first + second + backward
    rate = devices.flops[work.precision]
    loss, how = loss_seconds(work, devices)
    transfers = _transfers(work, devices, loss, backward)
    moved = work.optimizer.moved / (work.ranks if work.fsdp else 1)
    terms = [
        TimeTerm(name="encode", seconds=first, how="forward pass of all chunks"),
        TimeTerm(
            name=work.second.role if work.second is not None else "",
            seconds=frozen,
            how="forward pass of all chunks, without gradients",
        ),
        TimeTerm(name="encode again", seconds=second, how="the extra forward pass of the gradient cache"),
        TimeTerm(name="backward", seconds=backward, how="backward pass of all chunks"),
        TimeTerm(name="loss", seconds=loss, how=how),
        *transfers.terms,
        TimeTerm(
            name="update",
            seconds=work.optimizer.seconds / (work.ranks if work.fsdp else 1) or moved / devices.bandwidth,
            how=f"{work.optimizer.name}: {moved / 1e9:.2f} GB read and written"
            + (", gradients clipped" if work.optimizer.seconds else ""),
        ),
    ]
    return StepSeconds(
        terms=tuple(term for term in terms if term.seconds),
        batch=work.batch,
        sent_bytes=transfers.sent,
        hidden=transfers.hidden,
        utilisation=products / rate / encoders if encoders else 0.0,
    )


def pass_seconds(chunk: PassCost, devices: Devices, precision: str) -> tuple[float, float, float]:
    """Seconds of a chunk's forward pass without gradients, forward pass with them, and backward pass."""
    if chunk.forward_seconds:
        return chunk.encode_seconds, chunk.forward_seconds, chunk.backward_seconds
    found = []
    for way in ("forward", "backward"):
        flops, product_bytes, moved, operators = (
            getattr(chunk, f"{way}_{name}") for name in ("flops", "product_bytes", "moved", "operators")
        )
        products = max(flops / devices.flops[precision], product_bytes / devices.bandwidth)
        found.append(products + moved / devices.bandwidth + operators * devices.operator_seconds)
    return found[0], found[0], found[1]


def loss_seconds(work: Workload, devices: Devices) -> tuple[float, str]:
    """Seconds of compute that the loss takes on a rank, without transfers."""
    rows = work.loss.views * work.share
    blocks = work.loss.blocks(work.ranks)
    if devices.gpu is not None:
        dtype = torch.float32 if work.feature_itemsize == FP32 else torch.bfloat16
        one = _predict(devices.gpu.name, rows, work.width, dtype)
        how = f"{blocks:g} blocks of {rows:,} x {rows:,}, kernel model ({one.kind})"
        if work.second is not None:
            how += f"; with a {work.second.role} the torch backend runs instead, which takes longer"
        return blocks * one.seconds, how
    flops = blocks * 4 * 2.0 * rows * rows * work.width
    told = f"4 products of {rows:,} x {int(rows * blocks):,} x {work.width}"
    if work.second is not None:  # the forward and the backward pass multiply its features once each
        width = work.second.sides[0].width
        flops += blocks * 2 * 2.0 * rows * rows * width
        told += f" and 2 of the {work.second.role}, x {width},"
    how = f"{told} at {LOSS_SHARE:.0%} of the rate"
    return flops / (LOSS_SHARE * devices.flops["fp32"]), how


_predict = lru_cache(maxsize=64)(predict)


@dataclass(frozen=True, kw_only=True)
class _Transfers:
    terms: Sequence[TimeTerm]
    sent: float
    hidden: float


def _transfers(work: Workload, devices: Devices, loss: float, backward: float) -> _Transfers:
    """Transfers that are not hidden behind compute: ring, gradients, weights and offloaded inputs."""
    ranks, terms, total, exposed = work.ranks, [], 0.0, 0.0
    slowest = devices.network if devices.nodes > 1 else devices.link
    sent = 0.0

    def add(name: str, seconds: float, behind: float, how: str) -> None:
        nonlocal total, exposed
        rest = max(0.0, seconds - behind)
        total, exposed = total + seconds, exposed + rest
        terms.append(TimeTerm(name=name, seconds=rest, how=f"{how}: {seconds:.3g} s, {seconds - rest:.3g} s hidden"))

    if ranks > 1:
        facts = work.loss
        block = facts.views * work.share * work.width * work.feature_itemsize
        # Keys of two sets travel with their gradients, which go one hop further; keys of one set travel alone.
        one_set, two_sets = (1, 0) if facts.views == 2 else (facts.same_type, 1)
        more = (facts.key_sets - 1) * (2 if "doc_to_doc" in facts.directions else 1)
        trips, home = one_set + two_sets + more, two_sets + more
        links = [("ring", 2 * (ranks - 1) * trips + home * ranks, ranks, slowest)]
        if over_nodes(work, devices):
            nodes = devices.nodes
            links = [
                ("ring", 2 * (ranks - nodes) * trips + home * ranks, ranks, devices.link),
                ("ring between nodes", 2 * (nodes - 1) * trips + home * nodes, nodes, devices.network),
            ]
        for name, blocks, hops, speed in links:
            bytes_ = blocks * block
            sent += bytes_
            behind = loss * (hops - 1) / hops  # the last hop has nothing to hide behind
            add(name, bytes_ / speed, behind, f"{bytes_ / 1e9:.2f} GB sent over {speed / 1e9:.0f} GB/s")
        weights = sum(x.trained_bytes for x in work.encoders)
        chunks = -(-work.share // work.chunk)
        if work.fsdp:
            moved = (ranks - 1) / ranks * (3 * chunks * sum(x.weight_bytes for x in work.encoders) + weights)
            add("weights gathered", moved / slowest, 0.9 * backward, "of every chunk")
        else:
            moved = 2 * (ranks - 1) / ranks * weights
            add("gradients summed", moved / slowest, backward / max(1, chunks), "once, in the last chunk")
    if work.offload != "none" and not (devices.on_cpu and work.offload == "host"):
        rate = DISK / devices.per_node if work.offload == "disk" else HOST_LINK
        moved = 2 * input_bytes(work, work.share)
        add(f"inputs to {work.offload}", moved / rate, 0.5 * backward, f"{moved / 1e9:.2f} GB, there and back")
    return _Transfers(terms=terms, sent=sent, hidden=1 - exposed / total if total else 1.0)

"""The devices of a run: how many, their memory, rates and links.

    parse_devices("4x8xH100")         # 4 nodes of 8
    parse_devices("8xA800-80G")
    parse_devices("cpu")              # this machine; its rates are measured, which takes a second or two

GPUs come from the table in `gpus.find`; figures passed by hand replace the table's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from contratile.errors import bad_value
from contratile.host_memory import available_bytes, returns_freed
from contratile.planner.cpu_rates import CpuRates, OperatorClock, cpu_rates, mapped_from
from contratile.planner.gpus import Gpu, find
from contratile.planner.tile_time import DEFAULT

GB = 10**9
RESERVE = 8 * GB // 10
"""Assumed: device memory of the CUDA context, of libraries and of communication buffers."""
UNREUSED_SHARE = 0.04
"""Assumed: share of the activations that a GPU's caching allocator loses to fragmentation."""
NETWORK = 25e9
"""Assumed: bytes per second of each device's link to other nodes, 200 Gbit/s."""
HOST_SHARE = 2.0
"""Assumed: host memory of a node over the device memory of its GPUs."""
GPU_OPERATOR = 6e-6
"""Assumed: fixed seconds of an operator."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run: equal devices in equal nodes."""

    name: str
    nodes: int = 1
    per_node: int = 1
    memory: float
    """Bytes of one device that a run may use, its reserve included."""

    reserve: float = 0.0
    """Bytes of one device that PyTorch and the driver take before anything is allocated."""

    host_memory: float
    """Bytes of a node's host memory; on a CPU they are the devices' memory."""

    flops: Mapping[str, float]
    """Flops per second of large matrix products, by precision: fp32, bf16, fp16."""

    bandwidth: float
    """Bytes per second of device memory in other operators."""

    operator_seconds: float = GPU_OPERATOR
    """Fixed seconds of each operator."""

    link: float
    """Bytes per second that a device sends to others of its node."""

    network: float = NETWORK
    """Bytes per second that a device sends to other nodes."""

    gpu: Gpu | None = None
    """The entry of the table, if there is one."""

    on_cpu: bool = False
    cpu: CpuRates | None = None
    """Rates of a CPU by kind and size of operators, for all its processes together."""

    keeps_freed: bool = False
    """On a CPU: malloc keeps freed memory, which is its default (`host_memory.returns_freed`)."""

    sources: tuple[str, ...] = ()
    """Where the figures come from."""

    @property
    def count(self) -> int:
        return self.nodes * self.per_node

    @property
    def usable(self) -> float:
        """Bytes of a device for the run."""
        return self.memory - self.reserve

    def clock(self, precision: str) -> OperatorClock | None:
        """Estimates the seconds of a CPU's operators; None on other devices."""
        if self.cpu is None:
            return None
        flops = self.flops[precision] * self.per_node
        return OperatorClock(self.cpu, flops, mapped_from=mapped_from(self.keeps_freed), sharing=self.per_node)


def parse_devices(
    text: str,
    *,
    memory: float | None = None,
    flops: float | None = None,
    link: float | None = None,
    network: float | None = None,
    host_memory: float | None = None,
) -> Devices:
    """Devices from what a user types.

    Args:
        text: "cpu", "2xcpu", "H100", "8xA800-80G", "4x8xH100" (nodes, devices of a node); or "8" and "4x8" for devices
            that are described by hand.
        memory: Bytes of a device.
        flops: Flops per second that its large products reach, in the precision of the run.
        link: Bytes per second between the devices of a node.
        network: Bytes per second of each device between nodes.
        host_memory: Bytes of a node's host memory.

    Raises:
        ValueError: The text is not of this form, the device is unknown, or one by hand lacks memory or flops.

    Example:
        >>> found = parse_devices("4x8xH100")
        >>> found.nodes, found.per_node, found.count
        (4, 8, 32)
    """
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([A-Za-z].*|\d+)", text.strip())
    if match is None:
        remedy = "Write 8xA800-80G, 4x8xH100 for 4 nodes of 8, or cpu."
        bad_value("devices", expected="[NODESx][DEVICESx]NAME", got=repr(text), remedy=remedy)
    first, second, name = match.groups()
    counts = [int(x) for x in (first, second) if x]
    if name.isdigit():
        counts, name = [*counts, int(name)], ""
    if len(counts) > 2 or 0 in counts:
        remedy = "Write 8xA800-80G, or 4x8xH100 for 4 nodes of 8."
        bad_value("devices", expected="at least one device, in nodes", got=repr(text), remedy=remedy)
    nodes, per_node = [1, 1, *counts][-2:]
    for option, value in (("memory", memory), ("flops", flops), ("link", link), ("network", network)):
        if value is not None and not value > 0:
            bad_value(f"device {option}", expected="a positive number", got=value, remedy="Leave it out.")
    by_hand = _ByHand(memory, flops, link, network, host_memory)
    if not name:
        return _described(nodes, per_node, by_hand)
    return _cpus(nodes, per_node, by_hand) if name.lower() == "cpu" else _gpus(nodes, per_node, find(name), by_hand)


@dataclass(frozen=True)
class _ByHand:
    memory: float | None
    flops: float | None
    link: float | None
    network: float | None
    host_memory: float | None

    def said(self, name: str) -> str:
        return "" if getattr(self, name) else " (assumed)"

    def rates(self, otherwise: Mapping[str, float]) -> Mapping[str, float]:
        return otherwise if self.flops is None else dict.fromkeys(("fp32", "bf16", "fp16"), self.flops)


def _gpus(nodes: int, per_node: int, gpu: Gpu, given: _ByHand) -> Devices:
    kinds = {"fp32": "ieee", "bf16": "16-bit", "fp16": "16-bit"}
    memory = given.memory or float(gpu.dram_bytes)
    link, network = given.link or gpu.link_bandwidth, given.network or NETWORK
    return Devices(
        name=_name(nodes, per_node, gpu.name),
        nodes=nodes,
        per_node=per_node,
        memory=memory,
        reserve=RESERVE,
        host_memory=given.host_memory or HOST_SHARE * memory * per_node,
        flops=given.rates({precision: gpu.peak(kind) * gpu.sustained for precision, kind in kinds.items()}),
        bandwidth=gpu.dram_bandwidth * DEFAULT.dram_share,
        link=link,
        network=network,
        gpu=gpu,
        sources=(
            f"{gpu.name}: {gpu.source}; large products reach {gpu.sustained:.0%} of the peak ({gpu.sustained_source})",
            f"link in a node {link / 1e9:.0f} GB/s" + ("" if given.link else f" ({gpu.link_source})"),
            *([f"link between nodes {network / 1e9:.0f} GB/s{given.said('network')}"] if nodes > 1 else []),
            f"{RESERVE / GB:.1f} GB of a device are taken by context, libraries and communication (assumed)",
            *([] if given.host_memory else [f"host memory: {HOST_SHARE:g} times the memory of its GPUs (assumed)"]),
        ),
    )


def _described(nodes: int, per_node: int, given: _ByHand) -> Devices:
    for option, value in (("--device-memory", given.memory), ("--device-flops", given.flops)):
        if value is None:
            remedy = f"Pass {option}, or name the device: 8xA800-80G."
            bad_value(
                "devices", expected="a name, or a device by hand", got=f"a number without {option}", remedy=remedy
            )
    assert given.memory is not None and given.flops is not None
    return Devices(
        name=_name(nodes, per_node, "device"),
        nodes=nodes,
        per_node=per_node,
        memory=given.memory,
        reserve=RESERVE,
        host_memory=given.host_memory or HOST_SHARE * given.memory * per_node,
        flops=given.rates({}),
        bandwidth=given.flops / BYTES_PER_FLOP,
        link=given.link or 32e9,
        network=given.network or NETWORK,
        sources=("device described by hand; memory bandwidth assumed from its flops, as on an A100",),
    )


BYTES_PER_FLOP = 150.0
"""Assumed for a device by hand: flops per byte of memory bandwidth (an A100 has 312e12 / 2.0e12 = 153)."""


def _cpus(nodes: int, per_node: int, given: _ByHand) -> Devices:
    rates = cpu_rates()
    total = given.memory * per_node if given.memory else float(available_bytes())
    share = {name: rate / per_node for name, rate in rates.flops.items()}
    return Devices(
        name=_name(nodes, per_node, "cpu"),
        nodes=nodes,
        per_node=per_node,
        memory=total / per_node,
        host_memory=total,
        flops=given.rates(share),
        bandwidth=rates.bandwidth / per_node,
        operator_seconds=rates.operator,
        cpu=rates,
        link=given.link or rates.bandwidth / 4 / per_node,
        network=given.network or NETWORK,
        on_cpu=True,
        keeps_freed=not returns_freed(),
        sources=(
            f"measured here: products {rates.flops['fp32'] / 1e9:.0f} GFLOP/s, copies {rates.bandwidth / 1e9:.0f} GB/s,"
            f" {torch.get_num_threads()} threads" + (f", shared by {per_node} processes" if per_node > 1 else ""),
            *([] if given.memory else ["memory: what is available now"]),
        ),
    )


def _name(nodes: int, per_node: int, kind: str) -> str:
    return f"{nodes}x{per_node}x{kind}" if nodes > 1 else f"{per_node}x{kind}"

"""Measures the rates of this machine's processor, and estimates the seconds of operators from them.

    rates = cpu_rates()                          # a second or two, once per process
    with fake_tensors(), LiveBytes(clock=OperatorClock(rates, rates.flops["fp32"], mapped_from=32 << 20)) as live:
        model(inputs)
    live.seconds

Only primitives are measured, never models: products of several sizes, additions in and out of cache, operators bound by
compute, pages that are touched for the first time, and an operator that does nothing.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

EDGES = (16, 32, 64, 256, 1024)
"""Square products are measured at these sizes; the small ones in batches."""
STREAMS = (1 << 16, 1 << 20, 1 << 24)
"""Elements of the additions."""
ROWS, COLUMNS = (1, 60), 256
"""Shapes of operators that are bound by compute: small enough for malloc to reuse memory with any of its settings."""
RUNS, LEAST = 5, 0.004
"""Runs of a primitive, and seconds of each. The median counts, because a training step is never all best moments."""

Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class CpuRates:
    """The rates of this machine with the threads of this process."""

    flops: Mapping[str, float]
    """Flops per second of large products, by precision."""

    bandwidth: float
    """Bytes per second of large copies, read and written."""

    products: Curve
    """(flops of one product, share of the rate of large ones), ascending."""

    streams: Curve
    """(bytes that an addition reads and writes, bytes per second), ascending."""

    elements: Mapping[str, float]
    """Seconds per element of operators that are bound by compute."""

    fault: float
    """Seconds per byte of memory that is touched for the first time."""

    operator: float
    """Fixed seconds of an operator, autograd included."""


class OperatorClock:
    """Seconds of operators by their shapes.

    Args:
        rates: Rates of the machine.
        flops: Rate of large products in the precision at hand.
        mapped_from: Bytes from which malloc maps new pages for every tensor (glibc: 32 MiB at most).
        sharing: Processes that share the machine's rates.
    """

    def __init__(self, rates: CpuRates, flops: float, *, mapped_from: int, sharing: int = 1) -> None:
        self.rates, self.flops, self.mapped_from, self.sharing = rates, flops, mapped_from, sharing

    def __call__(self, name: str, args: Any, touched: Sequence[Tensor], flops: float) -> float:
        """Seconds of an operator whose output is in memory that was used before.

        Args:
            name: The operator's name without its overload.
            args: What it was called with.
            touched: Tensors that it reads or writes.
            flops: Flops of a product, convolution or attention; 0 for others.
        """
        size = float(sum(x.numel() * x.element_size() for x in touched))
        if name.endswith("_"):  # in place: read and written
            size += sum(x.numel() * x.element_size() for x in tree_leaves(args[:1]) if isinstance(x, Tensor))
        elements = max(x.numel() for x in touched)
        computed, rates = 0.0, self.rates
        moved = size / interpolated(rates.streams, size)
        if flops:
            pieces = _pieces(name, args)
            computed = flops / (self.flops * interpolated(rates.products, flops / pieces / (2 if pieces > 1 else 1)))
            if "attention" in name:
                n, heads, rows, _ = _query(args).shape
                computed += n * heads * rows * rows * rates.elements["_softmax"]
            computed += size / rates.streams[-1][1]  # weights are out of the cache by the time they are used again
        elif (known := FAMILY.get(name, name)) in rates.elements:
            computed = elements * rates.elements[known]
        return self.sharing * (max(computed, moved) + rates.operator)

    def faults(self, size: float) -> float:
        """Seconds that it takes to touch this many new bytes."""
        return self.sharing * self.rates.fault * size


def mapped_from(keeps_freed: bool) -> int:
    """Bytes from which malloc maps new pages for every tensor."""
    return (32 << 20) if keeps_freed else (1 << 16)


def interpolated(curve: Curve, at: float) -> float:
    """Interpolate linearly between neighbours, over the logarithm of the position; constant beyond the ends."""
    for (low, first), (high, second) in pairwise(curve):
        if at < high:
            share = max(0.0, math.log(max(at, 1.0) / low) / math.log(high / low))
            return first + share * (second - first)
    return curve[-1][1]


def _query(args: Any) -> Tensor:
    """The query of attention; its backward operator takes a gradient of the same shape first."""
    found: Tensor = args[0]
    return found


def _pieces(name: str, args: Any) -> int:
    """Independent products of a batch."""
    if "attention" in name:
        return _query(args).shape[0] * _query(args).shape[1]
    if name in ("bmm", "baddbmm"):
        return int(args[-1 if name == "bmm" else 1].shape[0])
    return 1


# --- measured ---------------------------------------------------------------------------------------------------------

FAMILY = {
    "_log_softmax": "_softmax",
    "_log_softmax_backward_data": "_softmax_backward_data",
    "_safe_softmax": "_softmax",
    "silu": "sigmoid",
    "silu_backward": "sigmoid",
    "erf": "tanh",
    "native_dropout": "bernoulli_",
    "uniform_": "bernoulli_",
    "normal_": "bernoulli_",
    "native_group_norm": "native_layer_norm",
    "native_batch_norm": "native_layer_norm",
    "native_group_norm_backward": "native_layer_norm_backward",
    "native_batch_norm_backward": "native_layer_norm_backward",
}
"""Operators that are assumed to cost as much as a measured one."""


def _computed(rows: int) -> dict[str, Callable[[], object]]:
    aten: Any = torch.ops.aten
    x, width = torch.randn(rows, COLUMNS), [COLUMNS]
    grad, weight = torch.randn_like(x), torch.ones(COLUMNS)
    _, mean, inverse = aten.native_layer_norm(x, width, weight, weight, 1e-5)
    soft = torch.softmax(x, 1)
    norm = (grad, x, width, mean, inverse, weight, weight, [True, True, True])
    return {
        "gelu": lambda: aten.gelu(x),
        "gelu_backward": lambda: aten.gelu_backward(grad, x),
        "sigmoid": lambda: aten.sigmoid(x),
        "tanh": lambda: aten.tanh(x),
        "exp": lambda: aten.exp(x),
        "_softmax": lambda: aten._softmax(x, 1, False),
        "_softmax_backward_data": lambda: aten._softmax_backward_data(grad, soft, 1, torch.float32),
        "native_layer_norm": lambda: aten.native_layer_norm(x, width, weight, weight, 1e-5),
        "native_layer_norm_backward": lambda: aten.native_layer_norm_backward(*norm),
        "bernoulli_": lambda: soft.bernoulli_(0.9),
    }


@cache
def cpu_rates() -> CpuRates:
    """Measure this machine with the threads of this process, once per process."""
    clock = process_clock()
    with torch.no_grad():
        products = [(2.0 * edge**3, _product_rate(edge, clock)) for edge in EDGES]
        streams = [_stream(elements, clock) for elements in STREAMS]
        few, many = ({name: call_seconds(work, clock) for name, work in _computed(rows).items()} for rows in ROWS)
        count = (ROWS[1] - ROWS[0]) * COLUMNS
        elements = {name: max(0.0, many[name] - few[name]) / count for name in few}
        source, target = torch.zeros(STREAMS[-1]), torch.zeros(STREAMS[-1])
        copy = call_seconds(lambda: target.copy_(source), clock)
        fault = _fault(target, clock)
        half = torch.randn(512, 512).bfloat16()
        bf16 = 2.0 * 512**3 / call_seconds(lambda: half @ half, clock)
    fastest = products[-1][1]
    return CpuRates(
        flops={"fp32": fastest, "bf16": bf16, "fp16": bf16},
        bandwidth=2.0 * target.nbytes / copy,
        products=tuple((flops, rate / fastest) for flops, rate in products),
        streams=tuple(streams),
        elements=elements,
        fault=fault,
        operator=_operator(clock),
    )


def process_clock() -> Callable[[], float]:
    """With one thread the processor time of this process, which other processes do not inflate; otherwise wall time."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def call_seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of a call: the median of a few runs."""
    work()
    found = []
    for _ in range(RUNS):
        calls, start, spent = 0, clock(), 0.0
        while spent < LEAST:
            work()
            calls += 1
            spent = clock() - start
        found.append(spent / calls)
    return sorted(found)[RUNS // 2]


def _product_rate(edge: int, clock: Callable[[], float]) -> float:
    pieces = max(1, (1 << 18) // edge**2)
    a, b = (torch.randn(pieces, edge, edge) for _ in range(2))
    out = torch.empty_like(a)
    if pieces == 1:
        a, b, out = a[0], b[0], out[0]
    return pieces * 2.0 * edge**3 / call_seconds(lambda: torch.matmul(a, b, out=out), clock)


def _stream(elements: int, clock: Callable[[], float]) -> tuple[float, float]:
    a, b, out = (torch.zeros(elements) for _ in range(3))
    size = 3.0 * a.nbytes
    return size, size / call_seconds(lambda: torch.add(a, b, out=out), clock)


def _fault(blank: Tensor, clock: Callable[[], float]) -> float:
    """Pages are mapped by hand, because malloc may reuse memory that was touched before."""
    warm = call_seconds(lambda: blank.fill_(0.0), clock)

    def new() -> None:
        with mmap.mmap(-1, blank.nbytes) as pages:
            tensor = torch.frombuffer(pages, dtype=blank.dtype).fill_(0.0)
            del tensor

    return max(0.0, call_seconds(new, clock) - warm) / blank.nbytes


def _operator(clock: Callable[[], float]) -> float:
    """Forward and backward pass of products of a few numbers: three operators each."""
    x, count = torch.ones(8, requires_grad=True), 32

    def chain() -> None:
        with torch.enable_grad():
            y = x
            for _ in range(count):
                y = y * x
            torch.autograd.grad(y.sum(), x)

    return call_seconds(chain, clock) / (4 * count)  # a product forward, two backward, and the sum of gradients

"""Seconds of a CPU's operators by their shapes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from contratile.planner.cpu_rates import CpuRates, OperatorClock, cpu_rates, interpolated
from contratile.planner.devices import parse_devices
from contratile.planner.encoder_cost import encoder_cost, fake_tensors
from contratile.planner.live_bytes import LiveBytes
from contratile.planner.workload import by_name, count_optimizer

RATES = CpuRates(
    flops={"fp32": 1e9},
    bandwidth=1e9,
    products=((1e3, 0.25), (1e9, 1.0)),
    streams=((1e3, 4e9), (1e9, 4e9)),
    elements={"gelu": 1e-6, "_softmax": 1e-6},
    fault=1e-9,
    operator=0.0,
)
clock = partial(OperatorClock, RATES, 1e9, mapped_from=1 << 20)


def test_values_between_and_beyond_the_points_of_a_curve() -> None:
    curve = ((1e2, 1.0), (1e4, 3.0), (1e6, 4.0))
    found = [interpolated(curve, at) for at in (0.0, 1e2, 1e3, 1e4, 1e5, 1e9)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.5, 4.0])


def test_products_of_a_batch_are_as_slow_as_small_ones() -> None:
    """Two operators of the same flops: one large product, and many small ones at a quarter of the rate."""
    with fake_tensors():
        sides = torch.empty(125, 8, 8), torch.empty(125, 8, 8)
        with LiveBytes(clock=clock(mapped_from=1 << 40)) as small:
            torch.bmm(*sides)
    flops, moved = 125 * 2 * 8**3, 3 * 125 * 64 * 4
    share = interpolated(RATES.products, 2 * 8**3 / 2)
    assert small.flops == flops
    assert small.seconds == pytest.approx(flops / (share * 1e9) + moved / 4e9 + 1e-9 * 125 * 64 * 4)


def test_operators_that_compute_and_new_pages() -> None:
    """GELU takes its time per element; a large output is in new pages every time, a small one once."""
    with fake_tensors():
        small, large = torch.empty(1000), torch.empty(1 << 19)
        for x, first, second in ((small, 1e-3 + 4e-6, 1e-3), (large, 0.524288 + 2.097152e-3, 0.524288 + 2.097152e-3)):
            with LiveBytes(clock=clock()) as live:
                F.gelu(x)
                assert live.seconds == pytest.approx(first)
                F.gelu(x)
                assert live.seconds == pytest.approx(first + second)


def test_attention_counts_products_and_exponentials() -> None:
    with fake_tensors():
        q = torch.empty(2, 3, 16, 8)
        with LiveBytes(clock=clock(mapped_from=1 << 40)) as live:
            F.scaled_dot_product_attention(q, q, q)
    assert live.flops == 2 * 2 * 2 * 3 * 16 * 16 * 8
    assert live.seconds > 2 * 3 * 16 * 16 * 1e-6


def test_processes_share_what_is_measured() -> None:
    one, two = (parse_devices(name, memory=8e9).clock("fp32") for name in ("cpu", "2xcpu"))
    assert one is not None and two is not None and one.rates is two.rates
    x = torch.empty(256, 256)
    assert two("mm", (x, x), [x, x, x], 2.0 * 256**3) == pytest.approx(2 * one("mm", (x, x), [x, x, x], 2.0 * 256**3))


def test_passes_and_updates_have_seconds_with_a_clock_only() -> None:
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32))
    timed, plain = (encoder_cost(module, torch.empty(1, 64), rows=(8, 16), clock=x) for x in (clock(), None))
    one, other = timed.at(32), plain.at(32)
    assert 0 < one.encode_seconds < one.forward_seconds and one.backward_seconds > 0
    assert (other.encode_seconds, other.forward_seconds, other.backward_seconds) == (0, 0, 0)
    assert (one.peak, one.forward_flops) == (other.peak, other.forward_flops)
    with_clock, without = (count_optimizer([module], by_name("adamw"), "adamw", x) for x in (clock(), None))
    assert with_clock.seconds > 0 == without.seconds
    assert (with_clock.state_bytes, with_clock.moved) == (without.state_bytes, without.moved)


def test_this_machine_is_measured() -> None:
    rates = cpu_rates()
    assert rates is cpu_rates(), "once"
    assert rates.flops["fp32"] > 0 and rates.bandwidth > 0 and rates.operator > 0
    assert all(share > 0 for _, share in rates.products) and rates.products[-1][1] == 1.0
    assert min(rates.elements.values()) >= 0 and rates.fault >= 0

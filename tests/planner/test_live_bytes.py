"""Bytes, flops and traffic of operators on fake tensors."""

import torch
from torch import nn

from contratile.models.towers import TowerConfig, build_towers
from contratile.planner.encoder_cost import fake_module, fake_rows, fake_tensors
from contratile.planner.live_bytes import LiveBytes

KiB = 1 << 10


def test_storages_count_from_their_operator_until_they_are_freed() -> None:
    with fake_tensors(), LiveBytes() as live:
        x = torch.empty(256)  # 1 KiB
        y = x + 1
        assert live.now == live.peak == 2 * KiB
        del x
        assert live.now == KiB
        z = y.view(16, 16).t()  # no memory of its own
        del y
        assert live.now == KiB
        del z
        assert live.now == 0 and live.peak == 2 * KiB


def test_what_was_there_before_does_not_count() -> None:
    with fake_tensors():
        weight = torch.empty(16, 16)
        with LiveBytes() as live:
            weight.t()
            weight.add_(1)
            assert live.peak == 0


def test_saved_tensors_and_temporaries_of_the_backward_pass() -> None:
    """exp saves its result; the backward pass holds that, the gradient it gets and the one it makes."""
    with fake_tensors():
        x = torch.empty(256, requires_grad=True)
        x.grad = torch.empty(256)
        with LiveBytes() as live:
            y = x.exp()
            given = torch.empty_like(y)
            torch.autograd.backward(y, given)
        assert live.peak == 3 * KiB


def test_flops_and_traffic() -> None:
    with fake_tensors(), LiveBytes() as live:
        a, b = torch.empty(8, 16), torch.empty(16, 4)
        live.moved = live.operators = 0
        product = a @ b
        assert live.flops == 2 * 8 * 16 * 4
        assert live.product_bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4) and live.moved == 0
        product.add(1)
        assert live.moved == 2 * 4 * 8 * 4


def test_attention_of_a_cpu_has_flops() -> None:
    with fake_tensors(), LiveBytes() as live:
        q, k, v = (torch.empty(2, 3, 8, 16) for _ in range(3))
        nn.functional.scaled_dot_product_attention(q, k, v)
    assert live.flops == 2 * 2 * 3 * 8 * 8 * (16 + 16)


def test_code_that_reads_a_value_gets_one() -> None:
    with fake_tensors(), LiveBytes():
        assert torch.empty(()).item() == 0.5
        assert bool(torch.empty((), dtype=torch.bool)) is True
        assert torch.empty((), dtype=torch.long).item() == 1


def test_fake_tensors_need_as_much_as_real_ones() -> None:
    """The same operators with the same lifetimes: the peak is equal to the last byte."""
    towers = build_towers(TowerConfig(width=32, depth=2), texts=["a red circle", "a blue square"]).train()
    tower, inputs = towers.left, torch.zeros(4, 3, 32, 32)

    def peak(module: nn.Module, x: torch.Tensor) -> int:
        for p in module.parameters():
            p.grad = torch.empty_like(p)
        with LiveBytes() as live:
            features = module(x)
            torch.autograd.backward(features, torch.empty_like(features))
            del features
        return int(live.peak)

    real = peak(tower, inputs)
    with fake_tensors():
        assert peak(fake_module(tower), fake_rows(inputs, 4)) == real > 100 * KiB


def test_holes_are_what_a_recorded_forward_pass_frees() -> None:
    with fake_tensors():
        x = torch.empty(256, requires_grad=True)
        with LiveBytes(hole_share=0.5) as live:
            y = (x + 1).exp()  # x + 1 is freed: exp saves its result only
            assert live.holes == KiB and live.peak_with_holes == 2 * KiB
            with torch.no_grad():
                del y  # in a backward pass nothing is recorded
            assert live.holes == live.now == 0

"""What chunks cost in an encoder."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from contratile.models.towers import TowerConfig
from contratile.planner.encoder_cost import EncoderCost, encoder_cost
from contratile.planner.tower_inputs import encoder_sides, tower_definitions


@cache
def tiny(
    rows: tuple[int, int] = (8, 16), *, precision: str = "fp32", on_cpu: bool = True, **options: object
) -> EncoderCost:
    towers = tower_definitions(TowerConfig(width=64, depth=4, **options))  # type: ignore[arg-type]
    side = encoder_sides(towers)[0]
    return encoder_cost(side.module, side.inputs, rows=rows, precision=precision, on_cpu=on_cpu)  # type: ignore[arg-type]


def test_figures_are_linear_in_the_rows() -> None:
    """Extrapolated from 8 and 16 rows to 64, as counted at 64."""
    far, counted = tiny().at(64), tiny((64, 64)).large
    for name in (
        "encode_peak",
        "peak",
        "forward_flops",
        "backward_flops",
        "forward_moved",
        "input_bytes",
        "feature_bytes",
    ):
        assert getattr(far, name) == pytest.approx(getattr(counted, name), rel=0.02), name


def test_backward_has_twice_the_products_of_forward() -> None:
    cost = tiny().large
    assert cost.backward_flops == pytest.approx(2 * cost.forward_flops, rel=0.1)
    assert 0 < cost.encode_peak < cost.peak


def test_checkpointing_trades_memory_for_products() -> None:
    plain, again = tiny().large, tiny(checkpointing=True).large
    assert again.peak < 0.5 * plain.peak
    assert again.forward_flops == plain.forward_flops
    assert again.backward_flops == pytest.approx(plain.backward_flops + plain.forward_flops, rel=0.15)


def test_sixteen_bits_halve_activations() -> None:
    full, half = tiny(on_cpu=False).large, tiny(on_cpu=False, precision="bf16").large
    assert 0.4 * full.peak < half.peak < 0.85 * full.peak
    assert half.feature_bytes == full.feature_bytes  # normalised in fp32


def test_a_locked_backbone_saves_nothing() -> None:
    trained, locked = tiny(head="linear"), tiny(head="linear", lock="image")
    assert locked.trained_bytes == 4 * 64 * 64 < trained.trained_bytes
    assert locked.large.peak < 0.5 * trained.large.peak


def test_dropout_of_attention_takes_a_matrix_on_a_cpu_only() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q = self.project(x).unsqueeze(1)
            return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).squeeze(1).mean(1)

    inputs = torch.empty(1, 128, 64, device="meta")
    cpu, gpu = (encoder_cost(Attention(), inputs, rows=(4, 8), on_cpu=here).large.peak for here in (True, False))
    assert cpu - gpu > 8 * 128 * 128 * 4


def test_real_weights_are_neither_copied_nor_changed() -> None:
    module = nn.Linear(8, 4)
    before = module.weight.clone()
    encoder_cost(module, torch.zeros(3, 8), rows=(2, 4))
    assert module.weight.grad is None and torch.equal(module.weight, before)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Conv1d(8, 4, 3), "model: expected one that runs on fake tensors, got RuntimeError"),
        (nn.Flatten(0), r"model: expected features \[rows, D\], got \[16\]"),
    ],
)
def test_a_module_that_returns_no_features_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder_cost(module, torch.zeros(3, 8), rows=(2, 4))

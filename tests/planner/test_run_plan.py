"""`contratile.plan`."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import contratile as ct
from contratile.models.towers import TowerConfig
from contratile.planner.devices import parse_devices
from contratile.planner.memory import device_memory
from contratile.planner.run_plan import Plan, plan
from contratile.planner.workload import LossFacts, by_name, count_optimizer

TINY = TowerConfig(width=32, depth=1)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def of_module(**options: object) -> Plan:
    given = {"sample_inputs": [torch.zeros(1, 64)], "batch": 4096, "devices": "8xA800-80G"} | options
    return ct.plan(encoder(), **given)  # type: ignore[arg-type]


def test_a_module() -> None:
    found = of_module()
    assert found.fits and found.work.ranks == 8 and found.work.share == 512
    assert found.work.chunk == found.chunk_best
    assert found.model == "Sequential"


def test_towers_by_name_and_by_configuration() -> None:
    by_config = plan(TINY, batch=256, devices="H100", chunk=64)
    assert by_config.work.width == 32 and by_config.work.chunk == 64
    weights = next(term.bytes for term in by_config.memory.terms if term.name == "weights")
    assert weights > 4 * 32 * 4096  # the whole vocabulary, although there were no texts
    assert plan("tiny", batch=16, devices="H100", chunk=4).model == "tiny"


def test_tokens_are_an_option() -> None:
    long, short = (plan(TINY, batch=64, devices="H100", chunk=16, tokens=tokens).work.sides[1] for tokens in (0, 4))
    assert long.large.input_bytes == 16 * 2 * 16 * 8 and short.large.input_bytes == 16 * 2 * 4 * 8
    assert short.large.peak < long.large.peak


def test_one_encoder_for_both_sides_counts_once() -> None:
    shared = of_module()
    two = ct.plan((encoder(), encoder()), sample_inputs=[torch.zeros(1, 64)] * 2, batch=4096, devices="8xA800-80G")
    other = of_module(sample_inputs=[torch.zeros(1, 64), torch.zeros(1, 64, dtype=torch.float64).float()])
    weights = [next(t.bytes for t in x.memory.terms if t.name == "weights") for x in (shared, two, other)]
    assert weights[1] == 2 * weights[0] and weights[2] == weights[0]


def test_plain_data() -> None:
    found = json.loads(json.dumps(of_module(samples_per_epoch=100_000, epochs=3).to_dict()))
    assert found["memory"]["peak"] == pytest.approx(
        sum(term["bytes"] for term in found["memory"]["terms"] if found["memory"]["phase"] in term["phases"])
    )
    assert found["steps_per_epoch"] == 24 and found["time"]["seconds"] > 0
    assert {one["method"] for one in found["largest"]} >= {"dense CLIP", "Inf-CL", "Contratile"}


def test_few_steps_are_warned_of() -> None:
    few, many = (of_module(samples_per_epoch=100_000, epochs=epochs) for epochs in (3, 100))
    assert few.steps == 74 and "74 steps in the whole run are few" in few.warnings[0]
    assert many.steps == 2442 and not many.warnings


def test_a_run_that_does_not_fit_says_what_would() -> None:
    found = of_module(batch=1 << 22, chunk=64, devices=parse_devices("8xA800-80G", memory=1e9))
    assert not found.fits and found.change is not None
    assert "does not fit" in str(found) and found.change.options in str(found)


def test_text_has_all_terms() -> None:
    found = of_module(offload="host")
    text = str(found)
    for name in (
        *(t.name for t in found.memory.terms),
        *(t.name for t in found.time.terms),
        "best chunk",
        "assumptions",
    ):
        assert name in text
    assert "prediction" in text and "inputs of 4,096 pairs, pinned" in text


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from contratile.planner.plan_picture import draw

    draw(of_module(), tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["bars.png"]


@pytest.mark.parametrize("name", ["adamw", "sgd", "Adafactor", "adagrad", "rmsprop", "nadam"])
def test_state_of_optimisers_is_that_of_real_ones(name: str) -> None:
    module = encoder()
    counted = count_optimizer([module], by_name(name), name).state_bytes
    optimizer = by_name(name)(module)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    assert counted == pytest.approx(sum(x.nbytes for x in tensors), abs=64)


def test_views_compare_everything() -> None:
    one, two = (of_module(loss=LossFacts(views=views)) for views in (1, 2))
    times = [next(t.seconds for t in x.time.terms if t.name == "loss") for x in (one, two)]
    assert times[1] > times[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch: expected at least 1, got 0"),
        ({"chunk": 0}, "chunk: expected at least 1, got 0"),
        ({"precision": "fp8"}, "precision: expected one of 'fp32', 'bf16', 'fp16', got 'fp8'"),
        ({"offload": "tape"}, "offload: expected one of"),
        ({"optimizer": "sdg"}, "optimizer: expected a class of torch.optim, got 'sdg'"),
        ({"sample_inputs": None}, "sample_inputs: expected an example input of each encoder"),
        ({"calibrate": True}, "calibrate: expected this machine as the device, got 8xA800-80GB"),
    ],
)
def test_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_module(**options)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_calibration_corrects_activations() -> None:
    """What two chunks take here lies near what was counted, and the plan uses it."""
    towers = TowerConfig(width=64, depth=2)
    found = plan(towers, batch=64, devices="cpu", chunk=32, calibrate=True)
    assert found.calibration is not None and found.calibration.seconds > 0
    line = found.calibration.memory
    assert 0.5 < line.slope < 3.0
    plain = replace(found.work, measured=None)
    before = {term.name: term.bytes for term in device_memory(plain, found.devices).terms}
    after = {term.name: term.bytes for term in found.memory.terms}
    counted = before["activations of a chunk"] + before["freed, not reused"]
    assert after["activations of a chunk"] == pytest.approx(line(counted)) and "freed, not reused" not in after
    assert "calibrated on this machine" in str(found)


def test_a_calibration_leaves_a_module_as_it_was() -> None:
    module = encoder()
    before = [p.clone() for p in module.parameters()]
    plan(module, sample_inputs=[torch.zeros(1, 64)], batch=64, devices="cpu", chunk=32, calibrate=True)
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))

"""Two processes learn what one process learns, also if they share the weights out (FSDP); checkpoints fit both."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contratile.train import checkpoint
from contratile.train.config import TrainConfig
from contratile.train.loop import Trainer
from contratile.train.setup import check_sharding
from contratile.train.sharding import FROM_ACCELERATE, layers
from tests.ranks import pool
from tests.train.runs import losses, shapes, small, weights


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


def shards_of(trainer: Trainer) -> tuple[int, int]:
    """Numbers of the towers that this process holds, and of the towers."""
    parameters = [p for tower in (trainer.towers.left, trainer.towers.right) for p in tower.parameters()]
    held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in parameters)
    return held, sum(p.numel() for p in parameters)


def trained(config: TrainConfig, variables: dict[str, str]) -> dict[str, Any]:
    """A run on a rank of a pool."""
    os.environ.update({"LOCAL_RANK": os.environ["RANK"], **variables})
    try:
        trainer = Trainer(config)
        held, of = shards_of(trainer)
        outcome = trainer.run()
    finally:
        for name in variables:
            del os.environ[name]
    kinds = {type(module).__name__ for module in trainer.cache.feed.encoders[:2]}
    return {"held": held, "of": of, "metrics": outcome.metrics, "found": outcome.held_out is not None, "kinds": kinds}


def test_two_ranks_do_what_one_process_does(table: Path, tmp_path: Path) -> None:
    Trainer(small(table, tmp_path / "one")).run()
    pool(2).run(trained, small(table, tmp_path / "two"), {})
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == len(two) == 6
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-4, atol=1e-4)
    _, facts = checkpoint.load(tmp_path / "two" / "best")
    assert len(facts["loader"]) == 2, "each process told its position"
    found = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    assert any("text_to_image_R@10" in entry for entry in found)


def test_shards_learn_what_one_process_learns(table: Path, tmp_path: Path) -> None:
    """Within rounding, 1e-4: from the start, and from a checkpoint of either kind resumed by the other."""

    def config(name: str, **changes: Any) -> TrainConfig:
        return small(table, tmp_path / name, save_every=3, eval_every=6, keep=9, **changes)

    alone = Trainer(config("alone")).run()
    found = pool(2).run(trained, config("shared", fsdp=True), {})
    total = found[0]["of"]
    assert all(rank["held"] < 0.55 * total for rank in found) and sum(rank["held"] for rank in found) >= total
    assert [rank["found"] for rank in found] == [True, False]
    assert found[0]["metrics"] == found[1]["metrics"] == pytest.approx(alone.metrics, abs=0.06)

    def middle(name: str) -> str:
        return str(tmp_path / name / "checkpoints" / "step-00000003")

    Trainer(config("shared then alone", resume=middle("shared"))).run()
    asked = {FROM_ACCELERATE: "true"}
    for rank in pool(2).run(trained, config("alone then shared", resume=middle("alone")), asked):
        assert rank["held"] < 0.55 * total
    want = torch.tensor(losses(tmp_path / "alone"))
    assert len(want) == 6
    for name, first in (("shared", 0), ("shared then alone", 3), ("alone then shared", 3)):
        got = torch.tensor(losses(tmp_path / name))
        torch.testing.assert_close(got, want[first:], rtol=1e-4, atol=1e-4)
        for weight, expected in zip(
            weights(tmp_path / name).values(), weights(tmp_path / "alone").values(), strict=True
        ):
            assert type(weight) is torch.Tensor
            torch.testing.assert_close(weight, expected, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_processes_share_partly_locked_towers_and_layer_decay(table: Path, tmp_path: Path, fsdp: bool) -> None:
    options: dict[str, Any] = {"lock": "image", "unlock": 1, "depth": 2, "layer_decay": 0.5, "steps": 3}
    Trainer(small(table, tmp_path / "alone", **options)).run()
    pool(2).run(trained, small(table, tmp_path / "shared", fsdp=fsdp, **options), {})
    got, want = (torch.tensor(losses(tmp_path / name)) for name in ("shared", "alone"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    mine, theirs = weights(tmp_path / "shared"), weights(tmp_path / "alone")
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=0.02, atol=2e-3)


def stopped(config: TrainConfig) -> str:
    trainer = Trainer(config)
    with torch.no_grad():
        for parameter in trainer.towers.left.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(FloatingPointError) as caught:
        trainer.run()
    return str(caught.value)


def test_a_loss_that_is_not_finite_names_the_sharded_weights(table: Path, tmp_path: Path) -> None:
    for text in pool(2).run(stopped, small(table, tmp_path, fsdp=True)):
        assert "weights that are not finite: left." in text


def test_layers_are_found_inner_ones_first() -> None:
    inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    outer = nn.Sequential(nn.Sequential(inner), nn.Sequential(nn.Linear(2, 2)))
    other = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    found = layers(nn.ModuleDict({"outer": outer, "other": other}))
    assert found.index(inner[0]) < found.index(outer[0])
    assert not set(found) & set(other)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch": 31}, r"batch: expected a multiple of the 2 processes with --fsdp, got 31"),
        ({"precision": "fp16"}, r"precision: expected fp32 or bf16 with --fsdp, got fp16"),
        ({"optimizer": "Adafactor"}, r"optimizer: expected one that can update shards with --fsdp, got Adafactor"),
        ({"optimizer": "timm:adafactorbv"}, r"optimizer: expected one that can update shards .*got timm:adafactorbv"),
    ],
)
def test_what_shards_cannot_do_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_sharding(small(Path("pairs.csv"), Path("run"), **changes), 2)

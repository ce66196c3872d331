"""Options of a run: each does what it says, in runs of a few steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contratile.report.tracking import history
from contratile.train import preparation
from contratile.train.config_file import CONFIG, load_config
from contratile.train.effects import check_effects
from contratile.train.loop import Trainer
from contratile.train.planning import plan_run
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import clip_folder, losses, sentence_folder, shapes, small, texts, weights

LOSSES = ["clip", "infonce", "siglip", "ntxent", "supcon"]
SHORT: dict[str, Any] = {"steps": 3, "eval_every": 3, "save_every": 3}
# The compiler's own imports use what it has deprecated.
own_deprecations = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def usual(table: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run without any option."""
    out = tmp_path_factory.mktemp("usual")
    Trainer(small(table, out, **SHORT)).run()
    return losses(out)


# --- precision ----------------------------------------------------------------------------------------------------


def test_bf16_is_near_fp32(table: Path, tmp_path: Path, usual: list[float]) -> None:
    Trainer(small(table, tmp_path, precision="bf16", **SHORT)).run()
    found = losses(tmp_path)
    assert found != usual
    assert found == pytest.approx(usual, abs=0.05)
    assert {x.dtype for x in weights(tmp_path).values() if x.is_floating_point()} == {torch.float32}


def test_fp16_wants_an_accelerator(table: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"precision: expected fp32 or bf16 on a CPU, got fp16. fp16 needs an acc"):
        Trainer(small(table, tmp_path, precision="fp16"))
    assert not list(tmp_path.iterdir())


# --- options that would do nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"loss": "infonce", "partition_mode": "per_direction"}, "partition_mode: expected --directions beyond"),
        ({"loss": "infonce", "hardness_mode": "all_negatives"}, "hardness_mode: expected --hardness-strength above 0"),
        (
            {"loss": "infonce", "hardness_mode": "hard_negatives", "hardness_strength": 3.0},
            "hardness_mode: expected data with hard negatives, got .*pairs.csv",
        ),
        ({"ids": "left", "same_id": "negative"}, "ids: expected --same-id exclude or positive"),
        ({"cache_mib": 8, "backend": "dense"}, "cache_mib: expected --backend auto, torch or triton"),
        ({"max_scale": 50.0, "learn_scale": False}, "max_scale: expected a scale that is learned"),
        ({"keep_outputs": False}, "keep_outputs: expected --lock image, text or both"),
        ({"init_bias": -5.0}, "init_bias: expected --loss siglip"),
        ({"queries": ("red", " ")}, "queries: expected texts to search for, got an empty one"),
        ({"backend": "triton"}, "backend='triton': expected a device and a Triton that kernels run on"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], told: str, table: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        Trainer(small(table, tmp_path / "run", **options))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"matryoshka_dims": (8, 64)}, "matryoshka_dims: expected at most the 32 features of the model"),
        ({"matryoshka_dims": (8, 64), "head": "linear", "dim": 48}, "expected at most the 48 features"),
        ({"loss": "infonce", "hardness_mode": "all_negatives"}, "hardness_mode: expected --hardness-strength above 0"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(options: dict[str, Any], told: str, table: Path, tmp_path: Path) -> None:
    config = small(table, tmp_path / "run", **options)
    for refused in (Trainer, plan_run):
        with pytest.raises(ValueError, match=told):
            refused(config)
    assert not (tmp_path / "run").exists()


def test_a_run_of_an_earlier_version_is_resumed_whatever_its_options(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = {**SHORT, "init_bias": -5.0}
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "check_effects", lambda config: None)
        Trainer(small(table, tmp_path / "run", **idle)).run()
    assert Trainer(small(table, tmp_path / "run", **idle)).resumed is not None


def test_a_strategy_of_no_margin_is_refused(table: Path, tmp_path: Path) -> None:
    Trainer(small(table, tmp_path / "first", steps=1)).run()
    second = {"guide": str(tmp_path / "first"), "guide_margin_strategy": "relative"}
    with pytest.raises(ValueError, match="guide_margin_strategy: expected --guide-margin other than 0"):
        Trainer(small(table, tmp_path / "run", **second))


def test_the_configuration_that_a_run_writes_is_one_that_starts(table: Path, tmp_path: Path) -> None:
    """What a run fills in has an effect too."""
    for number, options in enumerate(({"same_id": "negative"}, {"loss": "siglip"}, {"lock": "text"})):
        done = Trainer(small(table, tmp_path / f"run-{number}", **SHORT, **options)).config
        assert load_config(done.run.out / CONFIG) == done
        check_effects(done)


# --- memory and speed: the same results ---------------------------------------------------------------------------


def calls_of_layers(trainer: Trainer) -> list[int]:
    """A list that grows by one whenever a linear layer of the left tower computes."""
    calls: list[int] = []
    linear = next(module for module in trainer.towers.left.modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda *args: calls.append(1))
    return calls


def test_checkpointing_computes_again_and_changes_nothing(table: Path, tmp_path: Path, usual: list[float]) -> None:
    counts = []
    for name, on in (("off", False), ("on", True)):
        trainer = Trainer(small(table, tmp_path / name, checkpointing=on, **SHORT))
        calls = calls_of_layers(trainer)
        trainer.run()
        counts.append(len(calls))
    assert losses(tmp_path / "on") == usual
    assert counts[1] > counts[0]


@pytest.mark.slow
@own_deprecations
def test_compiled_towers_learn_the_same(table: Path, tmp_path: Path) -> None:
    torch._dynamo.reset()
    for name, on in (("plain", False), ("compiled", True)):
        trainer = Trainer(small(table, tmp_path / name, compile=on, chunk=32, **{**SHORT, "steps": 2}))
        kinds = {type(encoder).__name__ for encoder in trainer.cache.feed.encoders[:2]}
        assert kinds == ({"OptimizedModule"} if on else {"Tower"})
        trainer.run()
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


def test_workers_change_nothing(table: Path, tmp_path: Path, usual: list[float]) -> None:
    """The towers' preparation travels to other processes."""
    Trainer(small(table, tmp_path, workers=1, **SHORT)).run()
    assert losses(tmp_path) == usual


# --- optimisers and schedules -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # packages that timm imports
@pytest.mark.parametrize("optimizer", ["SGD", "adagrad", "adafactor", "timm:lion", "timm:adafactorbv"])
def test_other_optimizers_train_and_go_on_exactly(
    table: Path, tmp_path: Path, optimizer: str, usual: list[float]
) -> None:
    repair_torchvision()
    options: dict[str, Any] = {"optimizer": optimizer, "steps": 3, "eval_every": 3, "save_every": 1, "keep": 9}
    options |= {"momentum": 0.9} if optimizer == "SGD" else {}
    Trainer(small(table, tmp_path / "whole", **options)).run()
    found = losses(tmp_path / "whole")
    assert found[0] == usual[0] and found[2] != usual[2]
    middle = tmp_path / "whole" / "checkpoints" / "step-00000002"
    Trainer(small(table, tmp_path / "again", resume=str(middle), **options)).run()
    assert losses(tmp_path / "again") == found[2:]
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "again")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_constant_schedule(table: Path, tmp_path: Path) -> None:
    Trainer(small(table, tmp_path, schedule="constant", warmup=2, lr=1e-3, **{**SHORT, "steps": 4})).run()
    rates = [entry["lr"] for entry in history(tmp_path) if "lr" in entry]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])


# --- locked and dropped parts of the towers -----------------------------------------------------------------------


def test_unlocked_blocks_learn_and_nothing_is_kept(table: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lock": "image", "head": "linear", "depth": 2, **SHORT}
    assert list(Trainer(small(table, tmp_path / "locked", **options)).kept) == ["left"]
    trainer = Trainer(small(table, tmp_path / "partly", unlock=1, **options))
    assert not trainer.kept
    before = {name: x.clone() for name, x in trainer.towers.state_dict().items()}
    trainer.run()
    changed = {name for name, x in weights(tmp_path / "partly").items() if not torch.equal(x, before[name])}
    left = {name for name in changed if name.startswith("left.backbone")}
    words = ("layers.1.", "post_layernorm", "visual_projection")
    # The bias of keys has no gradient: softmax ignores it.
    expected = {name for name in before if name.startswith("left.backbone") and any(word in name for word in words)}
    assert left <= expected and {name for name in expected if "k_proj.bias" not in name} <= left
    assert not list((tmp_path / "partly").glob("kept-*"))
    with pytest.raises(ValueError, match=r"unlock: expected 1, as in the checkpoint, got 2. Pass --unlock 1"):
        Trainer(small(table, tmp_path / "partly", unlock=2, **options))


def test_runs_with_patch_dropout_go_on_exactly(table: Path, tmp_path: Path, usual: list[float]) -> None:
    options: dict[str, Any] = {"patch_dropout": 0.5, "steps": 3, "save_every": 1, "keep": 9}
    Trainer(small(table, tmp_path / "whole", **options)).run()
    found = losses(tmp_path / "whole")
    assert found != usual
    middle = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    Trainer(small(table, tmp_path / "again", resume=middle, **options)).run()
    assert losses(tmp_path / "again") == found[2:]
    Trainer(small(table, tmp_path / "without", resume=middle, **{**options, "patch_dropout": 0.0})).run()
    assert losses(tmp_path / "without") != found[2:], "the last steps may go without"


# --- every loss with every kind of towers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {"hf": f"hf:{clip_folder(folder / 'clip')}", "st": f"st:{sentence_folder(folder / 'sentences')}"}


@pytest.mark.filterwarnings("ignore")  # of sentence-transformers, about a model without its own pooling
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["hf", "st"])
def test_every_loss_with_every_kind_of_towers(
    table: Path, tmp_path: Path, models: dict[str, str], kind: str, loss: str
) -> None:
    data = table if kind == "hf" else texts(tmp_path)
    config = small(data, tmp_path / "run", towers=models[kind], loss=loss, pixels=0, **SHORT)
    trainer = Trainer(config)
    before = {name: x.clone() for name, x in trainer.towers.state_dict().items()}
    outcome = trainer.run()
    assert outcome.finished and len(losses(tmp_path / "run")) == 3
    changed = {name.split(".")[0] for name, x in weights(tmp_path / "run").items() if not torch.equal(x, before[name])}
    assert changed == {"left", "right", "log_scale"} | ({"bias"} if loss == "siglip" else set())


@pytest.mark.slow
@pytest.mark.peers
def test_open_clip_towers_train(table: Path, tmp_path: Path) -> None:
    repair_torchvision()
    config = small(table, tmp_path, towers="open_clip:ViT-S-32-alt", pixels=32, batch=8, chunk=4, **SHORT)
    assert Trainer(config).run().finished
    first, *_, last = losses(tmp_path)
    assert first != last

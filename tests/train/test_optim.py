"""The optimiser: its groups, its names, its rate."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contratile.models.towers import TowerConfig, build_towers
from contratile.train.config_file import load_config
from contratile.train.loop import Trainer
from contratile.train.optim import (
    PRETRAINED,
    SCRATCH,
    OptimConfig,
    clamp_scale,
    decays,
    make_optimizer,
    parameter_groups,
    resolved,
)
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import clip_folder, sentence_folder, shapes, small, weights


class Model(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3)
        self.conv = nn.Conv2d(2, 3, 2)
        self.ln_post = nn.LayerNorm(3)
        self.bn = nn.BatchNorm2d(3)
        self.position = nn.Parameter(torch.ones(5, 4))
        self.relative_bias_table = nn.Parameter(torch.ones(5, 4))
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


# --- groups -------------------------------------------------------------------------------------------------------


def test_groups() -> None:
    model = Model()
    without, with_decay = parameter_groups(model.named_parameters(), 0.3)
    assert names_of(model, with_decay) == {"proj.weight", "conv.weight", "position"}
    gains = {"ln_post.weight", "ln_post.bias", "bn.weight", "bn.bias", "proj.bias", "conv.bias"}
    assert names_of(model, without) == gains | {"relative_bias_table", "log_scale"}
    assert (without["weight_decay"], with_decay["weight_decay"]) == (0.0, 0.3)


@pytest.mark.peers
def test_groups_follow_open_clips_rule() -> None:
    """The rule stands inside open_clip's main function, so it is read from its source."""
    spec = importlib.util.find_spec("open_clip_train")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "main.py").read_text()
    (rule,) = re.findall(r"exclude = (lambda n, p: .*)", source)
    exclude = eval(rule)
    shapes = [(), (3,), (3, 3), (2, 3, 4, 5)]
    words = ["weight", "bias", "logit_scale", "logit_bias", "bn1.weight", "ln_final.weight", "token.weight", "q_bias.w"]
    for name in words:
        for shape in shapes:
            parameter = nn.Parameter(torch.ones(shape))
            assert decays(f"left.{name}", parameter) is not exclude(f"left.{name}", parameter)


def test_shared_parameters_are_counted_once() -> None:
    model = nn.ModuleDict({"left": nn.Linear(3, 3)})
    model["right"] = model["left"]
    groups = parameter_groups(model.named_parameters(), 0.1)
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_decay_shrinks_matrices_only() -> None:
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name in ("proj.weight", "conv.weight", "position") else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer: expected parameters to train, got none. Unlock a tower"):
        make_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimConfig())


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("adamw", torch.optim.AdamW),
        ("AdamW", torch.optim.AdamW),
        ("SGD", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
        ("radam", torch.optim.RAdam),
        ("Adafactor", torch.optim.Adafactor),
    ],
)
def test_optimizers_of_torch(name: str, cls: type[torch.optim.Optimizer]) -> None:
    assert_learns(name, cls)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # packages that timm imports
@pytest.mark.parametrize(("name", "cls"), [("timm:lion", "Lion"), ("timm:LAMB", "Lamb"), ("timm:adamw", "AdamW")])
def test_optimizers_of_timm(name: str, cls: str) -> None:
    keeps_alive = repair_torchvision()
    assert_learns(name, None, cls)
    with pytest.raises(ValueError, match=r"optimizer timm:loin: name: expected one of .*lion.*Did you mean lion"):
        make_optimizer(nn.Linear(2, 2), OptimConfig(optimizer="timm:loin"))
    del keeps_alive


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # packages that timm imports
def test_betas_of_adafactor_in_big_vision() -> None:
    """It calls them momentum and cap, as the paper's LiT scripts use them."""
    repair_torchvision()
    config = OptimConfig(optimizer="timm:adafactorbv", betas=(0.8, 0.95))
    for group in make_optimizer(nn.Linear(2, 2), config).param_groups:
        assert (group["momentum"], group["beta2_cap"]) == (0.8, 0.95)
    with pytest.raises(ValueError, match=r"momentum: expected none, as Lion has no momentum, got 0.9. Leave it out"):
        make_optimizer(nn.Linear(2, 2), OptimConfig(optimizer="timm:lion", momentum=0.9))


def assert_learns(name: str, cls: type[torch.optim.Optimizer] | None, class_name: str = "") -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = make_optimizer(model, OptimConfig(optimizer=name, lr=0.01))
    assert type(optimizer) is cls if cls else type(optimizer).__name__ == class_name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    x = torch.randn(16, 4)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_options_reach_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    config = OptimConfig(lr=0.5, betas=(0.8, 0.95), eps=1e-5)
    for group in make_optimizer(model, config).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.95), 1e-5)
    default = torch.optim.AdamW(model.parameters()).defaults
    for group in make_optimizer(model, OptimConfig()).param_groups:
        assert (group["betas"], group["eps"]) == (default["betas"], default["eps"])
    (*_, group) = make_optimizer(model, OptimConfig(optimizer="sgd", momentum=0.7)).param_groups
    assert group["momentum"] == 0.7


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": "adamm"}, r"optimizer adamm: name: expected one of .*adamw.*, got 'adamm'. Did you mean adam"),
        ({"optimizer": "lbfgs"}, r"optimizer lbfgs: name: expected one of"),
        ({"optimizer": "apex:lamb"}, r"package of the optimizer: expected one of '', 'timm', got 'apex'"),
        ({"optimizer": "sgd", "betas": (0.9, 0.9)}, r"betas: expected none, as SGD has no betas, got \(0.9, 0.9\)"),
        ({"optimizer": "rprop"}, r"weight_decay: expected none, as Rprop has no weight_decay, got 0.1. Set"),
        ({"optimizer": "muon"}, r"optimizer muon: .*2D"),
        ({"betas": (1.5, 0.9)}, r"optimizer adamw: Invalid beta"),
    ],
)
def test_bad_optimizers_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_optimizer(nn.Linear(2, 2), OptimConfig(**config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr": -1.0}, "lr: expected a finite number, 0 or more, got -1.0"),
        ({"clip_grad": math.nan}, "clip_grad: expected a finite number"),
        ({"warmup": -5}, "warmup: expected at least 0, got -5"),
        ({"schedule": "linear"}, "schedule: expected one of 'cosine', 'constant', 'constant-cooldown', got 'linear'"),
        ({"layer_decay": 0.0}, "layer_decay: expected more than 0, at most 1, got 0.0"),
        ({"layer_decay": 1.5}, "layer_decay: expected more than 0, at most 1, got 1.5"),
        ({"lr": 0.1, "min_lr": 0.2}, "min_lr: expected at most lr = 0.1, got 0.2"),
    ],
)
def test_bad_options_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimConfig(**config)


def test_the_scale_is_clamped() -> None:
    for before, after in ((9.0, math.log(100)), (2.0, 2.0), (-1.0, 0.0)):
        log_scale = nn.Parameter(torch.tensor(before, dtype=torch.float64))
        clamp_scale(log_scale)
        assert log_scale.item() == pytest.approx(after) and log_scale.requires_grad
    clamp_scale(log_scale.data.fill_(9.0), most=50.0)
    assert log_scale.item() == pytest.approx(math.log(50))


# --- rates that follow the towers ---------------------------------------------------------------------------------


def rates(towers: nn.Module, config: OptimConfig) -> dict[str, float]:
    """The factor on the learning rate of each trainable parameter."""
    of = {id(p): name for name, p in towers.named_parameters()}
    groups = make_optimizer(towers, config).param_groups
    return {of[id(p)]: group.get("lr_scale", 1.0) * config.rate for group in groups for p in group["params"]}


def test_what_starts_from_scratch_learns_fast() -> None:
    towers = build_towers(TowerConfig(width=32, depth=1), texts=["a", "b"])
    config = resolved(OptimConfig(), towers)
    assert (config.lr, config.backbone_lr) == (SCRATCH, None)
    assert len(make_optimizer(towers, config).param_groups) == 2, "as in checkpoints of older versions"


def test_a_pretrained_backbone_learns_slowly_and_its_head_fast(tmp_path: Path) -> None:
    name = f"hf:{clip_folder(tmp_path)}"
    for options, rest in (({}, ["log_scale"]), ({"head": "linear"}, ["head", "log_scale"])):
        towers = build_towers(TowerConfig(towers=name, **options))  # type: ignore[arg-type]
        config = resolved(OptimConfig(), towers)
        assert (config.lr, config.backbone_lr) == (SCRATCH, PRETRAINED)
        for parameter, rate in rates(towers, config).items():
            fast = any(word in parameter for word in rest)
            assert rate == pytest.approx(SCRATCH if fast else PRETRAINED), parameter
    locked = build_towers(TowerConfig(towers=name, lock="both", head="linear"))
    assert resolved(OptimConfig(), locked).backbone_lr is None
    mixed = build_towers(TowerConfig(towers=name, lock="image", head="linear"))
    found = rates(mixed, resolved(OptimConfig(), mixed))
    assert {name.split(".")[0] for name, rate in found.items() if rate == pytest.approx(PRETRAINED)} == {"right"}


def test_a_rate_that_is_given_is_that_of_everything(tmp_path: Path) -> None:
    towers = build_towers(TowerConfig(towers=f"hf:{clip_folder(tmp_path)}"))
    config = resolved(OptimConfig(lr=3e-4), towers)
    assert (config.lr, config.backbone_lr) == (3e-4, None)
    assert set(rates(towers, config).values()) == {3e-4}
    both = resolved(OptimConfig(lr=3e-4, backbone_lr=1e-6), towers)
    assert sorted(set(rates(towers, both).values())) == pytest.approx([1e-6, 3e-4])


@pytest.mark.filterwarnings("ignore")  # of sentence-transformers, about a model without its own pooling
def test_groups_have_a_place_for_unused_poolers(tmp_path: Path) -> None:
    """Runs of 0.1 had them in the optimiser, where they never had a gradient."""
    towers = build_towers(TowerConfig(towers=f"st:{sentence_folder(tmp_path)}"))
    named = dict(towers.named_parameters())
    assert [name for name, p in named.items() if not p.requires_grad] == [
        "left.backbone.model.0.model.pooler.dense.weight",
        "left.backbone.model.0.model.pooler.dense.bias",
    ]
    assert set(rates(towers, OptimConfig())) == set(named)
    slow = {name for name, rate in rates(towers, resolved(OptimConfig(), towers)).items() if rate < SCRATCH}
    assert slow == set(named) - {"log_scale"}
    locked = build_towers(TowerConfig(towers=f"st:{tmp_path}", lock="both", head="linear"))
    assert set(rates(locked, OptimConfig())) == {"left.head.weight", "log_scale"}
    partly = build_towers(TowerConfig(towers=f"st:{tmp_path}", lock="both", unlock=1))
    assert not any("pooler" in name for name in rates(partly, OptimConfig()))


def test_rates_of_backbones_that_are_not_there() -> None:
    towers = build_towers(TowerConfig(width=32, depth=1), texts=["a"])
    with pytest.raises(ValueError, match="backbone_lr: expected a pretrained backbone that is not locked, got 1e-05"):
        resolved(OptimConfig(backbone_lr=1e-5), towers)
    with pytest.raises(ValueError, match="lr: expected more than 0 with a backbone_lr"):
        OptimConfig(lr=0.0, backbone_lr=1e-5)
    with pytest.raises(ValueError, match=r"min_lr: expected at most lr = 0\.001"):
        OptimConfig(min_lr=1.0)


def test_rates_are_saved_and_a_run_goes_on_with_them(tmp_path: Path) -> None:
    """The same command goes on with the same rates, and other ones may be given."""
    table, folder = shapes(tmp_path / "shapes", sizes=1), clip_folder(tmp_path / "clip")
    whole, half = (
        small(table, tmp_path / name, towers=f"hf:{folder}", lr=None, batch=16, pixels=0, steps=4, save_every=2)
        for name in ("whole", "half")
    )
    Trainer(whole).run()
    saved = load_config(tmp_path / "whole" / "config.toml").optim
    assert (saved.lr, saved.backbone_lr) == (SCRATCH, PRETRAINED)
    stopped = Trainer(half)
    for batch in stopped.loader:
        if stopped.step == 2:
            break
        stopped.train_step(batch)
        stopped.step += 1
    stopped.save()
    again = Trainer(half)
    assert again.step == 2 and again.rates == stopped.rates
    again.run()
    groups = again.optimizer.param_groups
    assert [group["lr"] / groups[0]["lr"] for group in groups] == pytest.approx(again.rates)
    assert sorted(set(again.rates)) == pytest.approx([PRETRAINED / SCRATCH, 1.0])
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "half")
    assert all(torch.equal(a[name], b[name]) for name in a)
    other = Trainer(small(table, tmp_path / "half", towers=f"hf:{folder}", lr=5e-4, batch=16, pixels=0, steps=4))
    assert (other.config.optim.lr, other.config.optim.backbone_lr, set(other.rates)) == (5e-4, 5e-4, {1.0})


# --- rates that fall from block to block --------------------------------------------------------------------------


def test_layer_decay_of_tiny() -> None:
    towers = build_towers(TowerConfig(width=32, depth=2, head="linear"), texts=["a", "b"])
    found = rates(towers, OptimConfig(lr=1.0, layer_decay=0.5))
    expected = {"embeddings": 0.125, "pre_layrnorm": 0.125, "layers.0": 0.25, "layers.1": 0.5}
    expected |= {"post_layernorm": 1.0, "final_layer_norm": 1.0, "projection": 1.0, "head": 1.0, "log_scale": 1.0}
    for word, rate in expected.items():
        assert {x for name, x in found.items() if word in name} == {rate}, word
    assert all(any(word in name for word in expected) for name in found)
    names = {id(p): name for name, p in towers.named_parameters()}
    for group in make_optimizer(towers, OptimConfig(weight_decay=0.3, layer_decay=0.5)).param_groups:
        assert {decays(names[id(p)], p) for p in group["params"]} == {group["weight_decay"] == 0.3}


def test_layer_decay_multiplies_the_rate_of_backbones(tmp_path: Path) -> None:
    towers = build_towers(TowerConfig(towers=f"hf:{clip_folder(tmp_path)}", head="linear"))
    found = rates(towers, OptimConfig(lr=1e-2, backbone_lr=1e-3, layer_decay=0.5))
    for word, rate in {"embeddings": 2.5e-4, "layers.0": 5e-4, "projection": 1e-3, "head": 1e-2}.items():
        assert {round(x, 9) for name, x in found.items() if word in name} == {rate}, word


def test_layer_decay_needs_a_backbone_to_train() -> None:
    towers = build_towers(TowerConfig(width=32, depth=1, lock="both", head="linear"), texts=["a"])
    with pytest.raises(ValueError, match=r"layer_decay: expected a backbone to train, got 0.5. Drop it"):
        make_optimizer(towers, OptimConfig(layer_decay=0.5))
    one = build_towers(TowerConfig(width=32, depth=1, lock="image", head="linear"), texts=["a"])
    assert all("left.backbone" not in name for name in rates(one, OptimConfig(layer_decay=0.5)))


def test_a_run_with_layer_decay_goes_on_exactly_and_only_with_it(tmp_path: Path) -> None:
    table = shapes(tmp_path / "shapes", sizes=1)
    options: dict[str, Any] = {"batch": 16, "steps": 4, "save_every": 2, "keep": 9, "layer_decay": 0.5}
    Trainer(small(table, tmp_path / "whole", **options)).run()
    middle = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    again = Trainer(small(table, tmp_path / "again", resume=middle, **options))
    assert sorted(set(again.rates)) == [0.25, 0.5, 1.0]
    again.run()
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "again")
    assert all(torch.equal(a[name], b[name]) for name in a)
    with pytest.raises(ValueError, match="layer_decay: expected a factor below 1, as in the run that is resumed"):
        Trainer(small(table, tmp_path / "other", resume=middle, **{**options, "layer_decay": 1.0}))

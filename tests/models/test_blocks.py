"""Blocks of backbones: what is before and after them, in the models of every package."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contratile.models.blocks import find_blocks, need_blocks
from contratile.models.towers import TowerConfig, build_towers
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import SHAPE, clip_folder, sentence_folder, siglip_folder

repair_torchvision()
FIRST = ("embed", "conv1", "ln_pre", "pre_layrnorm", "cls_token", "position")
"""Words in the names of parameters before the blocks."""


def vit_folder(folder: Path) -> Path:
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(image_size=16, patch_size=8, **{**SHAPE, "num_hidden_layers": 3})).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "tiny": "tiny",
        "clip": f"hf:{clip_folder(folder / 'clip')}",
        "siglip": f"hf:{siglip_folder(folder / 'siglip')}",
        "pair": f"hf:{vit_folder(folder / 'vision')}+{sentence_folder(folder / 'text')}",
        "st": "st:minilm",
        "open_clip": "open_clip:ViT-S-32-alt",
    }


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [("tiny", 2, 2), ("clip", 1, 1), ("siglip", 1, 1), ("pair", 3, 1), ("st", 6, 6), ("open_clip", 12, 10)],
)
def test_blocks_of_every_kind_of_towers(models: dict[str, str], kind: str, left: int, right: int) -> None:
    towers = build_towers(TowerConfig(towers=models[kind], depth=2), texts=["a", "b"])
    for tower, blocks in ((towers.left, left), (towers.right, right)):
        found = find_blocks(tower.backbone)
        assert found is not None and len(found.modules) == blocks
        assert set(found.depth) == {name for name, _ in tower.backbone.named_parameters()}
        inside = {id(p): i for i, block in enumerate(found.modules, start=1) for p in block.parameters()}
        inputs = {id(p) for module in found.inputs for p in module.parameters()}
        for name, p in tower.backbone.named_parameters():
            first = any(word in name for word in FIRST)
            assert found.depth[name] == inside.get(id(p), 0 if first else blocks + 1), name
            assert (id(p) in inputs) <= (found.depth[name] == 0), name
        assert inputs and set(found.depth.values()) == {*range(blocks + 2)}


def test_blocks_that_are_stages_and_inputs_that_are_registered_last() -> None:
    from transformers import ConvNextConfig, ConvNextModel, MPNetConfig, MPNetModel

    stages = find_blocks(ConvNextModel(ConvNextConfig(hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 2, 1])))
    assert stages is not None and len(stages.modules) == 4 and stages.depth["layernorm.weight"] == 5
    options: dict[str, Any] = {"vocab_size": 50, **SHAPE}
    found = find_blocks(MPNetModel(MPNetConfig(**options)))
    assert found is not None and found.depth["encoder.relative_attention_bias.weight"] == 0


def test_networks_without_one_stack_of_blocks() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))

    stages = nn.ModuleDict({"stem": nn.Linear(4, 4), "layer1": stage(), "layer2": stage()})
    for model in (stages, nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.ModuleList()):
        assert find_blocks(model) is None
    with pytest.raises(ValueError, match=r"layer_decay: expected one stack of blocks, got no such stack in the text"):
        need_blocks(stages, "layer_decay", kind="text")


@pytest.mark.peers
def test_a_resnet_has_no_blocks() -> None:
    with pytest.raises(ValueError, match=r"unlock: expected one stack of blocks, got no such stack in the image"):
        build_towers(TowerConfig(towers="open_clip:RN50", pixels=32, lock="image", unlock=1))


# --- unlocking --------------------------------------------------------------------------------------------------


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.peers
@pytest.mark.parametrize("unlock", [1, 3, 10])
def test_unlocked_parts_are_open_clips(unlock: int) -> None:
    """It counts the projection as a group of its own."""
    import open_clip

    theirs: Any = open_clip.create_model("ViT-S-32-alt", force_image_size=32, force_custom_text=True)
    theirs.lock_image_tower(unlocked_groups=unlock + 1)
    theirs.lock_text_tower(unlocked_layers=unlock + 1)
    towers: Any = build_towers(TowerConfig(towers="open_clip:ViT-S-32-alt", pixels=32, lock="both", unlock=unlock))
    assert trained(towers.left.backbone[1]) == trained(theirs.visual)
    assert trained(towers.right.backbone) == trained(theirs.text)


def test_the_last_blocks_are_trained_and_the_rest_is_in_evaluation_mode() -> None:
    towers = build_towers(TowerConfig(width=32, depth=3, lock="image", unlock=1), texts=["a", "b"])
    left = towers.left
    assert not left.locked, "its outputs change"
    words = ("layers.2.", "post_layernorm", "visual_projection")
    names = {name for name, _ in left.named_parameters()}
    assert trained(left) == {name for name in names if any(word in name for word in words)}
    assert trained(towers.right) == {name for name, _ in towers.right.named_parameters()}
    blocks = find_blocks(left.backbone)
    assert blocks is not None
    for mode in (True, False, True):
        towers.train(mode)
        assert [block.training for block in blocks.modules] == [False, False, mode]
        assert not any(module.training for module in blocks.inputs)
        assert left.backbone.training is left.head.training is mode


def test_batch_norm_of_locked_parts_keeps_its_statistics() -> None:
    """Statistics of a trained block go on."""
    from contratile.models.base import Backbone
    from contratile.models.towers import Tower

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.BatchNorm1d(4), nn.ModuleList([block(), block()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for part in self.blocks:
                x = part(x)
            return x

    tower = Tower(Backbone(Net(), 4, "image", list)).train()
    tower.lock(1)
    before = {name: x.clone() for name, x in tower.named_buffers()}
    tower(torch.randn(8, 4))
    changed = {name for name, x in tower.named_buffers() if not torch.equal(x, before[name])}
    assert changed == {f"backbone.blocks.1.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"unlock": 1}, "unlock: expected a locked backbone, got 1. Pass --lock image"),
        ({"unlock": -1}, "unlock: expected at least 0, got -1"),
        ({"unlock": 3, "lock": "text"}, "unlock: expected at most the 2 blocks of the text encoder, got 3"),
    ],
)
def test_what_cannot_be_unlocked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build_towers(TowerConfig(width=32, depth=2, **options), texts=["a"])

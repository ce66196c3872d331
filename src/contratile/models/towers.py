"""The two encoders of a training run, by name.

    towers = build_towers(TowerConfig(towers="tiny"), texts=captions)
    towers.left(towers.left.prepare(images))                         # unit features [n, D]

Names of towers:

    tiny                                          a small CLIP trained from scratch, with its own tokenizer
    hf:openai/clip-vit-base-patch32               CLIP or SigLIP of transformers; or hf:<vision model>+<text model>
    open_clip:ViT-B-32:laion2b_s34b_b79k          a model of open_clip, with pretrained weights or without
    st:sentence-transformers/all-MiniLM-L6-v2     pairs of texts: one encoder for both sides

A tower is a backbone, an optional head, and `prepare`, which turns raw samples into the backbone's inputs. Beside the
weights, a run's folder holds what is needed to build the towers again: JSON and tokenizer files, no pickles.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.data.sample import Kind
from contratile.errors import bad_value, check_choice, check_count
from contratile.models.backbones import MAKERS
from contratile.models.base import Backbone
from contratile.models.blocks import need_blocks
from contratile.models.pooling import TextPooling
from contratile.models.tiny import WordTokenizer

Lock = Literal["none", "image", "text", "left", "right", "both"]
Head = Literal["none", "linear", "mlp", "residual"]


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Which encoders to train, and how they start."""

    towers: str = "tiny"
    """tiny | hf:<model or folder> | hf:<vision>+<text> | open_clip:<model>[:pretrained] | st:<model or folder>"""

    lock: Lock = "none"
    """Side whose backbone is frozen (LiT: image, the left side). Its outputs are computed once and cached."""

    unlock: int = 0
    """Train this many last blocks of a locked backbone, and what follows them (final norm, projection)."""

    head: Head = "none"
    """Trainable layers on top of each backbone; residual adds to the backbone's features, initially zero."""

    dim: int = 0
    """Output features of the head; 0: as many as the backbone has."""

    width: int = 128
    """tiny: size of the hidden states."""

    depth: int = 3
    """tiny: layers of each encoder."""

    patch: int = 8
    """tiny: edge of an image patch in pixels."""

    pixels: int = 0
    """Edge of the input images in pixels; 0: what the model was trained with (tiny: 32)."""

    patch_dropout: float = 0.0
    """Share of the image patches that are dropped at random in training (FLIP). tiny, and open_clip's ViTs."""

    text_pooling: TextPooling = "auto"
    """How tokens become features: the first token (cls), the model's pooler, mean, or the last token.
    For hf:<vision>+<text> (auto: mean) and st: (auto: as the model was trained)."""

    words: int = 16
    """tiny: maximum number of tokens per text."""

    vocabulary: int = 4096
    """tiny: maximum size of the tokenizer's vocabulary."""

    init_scale: float = 1 / 0.07
    """Initial scale of the cosines, the inverse temperature."""

    learn_scale: bool = True
    """Learn the scale; --no-learn-scale keeps it at its initial value, as SimCLR does."""

    init_bias: float = -10.0
    """Initial bias of the scores, for a loss that has one (siglip)."""

    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory per chunk, one more forward pass."""

    compile: bool = False
    """Run the encoders through torch.compile."""

    keep_outputs: bool = True
    """Compute the outputs of locked backbones once and keep them. --no-keep-outputs encodes in every epoch, as
    augmentation needs it."""

    def __post_init__(self) -> None:
        maker, _, name = self.towers.partition(":")
        if maker not in MAKERS or (maker == "tiny") == bool(name):
            expected = "tiny, hf:<model>, open_clip:<model> or st:<model>"
            bad_value("towers", expected=expected, got=repr(self.towers), remedy="See `contratile train --help`.")
        for field, least in {
            "width": 1,
            "depth": 1,
            "patch": 1,
            "words": 3,
            "vocabulary": 1,
            "pixels": 0,
            "dim": 0,
            "unlock": 0,
        }.items():
            check_count(field, getattr(self, field), least=least)
        # Options without effect are errors, not ignored.
        if self.dim and self.head == "none":
            bad_value("dim", expected="a head with that many features", got="--head none", remedy="Pass --head linear.")
        if maker == "tiny" and (self.pixels or 32) % self.patch:
            remedy = "Patches must cover the image exactly."
            bad_value("patch", expected=f"a divisor of {self.pixels or 32} pixels", got=self.patch, remedy=remedy)
        for field, choices in {"lock": Lock, "head": Head, "text_pooling": TextPooling}.items():
            check_choice(field, getattr(self, field), get_args(choices))
        self._check_parts(maker, name)
        if not self.init_scale >= 1:
            remedy = "It is the inverse temperature: 14.3 for a temperature of 0.07."
            bad_value("init_scale", expected="at least 1", got=self.init_scale, remedy=remedy)

    def _check_parts(self, maker: str, name: str) -> None:
        """Check the options that only some towers have."""
        if self.unlock and self.lock == "none":
            remedy = "Pass --lock image, text or both."
            bad_value("unlock", expected="a locked backbone", got=self.unlock, remedy=remedy)
        if not 0 <= self.patch_dropout < 1:
            bad_value("patch_dropout", expected="a share from 0 to below 1", got=self.patch_dropout, remedy="Try 0.5.")
        if self.patch_dropout and maker not in ("tiny", "open_clip"):
            remedy = "Drop it: models of transformers have no patch dropout."
            bad_value("patch_dropout", expected=f"none with {maker}: towers", got=self.patch_dropout, remedy=remedy)
        if self.patch_dropout and self.lock in ("image", "left", "both"):
            remedy = "Drop it: a locked encoder runs in evaluation mode, without dropout."
            bad_value("patch_dropout", expected="none with a locked image side", got=self.patch_dropout, remedy=remedy)
        choice = maker == "st" or (maker == "hf" and "+" in name)
        if self.text_pooling != "auto" and not choice:
            remedy = "Drop it: the pooling of this model is fixed."
            expected = "auto, except for hf:<vision>+<text> and st:"
            bad_value("text_pooling", expected=expected, got=self.text_pooling, remedy=remedy)


class Tower(nn.Module):
    """An encoder with features of unit length: backbone, head, normalisation.

    Attributes:
        prepare: Turns raw images or texts into the backbone's inputs.
        width: Number of features.
        kind: "image" or "text".
        locked: Whether the whole backbone is frozen, so that its outputs never change.
        frozen: Frozen modules of a backbone that is locked in part.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone, self.width, self.kind, self.prepare = backbone
        self.head: nn.Module = nn.Identity()
        self.locked = False
        self.frozen: list[nn.Module] = []
        self.pretrained = False
        """Whether the backbone's weights are pretrained."""

    def forward(self, inputs: Any = None, /, **tokens: Tensor) -> Tensor:
        """Features of prepared inputs. Tensors by name may be keywords, which `GradCache` can cut by length."""
        return F.normalize(self.head(self.backbone(tokens if inputs is None else inputs)), dim=-1)

    def lock(self, unlock: int = 0) -> None:
        """Freeze the backbone: no gradients, and evaluation mode whatever the mode of the rest.

        Args:
            unlock: Last blocks that stay trainable, with all that follows them.

        Raises:
            ValueError: The backbone has fewer blocks, or its blocks cannot be identified.
        """
        self.locked = not unlock
        trained = {name for name, parameter in self.backbone.named_parameters() if parameter.requires_grad}
        self.backbone.requires_grad_(False)
        if unlock:
            blocks = need_blocks(self.backbone, "unlock", kind=self.kind)
            there = len(blocks.modules)
            if unlock > there:
                remedy = "Lower it, or do not lock this side."
                expected = f"at most the {there} blocks of the {self.kind} encoder"
                bad_value("unlock", expected=expected, got=unlock, remedy=remedy)
            for name, parameter in self.backbone.named_parameters():
                parameter.requires_grad_(name in trained and blocks.depth[name] > there - unlock)
            self.frozen = [*blocks.inputs, *blocks.modules[: there - unlock]]
        self.train(self.training)

    def train(self, mode: bool = True) -> Tower:
        super().train(mode)
        for module in [self.backbone] if self.locked else self.frozen:
            module.eval()  # no dropout, and batch norm keeps its statistics
        return self

    def add_head(self, kind: Head, width: int) -> None:
        """Put a head with `width` features on the backbone."""
        if kind == "linear":
            self.head = nn.Linear(self.width, width, bias=False)
        elif kind == "mlp":
            self.head = nn.Sequential(nn.Linear(self.width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        elif kind == "residual":
            if width != self.width:
                remedy = "Drop --dim, or use --head mlp."
                bad_value("dim", expected=f"the backbone's {self.width} with --head residual", got=width, remedy=remedy)
            self.head = ResidualHead(width)
        self.width = width


class ResidualHead(nn.Module):
    """x + mlp(x). The last layer is zero-initialised, so training starts from the backbone's own features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]  # torch leaves modules' calls unannotated


class LockedTowerHead(nn.Module):
    """The trainable part of a locked tower: maps cached outputs of its backbone to features of unit length."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.head = tower.head

    def forward(self, hidden: Tensor) -> Tensor:
        return F.normalize(self.head(hidden), dim=-1)


class Towers(nn.Module):
    """Two towers, a learned scale and optionally a learned bias.

    Attributes:
        left: Tower of the images or first texts.
        right: Tower of the captions or second texts; the same object as `left` if they share an encoder.
        log_scale: Logarithm of the scale of the cosines.
        bias: Added to the scores, or None.
    """

    def __init__(self, left: Tower, right: Tower, config: TowerConfig, *, bias: bool) -> None:
        super().__init__()
        self.left, self.right, self.config = left, right, config
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)), requires_grad=config.learn_scale)
        self.bias = nn.Parameter(torch.tensor(config.init_bias)) if bias else None

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        return self.left.kind, self.right.kind


def build_towers(
    config: TowerConfig,
    *,
    texts: Iterable[str] = (),
    folder: Path | None = None,
    bias: bool = False,
    views: bool = False,
) -> Towers:
    """Build the towers that a configuration names.

    Args:
        config: Which towers, and their options.
        texts: Captions on which `tiny` trains its tokenizer.
        folder: A run's folder: a tokenizer saved there by `save_recipe` is used instead of training one.
        bias: Add a learned bias, for SigLIP's loss.
        views: Both sides are views of an image: one image encoder for both.

    Returns:
        Towers on the CPU, in training mode.

    Raises:
        ValueError: The model cannot be loaded, or the options leave nothing to train.
        ImportError: The package that the towers come from is missing or broken.

    Examples:
        >>> towers = build_towers(TowerConfig(width=32, depth=1), texts=["a red circle", "a blue square"])
        >>> towers.right(towers.right.prepare(["a blue circle"])).shape
        torch.Size([1, 32])
    """
    maker, _, name = config.towers.partition(":")
    parts = MAKERS[maker](name, config, texts, folder)
    left = Tower(parts[0])
    if views and left.kind != "image":
        remedy = "Use tiny, hf: or open_clip: towers."
        bad_value("towers", expected="an image encoder for --views 2", got=config.towers, remedy=remedy)
    right = left if views or parts[1] is parts[0] else Tower(parts[1])
    left.pretrained = right.pretrained = maker in ("hf", "st") or (maker == "open_clip" and ":" in name)
    if config.head == "none":
        if left.width != right.width:
            sizes = f"{left.width} and {right.width}"
            bad_value("towers", expected="one size of features", got=sizes, remedy="Pass --head linear.")
    else:
        for tower in dict.fromkeys((left, right)):
            tower.add_head(config.head, config.dim or left.width)
    sides = {"image": (left,), "left": (left,), "text": (right,), "right": (right,), "both": (left, right), "none": ()}
    for tower in sides[config.lock]:
        tower.lock(config.unlock)
    towers = Towers(left, right, config, bias=bias)
    if not any(p.requires_grad for p in [*left.parameters(), *right.parameters()]):
        remedy = "Pass --head linear or mlp, or lock one side only."
        bad_value("lock", expected="something left to train", got=repr(config.lock), remedy=remedy)
    return towers


RECIPE_FILES = (WordTokenizer.FILE,)
"""What `save_recipe` may write."""


def save_recipe(towers: Towers, folder: Path) -> None:
    """Write what `build_towers` needs besides weights: the trained tokenizer, if there is one."""
    for tower in (towers.left, towers.right):
        save = getattr(tower.prepare, "save", None)
        if save is not None:
            save(folder)


def recipe_checksums(folder: Path) -> dict[str, str]:
    """Checksums of the files that `save_recipe` wrote; checkpoints store them, as weights belong to one tokenizer."""
    path = folder / WordTokenizer.FILE
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else {}


def check_recipe(facts: Any, folder: Path) -> None:
    """Raise a ValueError if the tokenizer is not the one that the checkpoint was written with.

    Checkpoints of early versions hold no checksums and pass.
    """
    if not isinstance(facts, dict) or not isinstance(facts.get("step"), int):
        remedy = "Take another checkpoint (--weights), or another copy of the run."
        bad_value(f"checkpoint of {folder}", expected="facts with a step", got=repr(facts)[:60], remedy=remedy)
    known, now = facts.get("recipe", {}), recipe_checksums(folder)
    for name, checksum in known.items() if isinstance(known, dict) else ():
        if now.get(str(name)) != checksum:
            got = "another one" if str(name) in now else "none"
            remedy = "Restore it from a copy of the run: the weights are useless with another one."
            bad_value(f"{folder / str(name)}", expected="the file that the run wrote", got=got, remedy=remedy)


def load_weights(towers: Towers, state: Mapping[str, Any], folder: Path) -> None:
    """Load a checkpoint's weights into towers that were built from its configuration."""
    try:
        towers.load_state_dict(state["model"])
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # missing parts or other shapes
        got = " ".join(str(error).split())[:200]
        remedy = "The run's config.toml and its checkpoints do not belong together; restore both from one copy."
        bad_value(f"checkpoint {folder}", expected="weights of the run's towers", got=got, remedy=remedy)

"""The two encoders of a training run, by name.

    towers = build_towers("tiny", texts=captions)                    # a small CLIP, from scratch
    towers = build_towers("hf:openai/clip-vit-base-patch32")         # CLIP, SigLIP; or hf:<vision model>+<text model>
    towers = build_towers("open_clip:ViT-B-32:laion2b_s34b_b79k")
    towers = build_towers("st:sentence-transformers/all-MiniLM-L6-v2")   # text and text, one encoder for both
    towers.left(towers.left.prepare(images))                         # unit features [n, D]

A tower is a backbone from transformers, open_clip or sentence-transformers, a head that is nothing unless asked for,
and `prepare`, which turns raw samples into the backbone's inputs. What is needed to build it again without its weights
goes into a folder: JSON and tokenizer files, no pickles.
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
from contratile.models.backbones import MAKERS, Part, Words

Lock = Literal["none", "image", "text", "left", "right", "both"]
Head = Literal["none", "linear", "mlp", "residual"]


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The encoders."""

    towers: str = "tiny"
    """tiny | hf:<model or folder> | hf:<vision>+<text> | open_clip:<model>[:pretrained] | st:<model or folder>"""

    lock: Lock = "none"
    """The side whose backbone stays as it is (LiT: image, which is left). Its outputs are computed once and kept."""

    head: Head = "none"
    """Trainable layers on top of each backbone; residual: added to its features, at the start nothing is."""

    dim: int = 0
    """Features that a head gives; 0: as many as the backbone."""

    width: int = 128
    """Of tiny: size of its hidden states."""

    depth: int = 3
    """Of tiny: layers of each encoder."""

    patch: int = 8
    """Of tiny: edge of an image patch."""

    pixels: int = 0
    """Edge of the images that go in; 0: what the model was made for (tiny: 32)."""

    words: int = 16
    """Of tiny: tokens of a text at most."""

    vocabulary: int = 4096
    """Of tiny: tokens that its tokenizer learns at most."""

    init_scale: float = 1 / 0.07
    """Factor on the cosines at the start."""

    init_bias: float = -10.0
    """Added to the scores at the start, where the loss has a bias (siglip)."""

    checkpointing: bool = False
    """Recompute activations inside the encoders: less memory for large chunks, one more forward pass."""

    compile: bool = False
    """Run the encoders through torch.compile."""

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
        }.items():
            check_count(field, getattr(self, field), least=least)
        # What has no effect is refused, not ignored.
        if self.dim and self.head == "none":
            bad_value(
                "dim", expected="a head that gives so many features", got="--head none", remedy="Pass --head linear."
            )
        if maker == "tiny" and (self.pixels or 32) % self.patch:
            remedy = "Patches cover an image without a rest."
            bad_value("patch", expected=f"a divisor of {self.pixels or 32} pixels", got=self.patch, remedy=remedy)
        for field in ("lock", "head"):
            check_choice(field, getattr(self, field), get_args({"lock": Lock, "head": Head}[field]))
        if not self.init_scale >= 1:
            remedy = "It is the inverse of the temperature: 14.3 for 0.07."
            bad_value("init_scale", expected="at least 1", got=self.init_scale, remedy=remedy)


class Tower(nn.Module):
    """backbone, head, unit length."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.backbone, self.width, self.kind, self.prepare = part
        self.head: nn.Module = nn.Identity()
        self.locked = False
        self.pretrained = False
        """Whether the backbone came with weights that were trained before."""

    def forward(self, inputs: Any) -> Tensor:
        return self.finish(self.backbone(inputs))

    def finish(self, hidden: Tensor) -> Tensor:
        """From the backbone's outputs to features."""
        return F.normalize(self.head(hidden), dim=-1)

    def lock(self) -> None:
        """Keep the backbone as it is, in evaluation mode whatever the mode of the rest."""
        self.locked = True
        self.backbone.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> Tower:
        super().train(mode)
        if self.locked:
            self.backbone.eval()
        return self

    def add_head(self, kind: Head, width: int) -> None:
        if kind == "linear":
            self.head = nn.Linear(self.width, width, bias=False)
        elif kind == "mlp":
            self.head = nn.Sequential(nn.Linear(self.width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        elif kind == "residual":
            if width != self.width:
                remedy = "Drop --dim, or use --head mlp."
                bad_value("dim", expected=f"the backbone's {self.width} with --head residual", got=width, remedy=remedy)
            self.head = Residual(width)
        self.width = width


class Residual(nn.Module):
    """x + mlp(x), where the mlp gives zeros before training: it starts from what the backbone can do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        last = self.mlp[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)  # type: ignore[no-any-return]  # torch leaves modules' calls unannotated


class Finish(nn.Module):
    """The part of a locked tower that is left to train, on kept outputs of its backbone."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.head = tower.head

    def forward(self, hidden: Tensor) -> Tensor:
        return F.normalize(self.head(hidden), dim=-1)


class Towers(nn.Module):
    """A pair of encoders, a learned scale and, if asked for, a learned bias."""

    def __init__(self, left: Tower, right: Tower, config: TowerConfig, *, bias: bool) -> None:
        super().__init__()
        self.left, self.right, self.config = left, right, config
        self.log_scale = nn.Parameter(torch.tensor(math.log(config.init_scale)))
        self.bias = nn.Parameter(torch.tensor(config.init_bias)) if bias else None

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        return self.left.kind, self.right.kind


def build_towers(
    config: TowerConfig, *, texts: Iterable[str] = (), folder: Path | None = None, bias: bool = False
) -> Towers:
    """Towers by name. `texts` are what a tokenizer is trained on, if one is; `folder` holds one trained before."""
    maker, _, name = config.towers.partition(":")
    parts = MAKERS[maker](name, config, texts, folder)
    left = Tower(parts[0])
    right = left if parts[1] is parts[0] else Tower(parts[1])
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
        tower.lock()
    towers = Towers(left, right, config, bias=bias)
    if not any(p.requires_grad for p in [*left.parameters(), *right.parameters()]):
        remedy = "Pass --head linear or mlp, or lock one side only."
        bad_value("lock", expected="something left to train", got=repr(config.lock), remedy=remedy)
    return towers


def save_recipe(towers: Towers, folder: Path) -> None:
    """What `build_towers` needs beside weights: tokenizer files."""
    for tower in (towers.left, towers.right):
        save = getattr(tower.prepare, "save", None)
        if save is not None:
            save(folder)


def recipe_checksums(folder: Path) -> dict[str, str]:
    """What a checkpoint remembers of the files that `save_recipe` wrote: weights mean nothing with other tokens."""
    path = folder / Words.FILE
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else {}


def check_recipe(facts: Any, folder: Path) -> None:
    """Refuse tokenizer files that are not those the checkpoint was written with. Earlier versions remembered none."""
    if not isinstance(facts, dict) or not isinstance(facts.get("step"), int):
        remedy = "Take another checkpoint (--weights), or another copy of the run."
        bad_value(f"checkpoint of {folder}", expected="facts with a step", got=repr(facts)[:60], remedy=remedy)
    known, now = facts.get("recipe", {}), recipe_checksums(folder)
    for name, checksum in known.items() if isinstance(known, dict) else ():
        if now.get(str(name)) != checksum:
            got = "another one" if str(name) in now else "none"
            remedy = "Restore it from a copy of the run: with another one the weights mean nothing."
            bad_value(f"{folder / str(name)}", expected="the file that the run has written", got=got, remedy=remedy)


def load_weights(towers: Towers, state: Mapping[str, Any], folder: Path) -> None:
    """Put the weights of a checkpoint into towers that were built by its configuration."""
    try:
        towers.load_state_dict(state["model"])
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # parts that are missing, or of another shape
        got = " ".join(str(error).split())[:200]
        remedy = "The run's config.toml and its checkpoints do not belong together; restore both from one copy."
        bad_value(f"checkpoint {folder}", expected="weights of the run's towers", got=got, remedy=remedy)

"""Export towers to a format and check the result: the folder, loaded again, must give the towers' features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile.errors import bad_value, check_choice
from contratile.models.encoding import evaluating
from contratile.models.export.base import FORMATS, Exported
from contratile.models.export.open_clip import to_open_clip
from contratile.models.export.sentence_transformers import to_sentence_transformers
from contratile.models.export.transformers import to_transformers
from contratile.models.towers import Tower, Towers

WRITERS: dict[str, Callable[[Towers, Path], Exported]] = {
    "transformers": to_transformers,
    "open_clip": to_open_clip,
    "sentence-transformers": to_sentence_transformers,
}
TEXTS = ("a red circle on white", "two words", "Nothing")
LARGEST = 1e-4
"""Largest difference between a feature of the towers and one of the folder. fp32 stays below 1e-5; 16 bit does not."""


def export_towers(towers: Towers, to: str, folder: Path) -> Exported:
    """Write towers to an empty folder in the format of another package, and check them.

    Args:
        towers: The encoders, on the CPU.
        to: "transformers", "open_clip" or "sentence-transformers".
        folder: An existing, empty folder.

    Returns:
        How the folder is loaded and used.

    Raises:
        ValueError: The format has no place for these towers or their head, or the folder gives other features.
        ImportError: The package is missing or broken.
    """
    check_choice("to", to, FORMATS)
    with torch.no_grad(), evaluating(towers):
        exported = WRITERS[to](towers, folder)
        pickles = [path.name for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
        if pickles:
            remedy = "This model cannot be written as safetensors only."
            bad_value(f"export to {to}", expected="safetensors", got=", ".join(pickles), remedy=remedy)
        _check(towers, to, exported)
    return exported


def _check(towers: Towers, to: str, exported: Exported) -> None:
    """Compare features of random pixels and of a few texts."""
    if exported.encode_pixels is not None:
        tower = towers.left
        edge = tower.prepare.edge  # type: ignore[attr-defined]  # of Squares
        pixels = torch.randint(256, (2, 3, edge, edge), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        normalised = tower.backbone[0](pixels)  # type: ignore[index]  # a Sequential
        _compare(tower, tower(pixels), exported.encode_pixels(normalised), to)
    if exported.encode_texts is not None:
        tower = towers.right
        _compare(tower, tower(tower.prepare(TEXTS)), exported.encode_texts(TEXTS), to)


def _compare(tower: Tower, ours: Tensor, theirs: Tensor, to: str) -> None:
    theirs = F.normalize(theirs.float(), dim=-1)
    same = ours.shape == theirs.shape
    gap = float((ours.float() - theirs).abs().max()) if same else float("inf")
    if not gap <= LARGEST:
        got = f"a difference of {gap:.2g}" if same else f"shape {list(theirs.shape)} for {list(ours.shape)}"
        remedy = f"{to} computes this model in another way: use contratile.load in Python."
        bad_value(f"export to {to}", expected=f"the {tower.kind} encoder's own features", got=got, remedy=remedy)

"""Export to sentence-transformers: SentenceTransformer(FOLDER)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from contratile.models.base import import_needed
from contratile.models.export.base import Exported, refuse_head, refuse_towers
from contratile.models.towers import Towers

USAGE = """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
features = model.encode(["a text", "another one"])
print(model.similarity(features, features))
"""


def to_sentence_transformers(towers: Towers, folder: Path) -> Exported:
    """Write the modules of the model, the head as Dense modules, and Normalize."""
    if not towers.config.towers.startswith("st:"):
        to = "open_clip" if towers.config.towers.startswith("open_clip:") else "transformers"
        refuse_towers(
            towers, "sentence-transformers", expected="st: towers, which encode texts", remedy=f"Pass --to {to}."
        )
    package = import_needed(
        "sentence_transformers", "sentence-transformers", needed_for="export to sentence-transformers"
    )
    tower: Any = towers.left
    known: Any = tower.backbone.model
    modules = [*known.children(), *_head(towers, package)]
    if type(modules[-1]).__name__ != "Normalize":
        modules.append(_module(package, "Normalize")())
    # A new one, without the prompts of the pretrained model: training did not use them.
    made = package.SentenceTransformer(modules=modules, device="cpu", similarity_fn_name="cosine")
    made.save(str(folder), create_model_card=False, safe_serialization=True)

    loaded = package.SentenceTransformer(str(folder), device="cpu", trust_remote_code=False)
    return Exported(
        loaded_by="SentenceTransformer",
        usage=USAGE,
        task="sentence-similarity",
        encode_texts=lambda texts: torch.as_tensor(loaded.encode(list(texts), show_progress_bar=False)),
        notes=(),
    )


def _head(towers: Towers, package: Any) -> list[nn.Module]:
    head: Any = towers.left.head
    if isinstance(head, nn.Identity):
        return []
    if isinstance(head, nn.Linear):
        return [_dense(package, head, nn.Identity())]
    if isinstance(head, nn.Sequential):
        return [_dense(package, head[0], nn.GELU()), _dense(package, head[2], nn.Identity())]
    refuse_head(towers, "sentence-transformers", "no head, linear or mlp: Dense modules cannot add their first input")


def _dense(package: Any, layer: Any, activation: nn.Module) -> nn.Module:
    dense: nn.Module = _module(package, "Dense")(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        activation_function=activation,
        init_weight=layer.weight.detach().clone(),
        init_bias=None if layer.bias is None else layer.bias.detach().clone(),
    )
    return dense


def _module(package: Any, name: str) -> Any:
    """A module class of sentence-transformers; they moved in version 6."""
    from importlib import import_module

    try:
        found = import_module(f"{package.__name__}.sentence_transformer.modules")
    except ImportError:
        found = import_module(f"{package.__name__}.models")
    return getattr(found, name)

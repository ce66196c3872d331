"""Towers without weights: built from their settings on the meta device, so that even the largest take no memory.

    with definitions():
        towers = build_towers(TowerConfig(towers="open_clip:ViT-L-14"))       # nothing is downloaded but settings

Inside the context makers of backbones read configurations and tokenizers, and no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from contratile.errors import bad_value
from contratile.models.base import import_needed
from contratile.models.pooling import TextPooling
from contratile.models.pretrained import pretrained

_active: ContextVar[bool] = ContextVar("definitions", default=False)


@contextmanager
def definitions() -> Iterator[None]:
    """Context in which towers are built on the meta device, without weights."""
    token = _active.set(True)
    try:
        with torch.device("meta"):
            yield
    finally:
        _active.reset(token)


def definition_only() -> bool:
    """Whether towers are being built without weights."""
    return _active.get()


def model_of(transformers: Any, name: str) -> Any:
    """A model of transformers: with its weights, or from its configuration inside `definitions`."""
    if not definition_only():
        return transformers.AutoModel.from_pretrained(name, trust_remote_code=False)
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    return transformers.AutoModel.from_config(config, trust_remote_code=False)


def sentence_definition(path: str, pooling: TextPooling) -> tuple[Any, int, Any, int, TextPooling]:
    """The parts of a sentence-transformers model: transformer, width, tokenizer, longest text, pooling.

    Raises:
        ValueError: It has parts besides a transformer, a pooling and a normalisation.
    """
    transformers = import_needed("transformers", "transformers", needed_for="st: towers")
    with pretrained("st", path):
        model = model_of(transformers, path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    folder = Path(path)
    parts = _json(folder / "modules.json")
    kinds = [str(part.get("type", "")).rpartition(".")[2] for part in parts] if isinstance(parts, list) else []
    other = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if other:
        remedy = "Pass the model itself to contratile.plan, with sample_inputs."
        bad_value("towers", expected="a transformer with pooling", got=f"a {other[0]} layer", remedy=remedy)
    if pooling == "auto":
        facts = _json(folder / "1_Pooling" / "config.json")
        pooling = "cls" if isinstance(facts, dict) and facts.get("pooling_mode_cls_token") else "mean"
    facts = _json(folder / "sentence_bert_config.json")
    length = int(facts.get("max_seq_length") or 0) if isinstance(facts, dict) else 0
    return model, int(model.config.hidden_size), tokenizer, length or int(model.config.max_position_embeddings), pooling


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None

"""The runs of `contratile bench plan`: models, and a list that was fixed before anything was measured.

`POINTS` are predicted and measured. Constants of the model were fitted on other runs: the share of unreused memory on
single chunks of 64 x 32 tokens through 6 layers of BERT, of 32 images through ViT-B/32 and of 32 x 64 tokens through
BERT-base; what two encoders keep from each other on `tiny` with 512 pairs in chunks of 256 and 1,024 in chunks of 512;
what is not given back before the update on `vit` (2 pairs), `bert` (3) and `minilm` (12 of 24 tokens).
"""

from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.models.towers import TowerConfig
from contratile.planner.tower_inputs import EncoderExample, encoder_sides, tower_definitions

FEATURES = 256


@dataclass(frozen=True, kw_only=True)
class PlanPoint:
    """A training step: AdamW, the symmetric loss, gradient caching."""

    model: str
    batch: int
    chunk: int
    tokens: int = 32
    """Tokens of a text."""

    checkpointing: bool = False
    offload: str = "none"
    world: int = 1
    """Processes, over which the batch is divided."""


class _Images(nn.Module):
    """An image encoder of transformers with a projection."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.project = model, nn.Linear(width, FEATURES, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return F.normalize(self.project(self.model(pixel_values=pixels).pooler_output), dim=-1)


class _Texts(nn.Module):
    """A text encoder of transformers with mean pooling and a projection."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model, self.project = model, nn.Linear(width, FEATURES, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return F.normalize(self.project(hidden.mean(1)), dim=-1)


def definition(point: PlanPoint) -> tuple[EncoderExample, EncoderExample]:
    """Both encoders of a point without weights; the same object if it has one for both sides."""
    if point.model in ("tiny", "minilm"):
        spec = {"tiny": {"towers": "tiny"}, "minilm": {"towers": "st:minilm"}}
        config = TowerConfig(checkpointing=point.checkpointing, **spec[point.model])  # type: ignore[arg-type]
        return encoder_sides(tower_definitions(config), tokens=point.tokens)
    from contratile.models.base import import_needed

    transformers = import_needed("transformers", "transformers", needed_for="models of this benchmark")
    ids = torch.empty((1, point.tokens), dtype=torch.long, device="meta")
    with torch.device("meta"):
        if point.model == "vit":
            config = transformers.CLIPVisionConfig()  # its defaults are those of ViT-B/32
            model, inputs = transformers.CLIPVisionModel(config), torch.empty(1, 3, 224, 224)
            module: nn.Module = _Images(model, config.hidden_size)
        else:
            config = transformers.BertConfig()  # its defaults are those of BERT-base
            model, inputs = transformers.BertModel(config, add_pooling_layer=False), None
            module = _Texts(model, config.hidden_size)
    if point.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    example = {"input_ids": ids, "attention_mask": ids} if inputs is None else inputs
    return (EncoderExample(module.train(), example),) * 2


def _grid() -> tuple[PlanPoint, ...]:
    tiny = PlanPoint(model="tiny", batch=1024, chunk=640, tokens=16)
    mini = PlanPoint(model="minilm", batch=32, chunk=32)
    vit = PlanPoint(model="vit", batch=4, chunk=4)
    bert = PlanPoint(model="bert", batch=8, chunk=8)
    found = [
        *(replace(tiny, chunk=chunk) for chunk in (576, 640, 768, 1024)),
        *(replace(tiny, chunk=512, batch=batch) for batch in (512, 768, 2048)),
        *(replace(tiny, chunk=768, batch=batch) for batch in (768, 1536)),
        replace(tiny, chunk=1536, batch=1536),
        replace(tiny, chunk=2048, batch=2048),
        replace(tiny, chunk=2048, batch=2048, checkpointing=True),
        replace(tiny, chunk=3072, batch=3072, checkpointing=True),
        replace(tiny, offload="disk"),
        replace(tiny, chunk=1024, offload="disk"),
        replace(tiny, chunk=512, world=2, batch=1024),
        *(replace(mini, chunk=chunk) for chunk in (16, 24, 32)),
        *(replace(mini, chunk=chunk, batch=chunk) for chunk in (12, 40, 48)),
        *(replace(mini, chunk=16, tokens=tokens) for tokens in (16, 48, 64)),
        replace(mini, checkpointing=True),
        replace(mini, chunk=16, checkpointing=True),
        replace(mini, offload="disk"),
        replace(mini, chunk=16, world=2),
        replace(mini, chunk=8, world=2),
        *(replace(vit, chunk=chunk, batch=chunk) for chunk in (1, 3, 4, 5, 6)),
        replace(vit, chunk=2),
        replace(vit, checkpointing=True),
        replace(vit, chunk=2, offload="disk"),
        replace(vit, chunk=2, world=2),
        *(replace(bert, chunk=chunk, batch=chunk) for chunk in (2, 4, 6, 8)),
        *(replace(bert, chunk=4, batch=4, tokens=tokens) for tokens in (16, 64)),
        replace(bert, chunk=4),
        replace(bert, checkpointing=True),
        replace(bert, chunk=4, offload="disk"),
        replace(bert, chunk=2, batch=4, world=2),
    ]
    mine = {point.model: [x for x in found if x.model == point.model] for point in found}
    return tuple(x for row in zip_longest(*mine.values()) for x in row if x is not None)  # models take turns


POINTS = _grid()
"""What is measured: fixed beforehand."""

QUICK = tuple(point for point in POINTS if point.model == "tiny")[:2]

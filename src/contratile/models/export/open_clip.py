"""Export to open_clip: open_clip.create_model_and_transforms("local-dir:FOLDER")."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from contratile.models.base import import_needed
from contratile.models.export.base import (
    Exported,
    image_alone,
    linear_head,
    preprocessing,
    refuse_head,
    refuse_towers,
    through_head,
)
from contratile.models.towers import Towers

WEIGHTS, CONFIG = "open_clip_model.safetensors", "open_clip_config.json"
USAGE = """\
import open_clip, torch
from PIL import Image

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:FOLDER")
tokenizer = open_clip.get_tokenizer("local-dir:FOLDER")
model.eval()
with torch.no_grad():
    image = model.encode_image(preprocess(Image.open("picture.jpg"))[None], normalize=True)
    text = model.encode_text(tokenizer(["a text"]), normalize=True)
print(image @ text.T)
"""


def to_open_clip(towers: Towers, folder: Path) -> Exported:
    """Write open_clip's config and weights, and the tokenizer if it is not built into open_clip."""
    maker, _, name = towers.config.towers.partition(":")
    if maker != "open_clip":
        to = "sentence-transformers" if maker == "st" else "transformers"
        refuse_towers(towers, "open_clip", expected="open_clip: towers", remedy=f"Pass --to {to}.")
    if image_alone(towers):
        remedy = "The run trained on views of images; open_clip has no folder for an image encoder alone."
        refuse_towers(towers, "open_clip", expected="an image and a text encoder", remedy=remedy)
    open_clip = import_needed(
        "open_clip", "open_clip_torch, and a torchvision that fits torch", needed_for="export to open_clip"
    )
    left, right = towers.left, towers.right
    visual: Any = left.backbone[1]  # type: ignore[index]  # behind the pixels
    text: Any = right.backbone
    config = open_clip.get_model_config(name.partition(":")[0])
    edge, mean, std = preprocessing(left)
    state = {f"visual.{key}": x for key, x in visual.state_dict().items()}
    state |= {f"text.{key}": x for key, x in text.state_dict().items()}
    if towers.config.head != "none":
        state |= _with_heads(towers, visual, text)
        config["embed_dim"] = left.width
    state["logit_scale"] = towers.log_scale.detach()
    config["custom_text"] = True  # the text tower is a module of its own, as in training
    config["vision_cfg"]["image_size"] = edge
    config.pop("init_logit_bias", None)
    if towers.bias is not None:
        config["init_logit_bias"] = towers.bias.item()
        state["logit_bias"] = towers.bias.detach()
    _save(folder, state, {"model_cfg": config, "preprocess_cfg": {"mean": mean, "std": std, **RESIZE}})
    notes = []
    if "hf_tokenizer_name" in config["text_cfg"]:
        tokenizer: Any = right.prepare
        tokenizer.save_pretrained(str(folder))
    if "hf_model_name" in config["text_cfg"]:
        hub = config["text_cfg"]["hf_model_name"]
        notes.append(f"open_clip reads the settings of the text model from the hub ({hub}), the weights from here.")

    loaded = open_clip.create_model(f"local-dir:{folder}").eval()
    tokenize = open_clip.get_tokenizer(f"local-dir:{folder}")
    return Exported(
        loaded_by="open_clip.create_model_and_transforms",
        usage=USAGE,
        task="zero-shot-image-classification",
        encode_pixels=loaded.encode_image,
        encode_texts=lambda texts: loaded.encode_text(tokenize(list(texts))),
        notes=tuple(notes),
    )


RESIZE = {"interpolation": "bicubic", "resize_mode": "shortest"}


def _with_heads(towers: Towers, visual: Any, text: Any) -> dict[str, Tensor]:
    """Linear heads become part of the projections of a ViT and of a text transformer: matrices [in, out]."""
    heads = linear_head(towers.left), linear_head(towers.right)
    if heads[0] is None:
        refuse_head(towers, "open_clip", "no head or a linear one: open_clip's models end in one matrix")
    last = getattr(visual, "proj", None), getattr(text, "text_projection", None)
    if not all(isinstance(x, nn.Parameter) for x in last):
        refuse_head(towers, "open_clip", "no head: this model does not end in two plain matrices")
    joined = [through_head(head, x.T).T.contiguous() for head, x in zip(heads, last, strict=True)]  # type: ignore[union-attr]
    return {"visual.proj": joined[0], "text.text_projection": joined[1]}


def _save(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    # Clones: safetensors refuses tensors that share memory.
    save_file({key: x.detach().clone().contiguous() for key, x in state.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

"""Export to transformers: AutoModel.from_pretrained(FOLDER), with tokenizer and image processor.

    tiny                  CLIPModel
    hf:<CLIP, SigLIP>     the class it came as
    hf:<vision>+<text>    VisionTextDualEncoderModel
    --views 2             the vision model alone, CLIPVisionModelWithProjection for CLIP

A linear head becomes part of the projection. Formats without a projection, and other heads, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contratile.models.base import import_needed
from contratile.models.export.base import (
    Exported,
    image_alone,
    linear,
    linear_head,
    preprocessing,
    refuse_head,
    refuse_towers,
    through_head,
)
from contratile.models.pretrained import pretrained
from contratile.models.towers import Tower, Towers

TO = "transformers"
USAGE = """\
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("FOLDER")
processor = AutoImageProcessor.from_pretrained("FOLDER", backend="pil")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
images = processor(Image.open("picture.jpg"), return_tensors="pt")
texts = tokenizer(["a text"], padding={padding}, truncation=True, return_tensors="pt")
with torch.no_grad():
    found = model(**images, input_ids=texts["input_ids"], attention_mask=texts.get("attention_mask"))
print(found.image_embeds @ found.text_embeds.T)      # cosines
"""
USAGE_OF_IMAGES = """\
import torch
from PIL import Image
from transformers import AutoImageProcessor, {model}

model = {model}.from_pretrained("FOLDER")
processor = AutoImageProcessor.from_pretrained("FOLDER", backend="pil")
with torch.no_grad():
    found = model(**processor(Image.open("picture.jpg"), return_tensors="pt")).{output}
features = torch.nn.functional.normalize(found, dim=-1)
"""


def to_transformers(towers: Towers, folder: Path) -> Exported:
    """Write a folder of transformers."""
    maker, _, name = towers.config.towers.partition(":")
    if maker not in ("tiny", "hf"):
        to = "open_clip" if maker == "open_clip" else "sentence-transformers"
        refuse_towers(towers, TO, expected="tiny or hf: towers", remedy=f"Pass --to {to}.")
    transformers = import_needed("transformers", "transformers", needed_for="export to transformers")
    if towers.config.head not in ("none", "linear"):
        refuse_head(towers, TO, "no head or a linear one: the models of transformers end in a projection")
    if image_alone(towers):
        return _image_alone(transformers, towers, folder)
    if maker == "tiny":
        model, tokenizer = _tiny(transformers, towers), _tiny_tokenizer(transformers, towers.right)
    elif "+" in name and not Path(name).is_dir():
        model, tokenizer = _pair(transformers, towers), _hf_tokenizer(towers.right)
    else:
        model, tokenizer = _two_towers(transformers, towers, name), _hf_tokenizer(towers.right)
    notes = _set_scale(model, towers)
    _save(model, folder)
    tokenizer.save_pretrained(folder)
    _save_preprocessing(towers.left, folder, _processor_class(model))
    full = getattr(towers.right.prepare, "pad_fully", False)
    return Exported(
        loaded_by=type(model).__name__,
        usage=USAGE.format(padding='"max_length"' if full else True),
        task="zero-shot-image-classification",
        notes=tuple(notes),
        **_encoders(transformers, folder, padding="max_length" if full else True),
    )


# --- the models -----------------------------------------------------------------------------------------------------


def _tiny(transformers: Any, towers: Towers) -> Any:
    """A CLIPModel with the weights of `tiny`, whose parameters have the same names."""
    prepare: Any = towers.right.prepare
    ids = {name: prepare.tokenizer.token_to_id(token) for name, token in TOKENS.items()}
    text = {
        **_tiny_shape(towers),
        "vocab_size": prepare.tokenizer.get_vocab_size(),
        "max_position_embeddings": prepare.length,
        **{f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad")},
    }
    config = transformers.CLIPConfig(
        text_config=text, vision_config=_tiny_vision(towers), projection_dim=towers.left.width
    )
    model = transformers.CLIPModel(config)
    _load(model, {**_tiny_state(towers.left), **_tiny_state(towers.right), "logit_scale": towers.log_scale.detach()})
    return model


def _tiny_shape(towers: Towers) -> dict[str, Any]:
    from contratile.models.tiny import Shape

    shape = Shape(towers.config.width, towers.config.depth)
    return {
        "hidden_size": shape.width,
        "intermediate_size": 4 * shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "projection_dim": towers.left.width,
        "hidden_act": "quick_gelu",
    }


def _tiny_vision(towers: Towers) -> dict[str, Any]:
    edge = preprocessing(towers.left)[0]
    return {**_tiny_shape(towers), "image_size": edge, "patch_size": towers.config.patch}


def _tiny_state(tower: Tower) -> dict[str, Tensor]:
    """The weights of one encoder, a linear head included."""
    encoder: Any = tower.backbone[1] if tower.kind == "image" else tower.backbone  # type: ignore[index]
    state: dict[str, Tensor] = encoder.model.state_dict()
    last = "visual_projection.weight" if tower.kind == "image" else "text_projection.weight"
    return {**state, last: through_head(linear_head(tower), state[last])}


def _load(model: Any, state: dict[str, Tensor]) -> None:
    """Load all weights; only buffers that transformers computes by itself may be missing."""
    found = model.load_state_dict(state, strict=False)
    absent = [name for name in found.missing_keys if not name.endswith("position_ids")]
    assert not absent and not found.unexpected_keys, found


def _two_towers(transformers: Any, towers: Towers, name: str) -> Any:
    """The pretrained model with the trained parts in place of its own."""
    with pretrained("hf", name):
        model = transformers.AutoModel.from_pretrained(name, trust_remote_code=False)
    left: Any = towers.left.backbone[1]  # type: ignore[index]  # behind the pixels
    right: Any = towers.right.backbone
    model.vision_model, model.text_model = left.encoder, right.encoder
    for attribute, tower, part in (
        ("visual_projection", towers.left, left),
        ("text_projection", towers.right, right),
    ):
        head = linear_head(tower)
        if not hasattr(model, attribute):
            if head is not None:
                why = f"no head: {type(model).__name__} has no projection for it to be part of"
                refuse_head(towers, TO, why)
        elif head is None:
            setattr(model, attribute, part.projection)
        elif isinstance(part.projection, nn.Linear) and part.projection.bias is None:
            setattr(model, attribute, linear(through_head(head, part.projection.weight)))
            for config in (model.config, model.config.vision_config, model.config.text_config):
                if hasattr(config, "projection_dim"):
                    config.projection_dim = tower.width
        else:
            refuse_head(towers, TO, f"no head: the projection of {type(model).__name__} is not one matrix")
    return model


def _pair(transformers: Any, towers: Towers) -> Any:
    """A vision and a text model as one: pooled outputs, each with a projection without bias."""
    left: Any = towers.left.backbone[1]  # type: ignore[index]  # behind the pixels
    right: Any = towers.right.backbone
    if right.pooling != "pooler":
        expected = "a text model read through its pooler, as VisionTextDualEncoderModel does"
        remedy = "Train with --text-pooling pooler to export it, or use contratile.load in Python."
        refuse_towers(towers, TO, expected=expected, remedy=remedy)
    _check_pooled(towers, left.model)
    width = towers.left.width
    if not hasattr(left.model.config, "hidden_size"):  # models of timm have their own name for it
        head = linear_head(towers.left)
        left.model.config.hidden_size = width if head is None else head.shape[1]
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        left.model.config, right.model.config, projection_dim=width
    )
    model = transformers.VisionTextDualEncoderModel(config, vision_model=left.model, text_model=right.model)
    for attribute, tower in (("visual_projection", towers.left), ("text_projection", towers.right)):
        head = linear_head(tower)
        setattr(model, attribute, linear(torch.eye(width) if head is None else head.clone()))
    return model


def _check_pooled(towers: Towers, vision: Any) -> None:
    """Refuse vision models that have no pooled output [n, width]: the mean over patches has no place in the format."""
    edge = preprocessing(towers.left)[0]
    pooled = getattr(vision(pixel_values=torch.zeros(1, 3, edge, edge)), "pooler_output", None)
    if pooled is None or pooled.dim() != 2:
        expected = "a vision model with a pooled output"
        refuse_towers(towers, TO, expected=expected, remedy="Use contratile.load in Python.")


def _set_scale(model: Any, towers: Towers) -> list[str]:
    """Put the learned scale, and the bias if there is one, into the model; return what has no place."""
    scale = towers.log_scale.detach()
    model.logit_scale.data = scale.to(model.logit_scale.dtype).reshape(model.logit_scale.shape)
    bias = getattr(model, "logit_bias", None)
    if bias is not None:
        value = torch.zeros(()) if towers.bias is None else towers.bias.detach()
        bias.data = value.to(bias.dtype).reshape(bias.shape)
    elif towers.bias is not None:
        lost = f"{type(model).__name__} has no place for the learned bias of the scores ({towers.bias.item():.4f})"
        return [f"{lost}; features do not depend on it."]
    return []


def _save(model: Any, folder: Path) -> None:
    """Write config.json and safetensors, without the paths that the parts were loaded from."""
    for part in model.modules():
        if hasattr(part, "config"):
            part.config._name_or_path = ""
    for name in ("vision_config", "text_config"):
        if hasattr(model.config, name):
            getattr(model.config, name)._name_or_path = ""
    model.save_pretrained(folder)


# --- the image encoder alone ----------------------------------------------------------------------------------------


def _image_alone(transformers: Any, towers: Towers, folder: Path) -> Exported:
    backbone: Any = towers.left.backbone[1]  # type: ignore[index]  # behind the pixels
    head = linear_head(towers.left)
    output = "image_embeds"
    if towers.config.towers == "tiny":
        model = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**_tiny_vision(towers)))
        _load(model, _tiny_state(towers.left))
    elif _is_clip(backbone):
        config = backbone.encoder.config
        config.projection_dim = towers.left.width
        model = transformers.CLIPVisionModelWithProjection(config)
        model.vision_model = backbone.encoder
        model.visual_projection = linear(through_head(head, backbone.projection.weight))
    else:
        if head is not None:
            refuse_head(towers, TO, "no head: this vision model has no projection for it to be part of")
        model, output = getattr(backbone, "model", None) or backbone.encoder, "pooler_output"
        if not isinstance(getattr(backbone, "projection", nn.Identity()), nn.Identity):
            expected = "CLIP, or a vision model without projection, for an image encoder alone"
            refuse_towers(towers, TO, expected=expected, remedy="Use contratile.load in Python.")
        if model.config.model_type == "timm_wrapper":
            expected = "another vision model: AutoImageProcessor prepares images for models of timm in its own way"
            refuse_towers(towers, TO, expected=expected, remedy="Use contratile.load in Python.")
        _check_pooled(towers, model)
    _save(model, folder)
    _save_preprocessing(towers.left, folder)
    loaded = type(model).from_pretrained(folder).eval()
    name = type(model).__name__
    return Exported(
        loaded_by=name,
        usage=USAGE_OF_IMAGES.format(model=name, output=output),
        task="image-feature-extraction",
        encode_pixels=lambda pixels: getattr(loaded(pixel_values=pixels), output),
    )


def _is_clip(backbone: Any) -> bool:
    encoder = getattr(backbone, "encoder", None)
    return encoder is not None and encoder.config.model_type in ("clip", "clip_vision_model")


# --- tokenizer, preprocessing and the check -------------------------------------------------------------------------

TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[START]", "eos": "[END]"}
"""Special tokens of `tiny`, by transformers' names."""


def _tiny_tokenizer(transformers: Any, tower: Tower) -> Any:
    prepare: Any = tower.prepare
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=prepare.tokenizer,
        model_max_length=prepare.length,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in TOKENS.items()},
    )


def _hf_tokenizer(tower: Tower) -> Any:
    """The tokenizer, with the length at which training cut texts."""
    prepare: Any = tower.prepare
    prepare.tokenizer.model_max_length = prepare.length
    return prepare.tokenizer


def _processor_class(model: Any) -> str | None:
    """What AutoProcessor makes of the folder: image processor and tokenizer in one."""
    known = {"clip": "CLIPProcessor", "vision-text-dual-encoder": "VisionTextDualEncoderProcessor"}
    return known.get(model.config.model_type)


def _save_preprocessing(tower: Tower, folder: Path, processor: str | None = None) -> None:
    """Write preprocessor_config.json: images as this tower was trained on, whatever its pretrained model had."""
    edge, mean, std = preprocessing(tower)
    facts = {
        "image_processor_type": "CLIPImageProcessor",
        **({} if processor is None else {"processor_class": processor}),
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": edge},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": edge, "width": edge},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _encoders(transformers: Any, folder: Path, *, padding: bool | str) -> dict[str, Callable[[Any], Tensor]]:
    """The features of the folder, as transformers loads it."""
    model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def encode_texts(texts: Sequence[str]) -> Tensor:
        found = tokenizer(list(texts), padding=padding, truncation=True, return_tensors="pt")
        inputs = {name: found[name] for name in ("input_ids", "attention_mask") if name in found}
        return _features(model.get_text_features(**inputs))

    return {
        "encode_pixels": lambda pixels: _features(model.get_image_features(pixel_values=pixels)),
        "encode_texts": encode_texts,
    }


def _features(found: Any) -> Tensor:
    """Versions before 5 return the features themselves."""
    return found if isinstance(found, Tensor) else found.pooler_output

"""Small runs to test: pictures of coloured shapes with their names, a tiny model, a few steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from contratile.models.tiny import train_tokenizer
from contratile.models.towers import build_towers, recipe_checksums, save_recipe
from contratile.report.tracking import history
from contratile.train import checkpoint
from contratile.train.config import SECTIONS, TrainConfig
from contratile.train.config_file import from_dict, save_config
from contratile.train.paths import absolute_paths
from tests.torchvision_repair import repair_torchvision

COLOURS = ("red", "green", "blue", "black", "orange", "purple", "brown", "gray")
SHAPES = ("ellipse", "rectangle", "line", "arc")


def shapes(folder: Path, *, sizes: int = 3) -> Path:
    """A table of 96 pictures: every colour and shape in some sizes."""
    rows = ["path,caption"]
    folder.mkdir(parents=True, exist_ok=True)
    for colour in COLOURS:
        for shape in SHAPES:
            for size in range(1, sizes + 1):
                image = Image.new("RGB", (16, 16), "white")
                box = (8 - 2 * size, 8 - 2 * size, 7 + 2 * size, 7 + 2 * size)
                draw = ImageDraw.Draw(image)
                if shape == "arc":
                    draw.arc(box, 0, 200, fill=colour, width=2)
                else:
                    getattr(draw, shape)(box, fill=colour)
                name = f"{colour}-{shape}-{size}.png"
                image.save(folder / name)
                rows.append(f"{name},{colour} {shape} of size {size}")
    table = folder / "pairs.csv"
    table.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return table


def everything(folder: Path) -> dict[str, Any]:
    """Two tables with several captions and hard negatives, and options that use all of it, with augmentation."""
    shapes(folder)
    names = sorted(path.name for path in folder.glob("*.png"))
    for number, table in enumerate((names[:64], names[64:])):
        rows = []
        for place, name in enumerate(table):
            colour, shape, size = name.removesuffix(".png").split("-")
            captions = [f"{colour} {shape} of size {size}", f"a {shape}, {colour}", f"size {size} {colour}"]
            hard = [f"{other} {shape}" for other in COLOURS[: place % 4] if other != colour]
            rows.append({"image": name, "captions": captions, "negatives": hard or ["nothing"]})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"part-{number}.jsonl").write_text(lines, encoding="utf-8")
    tables = tuple(str(folder / f"part-{number}.jsonl") for number in (0, 1))
    augment = {"augment": "simclr", "blur": 0.3}
    return {"data": tables, "data_weights": (1.0, 2.0), "num_negatives": 2, **augment}


def texts(folder: Path) -> Path:
    """A table of 60 pairs of texts."""
    rows = [f"the {colour} {shape},{shape} in {colour}" for colour in COLOURS for shape in (*SHAPES, "dot", "cross")]
    table = folder / "texts.csv"
    table.write_text("\n".join(["left,right", *rows]) + "\n", encoding="utf-8")
    return table


SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
"""Of small transformers."""


def clip_folder(folder: Path) -> Path:
    """A small CLIP with tokenizer and image facts, as the hub would have it."""
    repair_torchvision()
    from transformers import CLIPConfig, CLIPModel

    tokenizer = _tokenizer(folder)
    end = tokenizer.token_to_id("[END]")
    text = {**SHAPE, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 12, "eos_token_id": end}
    vision = {**SHAPE, "image_size": 16, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    return folder


def siglip_folder(folder: Path) -> Path:
    """A small SigLIP with tokenizer; image facts are left to their defaults."""
    repair_torchvision()
    from transformers import SiglipConfig, SiglipModel

    vocabulary = _tokenizer(folder).get_vocab_size()
    text = {**SHAPE, "vocab_size": vocabulary, "max_position_embeddings": 12, "projection_size": SHAPE["hidden_size"]}
    vision = {**SHAPE, "image_size": 16, "patch_size": 8}
    SiglipModel(SiglipConfig(text_config=text, vision_config=vision)).save_pretrained(folder)
    return folder


def sentence_folder(folder: Path) -> Path:
    """A small BERT with tokenizer: a text model of transformers, and of sentence-transformers."""
    repair_torchvision()
    from transformers import BertConfig, BertModel

    vocabulary = _tokenizer(folder).get_vocab_size()
    BertModel(BertConfig(vocab_size=vocabulary, max_position_embeddings=12, **SHAPE)).save_pretrained(folder)
    return folder


def _tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES], 300)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[END]", model_max_length=12
    )
    fast.save_pretrained(folder)
    return tokenizer


def small(table: Path, out: Path, **changes: Any) -> TrainConfig:
    """Six steps of 32 pairs with a tiny model; `changes` are fields of any section, by their names.

    It is evaluated and saved at its end only, which takes longer than a step: pass `eval_every` and `save_every` where
    that matters.
    """
    steps = changes.get("steps", 6)
    changes = {"eval_every": steps, "save_every": steps, **changes}
    config = from_dict(
        {
            "run": {"out": str(out), "batch": 32, "chunk": 10, "steps": 6, "cpu": True, "tensorboard": False},
            "data": {"data": str(table), "test_share": 0.2},
            "towers": {"width": 32, "depth": 1, "pixels": 16, "words": 8},
            "optim": {"lr": 3e-3, "warmup": 10},
        },
        TrainConfig(),
        where="test",
    )
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        (section,) = (s for s in SECTIONS if hasattr(getattr(config, s), name))
        by_section.setdefault(section, {})[name] = value
    # Together: some are only valid beside others.
    return replace(config, **{s: replace(getattr(config, s), **given) for s, given in by_section.items()})


def unlike_pretrained(config: TrainConfig) -> Path:
    """The folder of a run that was not trained: random changes to its weights, saved as step 7."""
    out, views = config.run.out, config.augment.views == 2
    captions = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    torch.manual_seed(0)
    towers = build_towers(config.towers, texts=captions, bias=config.loss.loss == "siglip", views=views)
    with torch.no_grad():
        for parameter in towers.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    out.mkdir(parents=True)
    save_config(absolute_paths(config), out)
    save_recipe(towers, out)
    facts = {"step": 7, "best_step": 7, "recipe": recipe_checksums(out)}
    checkpoint.save(out / "checkpoints" / checkpoint.step_name(7), {"model": towers.state_dict()}, facts)
    return out


def weights(run: Path) -> dict[str, Tensor]:
    """Of the last checkpoint."""
    folder = checkpoint.latest(run)
    assert folder is not None
    model: dict[str, Tensor] = checkpoint.load(folder)[0]["model"]
    return model


def losses(run: Path) -> list[float]:
    """Of every step."""
    return [entry["loss"] for entry in history(run) if "loss" in entry]

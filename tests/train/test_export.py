"""Exported folders: features as `contratile.load` gives them, in the package that the folder is for."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

import contratile as ct
from contratile.cli import main
from contratile.cli.train import parse
from contratile.recipes import find_recipe, recipe_names
from contratile.train import Trainer, export_run
from contratile.train.config import TrainConfig
from contratile.train.config_file import load_config, to_dict
from contratile.train.model_card import LEFT_OUT, command, public_name
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import (
    SHAPE,
    clip_folder,
    sentence_folder,
    shapes,
    siglip_folder,
    small,
    texts,
    unlike_pretrained,
)

repair_torchvision()
TEXTS = ["a red circle", "green", "", "a text that is longer than the twelve tokens of these small models, by far"]
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 0}
"""Features have unit length: fp32 rounding of a few layers, and of a head that became part of a projection."""


def pictures() -> list[Image.Image]:
    """Square ones, and others whose crop all packages place alike."""
    random = np.random.default_rng(0)
    sizes = ((16, 16), (40, 40), (40, 30), (301, 407))
    return [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small models of each package, by what they are."""
    from transformers import ViTConfig, ViTModel

    folder = tmp_path_factory.mktemp("models")
    ViTModel(ViTConfig(image_size=16, patch_size=8, **SHAPE)).save_pretrained(folder / "vision")
    text = sentence_folder(folder / "bert")
    return {
        "tiny": "tiny",
        "clip": f"hf:{clip_folder(folder / 'clip')}",
        "siglip": f"hf:{siglip_folder(folder / 'siglip')}",
        "pair": f"hf:{folder / 'vision'}+{text}",
        "open_clip": "open_clip:ViT-S-32-alt",
        "st": f"st:{text}",
    }


def made(models: dict[str, str], kind: str, folder: Path, **changes: Any) -> Path:
    """A run with such encoders."""
    pixels = {"tiny": 16, "open_clip": 64}.get(kind, 0)
    config = small(Path("pairs.csv"), folder / "run", towers=models[kind], pixels=pixels, **changes)
    return unlike_pretrained(config)


def with_transformers(folder: Path, *, padding: Any = True) -> tuple[Tensor, Tensor]:
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    tokens = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=padding, truncation=True, return_tensors="pt")
    pixels = torch.cat([processor(image, return_tensors="pt")["pixel_values"] for image in pictures()])
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask") if name in tokens}
    with torch.no_grad():
        found = model(**inputs, pixel_values=pixels)
    return found.image_embeds, found.text_embeds


def check(model: Any, image: Tensor, text: Tensor) -> None:
    torch.testing.assert_close(image, model.encode_image(pictures()), **CLOSE)
    torch.testing.assert_close(text, model.encode_text(TEXTS), **CLOSE)
    assert not torch.allclose(image[0], image[1], atol=1e-3), "a test that can fail"


@pytest.mark.parametrize("head", ["none", "linear"])
@pytest.mark.parametrize(("kind", "loaded_by"), [("tiny", "CLIPModel"), ("clip", "CLIPModel")])
def test_clip_in_transformers(kind: str, loaded_by: str, head: str, models: dict[str, str], tmp_path: Path) -> None:
    import transformers

    run = made(models, kind, tmp_path, head=head, dim=20 if head == "linear" else 0)
    exported, step = export_run(run, "transformers", tmp_path / "out")
    assert exported.loaded_by == loaded_by and step == 7
    model = ct.load(run, device="cpu")
    check(model, *with_transformers(tmp_path / "out"))
    named = getattr(transformers, loaded_by).from_pretrained(tmp_path / "out")
    torch.testing.assert_close(named.logit_scale, model.towers.log_scale)
    processor: Any = transformers.AutoProcessor.from_pretrained(tmp_path / "out")
    both = processor(text=TEXTS[:1], images=pictures()[:1], return_tensors="pt")
    assert {"input_ids", "pixel_values"} <= set(both)
    assert sorted(x.suffix for x in (tmp_path / "out").iterdir() if x.suffix not in (".json", ".md")) == [
        ".safetensors"
    ]


@pytest.mark.parametrize("loss", ["siglip", "clip"])
def test_siglip_in_transformers(loss: str, models: dict[str, str], tmp_path: Path) -> None:
    """Padded to the full length, with the bias; zero if the loss had none. Images are cropped, as in training."""
    from transformers import SiglipModel

    run = made(models, "siglip", tmp_path, loss=loss)
    export_run(run, "transformers", tmp_path / "out")
    model = ct.load(run, device="cpu")
    check(model, *with_transformers(tmp_path / "out", padding="max_length"))
    bias = SiglipModel.from_pretrained(tmp_path / "out").logit_bias.item()
    expected = 0.0 if model.towers.bias is None else model.towers.bias.item()
    assert bias == pytest.approx(expected) and (expected < -5) == (loss == "siglip")


@pytest.mark.parametrize("head", ["none", "linear"])
def test_a_pair_in_transformers(head: str, models: dict[str, str], tmp_path: Path) -> None:
    run = made(models, "pair", tmp_path, head=head, dim=20 if head == "linear" else 0, text_pooling="pooler")
    exported, _ = export_run(run, "transformers", tmp_path / "out")
    assert exported.loaded_by == "VisionTextDualEncoderModel"
    check(ct.load(run, device="cpu"), *with_transformers(tmp_path / "out"))
    assert str(tmp_path.parent) not in (tmp_path / "out" / "config.json").read_text(), "no paths of this machine"


@pytest.mark.peers
def test_a_pair_with_a_model_of_timm(models: dict[str, str], tmp_path: Path) -> None:
    """As the recipes of LiT have it. Alone it is refused: transformers would prepare its images differently."""
    timm: Any = pytest.importorskip("timm")
    size = {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2}
    vision = timm.create_model("vit_tiny_patch16_224", num_classes=5, **size)
    timm.models.save_for_hf(vision, tmp_path / "vision", model_config={"num_features": 24}, model_args=size)
    towers = f"hf:{tmp_path / 'vision'}+{models['st'].removeprefix('st:')}"
    common: dict[str, Any] = {"towers": towers, "pixels": 32}
    config = small(Path("x.csv"), tmp_path / "run", head="linear", dim=20, text_pooling="pooler", **common)
    export_run(unlike_pretrained(config), "transformers", tmp_path / "out")
    check(ct.load(tmp_path / "run", device="cpu"), *with_transformers(tmp_path / "out"))
    alone = unlike_pretrained(small(Path("x.csv"), tmp_path / "alone", loss="ntxent", views=2, **common))
    with pytest.raises(ValueError, match=r"expected another vision model: AutoImageProcessor prepares images for"):
        export_run(alone, "transformers", tmp_path / "again")


@pytest.mark.parametrize(
    ("kind", "head", "loaded_by", "output"),
    [
        ("tiny", "none", "CLIPVisionModelWithProjection", "image_embeds"),
        ("clip", "linear", "CLIPVisionModelWithProjection", "image_embeds"),
        ("siglip", "none", "SiglipVisionModel", "pooler_output"),
        ("pair", "none", "ViTModel", "pooler_output"),
    ],
)
def test_an_image_encoder_alone(
    kind: str, head: str, loaded_by: str, output: str, models: dict[str, str], tmp_path: Path
) -> None:
    import transformers

    changes: dict[str, Any] = {"loss": "ntxent", "views": 2, "head": head, "dim": 20 if head == "linear" else 0}
    run = made(models, kind, tmp_path, **changes)
    exported, _ = export_run(run, "transformers", tmp_path / "out")
    assert exported.loaded_by == loaded_by
    theirs = getattr(transformers, loaded_by).from_pretrained(tmp_path / "out").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "out", backend="pil")
    pixels = torch.cat([processor(image, return_tensors="pt")["pixel_values"] for image in pictures()])
    with torch.no_grad():
        found = F.normalize(getattr(theirs(pixel_values=pixels), output), dim=-1)
    model = ct.load(run, device="cpu")
    torch.testing.assert_close(found, model.encode_image(pictures()), **CLOSE)


@pytest.mark.peers
@pytest.mark.parametrize(("head", "loss"), [("none", "siglip"), ("linear", "clip")])
def test_open_clip(head: str, loss: str, models: dict[str, str], tmp_path: Path) -> None:
    import open_clip

    run = made(models, "open_clip", tmp_path, head=head, dim=20 if head == "linear" else 0, loss=loss)
    export_run(run, "open_clip", tmp_path / "out")
    theirs, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'out'}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'out'}")
    theirs.eval()
    with torch.no_grad():
        image = theirs.encode_image(torch.stack([preprocess(x) for x in pictures()]), normalize=True)
        text = theirs.encode_text(tokenizer(TEXTS), normalize=True)
    model = ct.load(run, device="cpu")
    check(model, image, text)
    torch.testing.assert_close(theirs.logit_scale, model.towers.log_scale)
    assert (theirs.logit_bias is None) == (loss == "clip")
    if model.towers.bias is not None:
        torch.testing.assert_close(theirs.logit_bias, model.towers.bias)


@pytest.mark.parametrize(("head", "dim"), [("none", 0), ("linear", 20), ("mlp", 20)])
def test_sentence_transformers(head: str, dim: int, models: dict[str, str], tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    run = made(models, "st", tmp_path, head=head, dim=dim)
    export_run(run, "sentence-transformers", tmp_path / "out")
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    model = ct.load(run, device="cpu")
    ours = model.encode_document(TEXTS)
    torch.testing.assert_close(torch.as_tensor(theirs.encode(TEXTS)), ours, **CLOSE)
    assert torch.equal(model.encode_query(TEXTS), ours)
    torch.testing.assert_close(theirs.similarity(ours, ours), model.similarity(ours, ours))
    assert not list((tmp_path / "out").rglob("*.bin"))
    for file in (tmp_path / "out").rglob("*.json"):
        assert "contratile" not in file.read_text(encoding="utf-8"), f"{file.name} needs Contratile"


@pytest.mark.parametrize(
    ("kind", "to", "changes", "told"),
    [
        ("tiny", "open_clip", {}, r"expected open_clip: towers, got tiny. Pass --to transformers"),
        ("tiny", "sentence-transformers", {}, r"expected st: towers, which encode texts, got tiny. Pass --to trans"),
        ("st", "transformers", {}, r"expected tiny or hf: towers, got st:.*Pass --to sentence-transformers"),
        ("open_clip", "transformers", {}, r"expected tiny or hf: towers, got open_clip:.*Pass --to open_clip"),
        ("tiny", "transformers", {"head": "mlp"}, r"no head or a linear one: .*, got --head mlp"),
        ("siglip", "transformers", {"head": "linear"}, r"SiglipModel has no projection .*, got --head linear"),
        ("pair", "transformers", {}, r"read through its pooler, .* Train with --text-pooling pooler"),
        ("open_clip", "open_clip", {"head": "mlp"}, r"open_clip's models end in one matrix, got --head mlp"),
        ("open_clip", "open_clip", {"loss": "ntxent", "views": 2}, r"expected an image and a text encoder"),
        ("st", "sentence-transformers", {"head": "residual"}, r"cannot add their first input, got --head residual"),
    ],
)
def test_what_a_format_has_no_place_for(
    kind: str, to: Any, changes: dict[str, Any], told: str, models: dict[str, str], tmp_path: Path
) -> None:
    run = made(models, kind, tmp_path, **changes)
    with pytest.raises(ValueError, match=told):
        export_run(run, to, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is left behind"


def test_a_folder_with_other_features_is_refused(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before the folder gets its name: here a writer that loses the head."""
    from contratile.models.export import transformers as writer

    run = made(models, "tiny", tmp_path, head="linear")
    monkeypatch.setattr(writer, "through_head", lambda head, projection: projection.clone())
    with pytest.raises(ValueError, match=r"expected the image encoder's own features, got a difference of"):
        export_run(run, "transformers", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_with_files_are_refused(models: dict[str, str], tmp_path: Path) -> None:
    run = made(models, "tiny", tmp_path)
    (tmp_path / "out").mkdir()
    export_run(run, "transformers", tmp_path / "out")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    for out in (tmp_path / "out", tmp_path / "out" / "README.md"):
        with pytest.raises(ValueError, match="out: expected a new or empty folder"):
            export_run(run, "transformers", out)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


# --- a trained run --------------------------------------------------------------------------------------------------


def test_a_trained_run_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Moved, without its data, from another folder, and loaded by a process that cannot import Contratile."""
    table = shapes(tmp_path / "shapes", sizes=1)
    config = small(table, tmp_path / "run", steps=2, save_every=1, eval_every=1, keep=2)
    Trainer(config).run()
    (tmp_path / "away").mkdir()
    shutil.move(tmp_path / "run", tmp_path / "away" / "run")
    shutil.rmtree(tmp_path / "shapes")
    monkeypatch.chdir(tmp_path / "away")
    words = ["export", "run", "--to", "transformers", "--out", "sub/clip", "--weights", "step-00000001"]
    assert main(words) == 0
    assert "sub/clip: weights of step 1, for CLIPModel of transformers" in capsys.readouterr().out
    assert main(words) == 2
    assert "out: expected a new or empty folder" in capsys.readouterr().err

    card = (tmp_path / "away/sub/clip/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: unknown  # fill in\nlibrary_name: transformers\n")
    assert "| data | `pairs.csv` |" in card and "--data pairs.csv" in card and "| weights | step 1 |" in card
    assert "| text_to_image_R@1 | " in card and str(tmp_path) not in card
    assert 'AutoModel.from_pretrained("clip")' in card

    pictures()[2].save("picture.jpg")
    code = (
        card.split("```python\n")[1].split("```")[0].replace("a text", "a red ellipse").replace('"clip"', '"sub/clip"')
    )
    repair = Path(__file__).parents[1] / "repair"
    blocked = "import sys; sys.modules['contratile'] = None\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", blocked + code],
        env={**os.environ, "PYTHONPATH": str(repair), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = ct.load("run", "step-00000001", device="cpu")
    cosine = model.similarity(model.encode_image(["picture.jpg"]), model.encode_text(["a red ellipse"]))
    assert float(done.stdout.strip().split("[[")[1].split("]]")[0]) == pytest.approx(float(cosine), abs=1e-4)


def test_text_pairs_from_the_command_line(models: dict[str, str], tmp_path: Path) -> None:
    config = small(texts(tmp_path), tmp_path / "run", towers=models["st"], pixels=0, lr=None, steps=1)
    Trainer(config).run()
    assert main(["export", str(tmp_path / "run"), "--to", "sentence-transformers", "--out", str(tmp_path / "x")]) == 0
    modules = json.loads((tmp_path / "x" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["Transformer", "Pooling", "Normalize"]
    assert "pipeline_tag: sentence-similarity" in (tmp_path / "x" / "README.md").read_text()


# --- the card -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("icons", "icons"),
        ("/home/me/My Data/pairs.csv", "pairs.csv"),
        ("/home/me/photos/", "photos"),
        ("hf:/home/me/vision+/home/me/text", "hf:vision+text"),
        ("hf:openai/clip-vit-base-patch32", "hf:openai/clip-vit-base-patch32"),
        ("open_clip:ViT-B-32:/w/x.pt", "open_clip:ViT-B-32:x.pt"),
        ("https://host/a/{00..10}.tar?token=secret", "https://host/a/{00..10}.tar"),
        ("pipe:aws s3 cp s3://bucket/x -", "pipe:COMMAND"),
        ("/d/a.tar::/d/b.tar", "a.tar::b.tar"),
    ],
)
def test_names_without_folders(name: str, told: str) -> None:
    assert public_name(name) == told


def test_the_command_has_what_was_chosen(tmp_path: Path) -> None:
    told = command(small(tmp_path / "my pairs.csv", tmp_path / "run", same_id="negative", init_scale=20.0))
    words = told.replace(" \\\n ", "").split()
    assert words[:2] == ["contratile", "train"] and "--same-id" in words and "--init-scale" in words
    assert "--data 'my pairs.csv'" in told and "--out" not in words and str(tmp_path) not in told
    assert command(TrainConfig()) == "contratile train"


def test_the_command_gives_the_same_options() -> None:
    """Of every recipe: what the card tells to run is the run, but for options that say nothing about the model."""
    for name in recipe_names():
        config = load_config(find_recipe(name))
        words = shlex.split(command(config).replace("\\\n", ""))
        want, found = (to_dict(each) for each in (config, parse(words[2:])))
        for options in (*want.values(), *found.values()):
            for option in LEFT_OUT:
                options.pop(option, None)
        assert found == want, name

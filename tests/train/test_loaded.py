"""`contratile.load`: features of paths, pictures, tensors and texts, as the encoders of the run give them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import contratile as ct
from contratile.train import loaded
from contratile.train.load import load_run
from tests.train.runs import sentence_folder, small, unlike_pretrained

TEXTS = ["a red circle", "green", "", "a blue rectangle of another size"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return unlike_pretrained(small(Path("gone.csv"), folder / "run", head="mlp", dim=12))


@pytest.fixture(scope="module")
def model(run: Path) -> Any:
    return ct.load(str(run), device="cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, random = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for number, (w, h) in enumerate([(16, 16), (40, 30), (20, 90), (33, 33), (16, 17)]):
        Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


def test_images_in_every_form(model: Any, run: Path, files: list[Path]) -> None:
    tower = load_run(run).towers.left
    with torch.no_grad():
        expected = tower(tower.prepare([Image.open(file) for file in files]))
    tensors = [torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files]
    images: Any
    for images in (files, [str(file) for file in files], [Image.open(file) for file in files], tensors):
        for batch_size in (2, 64):
            torch.testing.assert_close(model.encode_image(images, batch_size=batch_size), expected)
    stacked = torch.stack([tensors[0], 255 - tensors[0]])
    torch.testing.assert_close(model.encode_image(stacked)[:1], expected[:1])
    mixed = model.encode_image((files[0], tensors[1], Image.open(files[2])))
    torch.testing.assert_close(mixed, expected[:3])


def test_texts_keep_their_order(model: Any, run: Path) -> None:
    tower = load_run(run).towers.right
    with torch.no_grad():
        expected = tower(tower.prepare(TEXTS))
    for batch_size in (1, 3, 100):
        torch.testing.assert_close(model.encode_text(TEXTS, batch_size=batch_size), expected)


def test_normalised_unless_asked(model: Any, files: list[Path]) -> None:
    for encode, samples in ((model.encode_image, files), (model.encode_text, TEXTS)):
        unit, raw = encode(samples), encode(samples, normalize=False)
        torch.testing.assert_close(unit.norm(dim=1), torch.ones(len(samples)))
        assert ((raw.norm(dim=1) - 1).abs() > 0.01).all()
        torch.testing.assert_close(torch.nn.functional.normalize(raw, dim=1), unit)
        assert unit.dtype == torch.float32 and not unit.requires_grad and unit.shape[1] == model.width == 12


def test_nothing_to_encode(model: Any) -> None:
    assert model.encode_image([]).shape == model.encode_text([]).shape == (0, 12)


def test_similarity_is_the_cosine(model: Any, files: list[Path]) -> None:
    images, texts = model.encode_image(files), model.encode_text(TEXTS)
    found = model.similarity(texts * 3, images)
    torch.testing.assert_close(found, texts @ images.T)
    scores, places = ct.nearest(texts, images, 2)
    torch.testing.assert_close(scores, found.topk(2).values)
    assert torch.equal(places, found.topk(2).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_similarity_of_very_long_and_very_short_rows(model: Any, dtype: torch.dtype) -> None:
    """Squares of the largest numbers overflow, those of the smallest vanish; a cosine does not depend on the length."""
    torch.manual_seed(0)
    a, b = torch.randn(3, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    size = torch.finfo(dtype).max / 16
    lengths = torch.tensor([[size], [1], [torch.finfo(dtype).tiny * 1024]], dtype=dtype)
    found = model.similarity(a * lengths, b * torch.tensor(size, dtype=dtype))
    cosines = torch.nn.functional.cosine_similarity(a.double()[:, None], b.double()[None], dim=-1)
    torch.testing.assert_close(found.double(), cosines, atol=16 * torch.finfo(dtype).eps, rtol=0)
    assert model.similarity(torch.zeros(1, 8, dtype=dtype), b).tolist() == [[0.0] * 4]
    assert model.similarity(a[:0], b).shape == (0, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_similarity_of_what_has_no_cosine(model: Any, value: float) -> None:
    b = torch.ones(3, 8)
    b[1, 2] = value
    with pytest.raises(ValueError, match=r"row 1 of b: expected finite numbers, got (nan|inf)"):
        model.similarity(torch.ones(2, 8), b)


def test_broken_files_are_named(model: Any, files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"image 1, .*text\.png: expected a picture, got not an image in a known"):
        model.encode_image([files[0], tmp_path / "text.png"])
    with pytest.raises(ValueError, match=r"image 0, nowhere\.png: expected a picture, got no such file"):
        model.encode_image(["nowhere.png"])


@pytest.mark.parametrize(
    ("images", "error", "told"),
    [
        ("a.png", TypeError, r"images: expected a list, got str. Pass a list: \[\"a.png\"\]"),
        ([3], TypeError, "image 0: expected an image, got int"),
        (torch.zeros(2, 3, 4, 4), TypeError, "image 0: expected a uint8 tensor, got torch.float32"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), ValueError, r"images: expected a tensor \[n, 3, H, W\], got \[3, 4"),
        ([torch.zeros(4, 4, 3, dtype=torch.uint8)], ValueError, r"image 0: expected shape \[3, H, W\], got \[4, 4, 3"),
        (torch.zeros(2, 3, 0, 5, dtype=torch.uint8), ValueError, r"image 0: expected an image with pixels, got shape"),
        (
            [Image.new("RGB", (9, 9)), Image.new("RGB", (0, 5))],
            ValueError,
            "image 1: expected a picture, got image of 0 x 5",
        ),
        ([Image.new("L", (5, 0))], ValueError, "image 0: expected a picture, got image of 5 x 0 pixels"),
        ([Image.new("RGBA", (0, 0))], ValueError, "image 0: expected a picture, got image of 0 x 0 pixels"),
    ],
)
def test_what_is_no_image(images: Any, error: type[Exception], told: str, model: Any) -> None:
    with pytest.raises(error, match=told):
        model.encode_image(images)


def test_what_is_no_list_of_texts(model: Any) -> None:
    with pytest.raises(TypeError, match="texts: expected a list, got str"):
        model.encode_text("one text")
    with pytest.raises(TypeError, match="text 1: expected a str, got int"):
        model.encode_text(["a", 3])
    with pytest.raises(
        ValueError, match=r"text 2: .*, got the lone surrogate '\\ud800' at character 1\. .*\"replace\""
    ):
        model.encode_text(["a", "grün", "x\ud800y"])
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        model.encode_text(["a"], batch_size=0)


def test_sides_that_a_run_does_not_have(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"encode_query: expected a run on pairs of texts, .* encode_image and encode"):
        model.encode_query(["a"])
    views = unlike_pretrained(small(Path("x.csv"), tmp_path / "views", loss="ntxent", views=2))
    with pytest.raises(ValueError, match="encode_text: expected a run with a text encoder, got one without"):
        ct.load(views).encode_text(["a"])
    towers = f"st:{sentence_folder(tmp_path / 'bert')}"
    pairs = ct.load(unlike_pretrained(small(Path("x.csv"), tmp_path / "words", towers=towers, pixels=0)), device="cpu")
    with pytest.raises(ValueError, match="encode_image: expected a run with an image encoder, got texts on both"):
        pairs.encode_image([])
    assert torch.equal(pairs.encode_query(["a"]), pairs.encode_text(["a"]))


def test_weights_and_device(run: Path, model: Any) -> None:
    assert ct.load(run, "last").step == ct.load(run, "step-00000007").step == 7
    assert model.device == torch.device("cpu") and model.to("cpu") is model
    assert repr(model) == "Model(tiny, image and text, 12 features, step 7, cpu)"
    with pytest.raises(ValueError, match=r"checkpoint .*: expected a folder, got nothing there"):
        ct.load(run, "step-00000008")
    with pytest.raises(ValueError, match=r"run: expected a folder with config\.toml"):
        ct.load(run / "checkpoints")


@pytest.mark.parametrize("device", ["banana", "meta", "cuda:99", 3.5])
def test_devices_that_are_not_there(run: Path, model: Any, device: Any) -> None:
    told = r"device: expected a device of this machine \(cpu.*\), got .*\. Leave it out for the fastest one"
    with pytest.raises(ValueError, match=told):
        ct.load(run, device=device)
    with pytest.raises(ValueError, match=told):
        model.to(device)


def test_progress(model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for, or many texts and a terminal."""
    model.encode_text(TEXTS, progress=True)
    assert "encoding" in capsys.readouterr().err
    monkeypatch.setattr(loaded, "LONG", 4)
    model.encode_text(TEXTS)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    model.encode_text(TEXTS, progress=False)
    model.encode_text(TEXTS[:3])
    assert capsys.readouterr().err == ""
    model.encode_text(TEXTS)
    assert "encoding" in capsys.readouterr().err


def test_a_misspelt_name_is_suggested() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'loda'.*load"):
        ct.loda  # noqa: B018

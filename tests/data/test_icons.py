"""Icons: the names, the split, the drawing, the cache."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contratile.data import icons as module
from contratile.data.files import made_once
from contratile.data.icons import Icon, Icons, draw_icon, families
from contratile.data.sample import Broken

SQUARE = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10"><path d="M0 0h10v5H0z"/></svg>'
WIDE = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 10"><path d="M0 0h20v10H0z"/></svg>'


@pytest.mark.parametrize(
    ("key", "caption"),
    [
        ("material/arrow-left-bold", "arrow left bold"),
        ("octicons/alert-16", "alert"),
        ("octicons/number-24", "number"),
        ("material/dice-6", "dice 6"),
        ("simple/github", "github logo"),
        ("fontawesome/brands/github-alt", "github alt logo"),
        ("fontawesome/solid/star", "star"),
        ("fontawesome/regular/star", "star outline"),
    ],
)
def test_captions(key: str, caption: str) -> None:
    assert Icon(key, "").caption == caption


def test_families_join_names_and_drawings() -> None:
    icons = [
        Icon("material/close", "cross"),
        Icon("fontawesome/solid/xmark", "cross"),
        Icon("fontawesome/solid/times", "other cross"),
        Icon("octicons/times-16", "thin cross"),
        Icon("material/home", "house"),
        Icon("simple/xmark", "brand"),
        Icon("fontawesome/regular/home", "empty house"),
        Icon("material/home-outline", "thin house"),
        Icon("material/times", "cross"),
    ]
    assert families(icons) == [*["close"] * 4, "home", "close", "home", "home", "close"]


def write(folder: Path, **drawings: str) -> Path:
    for name, svg in drawings.items():
        file = folder / f"material/{name}.svg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(svg)
    return folder


def test_drawn_black_on_white_in_proportion() -> None:
    half = draw_icon(SQUARE, 10, "a")
    assert half.shape == (10, 10) and (half[:5] == 0).all() and (half[5:] == 255).all()
    wide = draw_icon(WIDE, 20, "a")
    assert (wide[5:15] == 0).all() and (wide[:5] == 255).all() and (wide[15:] == 255).all()


def test_a_damaged_drawing_names_its_file() -> None:
    with pytest.raises(Broken, match="set/name: not an SVG drawing"):
        draw_icon("<svg", 8, "set/name")


def test_drawn_once_into_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "icons", home=SQUARE, bus=WIDE)
    cache = tmp_path / "cache"
    icons = Icons("train", size=8, folder=folder, cache=cache, test_share=None)
    assert [icons[i].right for i in range(len(icons))] == ["bus", "home"]
    assert list(icons.texts()) == ["bus", "home"]
    assert icons[1].left.size == (8, 8) and icons[1].left.mode == "RGB"  # type: ignore[union-attr]
    (file,) = cache.glob("*.safetensors")
    assert not list(cache.glob("*.part")) and not list(cache.glob(".*.part"))
    monkeypatch.setattr(module, "draw_icon", None)
    assert len(Icons("train", size=8, folder=folder, cache=cache, test_share=None)) == 2
    assert "-8px-" in file.name


def test_an_interrupted_drawing_leaves_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path / "icons", home=SQUARE, bus="<svg")
    with pytest.raises(Broken, match="material/bus"):
        Icons("train", size=8, folder=folder, cache=tmp_path / "cache")

    def half(draft: Path) -> None:
        draft.write_text("half a file")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once(tmp_path / "cache/file", half)
    assert all(file.suffix == ".lock" for file in (tmp_path / "cache").iterdir())


def test_pickled_without_its_pixels(tmp_path: Path) -> None:
    folder = write(tmp_path / "icons", home=SQUARE)
    icons = Icons("train", size=64, folder=folder, cache=tmp_path / "cache", test_share=None)
    first = icons[0]
    data = pickle.dumps(icons)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert again[0].right == first.right and again[0].left.tobytes() == first.left.tobytes()  # type: ignore[union-attr]


def test_several_processes_at_once(tmp_path: Path) -> None:
    """All get the same pictures; one of them drew."""
    folder = write(tmp_path / "icons", **{f"icon-{i}": SQUARE for i in range(300)})
    code = (
        "import sys; from pathlib import Path; from contratile.data import icons as m\n"
        "draw, drawn = m.draw_icon, []\n"
        "m.draw_icon = lambda *a: drawn.append(1) or draw(*a)\n"
        "icons = m.Icons('train', size=16, folder=Path(sys.argv[1]), cache=Path(sys.argv[2]), test_share=None)\n"
        "print(len(icons), len(drawn), sum(icons[299].left.tobytes()))\n"
    )
    words = [sys.executable, "-c", code, str(folder), str(tmp_path / "cache")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    lines = [run.communicate(timeout=600)[0].split() for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert {line[0] for line in lines} == {"300"} and len({line[2] for line in lines}) == 1
    assert sorted(int(line[1]) for line in lines) == [0, 300]


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache: expected a folder to write to, got .*/cache .*Choose another folder"):
        Icons("train", folder=write(tmp_path / "icons", home=SQUARE), cache=tmp_path / "file/cache")


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"mkdocs-material with its icons, found none\. Install it: pip install mkdocs"
    ):
        Icons("train", cache=tmp_path)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Icons, Icons]:
    cache = tmp_path_factory.mktemp("icons")
    return Icons("train", size=16, cache=cache), Icons("test", size=16, cache=cache)


def test_the_package_has_thousands(real: tuple[Icons, Icons]) -> None:
    train, test = real
    assert len(train) + len(test) > 14_000
    assert 0.08 < len(test) / (len(train) + len(test)) < 0.12
    captions = [icon.caption for _, icon in train._chosen]
    assert {"arrow left bold", "github logo", "star outline"} & set(captions)
    # Hardly any picture is blank: the drawings were understood.
    pixels = train._pixels.numpy().reshape(len(train._pixels), -1)
    assert (np.ptp(pixels, axis=1) > 100).mean() > 0.99


def test_no_test_name_or_drawing_in_training(real: tuple[Icons, Icons]) -> None:
    train, test = ([icon for _, icon in split._chosen] for split in real)
    for what in ("name", "caption", "drawing", "key"):
        assert not {getattr(icon, what) for icon in train} & {getattr(icon, what) for icon in test}, what


def test_the_split_does_not_depend_on_the_size(tmp_path: Path) -> None:
    """Drawings are compared as files: at few pixels different ones look the same."""
    drawings = {f"icon-{i}": SQUARE.replace("h10v5", f"h10v5.{i:03d}") for i in range(100)}
    folder = write(tmp_path / "icons", **drawings)
    keys = [
        [icon.key for _, icon in Icons("test", size=size, folder=folder, cache=tmp_path / "cache")._chosen]
        for size in (2, 30)
    ]
    assert keys[0] == keys[1] and 2 < len(keys[0]) < 25

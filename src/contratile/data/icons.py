"""Icons and their names: about 14,000 image-text pairs from the mkdocs-material package.

    Icons("train", size=32)[0]      # an RGB image, black on white; "arrow left bold"; "material/arrow-left-bold"

Captions are the file names with hyphens replaced by spaces and without sizes ("alert-16"). A word is added if only the
folder implies it: "logo" for brands, "outline" for Font Awesome's regular style.

Icons that share a name, a caption or a drawing are in the same split, so that neither the name nor the drawing of a
test icon occurs in training: the sets repeat names, and some drawings have several names.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from contratile.data.files import cache_folder, made_once
from contratile.data.images import decode
from contratile.data.sample import Broken, Kinds, Sample, Split, in_split, need
from contratile.errors import bad_value

RECIPE = 1
"""Part of the cache file's name. Increase it if the drawing of icons or their list changes."""

ADDED = {"simple": "logo", "fontawesome/brands": "logo", "fontawesome/regular": "outline"}
T = TypeVar("T")


class Icon(NamedTuple):
    """An icon in the cache file."""

    key: str
    """Path below the icons' folder without suffix: set/name."""

    drawing: str
    """Digest of the SVG file."""

    @property
    def name(self) -> str:
        """The name in words."""
        folder, _, stem = self.key.rpartition("/")
        if folder == "octicons":
            stem = re.sub(r"-\d+$", "", stem)
        return " ".join(stem.lower().replace("_", "-").split("-"))

    @property
    def caption(self) -> str:
        added = ADDED.get(self.key.rpartition("/")[0])
        return f"{self.name} {added}" if added else self.name


class Icons:
    """An indexed source: the icons of one split with their names.

    Args:
        split: "train" or "test".
        size: Height and width in pixels.
        test_share: Share of the icons in the test split; None: both splits have all icons.
        cache: Folder for the drawn icons; None: contratile in the user's cache folder.
        folder: SVG files to use instead of the package's: set/name.svg.

    Raises:
        ImportError: mkdocs-material or resvg-py is missing.
    """

    kinds: Kinds = ("image", "text")

    def __init__(
        self,
        split: Split,
        *,
        size: int = 32,
        test_share: float | None = 0.1,
        cache: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self.name = f"icons of {size} x {size} pixels ({split})"
        self._file = _rasterised(folder, size, cache)
        icons = [Icon(*facts) for facts in json.loads(_metadata(self._file))]
        self._chosen = [
            (i, icon)
            for i, (icon, family) in enumerate(zip(icons, families(icons), strict=True))
            if in_split(family, split, test_share)
        ]

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Sample:
        row, icon = self._chosen[index]
        return Sample(Image.fromarray(self._pixels[row].numpy()).convert("RGB"), icon.caption, icon.key)

    def texts(self) -> Iterator[str]:
        return (icon.caption for _, icon in self._chosen)

    @cached_property
    def _pixels(self) -> Tensor:
        """Grey values [N, size, size], memory-mapped."""
        return need("safetensors.torch").load_file(self._file)["pixels"]  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """Without the pixels: workers map the file themselves."""
        return {name: value for name, value in vars(self).items() if name != "_pixels"}


def families(icons: Iterable[Icon]) -> list[str]:
    """For each icon, the first name among all icons connected to it by equal names, captions or drawings."""
    icons = list(icons)
    parent: dict[str, str] = {}

    def top(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = name = parent[parent[name]]
        return name

    drawn_as: dict[str, str] = {}
    for icon in icons:
        for other in (icon.caption, drawn_as.setdefault(icon.drawing, icon.name)):
            a, b = top(icon.name), top(other)
            parent[max(a, b)] = min(a, b)
    return [top(icon.name) for icon in icons]


def icons_folder() -> Path:
    """The folder of SVG files in the installed mkdocs-material package, which is not imported."""
    spec = find_spec("material")
    for place in spec.submodule_search_locations or () if spec else ():
        if (folder := Path(place) / "templates" / ".icons").is_dir():
            return folder
    remedy = "Install it: pip install mkdocs-material resvg-py."
    raise ImportError(f"icons: expected the package mkdocs-material with its icons, found none. {remedy}")


def _rasterised(folder: Path | None, size: int, cache: Path | None) -> Path:
    """The cache file with pixels [N, size, size] and a list of icons; created if it does not exist."""
    if folder is None:
        folder, edition = icons_folder(), version("mkdocs-material")
    else:
        edition = _digest(str(folder.resolve()).encode())
    try:
        renderer = version("resvg-py")
    except PackageNotFoundError:
        renderer = "none"  # fine if the file exists; otherwise `need` raises
    path = cache_folder(cache) / f"icons-{edition}-{size}px-resvg{renderer}-r{RECIPE}.safetensors"
    return made_once(path, lambda draft: _rasterise(folder, size, draft))


def _rasterise(folder: Path, size: int, draft: Path) -> None:
    """Draw all icons, at about a millisecond each."""
    need("resvg_py", "demo")
    files = sorted(folder.glob("*/**/*.svg"))
    if not files:
        bad_value(
            "icons", expected=f"SVG files in the folders of {folder}", got="none", remedy="Reinstall the package."
        )
    pixels = np.empty((len(files), size, size), dtype=np.uint8)
    facts = []
    for place, file in zip(pixels, _progress(files, f"drawing icons at {size} px, once"), strict=True):
        svg = file.read_text()
        key = file.relative_to(folder).with_suffix("").as_posix()
        place[:] = draw_icon(svg, size, key)
        facts.append(Icon(key, _digest(svg.encode())))
    tensors = {"pixels": torch.from_numpy(pixels)}
    need("safetensors.torch").save_file(tensors, draft, metadata={"icons": json.dumps(facts)})


def draw_icon(svg: str, size: int, key: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Draw an SVG as grey pixels [size, size], black on white, keeping its proportions."""
    sized = re.sub(r"<svg\b", f'<svg width="{size}" height="{size}"', svg, count=1)
    try:
        png = need("resvg_py", "demo").svg_to_bytes(svg_string=sized, skip_system_fonts=True)
    except ValueError as error:
        raise Broken(key, f"not an SVG drawing ({error})") from None
    return np.asarray(decode(bytes(png), key).convert("L"))


def _metadata(file: Path) -> str:
    with need("safetensors").safe_open(file, framework="pt") as opened:
        return str(opened.metadata()["icons"])


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _progress(items: list[T], what: str) -> Iterator[T]:
    """Iterate with a progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        return iter(items)
    rich = need("rich.progress")
    return iter(rich.track(items, description=what, console=need("rich.console").Console(stderr=True), transient=True))

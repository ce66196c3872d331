"""A trained model to use from Python: paths, pictures and texts in, features out.

    import contratile as ct

    model = ct.load("runs/icons")
    images = model.encode_image(["a.png", "b.png"])              # [2, D], unit length, on the CPU
    texts = model.encode_text(["battery charging"])
    model.similarity(texts, images)                              # cosines; for large sets ct.nearest(texts, images, k)

Needs only the folder of the run, and the pretrained model it started from, if there was one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from contratile.errors import bad_type, bad_value, check_count, check_features
from contratile.models.encoding import best_device, evaluating, to_device, usable_device
from contratile.models.towers import Tower, Towers
from contratile.train.config import TrainConfig
from contratile.train.load import load_run

if TYPE_CHECKING:
    from PIL.Image import Image

    Picture: TypeAlias = "str | Path | Image | Tensor"

LONG = 1000
"""Lists from this length on get a progress bar, if stderr is a terminal."""


class Model:
    """The encoders of a run. `contratile.load` makes it.

    Attributes:
        towers: Both encoders, in evaluation mode.
        config: The options of the run.
        step: Step of the checkpoint.
        width: Number of features.
    """

    def __init__(self, towers: Towers, config: TrainConfig, step: int) -> None:
        self.towers, self.config, self.step = towers, config, step
        self.width = towers.left.width

    def __repr__(self) -> str:
        kinds = "image" if self._views else " and ".join(self.towers.kinds)
        return f"Model({self.config.towers.towers}, {kinds}, {self.width} features, step {self.step}, {self.device})"

    @property
    def device(self) -> torch.device:
        """Where the encoders run."""
        return self.towers.log_scale.device

    def to(self, device: str | torch.device) -> Model:
        """Move the encoders to a device and return the model."""
        self.towers.to(usable_device(device))
        return self

    def encode_image(
        self,
        images: Sequence[Picture] | Tensor,
        *,
        normalize: bool = True,
        batch_size: int = 64,
        progress: bool | None = None,
    ) -> Tensor:
        """Encode images.

        Args:
            images: Paths, Pillow images, or uint8 tensors [3, H, W], in a list; or one uint8 tensor [n, 3, H, W]. They
                are scaled and center-cropped to the size of the encoder. Transparent parts become white.
            normalize: Scale features to unit length.
            batch_size: Images to encode at a time.
            progress: Show a progress bar; None: for 1,000 images or more, if stderr is a terminal.

        Returns:
            Features [n, D], float32 on the CPU.

        Raises:
            ValueError: A file cannot be read (the message names it), or the run has no image encoder.
            TypeError: Something in the list is not an image.
        """
        tower = self.towers.left
        if tower.kind != "image":
            remedy = "The run trained on pairs of texts: use encode_query and encode_document."
            bad_value("encode_image", expected="a run with an image encoder", got="texts on both sides", remedy=remedy)
        if isinstance(images, Tensor):
            if images.dim() != 4:
                remedy = "Add a dimension, image[None], or pass a list of tensors."
                bad_value("images", expected="a tensor [n, 3, H, W]", got=list(images.shape), remedy=remedy)
        else:
            _check_list("images", images, remedy='Pass a list: ["a.png"].')
        edge: int = tower.prepare.edge  # type: ignore[attr-defined]  # of Squares
        found = [torch.empty(0, self.width)]
        for rows in self._batches(len(images), batch_size, progress):
            # Cropped one by one: a batch of large pictures need not fit into memory.
            squares = [_square(images[row], f"image {row}", edge) for row in rows]
            found.append(self._encode(tower, squares, normalize))
        return torch.cat(found)

    def encode_text(
        self, texts: Sequence[str], *, normalize: bool = True, batch_size: int = 256, progress: bool | None = None
    ) -> Tensor:
        """Encode texts.

        Args:
            texts: A list of texts.
            normalize: Scale features to unit length.
            batch_size: Texts to encode at a time. They are sorted by length first, so that little is padded.
            progress: Show a progress bar; None: for 1,000 texts or more, if stderr is a terminal.

        Returns:
            Features [n, D], float32 on the CPU, in the order of the texts.

        Raises:
            ValueError: The run has no text encoder, or a text holds half a character (a lone surrogate; the message
                says which text).
            TypeError: Something in the list is not a text.
        """
        return self._texts("encode_text", self.towers.right, texts, normalize, batch_size, progress)

    def encode_query(
        self, texts: Sequence[str], *, normalize: bool = True, batch_size: int = 256, progress: bool | None = None
    ) -> Tensor:
        """Encode texts of the left column of text pairs. The arguments are those of `encode_text`."""
        self._check_pairs("encode_query")
        return self._texts("encode_query", self.towers.left, texts, normalize, batch_size, progress)

    def encode_document(
        self, texts: Sequence[str], *, normalize: bool = True, batch_size: int = 256, progress: bool | None = None
    ) -> Tensor:
        """Encode texts of the right column of text pairs. The arguments are those of `encode_text`."""
        self._check_pairs("encode_document")
        return self._texts("encode_document", self.towers.right, texts, normalize, batch_size, progress)

    def similarity(self, a: Tensor, b: Tensor) -> Tensor:
        """Cosines between all rows of two sets of features: [n, m], without the learned scale.

        Rows may have any length; a row of zeros has the cosine 0 with all others. All n x m cosines are held in memory;
        `contratile.nearest` finds the nearest rows of large sets without them.

        Raises:
            ValueError: The shapes do not fit, or a row holds NaN or an infinite number.
        """
        check_features({"a": a, "b": b}, empty=True)
        return _unit("a", a) @ _unit("b", b).T

    @property
    def _views(self) -> bool:
        return self.towers.left is self.towers.right and self.towers.left.kind == "image"

    def _check_pairs(self, call: str) -> None:
        if self.towers.kinds != ("text", "text"):
            remedy = "Use encode_image." if self._views else "Use encode_image and encode_text."
            bad_value(call, expected="a run on pairs of texts", got="one with images", remedy=remedy)

    def _texts(
        self, call: str, tower: Tower, texts: Sequence[str], normalize: bool, batch_size: int, progress: bool | None
    ) -> Tensor:
        if tower.kind != "text":
            remedy = "The run trained on views of images (--views 2): use encode_image."
            bad_value(call, expected="a run with a text encoder", got="one without", remedy=remedy)
        _check_list("texts", texts, remedy='Pass a list: ["a text"].')
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                bad_type(f"text {row}", expected="a str", got=type(text).__name__, remedy="Pass a list of str.")
            if not text.isascii():
                _check_unicode(text, f"text {row}")
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        found = torch.empty(len(texts), self.width)
        for rows in self._batches(len(texts), batch_size, progress):
            places = order[rows.start : rows.stop]
            found[places] = self._encode(tower, [texts[place] for place in places], normalize)
        return found

    @torch.no_grad()
    def _encode(self, tower: Tower, samples: list[Any], normalize: bool) -> Tensor:
        with evaluating(tower):
            features = tower.head(tower.backbone(to_device(tower.prepare(samples), self.device))).float()
        return (F.normalize(features, dim=-1) if normalize else features).cpu()

    def _batches(self, n: int, size: int, progress: bool | None) -> Iterator[range]:
        """Ranges of rows, with a progress bar if there are many."""
        check_count("batch_size", size, least=1)
        batches = [range(start, min(n, start + size)) for start in range(0, n, size)]
        if not (n >= LONG and sys.stderr.isatty() if progress is None else progress):
            yield from batches
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("encoding", total=n)
            for rows in batches:
                yield rows
                bar.advance(task, len(rows))


def load(run: str | Path, weights: str = "best", *, device: str | torch.device | None = None) -> Model:
    """Load a trained model to encode images and texts.

    The folder may come from anyone: no code in it is executed. The training data is not needed.

    Args:
        run: Folder of a run, as `contratile train --out` wrote it.
        weights: Which checkpoint: "best", "last" or a step such as "step-00000100".
        device: Where to encode; None: the accelerator if there is one, else the CPU.

    Returns:
        The model, with `encode_image`, `encode_text`, `encode_query`, `encode_document` and `similarity`.

    Raises:
        ValueError: There is no such run, checkpoint or device; or the checkpoint is damaged, or its weights are NaN or
            infinite.
        ImportError: A package that the encoders come from is missing or broken.

    Examples:
        >>> model = ct.load("runs/icons")                                                   # doctest: +SKIP
        >>> images = model.encode_image(["a.png", "b.png"])                                 # doctest: +SKIP
        >>> model.similarity(model.encode_text(["battery charging"]), images)               # doctest: +SKIP
    """
    place = best_device() if device is None else usable_device(device)
    towers, config, step = load_run(Path(run), weights)
    return Model(towers.to(place), config, step)


def _unit(name: str, features: Tensor) -> Tensor:
    """Rows of unit length. The largest value becomes 1 first: squares of 1e30 overflow, those of 1e-30 vanish."""
    largest = features.abs().amax(dim=-1, keepdim=True)
    wrong = (~largest.isfinite()).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        bad_value(f"row {row} of {name}", expected="finite numbers", got=float(largest[row]), remedy="Leave it out.")
    scaled = features / largest.masked_fill(largest == 0, 1)
    lengths: Tensor = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / lengths.clamp(min=1)  # rows below 1 are zero


def _check_list(name: str, given: object, *, remedy: str) -> None:
    if isinstance(given, str | bytes | Path) or not isinstance(given, Sequence):
        bad_type(name, expected="a list", got=type(given).__name__, remedy=remedy)


def _check_unicode(text: str, name: str) -> None:
    """Refuse half a character, as training does: no tokenizer takes it, and a replacement would be another text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"the lone surrogate {text[error.start]!r} at character {error.start}"
        remedy = 'Decode the text correctly, or replace it: text.encode("utf-8", "replace").decode().'
        bad_value(name, expected="text that UTF-8 can hold", got=got, remedy=remedy)


def _square(picture: Any, name: str, edge: int) -> Image:
    """The center square of a path, a Pillow image or a tensor."""
    from PIL import Image

    from contratile.data.images import decode
    from contratile.data.resize import center_square
    from contratile.data.sample import Broken

    if isinstance(picture, Tensor):
        if picture.dtype != torch.uint8:
            remedy = "Pass the pixels before normalisation, 0 to 255: (image * 255).round().to(torch.uint8)."
            bad_type(name, expected="a uint8 tensor", got=picture.dtype, remedy=remedy)
        if 0 in picture.shape[1:]:
            got = list(picture.shape)
            bad_value(name, expected="an image with pixels", got=f"shape {got}", remedy="Leave it out.")
        if picture.dim() != 3 or picture.shape[0] != 3:
            bad_value(name, expected="shape [3, H, W]", got=list(picture.shape), remedy="Pass RGB, channels first.")
        image = Image.fromarray(picture.permute(1, 2, 0).contiguous().cpu().numpy())
    elif isinstance(picture, str | Path | Image.Image):
        source = picture if isinstance(picture, Image.Image) else Path(picture)
        named = name if isinstance(picture, Image.Image) else f"{name}, {picture}"
        try:
            image = decode(source, named)
        except Broken as error:
            bad_value(named, expected="a picture", got=error.reason, remedy="Check the file, or leave it out.")
    else:
        remedy = "Pass paths, Pillow images or uint8 tensors [3, H, W]."
        bad_type(name, expected="an image", got=type(picture).__name__, remedy=remedy)
    return center_square(image, edge)

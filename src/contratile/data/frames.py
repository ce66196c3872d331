"""Brings images to the size of a tower while they are decoded: center squares, or random views.

    frames = Frames(224, augment=Augment(config), seeds=(seed, epoch), views=2)
    with framed(frames):
        image = decode(file, "cats/3.jpg")                 # the first view, 224 x 224
    frames.views_of(image, "cats/3.jpg")                   # both

The crop is drawn before the file is decoded, from its size alone. So a large JPEG is decoded at a fraction of its size,
and the views of an image share one decoding.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from PIL import Image

from contratile.data.augment import Augment, Box, Changes
from contratile.data.sample import random_numbers

DRAFT = 3
"""JPEGs are decoded at 1/2, 1/4 or 1/8 of their size if that is still at least DRAFT times the target size: as good as
decoding them whole, in a fraction of the time and memory."""


class Frames:
    """Brings the images of one sample to the size of a tower: center squares, or random views of them.

    Args:
        edge: Height and width in pixels.
        augment: Random changes; None: the center square.
        seeds: Start of the random numbers of a view; the key of the image and the number of the view follow.
        views: Views of each image.
        plain_first: Leave the first view as it is, to compare the others with it.
    """

    def __init__(
        self,
        edge: int,
        *,
        augment: Augment | None = None,
        seeds: tuple[int, ...] = (),
        views: int = 1,
        plain_first: bool = False,
    ) -> None:
        self.edge, self.augment, self.seeds, self.views, self.plain_first = edge, augment, seeds, views, plain_first
        self._made: dict[int, tuple[Image.Image, ...]] = {}

    def draft(self, image: Image.Image, key: str) -> None:
        """Before an image is decoded: choose a size at which all its views still have enough pixels."""
        whole = image.size
        self._drawn = [self._changes(whole, key, view) for view in range(self.views)]
        short = min(min(whole) if x is None else min(x.box[2] - x.box[0], x.box[3] - x.box[1]) for x in self._drawn)
        share = DRAFT * self.edge / max(1, short)
        if share < 1:
            image.draft(None, (math.ceil(whole[0] * share), math.ceil(whole[1] * share)))
        factors = image.size[0] / whole[0], image.size[1] / whole[1]
        self._drawn = [x and x._replace(box=_times(x.box, factors, image.size)) for x in self._drawn]

    def frame(self, image: Image.Image, key: str, *, drafted: bool = False) -> Image.Image:
        """The first view of a decoded RGB image; `views_of` has them all."""
        if not drafted:
            self._drawn = [self._changes(image.size, key, view) for view in range(self.views)]
        made = []
        for changes in self._drawn:
            if changes is None or self.augment is None:
                square = center_square(image, self.edge)
                made.append(square.copy() if square is image else square)
            else:
                made.append(self.augment.apply(image, changes, self.edge))
        self._made[id(made[0])] = tuple(made)
        return made[0]

    def views_of(self, image: Image.Image, key: str) -> tuple[Image.Image, ...]:
        """All views of an image that `decode` returned, or that its source made in its own way."""
        if id(image) not in self._made:
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            return self._made[id(self.frame(rgb, key))]
        return self._made[id(image)]

    def _changes(self, size: tuple[int, int], key: str, view: int) -> Changes | None:
        if self.augment is None or (self.plain_first and view == 0):
            return None
        return self.augment.draw(size, random_numbers(*self.seeds, key, view))


def _times(box: Box, factors: tuple[float, float], size: tuple[int, int]) -> Box:
    """A box at another size of its image."""
    x, y = factors
    return box[0] * x, box[1] * y, min(box[2] * x, size[0]), min(box[3] * y, size[1])


_frames: ContextVar[Frames | None] = ContextVar("frames", default=None)


def current_frames() -> Frames | None:
    """What `framed` was entered with."""
    return _frames.get()


@contextmanager
def framed(frames: Frames | None) -> Iterator[None]:
    """Context in which `decode` returns images as `frames` makes them; None: as they are."""
    token = _frames.set(frames)
    try:
        yield
    finally:
        _frames.reset(token)


WIDEST = 4
"""Up to this aspect ratio an image is resized as a whole, then cropped: to the bit what CLIP's preprocessing does."""


def center_square(image: Image.Image, size: int) -> Image.Image:
    """Scale the shorter side of an image to `size` and crop the center, as transformers does for CLIP with Pillow."""
    if image.size == (size, size):
        return image
    short = min(image.size)
    width, height = (size * side // short for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    if max(image.size) <= WIDEST * short:
        whole = image.resize((width, height), Image.Resampling.BICUBIC)
        return whole.crop((left, top, left + size, top + size)) if width != height else whole
    # Resize only the part that is kept: scaling up a whole panorama could take gigabytes.
    box = (left / width, top / height, (left + size) / width, (top + size) / height)
    part = tuple(share * image.size[i % 2] for i, share in enumerate(box))
    return image.resize((size, size), Image.Resampling.BICUBIC, box=part)  # type: ignore[arg-type]

"""Brings images to the size of a tower while they are decoded: center squares, or random views.

    frames = Frames(224, augment=Augment(config), seeds=(seed, epoch), views=2)
    with framed(frames):
        image = decode(file, "cats/3.jpg")                 # the first view, 224 x 224
    frames.views_of(image, "cats/3.jpg")                   # both

The crop is drawn before the file is decoded, from its size alone. So a large JPEG is decoded at a fraction of its size,
and the views of an image share one decoding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from PIL import Image

from contratile.data.augment import Augment, Changes
from contratile.data.resize import GAP, PLAIN_GAP, center_square, decoded_smaller, shrunk_box
from contratile.data.sample import random_numbers


class Frames:
    """Brings the images of one sample to the size of a tower: center squares, or random views of them.

    Args:
        edge: Height and width in pixels.
        augment: Random changes; None: the center square.
        seeds: Start of the random numbers of a view; the key of the image and the number of the view follow.
        views: Views of each image.
        plain_first: Leave the first view as it is, to compare the others with it.
        second: Height and width for a second model, which sees the first view too; 0: there is none.
    """

    def __init__(
        self,
        edge: int,
        *,
        augment: Augment | None = None,
        seeds: tuple[int, ...] = (),
        views: int = 1,
        plain_first: bool = False,
        second: int = 0,
    ) -> None:
        self.edge, self.augment, self.seeds, self.views, self.plain_first = edge, augment, seeds, views, plain_first
        self.second = second
        self._made: dict[int, tuple[Image.Image, ...]] = {}

    def draft(self, image: Image.Image, key: str) -> int:
        """Before an image is decoded: choose a size at which all its views still have enough pixels.

        Returns:
            By how much each side is divided: 1, 2, 4 or 8.
        """
        size = self._whole = image.size
        self._drawn = self._draw(size, key)
        if self.augment is not None and self.augment.strengths.interpolation == "nearest":
            return 1  # it takes pixels as they are, and the decoder would average them
        factor = decoded_smaller(image, min(self._spare(size, changes) for changes in self._drawn))
        if factor > 1:
            self._drawn = [x and x._replace(box=shrunk_box(x.box, factor, image.size)) for x in self._drawn]
        return factor

    def frame(self, image: Image.Image, key: str, *, drafted: bool = False) -> Image.Image:
        """The first view of a decoded RGB image; `views_of` has them all."""
        if not drafted:
            self._whole, self._drawn = image.size, self._draw(image.size, key)
        made = tuple(self._view(image, changes, self.edge) for changes in self._drawn)
        if self.second:
            again = made[0] if self.second == self.edge else self._view(image, self._drawn[0], self.second)
            made = (*made, again)
        self._made[id(made[0])] = made
        return made[0]

    def views_of(self, image: Image.Image, key: str) -> tuple[Image.Image, ...]:
        """All views of an image that `decode` returned, or that its source made in its own way.

        With a second model, what it sees comes last.
        """
        if id(image) not in self._made:
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            return self._made[id(self.frame(rgb, key))]
        return self._made[id(image)]

    def _draw(self, size: tuple[int, int], key: str) -> list[Changes | None]:
        """What is done for each view; None: the center square."""
        return [self._changes(size, key, view) for view in range(self.views)]

    def _changes(self, size: tuple[int, int], key: str, view: int) -> Changes | None:
        if self.augment is None or (self.plain_first and view == 0):
            return None
        return self.augment.draw(size, random_numbers(*self.seeds, key, view))

    def _spare(self, size: tuple[int, int], changes: Changes | None) -> float:
        """The factor by which an image may be shrunk before a view is made."""
        edge = max(self.edge, self.second)
        if changes is None:
            return min(size) / (PLAIN_GAP * edge)
        left, top, right, bottom = changes.box
        return min(right - left, bottom - top) / (GAP * edge)

    def _view(self, image: Image.Image, changes: Changes | None, edge: int) -> Image.Image:
        if self.augment is None or changes is None:
            square = center_square(image, edge, self._whole)
            return square.copy() if square is image else square
        return self.augment.apply(image, changes, edge)


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

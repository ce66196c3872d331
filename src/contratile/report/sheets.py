"""Contact sheets: pictures of queries and what was found for them.

sheet = contact_sheet([SheetRow("arrow left", images, captions, hits, scores)])
Path("sheet.png").write_bytes(png(sheet))
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from contratile.errors import bad_value

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

INK, FAINT, PAPER, HIT = "#1b1f24", "#6b7280", "#ffffff", "#0a7d4f"
_GAP = 10


class SheetRow(NamedTuple):
    """A query and the items found for it, best first."""

    query: str
    images: Sequence[Image | None]
    """The pictures, None where one is missing; empty if texts were searched."""

    captions: Sequence[str]
    hits: Sequence[bool]
    """Whether each item is one that belongs to the query."""

    scores: Sequence[float] = ()
    names: Sequence[str] = ()
    """Paths or keys of the pictures."""

    trained: Sequence[bool] = ()
    """Whether each item is training data; empty if only held-out data was searched."""

    def mark(self, place: int) -> str:
        """Which split an item is from: "training", "held out", or "" if only held-out data was searched."""
        return ("training" if self.trained[place] else "held out") if self.trained else ""


def contact_sheet(rows: Sequence[SheetRow], *, columns: int = 8, size: int = 96) -> Image:
    """Draw each query above its first `columns` pictures.

    Args:
        rows: Queries with pictures.
        columns: Pictures per row at most.
        size: Edge of a picture in pixels.

    Returns:
        The sheet. Pictures that belong to their query have a thick frame and a tick.
    """
    from PIL import Image, ImageDraw

    if not rows or not all(row.images for row in rows):
        bad_value("rows", expected="queries with images", got="none", remedy="Pass at least one of each.")
    query_font, caption_font = _font(max(13, size // 6)), _font(max(10, size // 9))
    query_height, line_height = _line_height(query_font), _line_height(caption_font)
    columns = min(columns, max(len(row.images) for row in rows))
    width = _GAP + columns * (size + _GAP)
    height = query_height + size + 3 * line_height + 2 * _GAP  # two lines of caption and one of score
    sheet = Image.new("RGB", (width, _GAP + height * len(rows)), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        top = _GAP + number * height
        (query,) = wrapped(row.query, query_font, width - 2 * _GAP, lines=1)
        draw.text((_GAP, top), query, INK, query_font)
        found = zip(row.images, row.captions, row.hits, strict=True)
        for place, (image, caption, hit) in enumerate(list(found)[:columns]):
            left, up = _GAP + place * (size + _GAP), top + query_height + 4
            if image is not None:
                sheet.paste(fitted(image, size), (left, up))
            _frame(draw, left, up, size, hit)
            below = up + size + 4
            for text in wrapped(caption, caption_font, size, lines=2):
                draw.text((left, below), text, HIT if hit else INK, caption_font)
                below += line_height
            if row.scores:
                draw.text((left, below), f"{row.scores[place]:.3f} {row.mark(place)}", FAINT, caption_font)
    return sheet


def png(image: Image) -> bytes:
    """Encode a picture as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def wrapped(text: str, font: FreeTypeFont, width: int, *, lines: int) -> list[str]:
    """Break a text into at most `lines` lines of at most `width` pixels; an ellipsis marks what was cut."""
    # A letter is at least one pixel wide, so longer words cannot fit: cut them before measuring, which is slow.
    words = deque(shortened(word, width) for word in text.split(maxsplit=lines * width) or [""])
    found: list[str] = []
    while words and len(found) < lines:
        now = words.popleft()
        while words and font.getlength(f"{now} {words[0]}") <= width:
            now += f" {words.popleft()}"
        if len(found) == lines - 1 and words:
            now = f"{now} …"
        if font.getlength(now) > width:
            whole = now.removesuffix("…")
            letters = bisect_left(range(len(whole)), True, key=lambda n: font.getlength(_cut(whole, n + 1)) > width)
            now = _cut(whole, letters)
        found.append(now)
    return found


def shortened(text: str, length: int) -> str:
    """Cut a text to `length` characters, the last one an ellipsis."""
    return text if len(text) <= length else f"{text[: max(0, length - 1)]}…"


def _cut(text: str, letters: int) -> str:
    return f"{text[:letters].rstrip()}…"


def fitted(image: Image, edge: int) -> Image:
    """Centre a picture in a white square. Small ones are enlarged by whole factors, so that pixels stay sharp."""
    from PIL import Image

    image = on_white(image)
    factor = edge / max(image.size)
    whole = factor >= 2
    shape = [max(1, round(length * (int(factor) if whole else factor))) for length in image.size]
    image = image.resize((shape[0], shape[1]), Image.Resampling.NEAREST if whole else Image.Resampling.LANCZOS)
    square = Image.new("RGB", (edge, edge), PAPER)
    square.paste(image, ((edge - shape[0]) // 2, (edge - shape[1]) // 2))
    return square


def on_white(image: Image) -> Image:
    """Convert to RGB, with transparency on white."""
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, PAPER), image.convert("RGBA"))
    return image.convert("RGB")


def _frame(draw: ImageDraw, left: int, up: int, edge: int, hit: bool) -> None:
    thick = 4 if hit else 1
    draw.rectangle((left - 1, up - 1, left + edge, up + edge), outline=HIT if hit else "#c9ced6", width=thick)
    if hit:
        unit = max(6, edge // 12)
        right, high = left + edge - 3 * unit, up
        draw.rectangle((right, high, left + edge, high + 3 * unit), fill=HIT)
        tick = [(right + 0.6 * unit, high + 1.6 * unit), (right + 1.3 * unit, high + 2.3 * unit)]
        draw.line([*tick, (right + 2.5 * unit, high + 0.7 * unit)], fill=PAPER, width=max(2, unit // 3))


def _font(height: int) -> FreeTypeFont:
    """Pillow's built-in font, so that sheets look the same everywhere."""
    from PIL import ImageFont

    font = ImageFont.load_default(height)
    if not isinstance(font, ImageFont.FreeTypeFont):
        bad_value("Pillow", expected="a build with FreeType", got="one without", remedy="pip install pillow.")
    return font


def _line_height(font: FreeTypeFont) -> int:
    return sum(font.getmetrics()) + 2

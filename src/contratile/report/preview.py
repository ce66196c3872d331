"""Search results in the terminal: a table, with thumbnails drawn as half blocks where colours are available.

preview(SheetRow("arrow left", images, captions, hits, scores), Console())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contratile.printable import printable

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console
    from rich.text import Text

    from contratile.report.sheets import SheetRow

EDGE = 16
"""Edge of a thumbnail in pixels: that many columns and half as many lines."""

CAPTION = 400
"""Characters of a caption that are shown at most."""


def preview(row: SheetRow, console: Console) -> None:
    """Print the items found for a query, best first."""
    from rich.table import Table

    from contratile.report.sheets import shortened

    colours = console.color_system is not None
    # A query may contain what looks like markup: print it literally.
    console.print(f'nearest to "{printable(row.query)}"', markup=False, highlight=False)
    table = Table("#", "score", *(["image"] if colours else []), "text", show_lines=colours)
    found = zip(row.images, row.captions, row.hits, strict=True)
    for place, (image, caption, hit) in enumerate(found):
        score = f"{row.scores[place]:.3f}" if row.scores else ""
        mark = f" ({row.mark(place)})" if row.trained else ""
        text = _plain(printable(shortened(caption, CAPTION)) + (" (match)" if hit else "") + mark)
        shown = [_plain("") if image is None else terminal_thumbnail(image)] if colours else []
        table.add_row(str(place + 1), score, *shown, text)
    console.print(table)


def terminal_thumbnail(image: Image) -> Text:
    """Draw two pixels per character: an upper half block in one colour on the other."""
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    from contratile.report.sheets import fitted

    pixels = fitted(image, EDGE).load()
    assert pixels is not None
    text = Text(no_wrap=True)
    for y in range(0, EDGE, 2):
        for x in range(EDGE):
            (r, g, b), (u, v, w) = pixels[x, y], pixels[x, y + 1]  # type: ignore[misc]  # an RGB image has triples
            text.append("▀", Style(color=Color.from_rgb(r, g, b), bgcolor=Color.from_rgb(u, v, w)))
        if y + 2 < EDGE:
            text.append("\n")
    return text


def _plain(text: str) -> Text:
    from rich.text import Text

    return Text(text)

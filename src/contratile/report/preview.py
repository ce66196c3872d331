"""What was found for a query, in the terminal: a table, with thumbnails of half blocks where there are colours.

preview(SheetRow("arrow left", images, captions, hits, scores), Console())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contratile.printable import printable

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.console import Console
    from rich.text import Text

    from contratile.report.html import SheetRow

EDGE = 16
"""Pixels of a thumbnail's edge: columns, and twice its lines."""

CAPTION = 400
"""Characters of a caption that are shown."""


def preview(row: SheetRow, console: Console) -> None:
    """Print a query's images, best first."""
    from rich.table import Table

    from contratile.report.html import shortened

    colours = console.color_system is not None
    # A title may hold what looks like markup: it goes in as text.
    console.print(f'nearest to "{printable(row.query)}"', markup=False, highlight=False)
    table = Table("#", "score", *(["image"] if colours else []), "text", show_lines=colours)
    found = zip(row.images, row.captions, row.hits, strict=True)
    for place, (image, caption, hit) in enumerate(found):
        score = f"{row.scores[place]:.3f}" if row.scores else ""
        text = _plain(printable(shortened(caption, CAPTION)) + (" (its own)" if hit else ""))
        shown = [_plain("") if image is None else thumbnail(image)] if colours else []
        table.add_row(str(place + 1), score, *shown, text)
    console.print(table)


def thumbnail(image: Image) -> Text:
    """Two pixels in each character: the upper half block in the colour of one, on the colour of the other."""
    from rich.color import Color
    from rich.style import Style
    from rich.text import Text

    from contratile.report.html import fitted

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

"""The end of a run to look at: contact sheets of what was found, and report.html, one file that needs no other.

sheet = contact_sheet([SheetRow("arrow left", images, captions, hits, scores)])
write_report(run, title="icons", config={}, history=history(run), final=metrics, chance={}, sheet=png(sheet))
"""

from __future__ import annotations

import base64
import io
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contratile.data.files import written_whole
from contratile.errors import bad_value
from contratile.report.curves import curve
from contratile.report.tracking import numbers, size
from contratile.report.wording import PAIRWISE, PICTURES, in_words

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

# --- contact sheets -----------------------------------------------------------------------------------------------

INK, FAINT, PAPER, HIT = "#1b1f24", "#6b7280", "#ffffff", "#0a7d4f"
_GAP = 10


class SheetRow(NamedTuple):
    """A query and what was found for it, best first."""

    query: str
    images: Sequence[Image | None]
    """None for a picture that is not there; empty where texts were found."""

    captions: Sequence[str]
    hits: Sequence[bool]
    """Whether what was found is the one, or one of those, that belong to the query."""

    scores: Sequence[float] = ()
    names: Sequence[str] = ()
    """Of images: their paths or keys."""


def contact_sheet(rows: Sequence[SheetRow], *, columns: int = 8, size: int = 96) -> Image:
    """Each query above its first `columns` images, `size` pixels wide; a right one has a thick frame and a tick."""
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
            told = [*wrapped(caption, caption_font, size, lines=2)]
            for text in told:
                draw.text((left, below), text, HIT if hit else INK, caption_font)
                below += line_height
            if row.scores:
                draw.text((left, below), f"{row.scores[place]:.3f}", FAINT, caption_font)
    return sheet


def png(image: Image) -> bytes:
    """The bytes of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def wrapped(text: str, font: FreeTypeFont, width: int, *, lines: int) -> list[str]:
    """The text in at most so many lines, each no wider than `width`; what does not fit ends in dots."""
    # Letters are a pixel wide at least. What cannot be seen is cut off first: to measure it would take for ever.
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
    """At most so many characters, the last of them dots if some are missing."""
    return text if len(text) <= length else f"{text[: max(0, length - 1)]}…"


def _cut(text: str, letters: int) -> str:
    return f"{text[:letters].rstrip()}…"


def fitted(image: Image, edge: int) -> Image:
    """In the middle of a white square. Small pictures grow by whole factors, so that their pixels stay sharp."""
    from PIL import Image

    image = flat(image)
    factor = edge / max(image.size)
    whole = factor >= 2
    shape = [max(1, round(length * (int(factor) if whole else factor))) for length in image.size]
    image = image.resize((shape[0], shape[1]), Image.Resampling.NEAREST if whole else Image.Resampling.LANCZOS)
    square = Image.new("RGB", (edge, edge), PAPER)
    square.paste(image, ((edge - shape[0]) // 2, (edge - shape[1]) // 2))
    return square


def flat(image: Image) -> Image:
    """In RGB, what is transparent on white."""
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
    """Pillow's own, so that a sheet looks alike everywhere."""
    from PIL import ImageFont

    font = ImageFont.load_default(height)
    if not isinstance(font, ImageFont.FreeTypeFont):
        bad_value("Pillow", expected="a build with FreeType", got="one without", remedy="pip install pillow.")
    return font


def _line_height(font: FreeTypeFont) -> int:
    return sum(font.getmetrics()) + 2


# --- report.html --------------------------------------------------------------------------------------------------

_TITLES = {
    "loss": "loss",
    "top1": "accuracy in the batch (top-1)",
    "mean_rank": "mean rank in the batch",
    "scale": "scale",
    "lr": "learning rate",
    "grad_norm": "norm of the gradient",
    "samples_per_second": "samples per second",
}
_NO_CURVE = ("step", "epoch", "memory", "dense_memory", "broken", "skipped", "pairs", "seconds")

_STYLE = """
:root { color-scheme: light dark;
        --paper: #ffffff; --ink: #1b1f24; --faint: #5b6470; --rule: #d8dde3; --accent: #00746b }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14181d; --ink: #e6e9ed; --faint: #9aa4b0; --rule: #343b44; --accent: #4fd1c5 }
}
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
       font: 16px/1.5 system-ui, sans-serif }
h1 { margin: 0 0 .5rem } h2 { margin: 2.2rem 0 .6rem; font-size: 1.25rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top }
th.number, td.number { text-align: right }
td.value { overflow-wrap: anywhere }
.wide { overflow-x: auto }
.curves, .sections { display: grid; gap: 1rem 1.5rem;
                     grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)) }
.sections h3 { margin: .2rem 0; font-size: 1rem; color: var(--faint) }
.sheet img { max-width: 100%; height: auto; border: 1px solid var(--rule); border-radius: 4px; background: #ffffff }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif }
svg text { fill: var(--faint) } svg .title { fill: var(--ink); font-size: 13px; font-weight: 600 }
svg .end { text-anchor: end } svg .middle { text-anchor: middle } svg .last { fill: var(--accent); font-size: 12px }
svg .grid { stroke: var(--rule); stroke-width: 1 } svg .level { stroke: var(--faint); stroke-dasharray: 5 4 }
svg .line { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round }
svg circle { fill: var(--accent) }
"""


def write_report(
    run: Path,
    *,
    title: str,
    config: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
    final: Mapping[str, float],
    chance: Mapping[str, float],
    sheet: bytes = b"",
    found: Sequence[SheetRow] = (),
    notes: Sequence[str] = (),
    sheet_text: str = "Held-out texts, each with the images nearest to it; a frame and a tick mark the right one.",
    sides: tuple[str, str] = PICTURES,
) -> Path:
    """Write run/report.html: final metrics against chance, the contact sheet (a PNG), curves and the configuration.

    `found` are queries and texts, shown where there are no pictures; `sides` what left and right are called.
    """
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(note)}</p>" for note in notes)]
    if final:
        parts.append(_section("Held-out metrics", _metrics(final, chance, sides)))
    if sheet:
        address = f"data:image/png;base64,{base64.b64encode(sheet).decode()}"
        picture = f'<img src="{address}" alt="{escape(sheet_text, quote=True)}">'
        parts.append(_section("What it finds", f'<p>{escape(sheet_text)}</p><div class="sheet">{picture}</div>'))
    if found:
        told = f"Held-out texts ({sides[0]}), each with the nearest of the other side ({sides[1]}); ✓ marks its own."
        parts.append(_section("What it finds", f"<p>{escape(told)}</p>{_found(found)}"))
    if history:
        parts.append(_section("Curves", f'<div class="curves">{"".join(_curves(history, chance, sides))}</div>'))
        parts.append(_section("What it took", _table(["", ""], _costs(history))))
    parts.append(_section("Configuration", f'<div class="sections">{_configuration(config)}</div>'))
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Nothing may be fetched, whatever a caption says.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )
    run.mkdir(parents=True, exist_ok=True)
    path = run / "report.html"
    with written_whole(path) as draft:
        draft.write_text(page, encoding="utf-8")
    return path


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}"


def _found(rows: Sequence[SheetRow]) -> str:
    """Queries in the first column, what was found for them beside it, best first."""
    most = max(len(row.captions) for row in rows)
    told = []
    for row in rows:
        cells = [f"{'✓ ' if hit else ''}{text}" for text, hit in zip(row.captions, row.hits, strict=True)]
        told.append([row.query, *cells, *[""] * (most - len(cells))])
    return _table(["query", *(str(place + 1) for place in range(most))], told)


def _metrics(final: Mapping[str, float], chance: Mapping[str, float], sides: tuple[str, str]) -> str:
    rows = []
    for name, value in final.items():
        level = chance.get(name)
        beside = ["", ""] if level is None else [f"{level:.2%}", f"{value / level:.1f}" if level else ""]
        rows.append([_words(name, sides), f"{value:.4g}" if level is None else f"{value:.2%}", *beside])
    return _table(["metric", "reached", "chance", "times chance"], rows, aligned=True)


def _curves(history: Sequence[Mapping[str, Any]], chance: Mapping[str, float], sides: tuple[str, str]) -> list[str]:
    """Of every metric that was recorded at least twice, those of training first; pair by pair the table is enough."""
    names = dict.fromkeys(_TITLES) | {name: None for entry in history for name in entry}
    drawn = []
    for name in names:
        points = numbers(history, name)
        if name not in _NO_CURVE and not name.endswith(PAIRWISE) and len(points) > 1:
            percent = name in chance or name == "top1"
            form = percents if percent else "{:.4g}".format
            drawn.append(curve(points, title=_words(name, sides), level=chance.get(name), form=form))
    return drawn


def percents(share: float) -> str:
    """0.125 is 12.5%."""
    return f"{100 * share:.3g}%"


def _costs(history: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = [["steps", f"{max(entry['step'] for entry in history):,}"]]
    rates = [value for _, value in numbers(history, "samples_per_second")]
    if rates:
        rows.append(["samples per second (median)", f"{statistics.median(rates):,.0f}"])
    titles = {"memory": "memory of the process, at most", "dense_memory": "a dense loss alone would need"}
    for name, title in titles.items():
        values = [value for _, value in numbers(history, name)]
        if values:
            rows.append([title, size(max(values))])
    broken = numbers(history, "broken")
    if broken:
        rows.append(["broken samples, left out", f"{broken[-1][1]:,.0f}"])
    return rows


def _configuration(config: Mapping[str, Any]) -> str:
    """A table per section; values outside of any section come first."""
    loose = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    sections = ({"": loose} if loose else {}) | {name: value for name, value in config.items() if name not in loose}
    return "".join(
        f"<div><h3>{escape(str(name))}</h3>{_table(['option', 'value'], [[k, v] for k, v in section.items()])}</div>"
        for name, section in sections.items()
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, aligned: bool = False) -> str:
    """A table; all columns but the first are `aligned` to the right."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        kinds = ["", *(' class="number"' if aligned else ' class="value"' for _ in cells[1:])]
        return "".join(f"<{tag}{kind}>{escape(str(cell))}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    top = f"<thead><tr>{line('th', head)}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def _words(name: str, sides: tuple[str, str]) -> str:
    return _TITLES.get(name) or in_words(name, sides)

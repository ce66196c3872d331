"""report.html: the outcome of a run in one file, without any external resource.

write_report(run, title="icons", config={}, history=history(run), final=metrics, chance={}, sheet=png(sheet))
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from contratile.data.files import written_whole
from contratile.report.curves import curve
from contratile.report.metric_text import PAIRWISE, PICTURES, in_digits, in_words
from contratile.report.sheets import SheetRow
from contratile.report.tracking import binary_size, numbers

_TITLES = {
    "loss": "loss",
    "top1": "accuracy in the batch (top-1)",
    "mean_rank": "mean rank in the batch",
    "scale": "scale",
    "lr": "learning rate",
    "grad_norm": "norm of the gradient",
    "samples_per_second": "samples per second",
}
_NO_CURVE = (
    "step",
    "epoch",
    "memory",
    "loss_memory",
    "dense_memory",
    "broken",
    "skipped",
    "pairs",
    "seconds",
    "zero_shot_left_out",
)

SHEET_TEXT = "Held-out texts, each with the nearest held-out images; a frame and a tick mark the right one."
VIEWS_TEXT = "Held-out images, each followed by the nearest others; a frame and a tick mark those with the same text."
SEARCH_TEXT = (
    "The images nearest to some texts. Below each: its caption, score, and whether it is from the training data."
)

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
    searched: bytes = b"",
    notes: Sequence[str] = (),
    sheet_text: str = SHEET_TEXT,
    sides: tuple[str, str] = PICTURES,
) -> Path:
    """Write run/report.html: metrics against chance, contact sheets, curves and the configuration.

    Args:
        run: Folder of the run.
        title: Heading of the page.
        config: The configuration, by section.
        history: The lines of metrics.jsonl.
        final: Metrics of the last evaluation.
        chance: What guessing would reach, under the same names.
        sheet: Contact sheet of held-out queries, as a PNG file.
        found: Queries and the texts found for them, for data without pictures.
        searched: Contact sheet of the configured queries, as a PNG file.
        notes: Paragraphs below the heading.
        sheet_text: What the contact sheet shows.
        sides: Names of the left and the right side.

    Returns:
        The path of the page.
    """
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(note)}</p>" for note in notes)]
    if final:
        parts.append(_section("Held-out metrics", _metrics(final, chance, sides)))
    if searched:
        parts.append(_section("Search", _picture(searched, SEARCH_TEXT)))
    if sheet:
        parts.append(_section("Held-out queries", _picture(sheet, sheet_text)))
    if found:
        told = f"Held-out {sides[0]} texts, each with the nearest {sides[1]} texts; ✓ marks those that belong to it."
        parts.append(_section("Held-out queries", f"<p>{escape(told)}</p>{_found(found)}"))
    if history:
        parts.append(_section("Curves", f'<div class="curves">{"".join(_curves(history, chance, sides))}</div>'))
        parts.append(_section("Cost", _table(["", ""], _costs(history))))
    parts.append(_section("Configuration", f'<div class="sections">{_configuration(config)}</div>'))
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # Captions come from the data: the page must not load anything, whatever they contain.
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


def _picture(png: bytes, text: str) -> str:
    address = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<p>{escape(text)}</p><div class="sheet"><img src="{address}" alt="{escape(text, quote=True)}"></div>'


def _found(rows: Sequence[SheetRow]) -> str:
    """A table: the query, then the texts found for it, best first."""
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
        rows.append([_words(name, sides), in_digits(value) if level is None else f"{value:.2%}", *beside])
    return _table(["metric", "reached", "chance", "times chance"], rows, aligned=True)


def _curves(history: Sequence[Mapping[str, Any]], chance: Mapping[str, float], sides: tuple[str, str]) -> list[str]:
    """A curve for each metric with at least two values, training first; pairwise metrics are in the table only."""
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
    """Format a share: 0.125 becomes 12.5%."""
    return f"{100 * share:.3g}%"


def _costs(history: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = [["steps", f"{max(entry['step'] for entry in history):,}"]]
    rates = [value for _, value in numbers(history, "samples_per_second")]
    if rates:
        rows.append(["samples per second (median)", f"{statistics.median(rates):,.0f}"])
    titles = {
        "loss_memory": "memory of the loss (computed)",
        "dense_memory": "memory of a dense loss (computed)",
        "memory": "memory of the process, at most (measured)",
    }
    for name, title in titles.items():
        values = [value for _, value in numbers(history, name)]
        if values:
            rows.append([title, binary_size(max(values))])
    broken = numbers(history, "broken")
    if broken:
        rows.append(["broken samples left out", f"{broken[-1][1]:,.0f}"])
    return rows


def _configuration(config: Mapping[str, Any]) -> str:
    """A table per section; values outside any section come first."""
    loose = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    sections = ({"": loose} if loose else {}) | {name: value for name, value in config.items() if name not in loose}
    return "".join(
        f"<div><h3>{escape(str(name))}</h3>{_table(['option', 'value'], [[k, v] for k, v in section.items()])}</div>"
        for name, section in sections.items()
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, aligned: bool = False) -> str:
    """A table; with `aligned`, all columns but the first are right-aligned."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        kinds = ["", *(' class="number"' if aligned else ' class="value"' for _ in cells[1:])]
        return "".join(f"<{tag}{kind}>{escape(str(cell))}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    top = f"<thead><tr>{line('th', head)}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def _words(name: str, sides: tuple[str, str]) -> str:
    return _TITLES.get(name) or in_words(name, sides)

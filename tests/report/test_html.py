"""Contact sheets, report.html, and what the terminal shows."""

import base64
import io
import math
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageColor
from rich.console import Console

from contratile.data.tables import Table
from contratile.report.curves import curve, thinned, ticks
from contratile.report.gallery import _thumbnails as thumbnails
from contratile.report.html import write_report
from contratile.report.preview import preview, terminal_thumbnail
from contratile.report.sheets import HIT, SheetRow, contact_sheet, fitted, png, wrapped
from contratile.report.sheets import _font as font
from tests.train import browser

MAGENTA, CYAN = (255, 0, 255), (0, 200, 255)
HOSTILE = '<script src="https://example.org/x.js">&"\'</script><img src=x onerror=alert(1)>'


def image(colour: tuple[int, ...] = MAGENTA, shape: tuple[int, int] = (32, 32), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, shape, colour)


def row(query: str = "arrow left", *, number: int = 3, hit: int = 1, **changes: Any) -> SheetRow:
    made = SheetRow(
        query,
        [image(MAGENTA if place == hit else CYAN) for place in range(number)],
        [f"caption {place}" for place in range(number)],
        [place == hit for place in range(number)],
        [1 - place / 10 for place in range(number)],
    )
    return made._replace(**changes)


def count(sheet: Image.Image, colour: str | tuple[int, ...]) -> int:
    wanted = ImageColor.getrgb(colour) if isinstance(colour, str) else colour
    return sum(number for number, found in sheet.getcolors(1 << 24) or [] if found == wanted)


# --- contact sheets -----------------------------------------------------------------------------------------------


def test_a_sheet_holds_every_image() -> None:
    one, two = contact_sheet([row()]), contact_sheet([row(), row("other", hit=0)])
    assert one.mode == "RGB" and two.width == one.width and two.height > 1.8 * one.height
    # The frame, with its tick, covers a part of a right image.
    assert 0.7 * 96**2 < count(one, MAGENTA) < 96**2 and count(one, CYAN) > 1.9 * 96**2
    assert count(two, MAGENTA) == 2 * count(one, MAGENTA)
    assert count(one, HIT) > 4 * 90 * 4 and count(contact_sheet([row(hit=9)]), HIT) == 0


def test_a_sheet_shows_at_most_so_many_columns() -> None:
    wide, narrow = contact_sheet([row(number=12)], columns=12), contact_sheet([row(number=12)], columns=5)
    assert narrow.width < wide.width / 2
    assert count(narrow, CYAN) < count(wide, CYAN) / 2
    uneven = contact_sheet([row(number=2), row(number=4)])
    assert uneven.width == contact_sheet([row(number=4)]).width


@pytest.mark.parametrize("text", ["", "word " * 80, "x" * 500, "Flèche à gauche ←, 左", "line\nbreak\ttab", HOSTILE])
def test_any_text_fits(text: str) -> None:
    plain = contact_sheet([row(), row()])
    sheet = contact_sheet([row(text, captions=[text] * 3), row()])
    assert sheet.size == plain.size
    # The second row is untouched by what stands above it.
    half = plain.height // 2 + 6
    box = (0, half, plain.width, plain.height)
    assert sheet.crop(box).tobytes() == plain.crop(box).tobytes()


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=200), width=st.integers(40, 300), lines=st.integers(1, 3))
def test_wrapped_lines_fit(text: str, width: int, lines: int) -> None:
    letters = font(12)
    found = wrapped(text, letters, width, lines=lines)
    assert 1 <= len(found) <= lines and all(letters.getlength(line) <= width for line in found)
    if not any("…" in line for line in found):
        assert " ".join(found).split() == text.split()


@pytest.mark.parametrize("text", ["x" * 20_000, "x " * 20_000, "\u0301" * 20_000, "word " * 9 + "x" * 20_000])
def test_long_texts_are_cut_before_they_are_measured(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To take letters away one by one, and measure the rest each time, took minutes."""
    letters, measured = font(12), []
    length = letters.getlength

    def noted(text: str) -> float:
        measured.append(len(text))
        return length(text)

    monkeypatch.setattr(letters, "getlength", noted)
    found = wrapped(text, letters, 96, lines=2)
    assert found[-1].endswith("…") and all(length(line) <= 96 for line in found)
    assert sum(measured) < 20_000


def test_pictures_of_a_sheet_are_reduced_one_by_one(tmp_path: Path) -> None:
    """64 of the largest would take 13 GB."""
    image(shape=(1500, 700)).save(tmp_path / "large.png")
    image(shape=(40, 30)).save(tmp_path / "small.png")
    (tmp_path / "t.csv").write_text("path,text\nlarge.png,a\nsmall.png,b\n")
    source = Table(tmp_path / "t.csv", "train", test_share=None)
    wanted = [(source[place].key, place) for place in range(2)]
    large, small = (Image.open(io.BytesIO(file)) for file in thumbnails(source, wanted, "image"))
    assert large.size == (96, 45) and small.size == (40, 30)
    assert small.getpixel((20, 15)) == MAGENTA


def test_images_of_all_kinds_are_shown() -> None:
    assert fitted(image((255, 0, 255, 0), mode="RGBA"), 64).getpixel((32, 32)) == (255, 255, 255)
    assert fitted(image((255, 0, 255, 255), mode="RGBA"), 64).getpixel((32, 32)) == MAGENTA
    assert fitted(image((0,), mode="L"), 64).getpixel((0, 0)) == (0, 0, 0)
    assert fitted(image((1,), mode="1"), 64).getpixel((0, 0)) == (255, 255, 255)
    tall = fitted(image(shape=(10, 40)), 80)
    assert tall.getpixel((0, 40)) == (255, 255, 255) and tall.getpixel((40, 0)) == MAGENTA
    assert fitted(image(shape=(3000, 2)), 64).size == (64, 64)
    palette = image().convert("P", palette=Image.Palette.ADAPTIVE)
    assert fitted(palette, 64).getpixel((5, 5)) == MAGENTA


def test_small_images_keep_sharp_pixels() -> None:
    checkers = Image.new("L", (8, 8))
    checkers.putdata([255 * ((place % 8 + place // 8) % 2) for place in range(64)])
    assert set(fitted(checkers, 80).getcolors() or []) == {(3200, (0, 0, 0)), (3200, (255, 255, 255))}


def test_nothing_to_show_is_refused() -> None:
    for rows in ([], [row(number=0)]):
        with pytest.raises(ValueError, match="rows: expected queries with images, got none"):
            contact_sheet(rows)


# --- curves -------------------------------------------------------------------------------------------------------

finite = st.floats(-1e9, 1e9)


@settings(max_examples=200, deadline=None)
@example(low=5e-324, span=0.0, number=4)
@given(low=finite, span=st.just(0.0) | st.floats(1e-3, 1e9), number=st.integers(2, 8))
def test_ticks_are_few_and_cover(low: float, span: float, number: int) -> None:
    high = low + span
    found = ticks(low, high, number)
    slack = 1e-6 * max(abs(low), abs(high), span)
    assert found[0] <= low + slack and found[-1] >= high - slack
    assert 2 <= len(found) <= number + 3 and found == sorted(found)


@pytest.mark.parametrize(
    ("points", "level"),
    [
        ([(1, 8.3), (2, 7.9), (3, 2.0)], None),
        ([(5, 0.0), (6, 0.0)], None),
        ([(5, 3.0), (6, 3.0)], 0.1),
        ([(step, math.sin(step)) for step in range(5000)], -2.0),
        ([(1_000_000, 1e-9), (1_000_001, 2e-9)], None),
    ],
)
def test_curves_stay_inside_their_frame(points: list[tuple[float, float]], level: float | None) -> None:
    svg = ElementTree.fromstring(curve(points, title="a < b & c", level=level))
    (path,) = svg.iterfind("path[@class='line']")
    places = [tuple(map(float, pair.split())) for pair in path.attrib["d"].removeprefix("M").split("L")]
    assert len(places) == min(len(points), len(thinned(points)[0]))
    assert all(58 <= x <= 366.1 and 33.9 <= y <= 190.1 for x, y in places)
    if len(points) < 10:
        rising = [b > a for (_, a), (_, b) in pairwise(points) if a != b]
        assert rising == [b < a for (_, a), (_, b) in pairwise(places) if a != b]
    assert len(list(svg.iterfind("path[@class='level']"))) == (level is not None)
    assert "a < b & c" in svg.attrib["aria-label"]


def test_long_curves_are_thinned_by_means() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    drawn, note = thinned(points)
    assert 200 < len(drawn) <= 401 and drawn[0] == points[0] and drawn[-1] == points[-1]
    assert {y for _, y in drawn} == {1.0} and "a mean of" in note
    assert thinned(points[:300]) == (points[:300], "")


# --- report.html --------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The elements of a page; every one that opens must close."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data.strip())


HISTORY: list[dict[str, Any]] = [
    {"step": step, "loss": 8 / step, "top1": step / 40, "lr": 1e-3, "samples_per_second": 1000 + step}
    | {"memory": 1 << 30, "dense_memory": 1 << 34}
    for step in range(1, 21)
]
HISTORY += [{"step": step, "text_to_image_R@10": step / 50} for step in (10, 20)]
FINAL = {"text_to_image_R@10": 0.4, "text_to_image_mean_rank": 30.5}
CHANCE = {"text_to_image_R@10": 0.01}


def report(run: Path, **changes: Any) -> Page:
    options: dict[str, Any] = {
        "title": "icons",
        "config": {"run": {"batch": 4096}, "loss": {"loss": "clip"}},
        "history": HISTORY,
        "final": FINAL,
        "chance": CHANCE,
        "sheet": png(contact_sheet([row()])),
        "notes": ["a note"],
    }
    path = write_report(run, **(options | changes))
    assert path == run / "report.html" and [found.name for found in run.iterdir()] == ["report.html"]
    return Page(path.read_text(encoding="utf-8"))


def test_a_report_holds_everything(tmp_path: Path) -> None:
    page = report(tmp_path)
    words = " | ".join(filter(None, page.text))
    assert "text to image R@10 | 40.00% | 1.00% | 40.0" in words and "text to image mean rank | 30.5" in words
    assert "batch | 4096" in words and "loss | clip" in words and "a note" in words
    assert "samples per second (median) | 1,01" in words
    assert "memory of a dense loss (computed) | 16 GiB | memory of the process, at most (measured) | 1 GiB" in words
    labels = [str(attributes["aria-label"]) for tag, attributes in page.elements if tag == "svg"]
    titles = [label.split(":")[0] for label in labels]
    assert titles == [
        "loss",
        "accuracy in the batch (top-1)",
        "learning rate",
        "samples per second",
        "text to image R@10",
    ]
    assert labels[0] == "loss: 8 at step 1, 0.4 at step 20" and "chance 1%" in words


def test_every_picture_is_inside(tmp_path: Path) -> None:
    sheet = contact_sheet([row()])
    page = report(tmp_path, sheet=png(sheet))
    (picture,) = [attributes for tag, attributes in page.elements if tag == "img"]
    kind, _, content = str(picture["src"]).partition(",")
    assert kind == "data:image/png;base64" and picture["alt"]
    shown = Image.open(io.BytesIO(base64.b64decode(content, validate=True)))
    assert shown.size == sheet.size and shown.convert("RGB").tobytes() == sheet.tobytes()


def test_nothing_is_fetched_and_nothing_runs(tmp_path: Path) -> None:
    page = report(
        tmp_path,
        title=HOSTILE,
        notes=[HOSTILE],
        sheet_text=HOSTILE,
        config={HOSTILE: {HOSTILE: HOSTILE}, "loose": HOSTILE},
        final={HOSTILE: 1.0},
        history=[{"step": 1, HOSTILE: 1.0}, {"step": 2, HOSTILE: 2.0}],
    )
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "base", "form", "a"}
    for _, attributes in page.elements:
        assert str(attributes.get("src", "data:")).startswith("data:")
        assert not [name for name in attributes if name.startswith("on") or name in ("href", "srcset", "action")]
    style = (tmp_path / "report.html").read_text(encoding="utf-8").split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    (policy,) = [str(a["content"]) for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert "default-src 'none'" in policy
    assert HOSTILE in "".join(page.text)


def test_a_short_run_has_a_report_too(tmp_path: Path) -> None:
    short: list[dict[str, Any]] = [
        {"sheet": b""},
        {"history": []},
        {"history": [{"step": 1, "loss": None}]},
        {"final": {}},
    ]
    for changes in short:
        assert "icons" in report(tmp_path, **changes).text
    assert not [tag for tag, _ in report(tmp_path, sheet=b"").elements if tag == "img"]


# --- the terminal -------------------------------------------------------------------------------------------------


def test_preview_without_colours_is_a_table() -> None:
    console = Console(file=io.StringIO(), width=80)
    preview(row("arrow [bold]left"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert 'nearest to "arrow [bold]left"' in text and "caption 1 (match)" in text and "0.900" in text
    assert "▀" not in text and "\x1b" not in text


def test_preview_cuts_long_captions() -> None:
    console = Console(file=io.StringIO(), width=100)
    preview(row(captions=["x" * 20_000] * 3), console)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert told.count("…") == 3 and told.count("x") < 1300


def test_preview_with_colours_shows_thumbnails() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    preview(row(), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("▀") == 3 * 16 * 8
    assert "38;2;255;0;255;48;2;255;0;255" in text and "38;2;0;200;255" in text


def test_a_thumbnail_has_two_pixels_in_a_character() -> None:
    halves = Image.new("RGB", (16, 16), CYAN)
    halves.paste(MAGENTA, (0, 0, 16, 7))  # ends in the middle of a line of characters
    lines = terminal_thumbnail(halves).split("\n")
    assert len(lines) == 8 and all(len(text.plain) == 16 for text in lines)
    styles = [str(text.spans[0].style) for text in lines]
    assert styles[2] == "#ff00ff on #ff00ff" and styles[3] == "#ff00ff on #00c8ff" and styles[4] == "#00c8ff on #00c8ff"


# --- a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_the_report(dark: bool, tmp_path: Path) -> None:
    """Its pictures load, its curves are drawn, and it follows the colours that the reader prefers."""
    try:
        browser.chromium()
    except browser.NoBrowser as error:
        pytest.skip(str(error))
    report(tmp_path / "run", sheet=png(contact_sheet([row()])))
    browser.screenshot(tmp_path / "run" / "report.html", tmp_path / "shot.png", dark=dark)
    with Image.open(tmp_path / "shot.png") as file:
        shot = file.convert("RGB")
    paper, accent = ("#14181d", "#4fd1c5") if dark else ("#ffffff", "#00746b")
    assert count(shot, paper) > 0.5 * shot.width * shot.height
    assert count(shot, MAGENTA) == count(contact_sheet([row()]), MAGENTA)
    assert count(shot, accent) > 5 * 300  # five curves, each some hundred pixels long

"""The page in headless Chromium: typing, dropping, keyboard only, a narrow screen, hostile data."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from contratile.report.gallery_corpus import GalleryCorpus
from contratile.serve import Finder, Server
from tests.serve.conftest import gallery_of
from tests.serve.devtools import Page, opened
from tests.train import browser

Open = Callable[[Finder], Page]
STATUS = "document.getElementById('status').textContent"
HOSTILE = (
    "<img src=x onerror='window.harmed = 1'>",
    "</script><script>window.harmed = 1</script>",
    "javascript:window.harmed=1",
    "\u202egnp.exe" + "w" * 300,
)


@pytest.fixture
def open_page(serving: Callable[[Finder], Server], tmp_path: Path) -> Iterator[Open]:
    """Open the page of a finder. At the end the script must have raised nothing and loaded nothing from elsewhere."""
    try:
        browser.chromium()
    except browser.NoBrowser as error:
        pytest.skip(str(error))
    pages = []

    def start(finder: Finder) -> Page:
        server = serving(finder)
        context = opened(server.address, tmp_path)
        page = context.__enter__()
        pages.append((page, context, server.address))
        return page

    yield start
    for page, context, address in pages:
        loaded = page.value("performance.getEntriesByType('resource').map((entry) => entry.name)")
        context.__exit__(None, None, None)
        assert all(name.startswith((address, "blob:", "data:")) for name in loaded), loaded
        assert page.problems == []


def count(page: Page, selector: str) -> int:
    found: int = page.value(f"document.querySelectorAll({selector!r}).length")
    return found


def focused(page: Page) -> str:
    found: str = page.value("document.activeElement.id")
    return found


def test_typing_finds_pictures(pictures: Finder, open_page: Open) -> None:
    page = open_page(pictures)
    assert focused(page) == "text"
    page.type("red ellipse of size 1")
    page.press("Enter")
    page.until(f"{STATUS}.startsWith('24 results for “red ellipse of size 1”')")
    (group,) = pictures.by_text("red ellipse of size 1")
    assert page.value("Array.from(document.querySelectorAll('li .text'), (x) => x.textContent)") == [
        item.text for item in group.items
    ]
    page.until("Array.from(document.querySelectorAll('li img')).every((x) => x.complete && x.naturalWidth === 16)")
    assert page.value("document.getElementById('text').placeholder") == f"for example: {gallery_of(pictures).texts[0]}"
    page.until("Array.from(document.querySelectorAll('li img')).every((x) => x.clientWidth === 96)")  # 6 times as large
    assert page.value("getComputedStyle(document.querySelector('li img')).imageRendering") == "pixelated"
    assert count(page, "li img") == 24 and page.value("document.getElementById('status').ariaLive") == "polite"


def test_dropping_a_picture_finds_texts_and_pictures(pictures: Finder, pictures_run: Path, open_page: Open) -> None:
    page = open_page(pictures)
    page.drop(pictures_run.parent / "shapes" / "blue-line-3.png")
    page.until(f"{STATUS} === '48 results for the picture blue-line-3.png'")
    assert page.value("Array.from(document.querySelectorAll('h2'), (x) => x.textContent)") == ["Texts", "Pictures"]
    assert "blue-line-3.png" in page.value("document.querySelector('ol.pictures .about').textContent")
    page.until("document.getElementById('asked').naturalWidth === 16")
    page.type("red")  # a text replaces the picture
    page.press("Enter")
    page.until(f"{STATUS}.startsWith('24 results')")
    assert page.value("document.getElementById('asked').hidden")


def test_a_dropped_file_that_is_no_picture_gets_a_reason(pictures: Finder, tmp_path: Path, open_page: Open) -> None:
    page = open_page(pictures)
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate((1 << 24) + 1)
    page.drop(tmp_path / "notes.txt")
    page.until(f"{STATUS}.includes('not an image in a known format')")
    page.drop(tmp_path / "empty.png")
    page.until(f"{STATUS} === 'This file is empty.'")
    page.drop(tmp_path / "large.png")
    page.until(f"{STATUS} === 'This file is too large: at most 16 MiB.'")
    assert count(page, "li") == 0
    page.problems = [problem for problem in page.problems if "400" not in problem]  # the browser logs the status


def test_an_empty_query_and_an_empty_result_say_so(pictures: Finder, open_page: Open) -> None:
    gallery = gallery_of(pictures)
    trained = GalleryCorpus(gallery._replace(trained=torch.ones_like(gallery.trained)))
    page = open_page(Finder(trained, pictures.towers, "all trained"))
    page.press("Enter")
    page.until(f"{STATUS} === 'Type what to search for, or choose a picture.'")
    page.type("red")
    page.press("Enter")
    page.until(f"{STATUS}.startsWith('24 results')")
    page.press("Tab")
    assert focused(page) == "split"
    page.press("ArrowDown")  # held out
    page.until(f"{STATUS} === 'Nothing found for “red”.'")
    assert count(page, "li") == 0


def test_the_keyboard_reaches_everything_and_the_focus_shows(pictures: Finder, open_page: Open) -> None:
    page = open_page(pictures)
    reached = [focused(page)]
    for _ in range(3):
        page.press("Tab")
        reached.append(focused(page))
        assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert reached == ["text", "split", "go", "picture"]
    labelled = "Array.from(document.querySelectorAll('input, select')).every((x) => x.labels.length === 1)"
    assert page.value(labelled)
    for _ in range(3):
        page.press("Tab", modifiers=8)
    page.type("blue line")
    page.press("Tab")
    page.press("Tab")
    page.press("Space")  # the button
    page.until(f"{STATUS}.startsWith('24 results for “blue line”')")


def test_hostile_names_and_captions_stay_text_on_a_narrow_screen(pictures: Finder, open_page: Open) -> None:
    gallery = gallery_of(pictures)
    names = [HOSTILE[item % 4] + str(item) for item in range(len(gallery.names))]
    texts = [HOSTILE[item % 4] + str(item) for item in range(len(gallery.texts))]
    hostile = GalleryCorpus(gallery._replace(names=names, texts=texts))
    page = open_page(Finder(hostile, pictures.towers, HOSTILE[0] + HOSTILE[1] + "w" * 200))
    page.resize(400)
    page.type(HOSTILE[0])
    page.press("Enter")
    page.until(f"{STATUS}.startsWith('24 results')")
    shown = page.value("document.getElementById('found').textContent")
    assert HOSTILE[0] in shown and HOSTILE[1] in shown and HOSTILE[2] in shown and "\u202e" not in shown
    assert HOSTILE[0] in page.value(STATUS) and HOSTILE[1] in page.value("document.querySelector('h1').textContent")
    assert page.value("document.getElementById('text').placeholder") == f"for example: {texts[0]}"
    assert page.value("window.harmed") is None
    assert count(page, "script") == 1 and count(page, "img[src='x']") == 0 and count(page, "a") == 0
    assert page.value("document.documentElement.scrollWidth") <= 400


def test_text_pairs_have_no_pictures(pairs: Finder, open_page: Open) -> None:
    page = open_page(pairs)
    page.type("the red line")
    page.press("Enter")
    page.until(f"{STATUS}.startsWith('24 results')")
    assert count(page, "li img") == 0 and page.value("document.querySelector('h2').textContent") == "right"
    page.press("Tab")
    assert focused(page) == "among"
    page.press("ArrowDown")
    page.until("document.querySelector('h2').textContent === 'left'")
    assert page.value("document.getElementById('picture-field').hidden")


def test_views_take_pictures_alone(views: Finder, pictures_run: Path, open_page: Open) -> None:
    page = open_page(views)
    assert page.value("document.getElementById('text-field').hidden") and focused(page) == "picture"
    page.drop(pictures_run.parent / "shapes" / "red-arc-2.png")
    page.until(f"{STATUS} === '24 results for the picture red-arc-2.png'")
    assert count(page, "ol.pictures li") == 24 and count(page, "ol.texts") == 0

"""Embedded features behind the server and on the page."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from contratile.cli import main
from contratile.serve import Finder, Server, load_finder
from tests.serve.test_page import STATUS, Open, count
from tests.serve.test_page import open_page as open_page
from tests.serve.test_server import BYTES, ask, found, refused

Start = Callable[[Finder], Server]


@pytest.fixture(scope="module")
def embedded(pictures_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pictures of the run's data, embedded again."""
    folder = tmp_path_factory.mktemp("embedded")
    table = pictures_run.parent / "shapes" / "pairs.csv"
    words = ["embed", str(pictures_run), str(table), "--out", str(folder / "f.npy"), "--weights", "last"]
    assert main([*words, "--side", "both"]) == 0
    return folder


def test_it_answers_as_the_gallery_does(embedded: Path, pictures: Finder, pictures_run: Path, serving: Start) -> None:
    """Scores differ by the 16 bits in which a gallery keeps its features."""
    mine, theirs = serving(load_finder(embedded)), serving(pictures)
    asked = {"text": "red ellipse of size 1", "k": 96}
    (group,), (want,) = found(mine, asked), found(theirs, asked)
    by_name = {item["name"]: item for item in want["items"]}
    assert (group["title"], group["kind"], len(group["items"])) == (want["title"], want["kind"], 96)
    for item in group["items"]:
        other = by_name[item["name"]]
        assert (item["text"], item["match"], item["split"]) == (other["text"], other["match"], "")
        assert item["score"] == pytest.approx(other["score"], abs=2e-3)
    shown, known = group["items"][0], by_name[group["items"][0]["name"]]
    address = [f"/thumbnail/{item['thumbnail']}" for item in (shown, known)]
    assert (
        ask(mine, "GET", address[0])[0] == 200 and ask(mine, "GET", address[0])[2] == ask(theirs, "GET", address[1])[2]
    )
    file = pictures_run.parent / "shapes" / "blue-line-3.png"
    groups = json.loads(ask(mine, "POST", "/search?k=3", file.read_bytes(), BYTES)[2])["groups"]
    assert [each["kind"] for each in groups] == ["text", "image"]
    assert groups[1]["items"][0]["name"].endswith("blue-line-3.png") and groups[1]["items"][0]["score"] > 0.999
    assert found(mine, {**asked, "split": "training"})[0]["items"] == []
    assert refused(mine, "GET", "/thumbnail/96")[0] == 404


def test_a_stranger_shows_no_file_of_this_user(embedded: Path, tmp_path: Path, serving: Start) -> None:
    """Keys and data of the record name files outside: not one of them is sent, whatever number is asked for."""
    shutil.copytree(embedded, tmp_path / "given")
    private = tmp_path / "private"
    private.mkdir()
    shutil.copy(Path(__file__).parents[2] / "docs" / "icons.png", private / "me.png")
    record, keys = tmp_path / "given" / "f.npy.embedded.json", tmp_path / "given" / "f.keys.jsonl"
    told = json.loads(record.read_text())
    record.write_text(json.dumps(told | {"data": {"data": f"{private}/", "columns": ["", ""], "split": "all"}}))
    row = {"key": "../../../../../../etc/passwd", "name": "me.png", "text": "<b>me</b>", "index": 0}
    keys.write_text("".join(json.dumps({**row, "key": ("me.png", row["key"])[n % 2]}) + "\n" for n in range(96)))
    finder = load_finder(tmp_path / "given")
    server = serving(finder)
    (group,) = found(server, {"text": "red", "k": 5})
    assert [(item["name"], item["thumbnail"]) for item in group["items"]] == [("me.png", None)]
    assert {ask(server, "GET", f"/thumbnail/{item}")[0] for item in range(100)} == {404}
    assert "someone else embedded" in finder.corpus.remark
    assert finder.corpus.remark in ask(server, "GET", "/")[2].decode()


def test_the_page_of_embedded_features(embedded: Path, tmp_path: Path, open_page: Open) -> None:
    """Pictures that can be read are shown; of others the page says so."""
    shutil.copytree(embedded, tmp_path / "given")
    finder = load_finder(tmp_path / "given")
    read, corpus = finder.corpus.picture, finder.corpus
    damaged = b"\x89PNG\r\n\x1a\nnothing"  # of a missing one the browser would also complain
    corpus.picture = lambda item: damaged if item % 2 else read(item)  # type: ignore[method-assign]
    page = open_page(finder)
    page.type("blue line")
    page.press("Enter")
    page.until(f"{STATUS}.startsWith('24 results')")
    page.until("[...document.querySelectorAll('li img')].every((image) => image.complete && image.naturalWidth > 0)")
    blank = page.value("[...document.querySelectorAll('.frame')].filter((x) => x.textContent === 'no picture').length")
    assert blank and count(page, "li img") + blank == 24
    assert page.value("document.getElementById('split-field').hidden")
    assert page.value("document.querySelectorAll('p.faint')[1].hidden")

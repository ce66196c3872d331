"""The server: what it answers, and that nothing sent to it can stop it or read a file."""

import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.cli import main
from contratile.data.images import decode
from contratile.report.corpus import find_hits, sheet_rows
from contratile.report.gallery import load_gallery
from contratile.report.gallery_corpus import GalleryCorpus, found_rows
from contratile.serve import Finder, Server, make_server
from contratile.serve import server as serving_module
from contratile.train import load_run, search
from contratile.train.gallery_search import encode_queries
from tests.processes import until
from tests.serve.conftest import gallery_of

Start = Callable[[Finder], Server]
JSON = {"Content-Type": "application/json"}
BYTES = {"Content-Type": "application/octet-stream"}


def ask(
    server: Server, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def found(server: Server, asked: dict[str, Any]) -> Any:
    status, _, body = ask(server, "POST", "/search", json.dumps(asked).encode(), JSON)
    assert status == 200, body
    return json.loads(body)["groups"]


def refused(server: Server, method: str, path: str, body: bytes | None = None, headers: Any = None) -> tuple[int, str]:
    """Status and message; every refusal is JSON."""
    status, _, answer = ask(server, method, path, body, headers)
    return status, json.loads(answer)["error"]


def test_a_file_that_cannot_be_read_is_told(
    pictures: Finder, serving: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(item: int) -> bytes:
        raise FileNotFoundError(2, "No such file or directory", "/data/pairs.csv")

    monkeypatch.setattr(pictures, "thumbnail", gone)
    status, reason = refused(serving(pictures), "GET", "/thumbnail/0")
    assert status == 500 and "a file could not be read (No such file or directory)" in reason
    assert "pairs.csv" not in reason and "/data/pairs.csv" in capsys.readouterr().err


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_text_finds_what_search_finds(pictures: Finder, pictures_run: Path, serving: Start) -> None:
    (group,) = found(serving(pictures), {"text": "red ellipse of size 1", "k": 5})
    gallery = load_gallery(pictures_run)
    (row,) = search(load_run(pictures_run, "last").towers, gallery, ["red ellipse of size 1"], k=5)
    assert group["title"] == "Pictures" and group["kind"] == "image"
    assert [item["text"] for item in group["items"]] == list(row.captions)
    assert [item["name"] for item in group["items"]] == list(row.names)
    assert [item["match"] for item in group["items"]] == list(row.hits)
    assert [item["score"] for item in group["items"]] == pytest.approx(row.scores, abs=1e-4)
    assert [item["split"] for item in group["items"]] == [row.mark(place) for place in range(5)]


def test_a_picture_finds_itself_and_texts(pictures: Finder, pictures_run: Path, serving: Start) -> None:
    server = serving(pictures)
    file = pictures_run.parent / "shapes" / "blue-line-3.png"
    status, _, body = ask(server, "POST", "/search?k=3", file.read_bytes(), BYTES)
    texts, images = json.loads(body)["groups"]
    assert status == 200 and (texts["kind"], images["kind"]) == ("text", "image")
    assert len(texts["items"]) == len(images["items"]) == 3
    assert images["items"][0]["name"].endswith("blue-line-3.png") and images["items"][0]["score"] > 0.99
    assert all(item["thumbnail"] is None and item["name"] == "" for item in texts["items"])


def test_held_out_items_alone(pictures: Finder, serving: Start) -> None:
    server = serving(pictures)
    counts = {}
    for split in ("all", "held out", "training"):
        (group,) = found(server, {"text": "red", "k": 200, "split": split})
        counts[split] = len(group["items"])
        assert split == "all" or {item["split"] for item in group["items"]} == {split}
    assert counts["all"] == 96 == counts["held out"] + counts["training"]


def test_text_pairs_are_searched_both_ways(pairs: Finder, serving: Start) -> None:
    server = serving(pairs)
    (group,) = found(server, {"text": "the red line", "k": 48})
    assert (group["title"], group["kind"]) == ("right", "text")
    assert {item["text"] for item in group["items"] if item["match"]} == {"line in red"}
    (group,) = found(server, {"text": "line in red", "k": 48, "among": "left"})
    assert group["title"] == "left" and [item["text"] for item in group["items"] if item["match"]] == ["the red line"]
    assert refused(server, "POST", "/search", b"x", BYTES)[0] == 400


def test_views_are_searched_with_pictures(views: Finder, pictures_run: Path, serving: Start) -> None:
    server = serving(views)
    path = pictures_run.parent / "shapes" / "red-line-3.png"
    status, _, body = ask(server, "POST", "/search?k=4", path.read_bytes(), {"Content-Type": "image/png"})
    (group,) = json.loads(body)["groups"]
    features = encode_queries(views.towers.left, [decode(path, "")])
    (row,) = found_rows(gallery_of(views), ["no text"], features, k=4)
    assert status == 200 and group["kind"] == "image"
    assert [item["name"] for item in group["items"]] == list(row.names)
    status, error = refused(server, "POST", "/search", b'{"text": "red"}', JSON)
    assert status == 400 and "expected a picture" in error


def test_thumbnails_are_those_of_the_gallery(pictures: Finder, serving: Start) -> None:
    server = serving(pictures)
    status, headers, body = ask(server, "GET", "/thumbnail/3")
    assert (status, headers["Content-Type"], body) == (200, "image/png", gallery_of(pictures).pictures[3])
    assert ask(server, "GET", f"/thumbnail/{len(gallery_of(pictures).pictures)}")[0] == 404


def test_a_thumbnail_that_is_no_picture_is_not_sent(pictures: Finder, serving: Start) -> None:
    """Galleries may come from anyone; a browser could take such bytes for a page."""
    gallery = gallery_of(pictures)
    hostile = [b"<script>alert(1)</script>", *gallery.pictures[1:]]
    server = serving(Finder(GalleryCorpus(gallery._replace(pictures=hostile)), pictures.towers, "x"))
    assert [ask(server, "GET", f"/thumbnail/{item}")[0] for item in (0, 1)] == [404, 200]


def test_a_damaged_thumbnail_is_a_blank_on_the_sheet(pictures: Finder) -> None:
    gallery = gallery_of(pictures)
    damaged = [b"\x89PNG\r\n\x1a\nnothing", *gallery.pictures[1:]]
    corpus = GalleryCorpus(gallery._replace(pictures=damaged))
    (row,) = sheet_rows(corpus, ["x"], gallery.left[:1], k=2, among="left")
    assert row.images[0] is None and row.images[1] is not None
    with pytest.raises(ValueError, match="split: expected one of 'all', 'held out', 'training', got 'odd'"):
        find_hits(corpus, ["x"], gallery.left[:1], k=1, among="left", split="odd")  # type: ignore[arg-type]


def test_scores_that_are_not_finite_are_left_out(pictures: Finder, serving: Start) -> None:
    gallery = gallery_of(pictures)
    spoiled = GalleryCorpus(gallery._replace(left=torch.full_like(gallery.left, float("nan"))))
    (group,) = found(serving(Finder(spoiled, pictures.towers, "x")), {"text": "red"})
    assert {item["score"] for item in group["items"]} == {None}


def test_the_page_loads_nothing_from_elsewhere(pictures: Finder, serving: Start) -> None:
    server = serving(Finder(pictures.corpus, pictures.towers, '<img src=x onerror="alert(1)">'))
    status, headers, body = ask(server, "GET", "/")
    page = body.decode()
    assert status == 200 and "<img src=x" not in page and "&lt;img src=x" in page
    assert "http:" not in page and "https:" not in page and "innerHTML" not in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("sha256-") == 2
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Server"] == "contratile"
    assert ask(server, "HEAD", "/")[::2] == (200, b"")
    assert json.loads(ask(server, "GET", "/health")[2]) == {"status": "ok"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('"><script>alert(1)</script>', "&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("$style \x1b[2J\n${limit}", "$style  ${limit}"),
        ("w" * 300, "w" * 59 + "…"),
    ],
)
def test_the_search_field_shows_a_text_of_the_corpus_and_it_stays_text(
    pictures: Finder, serving: Start, text: str, shown: str
) -> None:
    gallery = gallery_of(pictures)
    hostile = GalleryCorpus(gallery._replace(texts=[text, *gallery.texts[1:]]))
    page = ask(serving(Finder(hostile, pictures.towers, "x")), "GET", "/")[2].decode()
    assert f'placeholder="for example: {shown}"' in page and page.count("<script>") == 1


def test_the_example_is_of_the_side_that_is_asked(pairs: Finder, views: Finder, serving: Start) -> None:
    assert pairs.example() == gallery_of(pairs).names[0] and views.example() == ""
    assert 'placeholder=""' in ask(serving(views), "GET", "/")[2].decode()


def test_a_corpus_that_cannot_be_read_has_no_example(pictures: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(pictures.corpus, "hit", fails)
    assert pictures.example() == ""


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/thumbnail/../../../etc/passwd",
        "/thumbnail/%2e%2e%2fconfig.toml",
        "/thumbnail/-1",
        "/thumbnail/1/",
        "/thumbnail/\u00b2".encode().decode("latin-1"),
        "/thumbnail/99999999999999999999",
        "/config.toml",
        "/gallery.json",
        "/thumbnail/",
        "//etc/passwd",
        "http://127.0.0.1/etc/passwd",
        "file:///etc/passwd",
    ],
)
def test_files_cannot_be_asked_for(pictures: Finder, serving: Start, path: str) -> None:
    server = serving(pictures)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
        answer = raw.makefile("rb").read()
    assert answer.split(b" ", 2)[1] == b"404" and b"root:" not in answer


@pytest.mark.parametrize(
    ("body", "headers", "status", "told"),
    [
        (b'{"text": ""}', JSON, 400, "expected a text"),
        (b'{"text": " \\u001b[2J "}', JSON, 400, "expected a text"),
        (b'{"text": 3}', JSON, 400, "expected an object with a text"),
        (b"[]", JSON, 400, "expected an object with a text"),
        (b"{", JSON, 400, "expected JSON"),
        (b"\xff\xfe", JSON, 400, "expected JSON"),
        (b"[" * 60000, JSON, 400, "expected JSON"),
        (b'{"text": "red", "k": 0}', JSON, 400, "from 1 to 200"),
        (b'{"text": "red", "k": true}', JSON, 400, "from 1 to 200"),
        (b'{"text": "red", "k": 1e9}', JSON, 400, "from 1 to 200"),
        (b'{"text": "red", "split": []}', JSON, 400, "split"),
        (b'{"text": "red", "among": {}}', JSON, 400, "among"),
        (b'{"text": "red", "among": "right"}', JSON, 400, "Search with a picture"),
        (b'{"text": "red", "path": "/etc/passwd"}', JSON, 400, "expected text, k, among and split"),
        (b" " * ((1 << 16) + 1), JSON, 413, "64 KiB"),
        (b"not a picture", BYTES, 400, "not an image in a known format"),
        (b"", BYTES, 400, "not an image"),
        (b" " * ((1 << 24) + 1), BYTES, 413, "16,384 KiB"),
        (b'{"text": "red"}', {"Content-Type": "text/plain"}, 415, "application/json"),
        (b'{"text": "red"}', {}, 415, "application/json"),
        (b'{"text": "red"}', {**JSON, "Content-Length": "-3"}, 400, "Content-Length"),
        (b'{"text": "red"}', {**JSON, "Transfer-Encoding": "chunked"}, 411, "Content-Length"),
        (b'{"text": "red"}', {**JSON, "Origin": "http://example.com"}, 403, "other sites"),
        (b'{"text": "red"}', {**JSON, "Origin": "null"}, 403, "other sites"),
        (b'{"text": "red"}', {**JSON, "Host": "rebound.example.com"}, 403, "--host"),
        (b'{"text": "red"}', {**JSON, "Host": "127.0.0.1.example.com"}, 403, "--host"),
        (b'{"text": "red"}', {**JSON, "Host": "[::"}, 403, "--host"),
    ],
)
def test_bad_requests_get_a_reason(
    pictures: Finder, serving: Start, body: bytes, headers: dict[str, str], status: int, told: str
) -> None:
    code, error = refused(serving(pictures), "POST", "/search", body, headers)
    assert code == status and told in error


def test_a_decompression_bomb_is_refused(pictures: Finder, serving: Start) -> None:
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )
    status, error = refused(serving(pictures), "POST", "/search", bomb, BYTES)
    assert status == 400 and "67 megapixels" in error


def test_loopback_names_are_accepted(pictures: Finder, serving: Start) -> None:
    server = serving(pictures)
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:8000", "[::1]:8000"):
        headers = {**JSON, "Host": host, "Origin": f"http://{host}"}
        assert ask(server, "POST", "/search", b'{"text": "red"}', headers)[0] == 200


def test_other_names_are_accepted_if_told_so(pictures: Finder) -> None:
    with make_server(pictures, host="0.0.0.0", port=0) as server:
        assert not server.local
    with make_server(pictures, host="localhost", port=0) as server:
        assert server.local


def test_errors_inside_stay_inside(
    pictures: Finder, serving: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*words: object, **options: object) -> None:
        raise RuntimeError("secret\x1b[2J")

    server = serving(pictures)
    monkeypatch.setattr(pictures, "by_text", fail)
    assert refused(server, "POST", "/search", b'{"text": "red"}', JSON) == (500, "internal error")
    assert capsys.readouterr().err == "contratile serve: RuntimeError: secret\n"


# --- abuse --------------------------------------------------------------------------------------------------------


def malformed(draw: random.Random) -> bytes:
    """A request that is random, or right up to a few bytes."""
    method = draw.choice([*["GET", "POST"] * 3, "HEAD", "PUT", "OPTIONS", "get", "", "\x00", "TRACE"])
    path = draw.choice(
        ["/", "/search", "/health", "/thumbnail/1", "/search?k=x&split=%ff", "*", "/" + "a" * 70000, "", "\\"]
    )
    version = draw.choice(
        ["HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/0.9", "HTTP/9.9", "HTTP/x", "", "RTSP/1.0"]
    )
    lines = [f"{method} {path} {version}"]
    for name, values in {
        "Host": ["localhost", "localhost", "localhost", "x", "", "[", "127.0.0.1:99999"],
        "Content-Type": ["application/json", "image/png", "text/html", ";;", ""],
        "Content-Length": ["0", "2", "5", "-1", "abc", "9" * 30, "1e3", "\xb2"],
        "Origin": ["http://localhost", "http://localhost", "null"],
        "Transfer-Encoding": ["chunked"],
        "X" * draw.randrange(1, 50): ["\x00\x01", "y" * 100],
    }.items():
        if draw.random() < (0.9 if name == "Host" else 0.5):
            lines.append(f"{name}: {draw.choice(values)}")
    body = draw.choice(
        [b"", b"{}", b'{"text": "red"}', b"\x89PNG\r\n\x1a\n", draw.randbytes(40), b'{"text":"\\ud800"}']
    )
    data = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
    spoiled = bytearray(data)
    for _ in range(draw.choice([0, 0, 1, 20])):
        spoiled[draw.randrange(len(spoiled))] = draw.randrange(256)
    return draw.choice(
        [bytes(spoiled), bytes(spoiled), bytes(spoiled[: draw.randrange(len(spoiled))]), draw.randbytes(200)]
    )


def test_a_thousand_malformed_requests_leave_it_running(
    pictures: Finder, serving: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server, draw, statuses = serving(pictures), random.Random(0), set()
    for _ in range(1000):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as raw:
            try:
                raw.sendall(malformed(draw))
                raw.shutdown(socket.SHUT_WR)
                answer = raw.makefile("rb").read() if draw.random() < 0.9 else b""  # some do not wait
            except OSError:  # the server may have closed it already
                continue
        statuses.add(answer.split(b" ", 2)[1] if answer.startswith(b"HTTP/") else b"")
        assert b"Traceback" not in answer and b".py" not in answer
    assert {b"200", b"400", b"403", b"404", b"501"} <= statuses and b"500" not in statuses
    assert found(server, {"text": "red"}) and until(lambda: not server._open, 60)
    assert capsys.readouterr().err == ""


def test_connections_that_say_nothing_do_not_block_others(
    pictures: Finder, serving: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit of connections the answer is 503, and after the deadline the silent ones are cut."""
    monkeypatch.setattr(serving_module, "DEADLINE", 1e9)
    monkeypatch.setattr(serving_module.Handler, "timeout", None)
    server = serving(pictures)
    address = ("127.0.0.1", server.server_port)
    silent = [socket.create_connection(address, timeout=60) for _ in range(serving_module.MAX_CONNECTIONS)]
    try:
        for raw in silent[:4]:
            raw.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n")
        assert until(lambda: len(server._open) == len(silent), 60)
        assert ask(server, "GET", "/health")[0] == 503
        monkeypatch.setattr(serving_module, "DEADLINE", -1.0)
        assert until(lambda: not server._open, 60)
        monkeypatch.setattr(serving_module, "DEADLINE", 1e9)
        assert until(lambda: ask(server, "GET", "/health")[0] == 200, 60)
    finally:
        for raw in silent:
            raw.close()


def test_a_silent_connection_is_closed(pictures: Finder, serving: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module.Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", serving(pictures).server_port), timeout=60) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: local")
        assert raw.recv(1) == b""


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_serves_a_moved_run_without_its_data_until_interrupted(pictures_run: Path, tmp_path: Path) -> None:
    moved, elsewhere = tmp_path / "moved", tmp_path / "elsewhere"
    shutil.copytree(pictures_run, moved, symlinks=True)
    options = (moved / "config.toml").read_text(encoding="utf-8")
    assert str(pictures_run.parent / "shapes") in options
    (moved / "config.toml").write_text(options.replace(str(pictures_run.parent / "shapes"), "/nowhere"))
    elsewhere.mkdir()
    words = [sys.executable, "-m", "contratile", "serve", "../moved", "--port", "0"]
    process = subprocess.Popen(words, cwd=elsewhere, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("moved: 96 image items")
        line = process.stdout.readline()
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/search", '{"text": "red"}', JSON)
        assert connection.getresponse().status == 200
        connection.close()
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, ""), out
    finally:
        process.kill()
        process.communicate()
    assert list(elsewhere.iterdir()) == []


def test_a_port_that_is_taken_or_impossible(pictures: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_server(pictures, port=0) as first:
        with pytest.raises(ValueError, match=r"port: expected a free port, got .* Pass --port 0"):
            make_server(pictures, port=first.server_port)
        monkeypatch.setattr(serving_module, "PORT", first.server_port)
        with make_server(pictures) as second:
            assert second.server_port != first.server_port
    with pytest.raises(ValueError, match="port: expected 0 to 65535, got 70000"):
        make_server(pictures, port=70000)
    with pytest.raises(ValueError, match="host: expected an address of this machine"):
        make_server(pictures, host="no.such.host.invalid", port=0)


def test_the_command_tells_that_the_port_is_taken(
    pictures: Finder, pictures_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(server: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    with make_server(pictures, port=0) as first:
        monkeypatch.setattr(serving_module, "PORT", first.server_port)
        assert main(["serve", str(pictures_run)]) == main(["serve", str(pictures_run), "--port", "0"]) == 0
    lines = capsys.readouterr().out.split("\n")
    told = [line for line in lines if "is taken" in line]
    port = next(line for line in lines if line.startswith("open ")).split(":")[2].partition("/")[0]
    assert told == [f"port {first.server_port} is taken: using {port} (--port chooses another)"]


def test_a_run_without_a_gallery_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path)]) == 2
    assert "expected a folder with gallery.safetensors" in capsys.readouterr().err

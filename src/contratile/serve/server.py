"""The HTTP server of `contratile serve`, for one person on this machine.

    GET /               the page
    GET /thumbnail/N    the picture of item N
    GET /health         {"status": "ok"}
    POST /search        {"text": "...", "k": 24, "among": "left", "split": "held out"} as JSON, or the bytes of a
                        picture (application/octet-stream or image/*; ?k=24&split=... in the address)

A request never names a file: items have numbers. Those of a run come from its gallery, in memory; those of embedded
features from their files, and their pictures from the data that was embedded. Each connection serves one request.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from contratile.errors import bad_value
from contratile.printable import printable
from contratile.report.corpus import SPLITS
from contratile.serve.finder import Finder, Group
from contratile.serve.page import make_page

PORT = 8000
MAX_JSON = 1 << 16
MAX_PICTURE = 1 << 24
"""Bytes of a request that are accepted at most."""

MAX_K = 200
MAX_CONNECTIONS = 32
"""Requests that are served at the same time; further ones get status 503."""

SILENCE = 10.0
"""Seconds without a byte after which a connection is closed."""

DEADLINE = 60.0
"""Seconds after which a request must have been received and answered."""

FORMATS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
"""First bytes of the thumbnails that are sent. They may come from anyone: nothing else is."""


class Refused(Exception):
    """A request that gets an error status.

    Args:
        status: The HTTP status.
        reason: For the client.
    """

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


class Server(ThreadingHTTPServer):
    """Serves the page of a finder. `make_server` makes it.

    Attributes:
        address: Where to open it.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, finder: Finder, host: str, port: int) -> None:
        self.finder, self.local = finder, is_loopback(host)
        self.page, self.policy = make_page(finder, limit=MAX_PICTURE)
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: dict[socket.socket, float] = {}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's looks up the name of the host, which can take long
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            request.settimeout(1)
            request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self._closed(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._closed(request)

    def _closed(self, request: socket.socket) -> None:
        self._open.pop(request, None)
        self._slots.release()

    def service_actions(self) -> None:
        """Cut connections that are past their deadline: one byte every few seconds would hold a thread for ever."""
        for request, since in list(self._open.items()):
            if time.monotonic() - since > DEADLINE:
                self._open.pop(request, None)
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # closed meanwhile

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # disconnected clients are not worth a message
            print(f"contratile serve: {type(error).__name__}: {printable(str(error))}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version, sys_version = "contratile", ""
    timeout = SILENCE

    def do_GET(self) -> None:
        self._answer(self._get)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, method: Any) -> None:
        try:
            self._check_origin()
            method()
        except Refused as refused:
            self._json(refused.status, {"error": refused.reason})
            self._drain()
        except (ConnectionError, TimeoutError):  # the client went away
            raise
        except OSError as error:
            print(f"contratile serve: {printable(str(error))}", file=sys.stderr)
            reason = f"a file could not be read ({error.strerror or type(error).__name__}); the server's log names it"
            self._json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": reason})
        except Exception as error:  # a client never sees a traceback, and the server goes on
            print(f"contratile serve: {type(error).__name__}: {printable(str(error))}", file=sys.stderr)
            self._json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "internal error"})

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        kind, _, number = path.rpartition("/")
        if path == "/":
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page, policy=self.server.policy)
        elif path == "/health":
            self._json(HTTPStatus.OK, {"status": "ok"})
        elif kind == "/thumbnail" and _is_number(number):
            data = self.server.finder.thumbnail(int(number))
            types = [name for begin, name in FORMATS.items() if data.startswith(begin)]
            if not types:
                raise Refused(HTTPStatus.NOT_FOUND, "no such picture")
            self._send(HTTPStatus.OK, types[0], data)
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "no such page")

    def _post(self) -> None:
        if self.path.partition("?")[0] != "/search":
            raise Refused(HTTPStatus.NOT_FOUND, "no such page")
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        finder = self.server.finder
        try:
            if kind == "application/json":
                groups = finder.by_text(**_text_query(self._body(MAX_JSON)))
            elif kind == "application/octet-stream" or kind.startswith("image/"):
                options = _picture_options(self.path)
                groups = finder.by_picture(self._body(MAX_PICTURE), **options)
            else:  # others can be sent by any web site without asking first
                reason = "send application/json with a text, or a picture as application/octet-stream"
                raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, reason)
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, printable(str(error))) from None
        self._json(HTTPStatus.OK, {"groups": [_as_json(group) for group in groups]})

    def _check_origin(self) -> None:
        """Refuse requests that other web sites make: by a name of theirs for this address, or from their own pages."""
        host = self.headers.get("Host", "")
        if self.server.local and not is_loopback(_name(host)):
            reason = "this server answers to localhost only; start it with --host to allow other names"
            raise Refused(HTTPStatus.FORBIDDEN, reason)
        origin = self.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refused(HTTPStatus.FORBIDDEN, "requests from other sites are refused")

    def _body(self, limit: int) -> bytes:
        sizes = self.headers.get_all("Content-Length") or []
        if "Transfer-Encoding" in self.headers or not sizes:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if len(set(sizes)) > 1 or not _is_number(sizes[0]):
            raise Refused(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
        size = int(sizes[0])
        if size > limit:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {limit >> 10:,} KiB")
        data = self.rfile.read(size)
        if len(data) < size:
            raise Refused(HTTPStatus.BAD_REQUEST, "the request ended early")
        return data

    def _json(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(content, allow_nan=False).encode())

    def _send(self, status: int, kind: str, data: bytes, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",  # another run may use this port later
            "Connection": "close",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _drain(self) -> None:
        """Read what is left of a refused request: closing now could reset the connection before the reply arrives."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        self.connection.settimeout(1)
        left = 4 * MAX_PICTURE
        while left > 0 and (data := self.connection.recv(1 << 16)):
            left -= len(data)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server itself refuses: malformed requests and unknown methods."""
        self.request_version = "HTTP/1.0"  # a first line that cannot be read is taken for HTTP/0.9, without a status
        self._json(code, {"error": printable(message or HTTPStatus(code).phrase)})

    def version_string(self) -> str:
        return self.server_version

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet: queries are private."""


def make_server(finder: Finder, *, host: str = "127.0.0.1", port: int | None = None) -> Server:
    """Open a server; `serve_forever` runs it.

    Args:
        finder: What it searches.
        host: The address to listen on. A loopback address can only be reached from this machine.
        port: The port, 0 for any free one. None: 8000, or a free one if that is taken.

    Returns:
        The server, which listens already.

    Raises:
        ValueError: The address or port cannot be used.
    """
    if port is not None and not 0 <= port < 1 << 16:
        bad_value("port", expected="0 to 65535", got=port, remedy="Pass --port 0 for any free one.")
    for tried in (PORT, 0) if port is None else (port,):
        try:
            return Server(finder, host, tried)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                if port is None and tried != 0:
                    continue
                got = f"{tried} ({error.strerror})"
                bad_value("port", expected="a free port", got=got, remedy="Pass --port 0 for any free one.")
            remedy = "Pass an address of this machine, or leave it out for 127.0.0.1."
            bad_value("host", expected="an address of this machine", got=f"{host!r} ({error})", remedy=remedy)
    raise AssertionError("a free port was asked for")


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """The Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12


def _text_query(body: bytes) -> dict[str, Any]:
    """The arguments of `Finder.by_text` in a JSON body.

    Raises:
        ValueError: It is not JSON, or a value is not allowed.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        bad_value("request", expected="JSON", got="something else", remedy='Send {"text": "..."}.')
    if not isinstance(asked, dict) or not isinstance(asked.get("text"), str):
        bad_value("request", expected="an object with a text", got="none", remedy='Send {"text": "..."}.')
    unknown = sorted(asked.keys() - {"text", "k", "among", "split"})
    if unknown:
        bad_value("request", expected="text, k, among and split", got=unknown[0][:40], remedy="Leave it out.")
    found = {"text": asked["text"], **_options(asked.get("k"), asked.get("split"))}
    if asked.get("among") is not None:
        if asked["among"] not in ("left", "right"):
            bad_value("among", expected="left or right", got="something else", remedy="Leave it out.")
        found["among"] = asked["among"]
    return found


def _picture_options(path: str) -> dict[str, Any]:
    """The options in the address of a search for a picture."""
    given = parse_qs(path.partition("?")[2], max_num_fields=10)
    k = given.get("k", [None])[-1]
    number = int(k) if k is not None and _is_number(k) else k
    return _options(number, given.get("split", [None])[-1])


def _options(k: object, split: object) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if k is not None:
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
            bad_value("k", expected=f"a whole number from 1 to {MAX_K}", got="something else", remedy="Leave it out.")
        found["k"] = k
    if split is not None:
        if split not in SPLITS:
            bad_value("split", expected=f"one of {', '.join(SPLITS)}", got="something else", remedy="Leave it out.")
        found["split"] = split
    return found


def _as_json(group: Group) -> dict[str, Any]:
    items = [item._asdict() | {"text": printable(item.text), "name": printable(item.name)} for item in group.items]
    return {"title": printable(group.title), "kind": group.kind, "items": items}

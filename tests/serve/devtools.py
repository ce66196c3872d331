"""A page in headless Chromium, driven over its debugging pipe: no package is needed.

with opened("http://127.0.0.1:8000/", folder) as page:
    page.type("red"), page.press("Enter")
    page.until("document.querySelectorAll('li').length > 0")
"""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes import until
from tests.train import browser

KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "ArrowDown": (40, ""), "Space": (32, " ")}
TRAMPOLINE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and writes answers to 4."""


class Page:
    """One tab.

    Attributes:
        problems: Exceptions of the script, and what the browser refused or could not load.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = os.fdopen(commands, "wb"), os.fdopen(answers, "rb")
        self._number, self._session = 0, ""
        self._left = b""
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = self._read()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(answer["params"]))
            elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["level"] == "error":
                self.problems.append(answer["params"]["entry"]["text"])
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _read(self) -> Any:
        while b"\0" not in self._left:
            data = os.read(self._answers.fileno(), 1 << 20)
            assert data, "the browser ended"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)

    def open(self, address: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && document.getElementById('status')")

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        assert until(lambda: self.value(f"Boolean({expression})"), 60), (
            f"{expression}: {self.value('document.body.innerText')}"
        )

    def type(self, text: str) -> None:
        """Type where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key; 8 holds Shift."""
        code, text = KEYS[key]
        same = {
            "key": " " if key == "Space" else key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": modifiers,
        }
        self.call("Input.dispatchKeyEvent", type="keyDown", **same, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **same)

    def drop(self, path: Path) -> None:
        """Drop a file into the page."""
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for step in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=step, x=50, y=200, data=data)

    def resize(self, width: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)

    def close(self) -> None:
        self._session = ""
        self.call("Browser.close")
        self._commands.close()
        self._answers.close()


@contextmanager
def opened(address: str, folder: Path) -> Iterator[Page]:
    """Open an address of this machine in a new browser, without any other network.

    Raises:
        NoBrowser: There is no Chromium.
    """
    command, variables = browser.chromium()
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe".split()
    )
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", f"--user-data-dir={folder / 'profile'}"]
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
    words = [sys.executable, "-c", TRAMPOLINE, *map(str, high), *command, *flags, *offline, "about:blank"]
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            words, env={**os.environ, **variables}, pass_fds=high, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    for end in (theirs_in, theirs_out, *high):
        os.close(end)
    page = Page(commands, answers)
    try:
        page.open(address)
        yield page
        page.close()
        process.wait(60)
    finally:
        process.kill()
        process.wait()

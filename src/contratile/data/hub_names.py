"""Names that are a folder here or a repository of the Hugging Face hub: which, and whether the hub can be asked.

    with found_at_hub("models/clip", "towers") as folder:    # the folder, or None: ask the hub, or what is cached of it
        AutoModel.from_pretrained(name)

A path that is not there is refused at once. Without this, the hub's client would look for it on the network and,
without one, try for half a minute before it says that it could not connect.
"""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from contratile.data.sample import need
from contratile.errors import bad_value

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
PATIENCE = 5.0
"""Seconds to wait for the hub to answer."""


@contextmanager
def found_at_hub(name: str, what: str) -> Iterator[Path | None]:
    """The folder of this name, or None if there is none and the hub may have it. `what` is what errors call it.

    Inside, the hub's client works from its cache if the hub cannot be reached.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        yield folder
        return
    if not _REPOSITORY.fullmatch(name):
        remedy = "Check the path; a repository of the Hugging Face hub is named organisation/name."
        bad_value(what, expected="a folder", got=f"nothing at {name}", remedy=remedy)
    with _offline_unless(reachable()):
        yield None


def absent(name: str) -> str:
    """What is known about a name that nobody could find."""
    hub = "is not on the Hugging Face hub" if reachable() else "the Hugging Face hub cannot be reached"
    return f"{name!r}, which is no folder here, and {hub}"


def reachable() -> bool:
    """Whether the hub answers, or may do so behind a proxy."""
    constants = need("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return False
    address = urlsplit(constants.ENDPOINT)
    if getproxies():
        return True
    answered = threading.Event()

    def knock() -> None:
        port = address.port or (80 if address.scheme == "http" else 443)
        with suppress(OSError), socket.create_connection((address.hostname or "", port), timeout=PATIENCE):
            answered.set()

    # In a thread, because looking up a name knows no time limit.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answered.is_set()


@contextmanager
def _offline_unless(online: bool) -> Iterator[None]:
    """Let the hub's clients work from their cache. They read these settings when they are imported."""
    places = [(need("huggingface_hub.constants"), "HF_HUB_OFFLINE")]
    with suppress(ImportError):
        places.append((need("datasets.config"), "HF_HUB_OFFLINE"))
    before = [getattr(module, name, False) for module, name in places]
    try:
        for module, name in places if not online else []:
            setattr(module, name, True)
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)

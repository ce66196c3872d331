"""Resolves names that mean a local folder or a repository of the Hugging Face hub.

    with found_at_hub("models/clip", "towers") as folder:    # the folder; None: ask the hub or its cache
        AutoModel.from_pretrained(name)

A missing path is refused immediately. Otherwise the hub's client would look for it on the network and, without a
network, retry for half a minute.
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
    """Context that yields the local folder, or None if there is none and the hub may have the name.

    Inside, the hub's clients use only their cache if the hub cannot be reached.

    Args:
        name: A path or the name of a repository.
        what: Names the thing in error messages.

    Raises:
        ValueError: There is no such folder, and the name cannot be a repository.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        yield folder
        return
    if not _REPOSITORY.fullmatch(name):
        remedy = "Check the path; names on the Hugging Face hub have the form organisation/name."
        bad_value(what, expected="a folder", got=f"nothing at {name}", remedy=remedy)
    with _offline_unless(reachable()):
        yield None


def why_not_found(name: str) -> str:
    """Describe a name that was found neither locally nor on the hub, for error messages."""
    hub = "is not on the Hugging Face hub" if reachable() else "the Hugging Face hub cannot be reached"
    return f"{name!r}, which is not a local folder, and {hub}"


def reachable() -> bool:
    """Whether the hub answers. Assumed if there is a proxy."""
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

    # In a thread, because DNS lookups have no timeout.
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return answered.is_set()


@contextmanager
def _offline_unless(online: bool) -> Iterator[None]:
    """Context in which the hub's clients use only their cache, unless online. Their settings are module attributes."""
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

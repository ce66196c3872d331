"""Names of data that a file gave, not the person at the keyboard: they may be read, and may start nothing.

    config = load_config(Path("RUN/config.toml"))      # its data is Foreign
    open_source(config.data, "test")                   # refuses pipe:COMMAND there; DataConfig(data="pipe:...") runs it

A run's folder or a recipe may come from anyone. `pipe:` is a shell command, and webdataset starts curl, gsutil and
others for addresses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from contratile.errors import bad_value

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class Foreign(str):
    """A name from a file; `origin` is the file."""

    origin: str

    def __new__(cls, name: str, origin: str = "") -> Foreign:
        made = super().__new__(cls, name)
        made.origin = origin
        return made

    def __reduce__(self) -> tuple[type[Foreign], tuple[str, str]]:
        return Foreign, (str(self), self.origin)


def from_the_same(name: str, changed: str) -> str:
    """A changed name, which is foreign if it was so before."""
    return Foreign(changed, name.origin) if isinstance(name, Foreign) else changed


def scheme(url: str) -> str:
    """What stands before the first colon of an address; empty for a path."""
    found = _SCHEME.match(url)
    return found[0][:-1].lower() if found else ""


def refuse_commands(name: str, urls: Sequence[str]) -> None:
    """Raise a ValueError if a foreign name would start a program. `urls` are what the name stands for."""
    if not isinstance(name, Foreign):
        return
    for url in urls:
        if scheme(url) not in ("", "file"):
            bad_value(
                "data",
                expected=f"local files, because the name comes from {name.origin or 'a file'}",
                got=f"{url!r}, which starts a program on this machine",
                remedy="If you trust it, pass --allow-pipe, or type it as --data.",
            )

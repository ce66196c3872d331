"""Names of data that come from a file instead of the user: they may be read, but must not start programs.

    config = load_config(Path("RUN/config.toml"))      # the names in config.data are Foreign
    open_source(config.data, "test")                   # refuses pipe:COMMAND; DataConfig(data="pipe:...") runs it

Run folders and recipes may come from anyone. `pipe:` is a shell command, and for URLs webdataset starts curl, gsutil
and other programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from contratile.errors import bad_value

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class Foreign(str):
    """A name that was read from the file `origin`."""

    origin: str

    def __new__(cls, name: str, origin: str = "") -> Foreign:
        made = super().__new__(cls, name)
        made.origin = origin
        return made

    def __reduce__(self) -> tuple[type[Foreign], tuple[str, str]]:
        return Foreign, (str(self), self.origin)


def from_the_same(name: str, changed: str) -> str:
    """`changed`, marked as foreign if `name` is."""
    return Foreign(changed, name.origin) if isinstance(name, Foreign) else changed


def scheme(url: str) -> str:
    """The scheme of a URL in lower case; empty for a path."""
    found = _SCHEME.match(url)
    return found[0][:-1].lower() if found else ""


def refuse_commands(name: str, urls: Sequence[str]) -> None:
    """Raise a ValueError if a foreign name would start a program.

    Args:
        name: Name of the data.
        urls: The files or URLs that it expands to.
    """
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

"""The files of this machine that the name of some data stands for.

    data_state("/home/me/pairs.csv")             # differs when the file has changed
    check_apart([Path("pairs.csv")], "pairs.csv")    # raises: the output would replace the data

Of a table it is the table itself, not the pictures that it names. Data on the hub or behind an address has no files.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from contratile.data.images import SUFFIXES as IMAGES
from contratile.data.shards import expand, is_shards
from contratile.errors import bad_value

_ADDRESS = re.compile(r"\w+:")


def data_files(name: str) -> Iterator[Path]:
    """The files of a table, a folder, shards or a local dataset, in order. None if the data is not here."""
    kind, _, rest = name.partition(":")
    if name in ("", "icons"):
        return
    if kind == "wordnet" and rest:
        yield from _inside(Path(rest))
    elif kind == "hf":
        yield from _inside(Path(rest.partition(":")[0]))
    elif is_shards(name) and kind != "pipe":
        yield from (Path(part) for part in expand(name) if not _ADDRESS.match(part) and Path(part).is_file())
    elif Path(name).is_dir():
        yield from (path for path in _inside(Path(name)) if path.suffix.lower() in IMAGES)
    elif Path(name).is_file():
        yield Path(name)


def data_state(name: str) -> str:
    """The number and size of the files, and a digest of their names, sizes and modification times."""
    digest, count, size = hashlib.blake2b(digest_size=8), 0, 0
    for path in data_files(name):
        told = path.stat()
        count, size = count + 1, size + told.st_size
        digest.update(f"{path}\0{told.st_size}\0{told.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return f"{count} file{'s' * (count != 1)} of {size} bytes, state {digest.hexdigest()}"


def check_apart(written: Iterable[Path], name: str) -> None:
    """Refuse to write over the data.

    Raises:
        ValueError: One of the files to write is one of the data.
    """
    ours = {(told.st_dev, told.st_ino): path for path in written if path.exists() for told in [path.stat()]}
    for file in data_files(name) if ours else ():
        told = file.stat()
        if (told.st_dev, told.st_ino) in ours:
            got = f"{ours[told.st_dev, told.st_ino]}, which is the data"
            bad_value("--out", expected="files that are not read", got=got, remedy="Choose another name.")


def _inside(folder: Path) -> Iterator[Path]:
    """The files in a folder or its subfolders, in order. Hidden ones are left out: unfinished work is there."""
    if folder.is_file():
        yield folder
    seen: set[str] = set()
    for base, folders, files in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(base))
        inner = sorted(each for each in folders if not each.startswith("."))
        folders[:] = [each for each in inner if os.path.realpath(Path(base, each)) not in seen]  # links may form a loop
        yield from (path for each in sorted(files) if not each.startswith(".") and (path := Path(base, each)).is_file())

"""The record of embedded features: the run, weights, sides and data that made them, in a file next to them.

    features.npy, features.keys.jsonl, features.npy.embedded.json

The record is written last: features that have one are complete. It may come from anyone, so it names no file that is
opened by itself. The only exception is the data that pictures are read from, and only if this user wrote the record:
`mark` is a keyed digest of these fields, and the key never leaves the user's cache folder.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contratile.data.files import cache_folder, made_once, written_whole
from contratile.errors import bad_value

FORMAT = "contratile embedded 1"
SUFFIX = ".embedded.json"
KEY = "embedded.key"
MOST = 1 << 20
"""Bytes of a record at most."""


def record_file(out: Path) -> Path:
    """The record's file. It keeps the features' suffix, because NAME.npy and NAME.parquet may be of different runs."""
    return out.with_name(out.name + SUFFIX)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The origin of embedded features."""

    run: str
    """Absolute path of the run; "" if features were made without one."""

    step: int
    weights: str
    """Digest of the weights."""

    sides: tuple[str, ...]
    """The sides that were embedded."""

    kinds: tuple[str, str]
    names: tuple[str, str]
    """What each side holds, and what it is called."""

    rows: int
    width: int
    data: dict[str, Any] = field(default_factory=dict)
    """Which data it was: name, columns, root, split."""

    mark: str = ""
    """Proves that this user wrote the record."""

    def write(self, path: Path) -> None:
        """Write it next to the features, with the mark of this user."""
        key = _key(make=True)
        told = {"format": FORMAT, **asdict(self), "mark": _mark(key, self) if key else ""}
        with written_whole(path) as draft:
            draft.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read it.

        Raises:
            ValueError: It is not there, or not what `write` writes.
        """
        try:
            with path.open(encoding="utf-8") as file:
                told = json.loads(file.read(MOST))
            if told.pop("format") != FORMAT:
                raise ValueError("another format")
            for name in ("sides", "kinds", "names"):
                told[name] = tuple(told[name])
            record = cls(**told)
            if not record._sound():
                raise ValueError("values that are not allowed")
            return record
        except FileNotFoundError:
            remedy = "Embed the data again: versions before 0.2 did not write it, and an interrupted call has not yet."
            bad_value("embedded features", expected=f"{path.name} next to them", got="none", remedy=remedy)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            remedy = "It is damaged or from another version: embed the data again."
            got = f"{type(error).__name__}"
            bad_value(f"record {path}", expected="what `contratile embed` writes", got=got, remedy=remedy)

    def _sound(self) -> bool:
        """Whether the values are of their types. Nothing is trusted."""
        texts = (self.run, self.weights, self.mark, *self.sides, *self.kinds, *self.names)
        whole = (self.step, self.rows, self.width)
        return (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(number, int) and not isinstance(number, bool) for number in whole)
            and self.sides in (("left",), ("right",), ("left", "right"))
            and self.kinds in (("image", "text"), ("text", "text"))
            and len(self.names) == 2
            and self.step >= 0
            and self.rows > 0
            and self.width > 0
            and isinstance(self.data, dict)
        )

    @property
    def own(self) -> bool:
        """Whether this user wrote the record, and its data fields were not changed since."""
        key = _key(make=False)
        return bool(key and self.mark.isascii() and hmac.compare_digest(_mark(key, self), self.mark))


def _mark(key: bytes, record: Record) -> str:
    told = json.dumps([record.run, record.data], sort_keys=True).encode()
    return hmac.new(key, told, hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes:
    """The key of this user; b"" if there is none and none can be made."""
    named = os.environ.get("CONTRATILE_CACHE")
    path = cache_folder(Path(named) if named else None) / KEY

    def write(draft: Path) -> None:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(32))

    try:
        if make:
            made_once(path, write)
        return path.read_bytes()
    except (OSError, ValueError):
        return b""

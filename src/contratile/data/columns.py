"""Which two columns of a table are the pair, and how their values become a sample."""

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from PIL.Image import Image as PILImage

from contratile.data.images import SUFFIXES, decode
from contratile.data.sample import Broken, Kind, Kinds, Sample, usable_text
from contratile.errors import bad_value

LEFTS = (
    *("image", "images", "img", "picture", "photo", "image_path", "img_path", "filepath", "file_path", "path"),
    *("file_name", "filename", "file", "url", "anchor", "query", "question", "sentence1", "word", "term"),
)
RIGHTS = (
    *("caption", "captions", "text", "title", "description", "positive", "answer", "sentence2", "definition"),
    *("name", "label"),
)
"""Names of columns that are understood without being told, best first."""

LeftKind: TypeAlias = Literal["auto", "image", "text"]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The pair of a table: its columns, what they hold, and where pictures are looked for."""

    left: str
    right: str
    kinds: Kinds
    base: Path
    """Relative paths of pictures start here."""

    confined: bool = False
    """Paths that leave the base are refused."""

    unused: tuple[tuple[str, str], ...] = ()
    """The other columns, and what each seems to hold: "text", "image", or "" for what is not the stuff of pairs."""

    def name_of(self, row: Mapping[str, Any]) -> str:
        """What a row is held out by: the left side where it is a text or a path, else the caption."""
        left = row.get(self.left)
        return left if isinstance(left, str) else str(row.get(self.right))

    def sample(self, row: Mapping[str, Any], key: str) -> Sample:
        """The pair in a row; raises Broken."""
        right = usable_text(row.get(self.right), key)
        left = row.get(self.left)
        if self.kinds[0] == "text":
            return Sample(usable_text(left, key), right, key)
        return Sample(self._picture(left, key), right, key, _picture_name(left))

    def texts(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """The usable texts in rows."""
        names = (self.left, self.right) if self.kinds[0] == "text" else (self.right,)
        for row in rows:
            for name in names:
                with suppress(Broken):
                    yield usable_text(row.get(name), "")

    def _picture(self, value: Any, key: str) -> PILImage:
        if isinstance(value, Mapping):  # as Hugging Face stores pictures
            value = value.get("bytes") or value.get("path")
        if not isinstance(value, str):
            if not isinstance(value, bytes | PILImage):
                raise Broken(key, f"expected a picture or its path, got {type(value).__name__}")
            return decode(value, key)
        if _address(value):
            raise Broken(key, "an address instead of a file (fetch with img2dataset, then use its shards)")
        if not value.strip():
            raise Broken(key, "no such file")
        path = self.base / value
        if self.confined and not self._inside(path, key):
            raise Broken(key, "path leads out of the root folder")
        return decode(path, key)

    def _inside(self, path: Path, key: str) -> bool:
        try:
            return path.resolve().is_relative_to(self.base.resolve())
        except (OSError, RuntimeError, ValueError):  # a loop of links, a name that no file can have
            raise Broken(key, "path that cannot be followed") from None


def choose(
    first_row: Mapping[str, Any],
    *,
    what: str,
    left: str = "",
    right: str = "",
    left_kind: LeftKind = "auto",
    base: Path,
    confined: bool = False,
) -> Columns:
    """The columns asked for, else those with familiar names, else both of two; the kind is seen in the first row."""
    names = list(first_row)
    for option, asked in (("left", left), ("right", right)):
        if asked and asked not in names:
            near = difflib.get_close_matches(asked, names, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else f"Name one of them with --{option}."
            bad_value(
                f"column {option} of {what}", expected=f"one of {', '.join(names)}", got=repr(asked), remedy=remedy
            )
    left = left or _familiar(LEFTS, names, taken=right)
    right = right or _familiar(RIGHTS, names, taken=left)
    if len(names) == 2:
        left = left or next(name for name in names if name != right)
        right = right or next(name for name in names if name != left)
    if not left or not right:
        remedy = "Say which two make the pair: --left IMAGE_OR_TEXT --right TEXT."
        bad_value(f"columns of {what}", expected="names such as image and caption", got=", ".join(names), remedy=remedy)
    kind: Kind = _kind(first_row.get(left)) if left_kind == "auto" else left_kind
    unused = tuple((name, _seems(value)) for name, value in first_row.items() if name not in (left, right))
    return Columns(left=left, right=right, kinds=(kind, "text"), base=base, confined=confined, unused=unused)


def _familiar(familiar: Sequence[str], names: list[str], taken: str) -> str:
    by_lower = {name.lower(): name for name in names if name != taken}
    return next((by_lower[name] for name in familiar if name in by_lower), "")


def _kind(value: Any) -> Kind:
    """Text, unless it is a picture, or looks like the name or the address of one."""
    return "image" if not isinstance(value, str) or value.lower().endswith(SUFFIXES) or _address(value) else "text"


def _seems(value: Any) -> str:
    """What a column that nobody asked for holds: texts have letters, pictures bytes or a path."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, str):
        return _kind(value) if any(map(str.isalpha, value)) else ""
    return "image" if isinstance(value, bytes) or (isinstance(value, Mapping) and "bytes" in value) else ""


def _picture_name(value: Any) -> str:
    """Equal for equal pictures: the path, or a digest of the bytes where a dataset holds them. Others have none."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return str(Path(value)) if isinstance(value, str) else ""


def _address(value: str) -> bool:
    return value.startswith(("http://", "https://"))

"""Selects the columns of a table that form the pairs and their hard negatives, and turns rows into samples."""

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeAlias

from PIL.Image import Image as PILImage

from contratile.data.images import SUFFIXES, decode
from contratile.data.sample import Broken, Kind, Kinds, Sample, Traits, usable_text, usable_texts
from contratile.errors import bad_value

LEFTS = (
    *("image", "images", "img", "picture", "photo", "image_path", "img_path", "filepath", "file_path", "path"),
    *("file_name", "filename", "file", "url", "anchor", "query", "question", "sentence1", "word", "term"),
)
RIGHTS = (
    *("caption", "captions", "text", "title", "description", "positive", "answer", "sentence2", "definition"),
    *("name", "label"),
)
"""Column names that are recognised automatically, best first."""

NEGATIVE = re.compile(r"(hard_?)?neg(ative)?s?[_-]?\d*", re.IGNORECASE)
"""Names of columns that are recognised as hard negatives: negative, negative_1, hard_negatives, neg ..."""

MOST_NEGATIVES = 8
"""Hard negatives of a pair that are used at most, unless more are asked for."""

LeftKind: TypeAlias = Literal["auto", "image", "text"]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of the pairs, what they hold, and where images are."""

    left: str
    right: str
    kinds: Kinds
    base: Path
    """Relative paths of images start here."""

    confined: bool = False
    """Refuse paths that lead out of the base."""

    negatives: tuple[str, ...]
    """Columns of hard negatives, each with one or a list of them."""

    traits: Traits
    unused: tuple[tuple[str, str], ...] = ()
    """The other columns and what they seem to hold: "text", "image", or "" for anything else."""

    def name_of(self, row: Mapping[str, Any]) -> str:
        """The name by which a row is assigned to a split: the left side if it is a text or a path, else the caption."""
        left = row.get(self.left)
        return left if isinstance(left, str) else str(row.get(self.right))

    def sample(self, row: Mapping[str, Any], key: str) -> Sample:
        """The pair in a row. Raises `Broken` if it cannot be used."""
        right, *more = usable_texts(row.get(self.right), key)
        left = row.get(self.left)
        picture = self.kinds[0] == "image"
        return Sample(
            self._picture(left, key) if picture else usable_text(left, key),
            right,
            key,
            _picture_name(left) if picture else "",
            more=tuple(more),
            negatives=tuple(self._negatives(row, key)),
        )

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that samples are made of."""
        return self.left, self.right, *self.negatives

    def _negatives(self, row: Mapping[str, Any], key: str) -> Iterator[Any]:
        """The hard negatives of a row; empty places are left out."""
        values = (row.get(name) for name in self.negatives)
        flat = chain.from_iterable(x if isinstance(x, list | tuple) else (x,) for x in values)
        for place, value in enumerate(x for x in flat if not _empty(x)):
            picture = self.traits.negatives == "image"
            yield partial(self._picture, value, f"{key}/{place}") if picture else usable_text(value, key)

    def texts(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """Yield the usable texts of rows, without hard negatives: a tokenizer must not depend on them."""
        names = [*([self.left] if self.kinds[0] == "text" else []), self.right]
        for row in rows:
            for name in names:
                with suppress(Broken):
                    yield from usable_texts(row.get(name), "")

    def _picture(self, value: Any, key: str) -> PILImage:
        if isinstance(value, Mapping):  # as Hugging Face datasets store images
            value = value.get("bytes") or value.get("path")
        if not isinstance(value, str):
            if not isinstance(value, bytes | PILImage):
                raise Broken(key, f"expected an image or its path, got {type(value).__name__}")
            return decode(value, key)
        if _is_url(value):
            raise Broken(key, "a URL instead of a file (download with img2dataset, then use its shards)")
        if not value.strip():
            raise Broken(key, "no such file")
        path = self.base / value
        if self.confined and not self._inside(path, key):
            raise Broken(key, "path leads out of the root folder")
        return decode(path, key)

    def _inside(self, path: Path, key: str) -> bool:
        try:
            return path.resolve().is_relative_to(self.base.resolve())
        except (OSError, RuntimeError, ValueError):  # a loop of links, or an invalid file name
            raise Broken(key, "path that cannot be resolved") from None


def choose_columns(
    first_row: Mapping[str, Any],
    *,
    what: str,
    left: str = "",
    right: str = "",
    left_kind: LeftKind = "auto",
    negatives: Sequence[str] = (),
    num_negatives: int | None = None,
    base: Path,
    confined: bool = False,
) -> Columns:
    """Choose the columns of the pairs.

    Args:
        first_row: Its keys are the names of the columns; its values show what they hold.
        what: Names the table in error messages.
        left: Column of the left side; empty: the first with a familiar name, or the other of two.
        right: Column of the right side, likewise.
        left_kind: What the left column holds; "auto": inferred from the first row.
        negatives: Columns of hard negatives; empty: those with a familiar name.
        num_negatives: Hard negatives per row; 0: use none; None: as many as the first row has.
        base: Folder of relative image paths.
        confined: Refuse paths that lead out of `base`.

    Raises:
        ValueError: There is no such column, or none can be chosen.
    """
    names = list(first_row)
    for option, asked in (("left", left), ("right", right), *(("negatives", name) for name in negatives)):
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
        remedy = "Name the two columns of the pairs: --left IMAGE_OR_TEXT --right TEXT."
        bad_value(f"columns of {what}", expected="names such as image and caption", got=", ".join(names), remedy=remedy)
    kind: Kind = _kind(first_row.get(left)) if left_kind == "auto" else left_kind
    hard = _negatives(first_row, [left, right], negatives, num_negatives)
    values = [first_row[name] for name in hard if not _empty(_first(first_row[name]))]
    kinds = {_kind(_first(value)) for value in values} or ({"text"} if hard else set())
    if len(kinds) > 1:
        remedy = "Name the columns of one kind: --negatives COLUMN ..."
        bad_value(f"hard negatives of {what}", expected="texts or pictures", got="both", remedy=remedy)
    if kinds == {"image"} and kind == "text":
        remedy = "Towers that encode them are those of the pairs: drop them with --num-negatives 0."
        bad_value(f"hard negatives of {what}", expected="texts, as the pairs are", got="pictures", remedy=remedy)
    count = sum(_length(first_row[name]) for name in hard) if num_negatives is None else num_negatives
    if num_negatives is None:
        count = min(count, MOST_NEGATIVES)
    traits = Traits(
        several_texts=isinstance(first_row.get(right), list | tuple),
        negatives=next(iter(kinds), None),
        negatives_count=count if hard else 0,
    )
    unused = tuple((name, _seems(x)) for name, x in first_row.items() if name not in (left, right, *hard))
    return Columns(
        left=left,
        right=right,
        kinds=(kind, "text"),
        base=base,
        confined=confined,
        negatives=hard,
        traits=traits,
        unused=unused,
    )


def _negatives(
    first_row: Mapping[str, Any], taken: Sequence[str], asked: Sequence[str], number: int | None
) -> tuple[str, ...]:
    """The columns of hard negatives: those asked for, else those with a familiar name that hold something."""
    if number == 0:
        return ()
    for name in asked:
        if name in taken:
            bad_value(
                "negatives", expected="columns other than the pair's own", got=repr(name), remedy="Name another one."
            )
    if asked:
        return tuple(asked)
    familiar = [name for name in first_row if name not in taken and NEGATIVE.fullmatch(name)]
    return tuple(name for name in familiar if _empty(_first(first_row[name])) or _seems(first_row[name]))


def _empty(value: Any) -> bool:
    """Whether a place has no negative."""
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], ())


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value


def _length(value: Any) -> int:
    return max(1, len(value)) if isinstance(value, list | tuple) else 1


def _familiar(familiar: Sequence[str], names: list[str], taken: str) -> str:
    by_lower = {name.lower(): name for name in names if name != taken}
    return next((by_lower[name] for name in familiar if name in by_lower), "")


def _kind(value: Any) -> Kind:
    """Text, unless it is an image, or looks like the path or URL of one."""
    return "image" if not isinstance(value, str) or value.lower().endswith(SUFFIXES) or _is_url(value) else "text"


def _seems(value: Any) -> str:
    """What an unused column seems to hold: texts have letters, images are bytes or a path."""
    value = _first(value)
    if isinstance(value, str):
        return _kind(value) if any(map(str.isalpha, value)) else ""
    return "image" if isinstance(value, bytes) or (isinstance(value, Mapping) and "bytes" in value) else ""


def _picture_name(value: Any) -> str:
    """A name that is equal for equal images: the path, or a digest of the bytes; empty for other values."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    return str(Path(value)) if isinstance(value, str) else ""


def _is_url(value: str) -> bool:
    return value.startswith(("http://", "https://"))

"""What a data source owes: pairs by index, or a stream of them; and the word for a sample that cannot be used.

A source is read in worker processes too, so it can be pickled, and it opens files only when it is asked for a sample.
Everything random in it follows from `generator`, everything held out from `held_out`: nothing depends on the process.
"""

import hashlib
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

Kind: TypeAlias = Literal["image", "text"]
Split: TypeAlias = Literal["train", "test"]
Kinds: TypeAlias = tuple[Kind, Kind]
Cursor: TypeAlias = Any
"""Where to go on in a stream; JSON can hold it."""


MAX_TEXT = 1 << 17
"""Characters of a text; longer ones are broken samples. The csv module has the same limit for a field."""


class Sample(NamedTuple):
    """A pair. The right side is always text."""

    left: "Image | str"
    right: str
    key: str
    """A stable name of the sample, for reports and messages."""

    name: str = ""
    """What the left side is called, if it has a name: its path, say. Samples of one name have the same left side."""


class Broken(Exception):
    """A sample that cannot be used. The reason is worded for counting: it names nothing that differs by sample."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class Source(Protocol):
    """Where pairs come from."""

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> Kinds: ...

    def texts(self) -> Iterator[str]:
        """All texts, of both sides where both are; read without pictures, for a tokenizer to learn from."""


@runtime_checkable
class Indexed(Source, Protocol):
    """Pairs by index: icons, WordNet, tables, datasets on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """The sample; raises Broken if it cannot be used."""


@runtime_checkable
class Stream(Source, Protocol):
    """Pairs one after the other: shards, datasets that are never stored.

    Reading is cut in two. `records` is sequential and cheap; `sample` decodes a record, in any process and order.
    """

    def records(
        self, *, seed: int | None, epoch: int, part: int, parts: int, start: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        """The records of one epoch that belong to reader `part` of `parts`, each with the cursor behind it.

        The order follows from the arguments alone; without a seed it is the source's own. `start` is such a cursor:
        reading goes on where it points, without decoding what lies before. What could not be read is a Broken.
        """

    def sample(self, record: Any) -> Sample:
        """Decode a record; raises Broken if it cannot be used."""


def generator(*numbers: int) -> torch.Generator:
    """A generator of random numbers for this purpose alone: (seed, epoch, ...)."""
    return torch.Generator().manual_seed(_hash("/".join(map(str, numbers))) >> 1)


def held_out(name: str, share: float) -> bool:
    """Whether what has this name belongs to the test split; the same everywhere and always."""
    return _hash(name) < share * 2**64


def in_split(name: str, split: Split, share: float | None) -> bool:
    """Whether it belongs to this split; with no share held out, everything does."""
    return share is None or held_out(name, share) == (split == "test")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def need(module: str, extra: str = "train") -> Any:
    """Import an optional package, or say how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is needed for this data: pip install "contratile[{extra}]" ({error})') from error


def left_name(sample: Sample) -> str:
    """What tells left sides apart: a text is its own name; a picture without a path has the sample's key."""
    return sample.name or (sample.left if isinstance(sample.left, str) else sample.key)


def both_texts(sample: Sample) -> Iterator[str]:
    """The sides of a pair that are texts."""
    if isinstance(sample.left, str):
        yield sample.left
    yield sample.right


def usable_text(value: object, key: str) -> str:
    """The text of a pair, its ends trimmed. Of several texts (a list of captions) the first serves."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if not isinstance(value, str):
        raise Broken(key, f"expected text, got {type(value).__name__}")
    if len(value) > MAX_TEXT:
        raise Broken(key, f"text of more than {MAX_TEXT:,} characters")
    try:
        value.encode()
    except UnicodeEncodeError:  # the bytes that could not be decoded, as surrogates
        raise Broken(key, "text is not UTF-8 (convert the file, for example with iconv)") from None
    if not value.strip():
        raise Broken(key, "empty text")
    return value.strip()

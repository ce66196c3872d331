"""The interface of data sources: pairs by index or as a stream, and the exception for samples that cannot be used.

Sources are also read in worker processes, so they must be picklable, and should open files only when a sample is read.
Use `generator` for randomness and `held_out` for splits: both give the same result in every process.
"""

import hashlib
from collections.abc import Callable, Iterator
from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

if TYPE_CHECKING:
    from PIL.Image import Image

Kind: TypeAlias = Literal["image", "text"]
Split: TypeAlias = Literal["train", "test"]
Kinds: TypeAlias = tuple[Kind, Kind]
Cursor: TypeAlias = Any
"""A position in a stream, made of JSON types."""


MAX_TEXT = 1 << 17
"""Maximum characters of a text; longer texts are broken samples. The csv module has the same limit per field."""


class Sample(NamedTuple):
    """A pair of an image or text and a text."""

    left: "Image | str"
    right: str
    key: str
    """A stable name of the sample, for reports and error messages."""

    name: str = ""
    """Name of the left side, such as its path. Samples with equal names have the same left side."""

    more: tuple[str, ...] = ()
    """Further texts that fit the left side. In training, one of `right` and these is chosen for each epoch."""

    negatives: "tuple[Image | str | Callable[[], Image], ...]" = ()
    """Hard negatives: texts that do not fit the left side, or pictures that do not fit the right side. A picture may be
    a function that reads it: only those that are used are read."""


class Traits(NamedTuple):
    """What else is known about a source. Sources that have something to say have an attribute `traits`."""

    several_texts: bool = False
    """Samples may have `more` texts."""

    negatives: Kind | None = None
    """What hard negatives are, if there are any."""

    negatives_count: int = 0
    """How many hard negatives a sample has, usually."""

    labelled: bool = True
    """False: the texts are only names of files, nothing to learn from."""


def traits_of(source: object) -> Traits:
    """The traits of a source; the default ones if it has none."""
    found: Traits = getattr(source, "traits", Traits())
    return found


class Broken(Exception):
    """Raised for a sample that cannot be used; the loader counts it and goes on.

    Args:
        key: Name of the sample.
        reason: What is wrong. Samples are counted by reason, so it should not contain anything specific to one sample.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class Source(Protocol):
    """A source of pairs. Implement `Indexed` or `Stream`."""

    @property
    def name(self) -> str:
        """Name for messages. A resumed run must have the same."""

    @property
    def kinds(self) -> Kinds:
        """What the left and the right sides are: ("image", "text") or ("text", "text")."""

    def texts(self) -> Iterator[str]:
        """Yield all texts, without decoding images. `tiny` trains its tokenizer on them."""


@runtime_checkable
class Indexed(Source, Protocol):
    """A source of pairs by index, such as icons, WordNet, tables and datasets on disk."""

    def __len__(self) -> int:
        """Number of pairs."""

    def __getitem__(self, index: int) -> Sample:
        """Return a pair. Raises `Broken` if it cannot be used."""


@runtime_checkable
class Stream(Source, Protocol):
    """A source of pairs in sequence, such as shards and datasets that are not stored locally.

    Reading has two steps: `records` is sequential and cheap, `sample` decodes a record in any process and order.
    """

    def records(
        self, *, seed: int | None, epoch: int, part: int, parts: int, start: Cursor = None
    ) -> Iterator[tuple[Any, Cursor]]:
        """Yield the records of one epoch that belong to reader `part` of `parts`.

        Args:
            seed: Determines the order, together with `epoch`; None: the source's own order.
            epoch: Number of the epoch.
            part: Number of the reader; every rank is one.
            parts: Number of readers.
            start: A cursor that was yielded before: continue behind it, without decoding earlier records.

        Yields:
            Records, each with the cursor behind it. A record that cannot be read is a `Broken`, yielded not raised.
        """

    def sample(self, record: Any) -> Sample:
        """Decode a record. Raises `Broken` if it cannot be used."""


def generator(*numbers: int) -> torch.Generator:
    """A random generator that is seeded with all the numbers: (seed, epoch, ...)."""
    return torch.Generator().manual_seed(_hash("/".join(map(str, numbers))) >> 1)


def random_numbers(*seeds: int | str) -> Random:
    """Python's random numbers, seeded with all the numbers and names: (seed, epoch, key, ...)."""
    return Random(_hash("/".join(map(str, seeds))))


def held_out(name: str, share: float) -> bool:
    """Whether the sample with this name is in the test split. Decided by a hash of the name alone."""
    return _hash(name) < share * 2**64


def in_split(name: str, split: Split, share: float | None) -> bool:
    """Whether the sample with this name is in a split. If no share is held out, every sample is in both."""
    return share is None or held_out(name, share) == (split == "test")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def need(module: str, extra: str = "train") -> Any:
    """Import an optional package, or raise an ImportError that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f'pip install ".[{extra}]" in a clone of Contratile'
        raise ImportError(f"{module} is needed for this data: {remedy} ({error})") from error


def left_name(sample: Sample) -> str:
    """Identifies a left side: its name, else the text itself, else the sample's key."""
    return sample.name or (sample.left if isinstance(sample.left, str) else sample.key)


def both_texts(sample: Sample) -> Iterator[str]:
    """Yield the sides of a pair that are texts."""
    if isinstance(sample.left, str):
        yield sample.left
    yield sample.right


def usable_texts(value: object, key: str) -> tuple[str, ...]:
    """One text, or all usable ones of a list of captions. Raises `Broken` if there is none."""
    if not isinstance(value, list | tuple) or not value:
        return (usable_text(value, key),)
    found, fault = [], Broken(key, "empty text")
    for each in value:
        try:
            found.append(usable_text(each, key))
        except Broken as error:
            fault = error
    if not found:
        raise fault
    return tuple(dict.fromkeys(found))


def usable_text(value: object, key: str) -> str:
    """A text without surrounding whitespace; of a list of texts, the first. Raises `Broken` if it is unusable."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if not isinstance(value, str):
        raise Broken(key, f"expected text, got {type(value).__name__}")
    if len(value) > MAX_TEXT:
        raise Broken(key, f"text of more than {MAX_TEXT:,} characters")
    try:
        value.encode()
    except UnicodeEncodeError:  # undecodable bytes, which were read as surrogates
        raise Broken(key, "text is not UTF-8 (convert the file, for example with iconv)") from None
    if not value.strip():
        raise Broken(key, "empty text")
    return value.strip()

"""Webdataset shards: tar files of images and captions, as img2dataset writes them, read in sequence.

    Shards("cc12m/{00000..01242}.tar", "train")
    Shards("pipe:aws s3 cp s3://bucket/{00000..01242}.tar -", "train")

Every epoch has its own order of shards; within a shard, windows of records are shuffled. A cursor counts shards and
records of the current shard, so resuming rereads at most one shard. Nothing is unpacked to disk: names inside a tar are
only labels. A tar that cannot be read to its end counts as a broken sample, and reading continues with the next tar.
Samples with files above the limits below are broken too.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from glob import glob
from itertools import chain, count, islice
from os import SEEK_END
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contratile.data.foreign import refuse_commands, scheme
from contratile.data.images import SUFFIXES, decode
from contratile.data.sample import (
    MAX_TEXT,
    Broken,
    Cursor,
    Kinds,
    Sample,
    Split,
    Traits,
    generator,
    in_split,
    need,
    usable_text,
    usable_texts,
)
from contratile.data.tars import grouped
from contratile.data.workers import shielded
from contratile.errors import bad_value

WINDOW = 1024
"""Records that are shuffled together; they are kept in memory undecoded."""

WINDOW_BYTES = 1 << 30
"""A window is closed early if its records take more bytes than this."""

MAX_PICTURE = 1 << 26
MAX_CAPTION = 4 * MAX_TEXT
MAX_JSON = 1 << 20
"""Maximum bytes of a sample's files."""

MOST = 1_000_000
"""Maximum number of shards that a pattern may expand to; LAION-5B has 232,000."""

CAPTIONS = ("caption", "text")
"""Fields of a sample's JSON that are used if it has no .txt."""


class ShardRecord(NamedTuple):
    """The undecoded files of one sample, by extension."""

    key: str
    files: dict[str, bytes]


class Shards:
    """A stream of the pairs in tar files.

    Args:
        names: Paths, URLs or `pipe:` commands with ranges in braces ("{00..99}") or `*`, separated by `::`.
        split: "train" or "test".
        left: Extensions of the left files ("png;jpg"); empty: those of images.
        right: Extension of the caption files, or field of the JSON file; empty: "txt", then "caption" or "text".
        test_share: Share of the samples in the test split; None: both splits are the whole data.

    Raises:
        ValueError: No such files, or a pattern that cannot be expanded.
    """

    def __init__(
        self, names: str, split: Split, *, left: str = "", right: str = "", test_share: float | None = 0.1
    ) -> None:
        self.urls = expand(names)
        self.name = f"{names.rpartition('/')[2]} ({split})"
        self._lefts = [ending.strip(". ") for ending in left.split(";")] if left else [s[1:] for s in SUFFIXES]
        self._ending, self._fields = right or "txt", (right,) if right else CAPTIONS
        self._split, self._share = split, test_share
        picture = any(f".{ending.lower()}" in SUFFIXES for ending in self._lefts)
        self.kinds: Kinds = ("image" if picture else "text", "text")
        lefts = dict.fromkeys(map(str.lower, self._lefts), MAX_PICTURE if picture else MAX_CAPTION)
        self._limits = {**lefts, "json": MAX_JSON, self._ending: MAX_CAPTION}

    @cached_property
    def traits(self) -> Traits:
        """Whether captions come in lists, as the first sample of a local shard shows."""
        local = (url for url in self.urls if not scheme(url))
        for record in chain.from_iterable(self._shard(url) for url in islice(local, 1)):
            with suppress(Broken):
                if isinstance(record, ShardRecord):
                    return Traits(several_texts=len(self._captions(record)) > 1)
        return Traits()

    def records(
        self, *, seed: int | None, epoch: int, part: int, parts: int, start: Cursor = None
    ) -> Iterator[tuple[ShardRecord | Broken, Cursor]]:
        n = len(self.urls)
        order = list(range(n)) if seed is None else torch.randperm(n, generator=generator(seed, epoch)).tolist()
        # With fewer shards than readers, every reader reads all shards and takes its share of the records.
        mine, stride = (order[part::parts], slice(None)) if n >= parts else (order, slice(part, None, parts))
        first, done = start or (0, 0)
        for place in range(first, len(mine)):
            found = islice(self._shard(self.urls[mine[place]]), stride.start, None, stride.step)
            seeds = None if seed is None else (seed, epoch, mine[place])
            for record in _shuffled(found, seeds, skip=done):
                done += 1
                yield record, [place, done]
            done = 0

    def _shard(self, url: str) -> Iterator[ShardRecord | Broken]:
        """Yield the records of one tar that belong to the split, and a `Broken` if it cannot be read to its end."""
        need("webdataset")
        label = Path(url).name
        try:
            if not scheme(url) and Path(url).exists() and not Path(url).is_file():
                yield Broken(label, "not a file but a folder, a pipe or a device")
                return
            with shielded():  # Ctrl-C must not kill a pipe's command before the checkpoint is written
                opened = _opened(url)
            with opened as stream:
                for name, files in grouped(stream, self._limits):
                    if in_split(name, self._split, self._share):
                        key = f"{label}/{name}"
                        yield Broken(key, files) if isinstance(files, str) else ShardRecord(key, files)
                if not _ended(stream, url):
                    raise EOFError
        except Exception as error:  # from the file system, the pipe's command, the compression or the tar format
            yield Broken(label, f"shard cannot be read to its end ({type(error).__name__})")

    def sample(self, record: ShardRecord | Broken) -> Sample:
        if isinstance(record, Broken):
            raise Broken(*record.args)
        key, files = record
        left = next((files[ending] for ending in self._lefts if ending in files), None)
        if left is None:
            raise Broken(key, f"no file .{' .'.join(self._lefts)} in the sample")
        right, *more = self._captions(record)
        found = decode(left, key) if self.kinds[0] == "image" else _text(left, key)
        return Sample(found, right, key, more=tuple(more))

    def texts(self) -> Iterator[str]:
        for url in self.urls:
            for record in self._shard(url):
                with suppress(Broken):
                    if isinstance(record, ShardRecord):
                        yield from self._captions(record)
                        if self.kinds[0] == "text":
                            yield str(self.sample(record).left)

    def _captions(self, record: ShardRecord) -> tuple[str, ...]:
        """The caption, or those of a list in the JSON."""
        key, files = record
        if self._ending in files:
            return (_text(files[self._ending], key),)
        if "json" in files:
            try:
                facts = json.loads(files["json"])
                found = next((facts[name] for name in self._fields if name in facts), None)
            except (ValueError, TypeError, RecursionError):
                raise Broken(key, "damaged JSON") from None
            if found is not None:
                return usable_texts(found, key)
        raise Broken(key, f"no caption: neither .{self._ending} nor {' or '.join(self._fields)} in .json")


def _shuffled(records: Iterator[Any], seeds: tuple[int, ...] | None, skip: int) -> Iterator[Any]:
    """Yield records, shuffled in windows, without the first `skip`."""
    for number in count():
        window = _window(records)
        if not window:
            return
        if skip < len(window):
            n = len(window)
            order = range(n) if seeds is None else torch.randperm(n, generator=generator(*seeds, number)).tolist()
            yield from (window[i] for i in order[skip:])
        skip = max(0, skip - len(window))


def _window(records: Iterator[Any]) -> list[Any]:
    """The next records, up to WINDOW of them or WINDOW_BYTES."""
    window: list[Any] = []
    size = 0
    for record in islice(records, WINDOW):
        window.append(record)
        size += sum(map(len, record.files.values())) if isinstance(record, ShardRecord) else 0
        if size >= WINDOW_BYTES:
            break
    return window


def _ended(stream: Any, url: str) -> bool:
    """Whether a tar was read to its end. One that is damaged, or cut between two entries, looks complete to tarfile.

    The last entry must be followed by zeros only, at least a block of them. Checked for uncompressed local files.
    """
    rest = False
    while block := stream.read(1 << 16):  # always read to the end: a closed pipe would kill the command
        rest |= bool(block.strip(b"\0"))
    if not url.endswith(".tar") or scheme(url):
        return True
    with Path(url).open("rb") as file:
        file.seek(-512, SEEK_END)
        return not rest and not file.read().strip(b"\0")


def _opened(url: str) -> Any:
    """Open a shard. Paths never reach webdataset, which would take some for URLs and start programs."""
    return need("webdataset").gopen(url) if scheme(url) else Path(url).open("rb")


def _text(data: bytes, key: str) -> str:
    return usable_text(data.decode("utf-8", "surrogateescape"), key)


def is_shards(name: str) -> bool:
    """Whether a data name means shards: `pipe:...` or a tar file."""
    return name.startswith("pipe:") or re.search(r"\.(tar|tgz|tar\.\w+)$", name) is not None


def _matches(pattern: str) -> list[str]:
    """Files that match a pattern. A file called `pipe:x.tar` stays a file."""
    return [f"./{path}" if scheme(path) else path for path in sorted(glob(pattern))]  # noqa: PTH207


def expand(names: str) -> list[str]:
    """Expand a pattern to the names of shards; see `Shards`."""
    braces = need("braceexpand").braceexpand
    try:
        urls = list(islice((url for pattern in names.split("::") for url in braces(pattern)), MOST + 1))
    except ValueError as error:  # an unclosed brace
        remedy = "Write a range such as shards/{00000..00099}.tar."
        bad_value("shards", expected="names with closed braces", got=f"{str(names)!r} ({error})", remedy=remedy)
    if len(urls) > MOST:
        bad_value("shards", expected=f"at most {MOST:,} names", got=repr(str(names)), remedy="Check the range.")
    refuse_commands(names, urls)
    local = [url for url in urls if not scheme(url)]
    found = {url: _matches(url) if "*" in url else [url] * Path(url).is_file() for url in local}
    if local and not any(found.values()):
        remedy = "Check the path and the range, such as shards/{00000..00099}.tar."
        bad_value("shards", expected="tar files", got=f"none of {len(local)}, first {local[0]!r}", remedy=remedy)
    # If only some are missing, they are kept: each is reported as a broken sample when its turn comes.
    return [each for url in urls for each in (found.get(url) or [url])]

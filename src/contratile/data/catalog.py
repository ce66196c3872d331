"""The data sources by name.

    source = open_source(DataConfig(data="pairs.csv"), "train")

`SOURCES` lists them, for the help and the documentation.
"""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from contratile.data import shards, tables
from contratile.data.columns import LeftKind
from contratile.data.foreign import refuse_commands
from contratile.data.loader import BROKEN_LIMIT
from contratile.data.rows import Subset, chosen
from contratile.data.sample import Indexed, Split, Stream
from contratile.errors import bad_value, check_choice, check_count


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where pairs come from. Options of the command line are these fields."""

    data: str = "icons"
    """icons, wordnet[:FOLDER], FILE.csv (.tsv .jsonl .parquet), SHARDS-{00..99}.tar, pipe:COMMAND, hf:NAME[:CONFIG]"""

    test_data: str = ""
    """Data of its own for evaluation, named in the same way; without it a share of `data` is held out."""

    left: str = ""
    """Column of the image or first text (shards: ending of the file). Familiar names are found without it."""

    right: str = ""
    """Column of the caption or second text (shards: ending of the file, or field of the JSON)."""

    left_kind: LeftKind = "auto"
    """What the left column holds; by itself it is seen from the first row."""

    root: Path | None = None
    """Folder of a table's pictures, which may not lead out of it; else paths are relative to the table."""

    test_share: float = 0.1
    """Share of the pairs that is held out, by hash, where the data has no test split of its own."""

    limit: int = 0
    """Train on so many pairs at most, a random choice that is always the same; 0: on all."""

    image_size: int = 32
    """Icons are drawn at this size, in pixels."""

    cache: Path | None = None
    """Folder for drawn icons; else contratile in the user's cache folder."""

    streaming: bool = False
    """Read a Hugging Face dataset as it arrives, without storing it."""

    broken_limit: float = BROKEN_LIMIT
    """Stop when more samples than this are broken: below 1 a share of those read (10 are forgiven), else a number."""

    workers: int = 0
    """Processes that decode and prepare samples; 0 does it in the training process."""

    def __post_init__(self) -> None:
        for name in filter(None, (self.data, self.test_data)):
            _entry(name)
        if not self.data:
            bad_value("data", expected="the name of a data source", got="''", remedy=f"There are {_listed()}.")
        if not 0 <= self.test_share < 1:
            remedy = "0.1 holds a tenth out."
            bad_value("test_share", expected="a share from 0 to below 1", got=self.test_share, remedy=remedy)
        if not self.broken_limit >= 0:
            remedy = "0.01 is one in a hundred, 500 that many, 0 none at all."
            bad_value("broken_limit", expected="0 or more", got=self.broken_limit, remedy=remedy)
        if self.streaming and not any(name.startswith("hf:") for name in (self.data, self.test_data)):
            remedy = "Tables are read as they are, shards are streams anyway: drop it."
            bad_value("streaming", expected="a Hugging Face dataset (hf:...)", got=repr(self.data), remedy=remedy)
        check_count("limit", self.limit, least=0)
        check_count("image_size", self.image_size, least=1)
        check_count("workers", self.workers, least=0)
        check_choice("left_kind", self.left_kind, ("auto", "image", "text"))


def open_source(config: DataConfig, split: Split) -> Indexed | Stream:
    """The pairs of one split, in the data's own order."""
    check_choice("split", split, ("train", "test"))
    name = config.test_data if split == "test" and config.test_data else config.data
    # With test data of its own, both are used whole.
    source = _entry(name).open(config, name, split, None if config.test_data else config.test_share)
    if isinstance(source, Indexed) and len(source) == 0:
        remedy = "Change the share that is held out (--test-share), or give --test-data."
        bad_value(f"{split} split of {name}", expected="at least one pair", got="none", remedy=remedy)
    if split == "train" and config.limit:
        if not isinstance(source, Indexed):
            remedy = "Name fewer shards, or set --steps."
            bad_value("limit", expected="data with a length", got=name, remedy=remedy)
        if config.limit < len(source):
            return Subset(source, chosen(len(source), config.limit))
    return source


class Entry(NamedTuple):
    """A line of the catalogue."""

    form: str
    summary: str
    fits: Callable[[str], bool]
    open: Callable[[DataConfig, str, Split, float | None], Indexed | Stream]


def _icons(config: DataConfig, name: str, split: Split, share: float | None) -> Indexed:
    from contratile.data.icons import Icons

    return Icons(split, size=config.image_size, test_share=share, cache=config.cache)


def _wordnet(config: DataConfig, name: str, split: Split, share: float | None) -> Indexed:
    from contratile.data.wordnet import WordNet

    folder = name.partition(":")[2]
    return WordNet(split, folder=Path(folder) if folder else None, test_share=share)


def _table(config: DataConfig, name: str, split: Split, share: float | None) -> Indexed:
    return tables.Table(
        Path(name),
        split,
        left=config.left,
        right=config.right,
        left_kind=config.left_kind,
        root=config.root,
        test_share=share,
    )


def _shards(config: DataConfig, name: str, split: Split, share: float | None) -> Stream:
    return shards.Shards(name, split, left=config.left, right=config.right, test_share=share)


def _hub(config: DataConfig, name: str, split: Split, share: float | None) -> Indexed | Stream:
    from contratile.data.hub import open_hub

    refuse_commands(name, [name.removeprefix("hf:")] if "://" in name else [])
    return open_hub(
        name,
        split,
        left=config.left,
        right=config.right,
        left_kind=config.left_kind,
        root=config.root,
        streaming=config.streaming,
        test_share=share,
    )


SOURCES = (
    Entry("icons", "14,000 icons and their names, built in", lambda name: name == "icons", _icons),
    Entry(
        "wordnet[:FOLDER]",
        "words and their definitions, from an installed WordNet or the folder of one",
        lambda name: name.partition(":")[0] == "wordnet",
        _wordnet,
    ),
    Entry("FILE.csv, .tsv, .jsonl", "a table of pairs", lambda name: name.lower().endswith(tables.SUFFIXES), _table),
    Entry(
        "SHARDS-{000..123}.tar, pipe:COMMAND",
        "webdataset shards, as img2dataset writes them",
        shards.is_shards,
        _shards,
    ),
    Entry(
        "hf:NAME[:CONFIG], FILE.parquet",
        "a Hugging Face dataset, of the hub or of a folder; Parquet",
        lambda name: name.startswith("hf:") or name.endswith(".parquet"),
        _hub,
    ),
)


def _entry(name: str) -> Entry:
    for entry in SOURCES:
        if entry.fits(name):
            return entry
    near = difflib.get_close_matches(name, ("icons", "wordnet"), 1)
    hint = f"Did you mean {near[0]!r}?" if near else "A Hugging Face dataset is named hf:NAME."
    bad_value("data", expected=_listed(), got=repr(name), remedy=hint)


def _listed() -> str:
    return ", ".join(entry.form for entry in SOURCES)

"""Data sources by name.

    source = open_source(DataConfig(data="pairs.csv"), "train")

`SOURCES` lists them for help texts and documentation.
"""

import difflib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from contratile.data import shards, tables
from contratile.data.columns import LeftKind
from contratile.data.foreign import refuse_commands
from contratile.data.loader import BROKEN_LIMIT
from contratile.data.mixture import Batching, mixed
from contratile.data.rows import Subset, chosen
from contratile.data.sample import Indexed, Split, Stream
from contratile.errors import bad_value, check_choice, check_count


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where pairs come from. The fields are also command-line options."""

    data: str | tuple[str, ...] = "icons"
    """icons, wordnet[:FOLDER], FILE.csv (.tsv .jsonl .parquet), SHARDS-{00..99}.tar, pipe:COMMAND, hf:NAME[:CONFIG],
    a folder of images; several of them are mixed"""

    data_weights: tuple[float, ...] = ()
    """Share of each of several sources in the pairs that are trained on; without it by their lengths."""

    batching: Batching = "mixed"
    """mixed: the pairs of a batch come from all sources; homogeneous: each batch comes from one source."""

    samples_per_epoch: int = 0
    """Pairs in an epoch; 0: all. Shards and streams need it for options that are given in epochs."""

    test_data: str | tuple[str, ...] = ""
    """Separate data for evaluation, named in the same way; without it a share of `data` is held out."""

    left: str = ""
    """Column of the image or first text (shards: file extension). Common names are found without it."""

    right: str = ""
    """Column of the caption or second text (shards: file extension, or field of the JSON)."""

    left_kind: LeftKind = "auto"
    """What the left column holds; auto: inferred from the first row."""

    negatives: tuple[str, ...] = ()
    """Columns of hard negatives, texts or images; without it those called negative, negative_1, hard_negatives ..."""

    num_negatives: int | None = None
    """Hard negatives per pair; of more, some are chosen for each epoch. 0: use none. Not given: as in the first row."""

    root: Path | None = None
    """Folder of a table's images; paths that lead out of it are refused. Without it paths are relative to the table."""

    test_share: float = 0.1
    """Share of the pairs that is held out by hash if the data has no test split."""

    limit: int = 0
    """Train on at most this many pairs, a random choice that is always the same; 0: all."""

    image_size: int = 32
    """Size in pixels at which icons are drawn."""

    cache: Path | None = None
    """Folder for drawn icons; default: contratile in the user's cache folder."""

    streaming: bool = False
    """Stream a Hugging Face dataset instead of downloading it first."""

    broken_limit: float = BROKEN_LIMIT
    """Stop if more samples than this are broken: below 1 a share of those read (10 are tolerated), else a number."""

    workers: int = 0
    """Processes that decode and prepare samples; 0: the training process does."""

    def __post_init__(self) -> None:
        for name in (*self.names, *self.test_names):
            _entry(name)
        if not self.names:
            bad_value("data", expected="the name of a data source", got="''", remedy=f"There are {_listed()}.")
        if not 0 <= self.test_share < 1:
            remedy = "0.1 holds out a tenth."
            bad_value("test_share", expected="a share from 0 to below 1", got=self.test_share, remedy=remedy)
        if not self.broken_limit >= 0:
            remedy = "0.01 tolerates one in a hundred, 500 that many, 0 none."
            bad_value("broken_limit", expected="0 or more", got=self.broken_limit, remedy=remedy)
        if self.streaming and not any(name.startswith("hf:") for name in (*self.names, *self.test_names)):
            remedy = "Drop it: tables are local files, and shards are always streamed."
            bad_value("streaming", expected="a Hugging Face dataset (hf:...)", got=repr(self.data), remedy=remedy)
        self._check_mixture()
        self._check_columns()
        check_count("limit", self.limit, least=0)
        check_count("samples_per_epoch", self.samples_per_epoch, least=0)
        if self.num_negatives is not None:
            check_count("num_negatives", self.num_negatives, least=0)
            if self.negatives and self.num_negatives == 0:
                bad_value("num_negatives", expected="at least 1 with --negatives", got=0, remedy="Drop one of them.")
        check_count("image_size", self.image_size, least=1)
        check_count("workers", self.workers, least=0)
        check_choice("left_kind", self.left_kind, ("auto", "image", "text"))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sources to train on."""
        return _names(self.data)

    @property
    def test_names(self) -> tuple[str, ...]:
        """The names of separate sources for evaluation."""
        return _names(self.test_data)

    def _check_mixture(self) -> None:
        check_choice("batching", self.batching, ("mixed", "homogeneous"))
        count = len(self.names)
        if len(set(self.names)) < count:
            remedy = "Name each source once; --data-weights sets its share."
            bad_value("data", expected="different sources", got=", ".join(self.names), remedy=remedy)
        if count == 1 and (self.data_weights or self.batching != "mixed"):
            what = "data_weights" if self.data_weights else "batching"
            bad_value(what, expected="several sources", got="one", remedy="Name them: --data A B.")
        if self.data_weights:
            if len(self.data_weights) != count:
                remedy = "Give one weight to each source of --data."
                bad_value("data_weights", expected=f"{count} numbers", got=len(self.data_weights), remedy=remedy)
            if not all(0 < weight < math.inf for weight in self.data_weights):
                remedy = "Drop sources that should not be used."
                bad_value("data_weights", expected="positive numbers", got=self.data_weights, remedy=remedy)
        if count > 1 and self.limit:
            bad_value("limit", expected="one source", got=f"{count} sources", remedy="Use --samples-per-epoch.")

    def _check_columns(self) -> None:
        """Options of columns need data that has some."""
        for option, forms in {"left": COLUMNS, "right": COLUMNS, "root": TABLES, "negatives": TABLES}.items():
            given = getattr(self, option)
            if given and not any(_entry(name).open in forms for name in (*self.names, *self.test_names)):
                remedy = "Drop it: this data has no columns to choose."
                expected = "a table" if forms is TABLES else "a table or shards"
                bad_value(option, expected=f"{expected} with it", got=self.data, remedy=remedy)


def _names(given: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, (given,) if isinstance(given, str) else given))


def open_source(config: DataConfig, split: Split) -> Indexed | Stream:
    """Open a data source.

    Args:
        config: Names the data and its options.
        split: "train" or "test". The test split is `config.test_data`, the data's own test split, or a share that is
            held out by hash.

    Returns:
        An `Indexed` or `Stream` source, in the order of the data.

    Raises:
        ValueError: The data does not exist, has no pairs, or the options do not fit it.
        ImportError: A package for this kind of data is missing.

    Examples:
        >>> source = open_source(DataConfig(data="icons"), "test")          # doctest: +SKIP
        >>> source[0].right                                                  # doctest: +SKIP
        'arrow left bold'
    """
    check_choice("split", split, ("train", "test"))
    names = config.test_names if split == "test" and config.test_names else config.names
    if split == "test":  # hard negatives are for training
        config = replace(config, negatives=(), num_negatives=0)
    sources = [_open(config, name, split) for name in names]
    training = {"weights": config.data_weights, "batching": config.batching} if split == "train" else {}
    source = mixed(sources, **training)  # type: ignore[arg-type]  # one dict for two types
    if split == "train" and config.limit:
        name = names[0]
        if not isinstance(source, Indexed):
            remedy = "Name fewer shards, or set --steps."
            bad_value("limit", expected="data with a length", got=name, remedy=remedy)
        if config.limit < len(source):
            return Subset(source, chosen(len(source), config.limit))
    return source


def _open(config: DataConfig, name: str, split: Split) -> Indexed | Stream:
    # With separate test data, nothing is held out.
    source = _entry(name).open(config, name, split, None if config.test_names else config.test_share)
    if isinstance(source, Indexed) and len(source) == 0:
        remedy = "Change the held-out share (--test-share), or pass --test-data."
        bad_value(f"{split} split of {name}", expected="at least one pair", got="none", remedy=remedy)
    return source


class Entry(NamedTuple):
    """A kind of data source: the form of its names, a summary, and how to recognise and open it."""

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
    return tables.Table(Path(name), split, **_columns(config), test_share=share)


def _shards(config: DataConfig, name: str, split: Split, share: float | None) -> Stream:
    return shards.Shards(name, split, left=config.left, right=config.right, test_share=share)


def _folder(config: DataConfig, name: str, split: Split, share: float | None) -> Indexed:
    from contratile.data.folder import ImageFolder

    return ImageFolder(Path(name), split, test_share=share)


def _hub(config: DataConfig, name: str, split: Split, share: float | None) -> Indexed | Stream:
    from contratile.data.hub import open_hub

    refuse_commands(name, [name.removeprefix("hf:")] if "://" in name else [])
    return open_hub(name, split, **_columns(config), streaming=config.streaming, test_share=share)


def _columns(config: DataConfig) -> dict[str, Any]:
    """The options of sources with columns."""
    return {name: getattr(config, name) for name in COLUMN_OPTIONS}


COLUMN_OPTIONS = ("left", "right", "left_kind", "negatives", "num_negatives", "root")
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
        "a Hugging Face dataset, from the hub or a folder; Parquet",
        lambda name: name.startswith("hf:") or name.endswith(".parquet"),
        _hub,
    ),
    Entry(
        "FOLDER/",
        "a folder of images, with class folders or without",
        lambda name: name.endswith(("/", os.sep)) or Path(name).is_dir(),
        _folder,
    ),
)


COLUMNS, TABLES = (_table, _hub, _shards), (_table, _hub)
"""What has columns or fields to choose, and what has columns of images and hard negatives."""


def is_source(name: str) -> bool:
    """Whether a name has the form of a data source."""
    return any(entry.fits(name) for entry in SOURCES)


def _entry(name: str) -> Entry:
    for entry in SOURCES:
        if entry.fits(name):
            return entry
    near = difflib.get_close_matches(name, ("icons", "wordnet"), 1)
    hint = f"Did you mean {near[0]!r}?" if near else "A Hugging Face dataset is named hf:NAME."
    bad_value("data", expected=_listed(), got=repr(name), remedy=hint)


def _listed() -> str:
    return ", ".join(entry.form for entry in SOURCES)

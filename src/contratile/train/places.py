"""Paths that mean the same from any folder: a run keeps where its data and its encoders are, not how they were typed.

    config = located(config)                   # pairs.csv becomes /home/me/pairs.csv
    absent(config.data.data)                   # what is no longer there

Names of the hub, addresses and commands stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from contratile.data.foreign import from_the_same
from contratile.data.shards import is_shards
from contratile.data.tables import SUFFIXES

if TYPE_CHECKING:
    from contratile.train.config import TrainConfig

_ADDRESS = re.compile(r"\w+:")


def located(config: TrainConfig) -> TrainConfig:
    """The options with absolute paths."""
    run, data, towers = config.run, config.data, config.towers
    return replace(
        config,
        run=replace(run, out=run.out.absolute()),
        data=replace(
            data,
            data=from_the_same(data.data, located_data(data.data)),
            test_data=from_the_same(data.test_data, located_data(data.test_data)),
            root=data.root and data.root.absolute(),
            cache=data.cache and data.cache.absolute(),
        ),
        towers=replace(towers, towers=located_towers(towers.towers)),
    )


def located_data(name: str) -> str:
    """The name of a data source with an absolute path, where it holds one."""
    kind, _, rest = name.partition(":")
    if kind == "wordnet":
        return f"wordnet:{_absolute(rest)}" if rest else name
    if kind == "hf":
        path, _, config = rest.partition(":")
        return f"hf:{_absolute(path, ':')}{':' * bool(config)}{config}" if Path(path).exists() else name
    if name.lower().endswith((*SUFFIXES, ".parquet")):
        return _absolute(name)
    if is_shards(name) and kind != "pipe":
        return "::".join(_absolute(part, "{}*?[:") if not _ADDRESS.match(part) else part for part in name.split("::"))
    return name


def located_towers(name: str) -> str:
    """The name of encoders with absolute paths of the folders or files in it."""
    maker, _, rest = name.partition(":")
    if maker in ("hf", "st"):
        parts = [rest] if maker == "st" or Path(rest).is_dir() else rest.split("+")
        special = "+" if len(parts) > 1 else ""
        return f"{maker}:{'+'.join(_absolute(part, special) if Path(part).is_dir() else part for part in parts)}"
    model, _, weights = rest.partition(":")
    return f"{maker}:{model}:{_absolute(weights)}" if maker == "open_clip" and Path(weights).is_file() else name


def absent(name: str) -> str:
    """The path in the name of a data source, if nothing is there."""
    kind, _, rest = name.partition(":")
    if kind == "wordnet":
        return rest if rest and not Path(rest).exists() else ""
    if kind == "hf":
        path = rest.partition(":")[0]
        return path if Path(path).is_absolute() and not Path(path).exists() else ""
    if name.lower().endswith((*SUFFIXES, ".parquet")):
        return "" if Path(name).exists() else name
    if is_shards(name) and not _ADDRESS.match(name):
        # The folder is enough: shards that are missing in it are broken samples.
        folder = str(Path(re.split(r"[{*?\[]", name, maxsplit=1)[0] + "x").parent)
        return "" if glob(folder) else folder  # noqa: PTH207  # a folder's name may be a pattern too
    return ""


def absent_towers(name: str) -> str:
    """The path in the name of encoders, if nothing is there."""
    maker, _, rest = name.partition(":")
    parts = [rest] if maker == "st" or Path(rest).is_dir() else rest.split("+") if maker == "hf" else []
    return next((part for part in parts if Path(part).is_absolute() and not Path(part).exists()), "")


def _absolute(path: str, special: str = "") -> str:
    """As seen from the root, unless the present folder has characters that mean something in such a name."""
    found = str(Path(path).absolute())
    return path if any(letter in str(Path.cwd()) for letter in special) else found

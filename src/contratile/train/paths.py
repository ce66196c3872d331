"""Absolute paths in a configuration, so that a run can be resumed and evaluated from any folder.

    config = absolute_paths(config)            # pairs.csv becomes /home/me/pairs.csv
    missing_data(config.data.names[0])         # the path in it, if nothing is there any more

Names on the Hugging Face hub, URLs and commands stay as they are.
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
from contratile.train.class_names import CLASSES, TEMPLATES, absolute_list
from contratile.train.second_options import is_pretrained

if TYPE_CHECKING:
    from contratile.train.config import TrainConfig

_ADDRESS = re.compile(r"\w+:")


def absolute_paths(config: TrainConfig) -> TrainConfig:
    """Make all paths in a configuration absolute."""
    run, data, towers, loss, evaluation = config.run, config.data, config.towers, config.loss, config.eval
    return replace(
        config,
        run=replace(run, out=run.out.absolute()),
        data=replace(
            data,
            data=_each(data.data),
            test_data=_each(data.test_data),
            root=data.root and data.root.absolute(),
            cache=data.cache and data.cache.absolute(),
        ),
        towers=replace(towers, towers=absolute_towers(towers.towers)),
        loss=replace(loss, guide=absolute_model(loss.guide), teacher=absolute_model(loss.teacher)),
        eval=replace(
            evaluation,
            zero_shot=from_the_same(evaluation.zero_shot, absolute_data(evaluation.zero_shot)),
            classes=absolute_list(evaluation.classes, CLASSES),
            templates=absolute_list(evaluation.templates, TEMPLATES),
        ),
    )


def _each(names: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(names, tuple):
        return tuple(from_the_same(name, absolute_data(name)) for name in names)
    return from_the_same(names, absolute_data(names))


def absolute_data(name: str) -> str:
    """Make the path in the name of a data source absolute, if there is one."""
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
    if name not in ("", "icons") and Path(name).is_dir():
        return f"{_absolute(name)}/"  # the slash marks it as a folder, even if it is removed later
    return name


def absolute_towers(name: str) -> str:
    """Make the paths in the name of towers absolute, if there are any."""
    maker, _, rest = name.partition(":")
    if maker in ("hf", "st"):
        parts = [rest] if maker == "st" or Path(rest).is_dir() else rest.split("+")
        special = "+" if len(parts) > 1 else ""
        return f"{maker}:{'+'.join(_absolute(part, special) if Path(part).is_dir() else part for part in parts)}"
    model, _, weights = rest.partition(":")
    return f"{maker}:{model}:{_absolute(weights)}" if maker == "open_clip" and Path(weights).is_file() else name


def absolute_model(name: str) -> str:
    """Make the paths in the name of a guide or a teacher absolute: a run's folder, or those of towers."""
    if not name:
        return name
    return absolute_towers(name) if is_pretrained(name) else str(Path(name).absolute())


def missing_data(name: str) -> str:
    """The path in the name of a data source, if it does not exist; else ""."""
    kind, _, rest = name.partition(":")
    if kind == "wordnet":
        return rest if rest and not Path(rest).exists() else ""
    if kind == "hf":
        path = rest.partition(":")[0]
        return path if Path(path).is_absolute() and not Path(path).exists() else ""
    if name.lower().endswith((*SUFFIXES, ".parquet")):
        return "" if Path(name).exists() else name
    if is_shards(name) and not _ADDRESS.match(name):
        # Check the folder only: shards that are missing in it count as broken samples.
        folder = str(Path(re.split(r"[{*?\[]", name, maxsplit=1)[0] + "x").parent)
        return "" if glob(folder) else folder  # noqa: PTH207  # the folder may be a pattern too
    return name if name.endswith("/") and not Path(name).is_dir() else ""


def missing_towers(name: str) -> str:
    """The path in the name of towers, if it does not exist; else ""."""
    maker, _, rest = name.partition(":")
    parts = [rest] if maker == "st" or Path(rest).is_dir() else rest.split("+") if maker == "hf" else []
    return next((part for part in parts if Path(part).is_absolute() and not Path(part).exists()), "")


def _absolute(path: str, special: str = "") -> str:
    """Make a path absolute, unless the current folder contains characters that are special in the name."""
    found = str(Path(path).absolute())
    return path if any(letter in str(Path.cwd()) for letter in special) else found

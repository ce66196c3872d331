"""The options of a training run: keyword-only, checked, saved with the run as TOML.

    config = TrainConfig(run=RunConfig(batch=4096), data=DataConfig(data="icons"))
    load_config(Path("recipes/icons.toml"))

On the command line every field is an option of its own name; in a recipe it stands under its section.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from contratile.data.catalog import DataConfig
from contratile.data.files import written_whole
from contratile.data.foreign import Foreign
from contratile.errors import bad_type, bad_value, check_choice, check_count, check_size
from contratile.models.towers import TowerConfig
from contratile.train.optim import OptimConfig

LossName = Literal["clip", "infonce", "siglip", "ntxent", "supcon"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss."""

    loss: LossName = "clip"
    """clip: both directions; infonce: left to right; siglip; ntxent: two views; supcon: equal texts are one class."""

    dedup: bool = True
    """Pairs of equal text are no negatives of each other (clip, infonce)."""

    margin: float | None = None
    """Drop negatives more similar than the positive less this margin (clip, infonce)."""

    label_smoothing: float = 0.0
    """Share of the target that is spread over all keys (clip, infonce)."""

    backend: Literal["auto", "torch", "triton", "dense"] = "auto"
    """How the loss is computed; dense, which needs memory for all scores, is there to compare with."""

    cache_mib: int = 0
    """Memory for keeping score tiles from forward to backward: faster, same results."""

    max_scale: float = 100.0
    """The learned scale is clamped to it after every step."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run."""

    out: Path = Path("runs/latest")
    """Folder of the run: configuration, metrics, checkpoints, report."""

    batch: int = 4096
    """Pairs in a step, over all processes."""

    chunk: int = 256
    """Pairs that go through the encoders at once: what their activations are held for."""

    steps: int = 0
    """Steps of the run; 0: as the epochs say."""

    epochs: float = 10.0
    """Passes over the data, if steps are not given."""

    seed: int = 0
    """Of the weights, the order of the data and everything random."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the encoders, fp16 on accelerators only; the loss accumulates in fp32."""

    fsdp: bool = False
    """Share weights, gradients and optimiser state out over the processes (FSDP2); nothing to do for one process."""

    offload: Literal["none", "host", "disk"] = "none"
    """Where a batch's inputs wait between the two passes through the encoders."""

    eval_every: int = 0
    """Steps between evaluations on held-out data; 0: ten in a run. There is one at the end in any case."""

    save_every: int = 0
    """Steps between checkpoints; 0: ten in a run."""

    keep: int = 2
    """Checkpoints that are kept, beside the best."""

    resume: str = "auto"
    """auto: continue the run in `out` if there is one; never: refuse to; or a checkpoint's folder, for a new `out`."""

    log_every: int = 1
    """Steps between lines of metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard's files too, if the package is there."""

    cpu: bool = False
    """Use the CPU even if there is an accelerator."""

    timeout: float = 1800.0
    """Seconds that processes wait for each other; then a dead or stalled one ends the run."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a pair of encoders with a contrastive loss at any batch size."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    towers: TowerConfig = field(default_factory=TowerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        run, loss = self.run, self.loss
        for section in SECTIONS:
            for option, value in vars(getattr(self, section)).items():
                if isinstance(value, int | float):
                    check_size(option, value)
        for name in ("batch", "chunk", "keep", "log_every"):
            check_count(name, getattr(run, name), least=1)
        for name in ("steps", "eval_every", "save_every"):
            check_count(name, getattr(run, name), least=0)
        if not 0 <= run.seed < 2**32:
            bad_value("seed", expected="0 to 4294967295", got=run.seed, remedy="Any number in between will do.")
        check_count("cache_mib", loss.cache_mib, least=0)
        if not 0 <= loss.label_smoothing < 1:
            got = loss.label_smoothing
            bad_value("label_smoothing", expected="a share from 0 to below 1", got=got, remedy="0.1 is common.")
        if not loss.max_scale >= 1:
            bad_value("max_scale", expected="at least 1", got=loss.max_scale, remedy="CLIP has 100.")
        if run.steps == 0 and not run.epochs > 0:
            bad_value("epochs", expected="a positive number", got=run.epochs, remedy="Or pass --steps.")
        if not 0 < run.timeout < 1e9:
            bad_value("timeout", expected="a positive number of seconds", got=run.timeout, remedy="Drop it for 1800.")
        if loss.loss not in ("clip", "infonce"):
            for name in ("margin", "label_smoothing"):
                if getattr(loss, name):
                    remedy = "Drop it, or use --loss clip or infonce."
                    bad_value(name, expected=f"none with --loss {loss.loss}", got=getattr(loss, name), remedy=remedy)


SECTIONS = ("run", "data", "towers", "loss", "optim")
CONFIG = "config.toml"
"""Of a run, in its folder."""

LARGEST = 1 << 20
"""Bytes of a recipe at most: they have some hundreds."""


def load_config(path: Path, default: TrainConfig | None = None, *, allow_pipe: bool = False) -> TrainConfig:
    """A recipe: sections and fields of `TrainConfig` in TOML, on top of `default`.

    Args:
        path: The file. Anyone may have written it, so every value is checked.
        default: What it leaves out; by default that of `TrainConfig`.
        allow_pipe: Let the data that it names start programs (`pipe:COMMAND`, addresses).

    Raises:
        ValueError: The file cannot be read, or has a name or a value that does not exist.
        TypeError: A value has the wrong type.
    """
    try:
        tomllib: Any = import_module("tomllib")
    except ImportError:  # Python 3.10
        tomllib = import_module("tomli")
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError("It is larger")
        given = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        bad_value("config", expected="a TOML file", got=path, remedy=f"{error.strerror or error}.")
    except ValueError as error:  # of TOML, of UTF-8, or a number with thousands of digits
        bad_value("config", expected=f"TOML in UTF-8, at most {LARGEST:,} bytes", got=path, remedy=f"{error}.")
    except RecursionError:
        bad_value("config", expected="sections of values", got=f"{path}, nested too deeply", remedy="See recipes/.")
    config = from_dict(given, default or TrainConfig(), where=str(path))
    if allow_pipe:
        return config
    names = [name for name in ("data", "test_data") if name in given.get("data", {})]
    foreign = {name: Foreign(getattr(config.data, name), origin=str(path)) for name in names}
    return replace(config, data=replace(config.data, **foreign))  # type: ignore[arg-type]  # they are texts


def from_dict(given: Mapping[str, Any], default: TrainConfig, *, where: str) -> TrainConfig:
    """The default with some fields replaced; unknown names are refused with the nearest known one."""
    parts = {}
    for section, values in given.items():
        _known(section, SECTIONS, where)
        if not isinstance(values, Mapping):
            bad_value(f"{where}: {section}", expected="a section", got=_short(values), remedy=f"Write [{section}].")
        part, here = getattr(default, section), f"{where} [{section}]"
        hints = get_type_hints(type(part))
        changes = {}
        for name, value in values.items():
            _known(name, tuple(f.name for f in fields(part)), here)
            changes[name] = _convert(f"{here} {name}", value, hints[name], getattr(type(part)(), name))
        with _named(here):
            parts[section] = replace(part, **changes)
    with _named(where):
        return replace(default, **parts)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Put the file in front of what is said about a value."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where} {error}") from error


def _known(name: str, known: tuple[str, ...], where: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]}?" if near else "Drop it."
        bad_value(where, expected=f"one of {', '.join(known)}", got=_short(name), remedy=remedy)


# What a field of a type wants to find in TOML: the types there, and the word for them.
_WANTED: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text in quotes"),
    Path: ((str,), "a path in quotes"),
}


def _convert(what: str, value: Any, hint: Any, default: Any) -> Any:
    """A value of TOML as a field wants it."""
    if get_origin(hint) in (Union, UnionType):  # TOML has no word for None, so the other one is meant
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is Literal:
        check_choice(what, value, get_args(hint))
        return value
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if not isinstance(value, list) or len(value) != len(kinds):
            bad_type(what, expected=f"a list of {len(kinds)}", got=_short(value), remedy="Write it as [0.9, 0.98].")
        return tuple(_convert(what, part, kind, None) for part, kind in zip(value, kinds, strict=True))
    types, word = _WANTED[hint]
    fits = isinstance(value, types) and isinstance(value, bool) == (hint is bool)
    if not fits:
        example = f"{what.rpartition(' ')[2]} = {_toml(str(default) if isinstance(default, Path) else default)}"
        remedy = "Check its type." if default is None else f"Write it like {example}."
        bad_type(what, expected=word, got=_short(value), remedy=remedy)
    if isinstance(value, int | float):
        check_size(what, value)
    elif "\0" in value:
        bad_value(what, expected="a text", got=_short(value), remedy="Remove the NUL.")
    return Path(value) if hint is Path else float(value) if hint is float else value


def _short(value: object) -> str:
    """What was found, at a length that fits a line."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # a nest, or a number of more digits than Python shows
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def to_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Plain values by section; what is None is left out, as TOML has no word for it."""
    sections = {}
    for section in SECTIONS:
        part = getattr(config, section)
        values = {f.name: getattr(part, f.name) for f in fields(part)}
        sections[section] = {k: str(v) if isinstance(v, Path) else v for k, v in values.items() if v is not None}
    return sections


def to_toml(config: TrainConfig) -> str:
    """A recipe that gives this config again."""
    lines = []
    for section, values in to_dict(config).items():
        lines += [f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items()), ""]
    return "\n".join(lines)


def save_config(config: TrainConfig, folder: Path) -> None:
    """Write the options of a run beside what it makes."""
    with written_whole(folder / CONFIG) as draft:
        draft.write_text(to_toml(config), encoding="utf-8")


def _toml(value: Any) -> str:
    # JSON's strings, numbers, booleans and lists are TOML too.
    return json.dumps(list(value) if isinstance(value, tuple) else value)

"""The options of a training run: checked dataclasses, saved with the run as TOML.

    config = TrainConfig(run=RunConfig(batch=4096), data=DataConfig(data="icons"))
    load_config(find_recipe("icons"))

On the command line every field is an option of the same name; in a recipe it stands under its section.
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

from contratile.data.augment import AugmentConfig
from contratile.data.catalog import DataConfig
from contratile.data.files import written_whole
from contratile.data.foreign import Foreign
from contratile.errors import bad_type, bad_value, check_choice, check_count, check_size
from contratile.models.towers import TowerConfig
from contratile.train.optim import OptimConfig

LossName = Literal["clip", "infonce", "siglip", "ntxent", "supcon"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The loss and its options."""

    loss: LossName = "clip"
    """clip: both directions; infonce: left to right; siglip; ntxent: sides are views; supcon: one class per text."""

    dedup: bool = True
    """Do not use pairs of the same id as negatives of each other (clip, infonce)."""

    ids: Literal["auto", "left", "right"] = "auto"
    """Which pairs have the same id: those of equal left or of equal right side. auto: left if the data has several
    texts for a left side, else right. The classes of supcon are ids, too."""

    hard_negatives: Literal["all", "own"] = "all"
    """Hard negatives of the data are compared with all pairs of the batch, or only with their own pair."""

    margin: float | None = None
    """Drop negatives whose similarity exceeds that of the positive minus this margin (clip, infonce)."""

    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all keys (clip, infonce)."""

    backend: Literal["auto", "torch", "triton", "dense"] = "auto"
    """Implementation of the loss; dense holds all scores in memory and is meant for comparison."""

    cache_mib: int = 0
    """Memory in MiB for keeping score tiles from forward to backward: faster, same results."""

    max_scale: float = 100.0
    """Upper limit of the learned scale; it is clamped after every step."""

    @property
    def rows_per_pair(self) -> int:
        """2 if the loss compares both sides of all pairs with each other (ntxent, supcon), else 1."""
        return 2 if self.loss in ("ntxent", "supcon") else 1


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run: where it writes, how long it trains, on what."""

    out: Path = Path("runs/latest")
    """Folder of the run: configuration, metrics, checkpoints, gallery and report."""

    batch: int = 4096
    """Pairs in a step, over all processes. The loss compares all of them with each other."""

    chunk: int | Literal["auto"] = 256
    """Pairs that go through the encoders at a time. Lower it if they run out of memory; results stay the same. auto:
    the largest that fits into memory, found by trial before the first step."""

    steps: int = 0
    """Steps of the run; 0: use epochs."""

    epochs: float = 10.0
    """Passes over the data, if steps is 0."""

    seed: int = 0
    """Seed for weights, data order and dropout."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the encoders; fp16 needs an accelerator. The loss accumulates in fp32."""

    fsdp: bool = False
    """Shard weights, gradients and optimiser state over the processes (FSDP2). No effect with one process."""

    offload: Literal["none", "host", "disk"] = "none"
    """Where the inputs of a batch are kept between the two passes through the encoders."""

    eval_every: int = 0
    """Steps between evaluations on held-out data; 0: ten in a run. There is always one at the end."""

    save_every: int = 0
    """Steps between checkpoints; 0: ten in a run."""

    keep: int = 2
    """Number of newest checkpoints to keep, besides the best one."""

    resume: str = "auto"
    """auto: continue the run in `out` if there is one; never: refuse to; or a checkpoint's folder, for a new run."""

    log_every: int = 1
    """Steps between lines of metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files too, if the package is installed."""

    track: tuple[str, ...] = ()
    """Further trackers, by the names that accelerate has for them: wandb, trackio, mlflow and others. They get
    everything that metrics.jsonl has, and use no network unless their environment variables ask for it."""

    cpu: bool = False
    """Use the CPU even if there is an accelerator."""

    timeout: float = 1800.0
    """Seconds that processes wait for each other before a dead or stalled one ends the run."""

    gallery: Literal["auto", "held-out", "all"] = "auto"
    """What `contratile search` covers: all pairs, held-out ones, or auto: all, if they are
    at most 20,000 and the run sees each at least once."""

    queries: tuple[str, ...] = ()
    """Texts to search for at the end of the run; the results are printed and shown in the report."""

    large_loss: bool = False
    """At the end, run one loss step that is too large for a dense loss on this machine, and report time and memory."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Zero-shot classification during training, beside retrieval on held-out pairs."""

    zero_shot: str = ""
    """Data to classify: named as in --data, with class names as texts, or the folder of a CLIP_benchmark data set."""

    classes: str = ""
    """Class names: imagenet (from open_clip) or a file with one per line; default: the distinct texts of the data."""

    templates: str = ""
    """Prompts: openai or simple (from open_clip) or a file with one per line; {} stands for the class name."""

    zero_shot_every: int = 0
    """Steps between zero-shot evaluations; 0: at every evaluation. There is always one at the end."""

    def __post_init__(self) -> None:
        check_count("zero_shot_every", self.zero_shot_every, least=0)
        for name in ("classes", "templates", "zero_shot_every"):
            if getattr(self, name) and not self.zero_shot:
                remedy = "Pass --zero-shot, or drop it."
                bad_value(name, expected="data to classify (--zero-shot)", got=getattr(self, name), remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train two encoders with a contrastive loss at any batch size."""

    run: RunConfig = field(default_factory=RunConfig)
    """Where the run writes, how long it trains, on what."""

    data: DataConfig = field(default_factory=DataConfig)
    """Where the pairs come from."""

    towers: TowerConfig = field(default_factory=TowerConfig)
    """The encoders."""

    loss: LossConfig = field(default_factory=LossConfig)
    """The loss."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser and its schedule."""

    augment: AugmentConfig = field(default_factory=AugmentConfig)
    """Random changes to training images."""

    eval: EvalConfig = field(default_factory=EvalConfig)
    """Zero-shot evaluation."""

    def __post_init__(self) -> None:
        run, loss = self.run, self.loss
        for section in SECTIONS:
            for option, value in vars(getattr(self, section)).items():
                if isinstance(value, int | float):
                    check_size(option, value)
        if isinstance(run.chunk, str):
            check_choice("chunk", run.chunk, ("auto",))
        else:
            check_count("chunk", run.chunk, least=1)
        for name in ("batch", "keep", "log_every"):
            check_count(name, getattr(run, name), least=1)
        for name in ("steps", "eval_every", "save_every"):
            check_count(name, getattr(run, name), least=0)
        if not 0 <= run.seed < 2**32:
            bad_value("seed", expected="0 to 4294967295", got=run.seed, remedy="Choose any number in that range.")
        check_count("cache_mib", loss.cache_mib, least=0)
        if not 0 <= loss.label_smoothing < 1:
            got = loss.label_smoothing
            bad_value("label_smoothing", expected="a share from 0 to below 1", got=got, remedy="0.1 is common.")
        if not loss.max_scale >= 1:
            bad_value("max_scale", expected="at least 1", got=loss.max_scale, remedy="CLIP uses 100.")
        if run.steps == 0 and not run.epochs > 0:
            bad_value("epochs", expected="a positive number", got=run.epochs, remedy="Or pass --steps.")
        if not 0 < run.timeout < 1e9:
            bad_value(
                "timeout", expected="a positive number of seconds", got=run.timeout, remedy="The default is 1800."
            )
        if loss.loss not in ("clip", "infonce"):
            for name in ("margin", "label_smoothing"):
                if getattr(loss, name):
                    remedy = "Drop it, or use --loss clip or infonce."
                    bad_value(name, expected=f"none with --loss {loss.loss}", got=getattr(loss, name), remedy=remedy)
        if "tensorboard" in run.track and not run.tensorboard:
            remedy = "Drop --no-tensorboard, or tensorboard from --track."
            bad_value("track", expected="other trackers with --no-tensorboard", got="tensorboard", remedy=remedy)
        if not self.towers.learn_scale and self.towers.init_scale > loss.max_scale:
            remedy = "Raise --max-scale, or lower --init-scale."
            bad_value("init_scale", expected=f"at most {loss.max_scale:g}", got=self.towers.init_scale, remedy=remedy)
        if self.augment.views == 2:
            if loss.loss not in ("ntxent", "supcon"):
                remedy = "Pass --loss ntxent; supcon also uses the classes."
                bad_value("views", expected=f"1 with --loss {loss.loss}", got=2, remedy=remedy)
            if self.eval.zero_shot:
                remedy = "Classes are told apart by their names, and --views 2 trains no text encoder."
                bad_value("zero_shot", expected="none with --views 2", got=self.eval.zero_shot, remedy=remedy)
            if run.queries:
                remedy = "Search with pictures afterwards: contratile search RUN PICTURE."
                bad_value(
                    "queries",
                    expected="none with --views 2, which trains no text encoder",
                    got=len(run.queries),
                    remedy=remedy,
                )
        if loss.ids != "auto" and loss.loss in ("siglip", "ntxent"):
            remedy = "Drop it: this loss has no ids."
            bad_value("ids", expected=f"auto with --loss {loss.loss}", got=loss.ids, remedy=remedy)
        if self.data.negatives and loss.loss not in ("clip", "infonce"):
            remedy = "Drop it, or use --loss clip or infonce."
            bad_value("negatives", expected=f"none with --loss {loss.loss}", got=self.data.negatives, remedy=remedy)


SECTIONS = ("run", "data", "towers", "loss", "optim", "augment", "eval")
CONFIG = "config.toml"
"""Name of the configuration file in a run's folder."""

LARGEST = 1 << 20
"""Largest recipe in bytes; real ones have a few hundred."""


def load_config(path: Path, default: TrainConfig | None = None, *, allow_pipe: bool = False) -> TrainConfig:
    """Load a recipe: sections and fields of `TrainConfig` in TOML.

    Args:
        path: The file. It may come from anyone, so every value is checked.
        default: Values for fields that the file leaves out; by default those of `TrainConfig()`.
        allow_pipe: Allow the data named in the file to start programs (`pipe:COMMAND`, URLs).

    Returns:
        The configuration.

    Raises:
        ValueError: The file cannot be read, or has an unknown field or a value out of range.
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
            raise ValueError("The file is larger")
        given = tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        bad_value("config", expected="a TOML file", got=path, remedy=f"{error.strerror or error}.")
    except ValueError as error:  # invalid TOML or UTF-8, or a number with thousands of digits
        bad_value("config", expected=f"TOML in UTF-8, at most {LARGEST:,} bytes", got=path, remedy=f"{error}.")
    except RecursionError:
        bad_value(
            "config", expected="sections of values", got=f"{path}, nested too deeply", remedy="See docs/training.md."
        )
    config = from_dict(given, default or TrainConfig(), where=str(path))
    if allow_pipe:
        return config
    foreign = {
        name: _foreign(getattr(config.data, name), path)
        for name in ("data", "test_data")
        if name in given.get("data", {})
    }
    if "zero_shot" in given.get("eval", {}):
        named = Foreign(config.eval.zero_shot, origin=str(path))
        config = replace(config, eval=replace(config.eval, zero_shot=named))
    return replace(config, data=replace(config.data, **foreign))  # type: ignore[arg-type]  # Foreign is a str


def _foreign(names: str | tuple[str, ...], path: Path) -> str | tuple[str, ...]:
    if isinstance(names, tuple):
        return tuple(Foreign(name, origin=str(path)) for name in names)
    return Foreign(names, origin=str(path))


def from_dict(given: Mapping[str, Any], default: TrainConfig, *, where: str) -> TrainConfig:
    """Replace some fields of a configuration.

    Args:
        given: Values by section and field, as TOML has them.
        default: The configuration to start from.
        where: What error messages call the source of the values.

    Raises:
        ValueError: A name is unknown (the message names the nearest one) or a value is out of range.
        TypeError: A value has the wrong type.
    """
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
        if section == "augment" and "augment" not in values and not part.on:
            changes["augment"] = "none" if changes.get("views") == 2 else "clip"  # a section turns it on
        with _named(here):
            parts[section] = replace(part, **changes)
    with _named(where):
        return replace(default, **parts)


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Prefix errors with the name of the file."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where} {error}") from error


def _known(name: str, known: tuple[str, ...], where: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"Did you mean {near[0]}?" if near else "Drop it."
        bad_value(where, expected=f"one of {', '.join(known)}", got=_short(name), remedy=remedy)


# For each field type: the accepted TOML types, and how to call them.
_WANTED: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text in quotes"),
    Path: ((str,), "a path in quotes"),
}


def _convert(what: str, value: Any, hint: Any, default: Any) -> Any:
    """Convert a TOML value to the type of a field."""
    words: tuple[str, ...] = ()
    if get_origin(hint) in (Union, UnionType):  # TOML has no None, so it must be one of the other types
        options = [option for option in get_args(hint) if option is not type(None)]
        words = tuple(word for option in options if get_origin(option) is Literal for word in get_args(option))
        if isinstance(value, str) and value in words:
            return value
        options = [option for option in options if get_origin(option) is not Literal] or options
        # Of several, a list wants a tuple and anything else does not.
        fitting = [option for option in options if (get_origin(option) is tuple) == isinstance(value, list)]
        hint = (fitting or options)[0]
    if get_origin(hint) is Literal:
        check_choice(what, value, get_args(hint))
        return value
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if kinds[-1] is ...:
            if not isinstance(value, list):
                bad_type(what, expected="a list", got=_short(value), remedy='Write it as ["first", "second"].')
            return tuple(_convert(what, part, kinds[0], None) for part in value)
        if not isinstance(value, list) or len(value) != len(kinds):
            bad_type(what, expected=f"a list of {len(kinds)}", got=_short(value), remedy="Write it as [0.9, 0.98].")
        return tuple(_convert(what, part, kind, None) for part, kind in zip(value, kinds, strict=True))
    types, word = _WANTED[hint]
    fits = isinstance(value, types) and isinstance(value, bool) == (hint is bool)
    if not fits:
        example = f"{what.rpartition(' ')[2]} = {_toml(str(default) if isinstance(default, Path) else default)}"
        remedy = "Check its type." if default is None else f"Write it like {example}."
        bad_type(what, expected=" or ".join((word, *map(repr, words))), got=_short(value), remedy=remedy)
    if isinstance(value, int | float):
        check_size(what, value)
    elif "\0" in value:
        bad_value(what, expected="a text", got=_short(value), remedy="Remove the NUL.")
    return Path(value) if hint is Path else float(value) if hint is float else value


def _short(value: object) -> str:
    """The repr of a value, cut to fit a line."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


def to_dict(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Plain values by section. None is left out, since TOML has no word for it."""
    sections = {}
    for section in SECTIONS:
        part = getattr(config, section)
        values = {f.name: getattr(part, f.name) for f in fields(part)}
        sections[section] = {k: str(v) if isinstance(v, Path) else v for k, v in values.items() if v is not None}
    return sections


def to_toml(config: TrainConfig) -> str:
    """Write a configuration as a recipe; `load_config` reads it back."""
    lines = []
    for section, values in to_dict(config).items():
        lines += [f"[{section}]", *(f"{name} = {_toml(value)}" for name, value in values.items()), ""]
    return "\n".join(lines)


def save_config(config: TrainConfig, folder: Path) -> None:
    """Write config.toml into a run's folder."""
    with written_whole(folder / CONFIG) as draft:
        draft.write_text(to_toml(config), encoding="utf-8")


def _toml(value: Any) -> str:
    for text in value if isinstance(value, tuple) else [value]:
        if isinstance(text, str) and not _is_unicode(text):
            bad_value(
                "config", expected="text in UTF-8", got=ascii(text), remedy="Check the bytes of the command line."
            )
    # Strings, numbers, booleans and lists are written the same in JSON and TOML.
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _is_unicode(text: str) -> bool:
    """Bytes of the command line that are not UTF-8 become lone surrogates, which TOML cannot hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)

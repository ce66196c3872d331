"""Unknown keywords, explained: other functions and packages have other names for the same things.

@known_keywords
def loss(query, key, scale=1.0): ...

loss(q, k, temperature=0.07)    # TypeError: ... loss has scale=, the inverse: pass scale=1 / 0.07.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import NoReturn, ParamSpec, TypeVar

from contratile.errors import bad_type

P = ParamSpec("P")
R = TypeVar("R")

_SCALE = ("scale", "logit_scale", "inverse_temperature", "inv_temperature")
_TEMPERATURE = ("temperature", "tau", "temp")
_SAME = (
    _SCALE,
    _TEMPERATURE,
    ("bias", "logit_bias"),
    ("image", "image_features", "image_embeds", "images"),
    ("text", "text_features", "text_embeds", "texts"),
    ("query", "queries", "anchor", "anchors"),
    ("key", "keys", "positive_key", "positive", "positives"),
    ("extra_keys", "negative_keys", "negatives", "queue"),
    ("z1", "z_i", "out0"),
    ("z2", "z_j", "out1"),
    ("z", "features", "embeddings"),
    ("labels", "targets", "target"),
    ("group", "process_group"),
)
"""Names of one thing: here, in open_clip, transformers, info-nce-pytorch, lightly, pytorch-metric-learning."""

_RANKS = "group='auto', the default, is all ranks of the process group; group=None is this process alone."
_OPEN_CLIP = "contratile.integrations.open_clip has the losses with open_clip's options."
_NOTES = {
    "base_temperature": "Multiply the loss by temperature / base_temperature instead.",
    "normalize": "No loss normalises its features: pass torch.nn.functional.normalize(x, dim=1).",
    "gather_across_devices": _RANKS,
    "gather_distributed": _RANKS,
    **dict.fromkeys(("local_loss", "gather_with_grad", "cache_labels", "rank", "world_size"), _OPEN_CLIP),
}


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, whose TypeError for a keyword that it does not have says which one was meant."""
    return _checked(function, names_of(function))


def passing_on(other: Callable[..., object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Likewise for a function that passes further keywords on to another."""
    options = [x.name for x in signature(other).parameters.values() if x.kind is Parameter.KEYWORD_ONLY]

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        mine = names_of(function)
        return _checked(function, (*mine, *(name for name in options if name not in mine)))

    return decorate


def names_of(function: Callable[..., object]) -> tuple[str, ...]:
    """The parameters that have a name."""
    parameters = signature(function).parameters.values()
    return tuple(x.name for x in parameters if x.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD))


def _checked(function: Callable[P, R], names: tuple[str, ...]) -> Callable[P, R]:
    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in names:
                unknown_keyword(function.__qualname__, name, keywords[name], names)
        return function(*args, **keywords)

    return call


def unknown_keyword(
    call: str, name: str, value: object, known: Sequence[str], *, elsewhere: tuple[str, Sequence[str]] = ("", ())
) -> NoReturn:
    """Refuse a keyword. `elsewhere` is another place that may have it, and what it knows."""
    known = [x for x in known if x != "self"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    remedy = meant(call, name, repr(value) if number else name, known) or ""
    if not remedy and elsewhere[0]:
        remedy = meant(elsewhere[0], name, repr(value) if number else name, elsewhere[1]) or ""
    got = f"{name}={value!r}" if number else f"{name}="
    bad_type(call, expected=f"keywords among {', '.join(known)}", got=got, remedy=remedy or _guess(name, known))


def meant(call: str, name: str, value: str, known: Sequence[str]) -> str | None:
    """A sentence that says which of the known keywords this name stands for."""
    if name in known:
        return f"{call} has it: give {name}= to that."
    for names in _SAME:
        if name in names:
            for other in names:
                if other in known:
                    return f"{call} calls it {other}=."
    for these, inverse in ((_TEMPERATURE, _SCALE), (_SCALE, _TEMPERATURE)):
        for other in inverse:
            if name in these and other in known:
                return f"{call} has {other}=, the inverse: pass {other}=1 / {value}."
    return _NOTES.get(name)


def _guess(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]}=?" if close else "Drop it."


def suggestion(name: str, known: Sequence[str]) -> str:
    """The end of a sentence about a function or class that is not here, if another is meant."""
    known = sorted((x for x in known if not x.startswith("_")), key=lambda x: x.islower() == name.islower())
    public = {x.lower().replace("_", ""): x for x in known}  # of a class and its function, the one spelled alike
    short = name.lower().replace("_", "")
    close = get_close_matches(short.removesuffix("loss"), public, n=1) or get_close_matches(short, public, n=1)
    return f". Did you mean contratile.{public[close[0]]}?" if close else ""

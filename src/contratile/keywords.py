"""Helpful errors for unknown keywords: other functions and packages use other names for the same things.

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
"""Synonyms: names used here, in open_clip, transformers, info-nce-pytorch, lightly and pytorch-metric-learning."""

_RANKS = "group='auto', the default, uses all ranks of the process group; group=None uses this process alone."
_OPEN_CLIP = "contratile.integrations.open_clip has the losses with open_clip's options."
_BATCH = (
    *("directions", "partition_mode", "hardness_mode", "hardness_strength"),
    *("in_batch_negatives", "share_hard_negatives", "hard_ids"),
)
_INFO_NCE = "info_nce has it, with labels=None: pass the images as queries and the texts as keys."
_NOTES = {
    **dict.fromkeys(_BATCH, _INFO_NCE),
    "base_temperature": "Multiply the loss by temperature / base_temperature instead.",
    "normalize": "No loss normalises its features: pass torch.nn.functional.normalize(x, dim=1).",
    "gather_across_devices": _RANKS,
    "gather_distributed": _RANKS,
    **dict.fromkeys(("local_loss", "gather_with_grad", "cache_labels", "rank", "world_size"), _OPEN_CLIP),
}


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the TypeError for an unknown keyword says which one was probably meant."""
    return _checked(function, names_of(function))


def passing_on(other: Callable[..., object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Like `known_keywords`, for a function that passes `**options` on to `other`."""
    options = [x.name for x in signature(other).parameters.values() if x.kind is Parameter.KEYWORD_ONLY]

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        mine = names_of(function)
        return _checked(function, (*mine, *(name for name in options if name not in mine)))

    return decorate


def names_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Names of a function's parameters, without *args and **kwargs."""
    parameters = signature(function).parameters.values()
    return tuple(x.name for x in parameters if x.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD))


def _checked(function: Callable[P, R], names: tuple[str, ...]) -> Callable[P, R]:
    known = frozenset(names)

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in known:
                unknown_keyword(function.__qualname__, name, keywords[name], names)
        return function(*args, **keywords)

    return call


def unknown_keyword(
    call: str, name: str, value: object, known: Sequence[str], *, elsewhere: tuple[str, Sequence[str]] = ("", ())
) -> NoReturn:
    """Raise a TypeError for a keyword.

    Args:
        call: The function that was called.
        name: The keyword.
        value: Its value.
        known: Keywords that the function has.
        elsewhere: Another function that may have the keyword, and the keywords of that function.
    """
    known = [x for x in known if x != "self"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    remedy = meant(call, name, repr(value) if number else name, known) or ""
    if not remedy and elsewhere[0]:
        remedy = meant(elsewhere[0], name, repr(value) if number else name, elsewhere[1]) or ""
    got = f"{name}={value!r}" if number else f"{name}="
    bad_type(call, expected=f"keywords among {', '.join(known)}", got=got, remedy=remedy or _guess(name, known))


def meant(call: str, name: str, value: str, known: Sequence[str]) -> str | None:
    """A sentence that says which known keyword the name corresponds to, if any."""
    if name in known:
        return f"{call} has it: pass {name}= there."
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
    """The end of an AttributeError's message: ". Did you mean contratile.X?" if a name is similar, else empty."""
    known = sorted((x for x in known if not x.startswith("_")), key=lambda x: x.islower() == name.islower())
    public = {
        x.lower().replace("_", ""): x for x in known
    }  # of a class and its function, prefer the one with the same case
    short = name.lower().replace("_", "")
    close = get_close_matches(short.removesuffix("loss"), public, n=1) or get_close_matches(short, public, n=1)
    return f". Did you mean contratile.{public[close[0]]}?" if close else ""

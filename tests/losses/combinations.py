"""Random combinations of all options of `clip_loss`, `info_nce` and `siglip_loss`, in fp64, with the dense definition.

    case = draw("info_nce", seed=7, ranks=3)
    found = of_ours(case, rank=1, group="auto")        # value, statistics and gradients of this rank
    whole = of_reference(case)                         # of all pairs on one process

Half of the features are whole numbers, whose products are exact: margins and guides then meet exact ties. The others
are random, nearly equal pairs, duplicates, rows of zeros, and rows of very different norms. What a rank holds differs
in length, and may be nothing. `allowed` says whether the documentation lets options stand together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import contratile as ct
from contratile import reference

LOSSES = "clip_loss", "info_nce", "siglip_loss"
KINDS = "unit", "whole", "whole", "near", "norms", "duplicates", "zeros"
ALL = "query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"
D, G, T = 8, 5, 6
BOTH_SIDES = "ids", "guide", "teacher"
"""Options that are a pair: of queries and of keys."""

OWNERS = {
    **dict.fromkeys(("query", "image", "hard_negatives", "hard_bias", "hard_mask", "hard_ids", "hard_guide"), "query"),
    **dict.fromkeys(("weights", "labels"), "query"),
    **dict.fromkeys(("key", "text", "key_bias"), "key"),
    **dict.fromkeys(("extra_keys", "extra_bias", "extra_ids", "extra_guide"), "extra"),
}
"""Whose rows a tensor has: with them it is dealt to the ranks."""


class Found(NamedTuple):
    value: Tensor
    grads: dict[str, Tensor]
    more: tuple[Any, ...]
    """Terms and statistics, where they were asked for."""


@dataclass
class Combination:
    """One call on the whole batch, and how it is dealt to ranks."""

    loss: str
    sizes: dict[str, tuple[int, ...]]
    leaves: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    options: frozenset[str] = frozenset()

    def part(self, name: str, x: Any, rank: int) -> Any:
        """What a rank passes."""
        if name in BOTH_SIDES:
            if isinstance(x, Tensor):
                return self.split(x, "query", rank)
            return *(self.split(y, of, rank) for y, of in zip(x, ("query", "key"), strict=False)), *x[2:]
        return self.split(x, OWNERS[name], rank) if name in OWNERS else x

    def split(self, x: Tensor, owner: str, rank: int) -> Tensor:
        return torch.split(x, list(self.sizes[owner]))[rank]

    def all_labels(self) -> Tensor:
        """For each query of the whole batch the place of its positive among all keys."""
        starts = [0, *accumulate(self.sizes["key"])]
        own = self.constants.get("labels", torch.cat([torch.arange(n) for n in self.sizes["query"]]))
        both = zip(self.sizes["query"], starts, strict=False)
        labels: Tensor = own + torch.cat([torch.full((n,), at) for n, at in both])
        return labels

    def __str__(self) -> str:
        shapes = " ".join(f"{name}{list(x.shape)}" for name, x in self.leaves.items())
        told = {k: v for k, v in self.constants.items() if not isinstance(v, Tensor) and k not in BOTH_SIDES}
        tensors = sorted(self.constants.keys() - told.keys())
        return f"{self.name} {self.loss} {self.sizes}: {shapes} | {tensors} {told} {self.how}"


class Draw:
    def __init__(self, seed: int) -> None:
        self.random, self.generator = Random(seed), torch.Generator().manual_seed(seed)

    def some(self, share: float) -> bool:
        return self.random.random() < share

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def rows(self, kind: str, *shape: int, like: Tensor | None = None) -> Tensor:
        if kind == "whole":
            return self.integers(-2, 3, *shape).double()
        x = F.normalize(self.normal(*shape), dim=-1)
        flat = x.view(-1, shape[-1])
        n = len(flat)
        if kind == "near" and like is not None and len(like):
            flat.copy_(F.normalize(like[torch.arange(n) % len(like)] + 0.03 * flat))
        elif kind == "norms":
            flat.mul_(torch.logspace(-3, 1.5, n, dtype=torch.float64).unsqueeze(1))
        elif kind == "duplicates" and n:
            flat.copy_(flat[self.integers(0, max(1, n // 3), n)])
        elif kind == "zeros":
            flat[::3] = 0
        return x

    def layout(self, x: Tensor) -> Tensor:
        """The same numbers with other strides."""
        return x.repeat_interleave(2, -1)[..., ::2] if self.some(0.3) else x


def draw(
    loss: str, seed: int, ranks: int = 1, options: frozenset[str] | None = None, kinds: tuple[str, ...] = KINDS
) -> Combination:
    """A call with the named options, or with options that may stand together."""
    r = Draw(seed)
    if options is None:
        options = frozenset(name for name in OPTIONS[loss] if r.some(0.25))
        while not allowed(loss, options):
            options -= {r.random.choice(sorted(options))}
    sizes = [r.random.choice([0, 1, 2, 7, 11] if ranks > 1 else [1, 2, 7, 16, 19]) for _ in range(ranks)]
    sizes[r.random.randrange(ranks)] = r.random.choice([5, 9])
    keys = [n + r.random.choice([1, 3]) for n in sizes] if "more_keys" in options else sizes
    extras = [r.random.choice([0, 1, 4]) for _ in range(ranks)]
    case = Combination(
        loss, {"query": tuple(sizes), "key": tuple(keys), "extra": tuple(extras)}, name=str(seed), options=options
    )
    kind = r.random.choice(kinds)
    left, right = ("query", "key") if loss == "info_nce" else ("image", "text")
    case.leaves[left] = r.layout(r.rows(kind, sum(sizes), D))
    case.leaves[right] = r.layout(r.rows(kind, sum(keys), D, like=case.leaves[left]))
    scale = r.random.choice([1.0, 20.0, 100.0, *([] if {"margin", "hardness"} & options else [-3.0])])
    case.leaves["scale"] = torch.tensor(scale / 4 if kind == "whole" else scale, dtype=torch.float64)
    if loss == "siglip_loss":
        case.leaves["bias"] = torch.tensor(r.random.choice([-10.0, 0.0, 2.0]), dtype=torch.float64)
    add_options(case, options, kind, r)
    case.how = {"tile": r.random.choice([None, 4, 8, 16]), "cache_bytes": r.random.choice([0, 0, 3000, 1 << 20])}
    if "matryoshka" in options:
        case.how.pop("cache_bytes")
    return case


OPTIONS = {
    "siglip_loss": ("ids", "pair_of_ids", "positive", "matryoshka", "none", "sum"),
    "clip_loss": (
        *("ids", "pair_of_ids", "positive", "extra", "extra_ids", "hard", "hard_mask", "key_bias", "extra_bias"),
        *("hard_bias", "margin", "smoothing", "weights", "matryoshka", "teacher", "guide", "none", "sum"),
    ),
}
OPTIONS["info_nce"] = (
    *OPTIONS["clip_loss"],
    *("labels", "more_keys", "elsewhere", "hard_ids", "share", "both", "apart", "same_type", "hardness"),
)

NEEDS = {
    "positive": {"ids", "pair_of_ids"},
    "extra_ids": {"extra"},
    "extra_bias": {"extra"},
    "hard_mask": {"hard"},
    "hard_bias": {"hard"},
    "hard_ids": {"hard"},
    "share": {"hard"},
    "elsewhere": {"extra", "hard"},
}
"""An option means something beside one of these; ids of negatives beside those of queries, too."""

APART = [
    ("margin", "smoothing"),
    ("positive", "margin", "smoothing", "hard_ids", "share", "key_bias", "extra_bias", "hard_bias"),
    ("smoothing", "key_bias", "extra_bias", "hard_bias"),
    ("share", "hard_mask"),
    *(
        (name, "positive", "smoothing", "elsewhere", "labels", "more_keys", "key_bias", "extra_bias", "hard_bias")
        for name in ("both", "apart", "same_type")
    ),
    ("same_type", "margin", "apart", "matryoshka"),
    ("hardness", "margin", "smoothing", "positive", "matryoshka"),
    ("matryoshka", "margin", "smoothing"),
    *(
        (name, "margin", "smoothing", "positive", "both", "apart", "same_type", "hardness", "matryoshka")
        for name in ("teacher", "guide")
    ),
    ("teacher", "extra", "hard", "guide", "elsewhere"),
    ("guide", "share"),
]
"""The first option of a line is refused beside each of the others."""


def allowed(loss: str, options: frozenset[str]) -> bool:
    """What the documentation says."""
    ids = bool({"ids", "pair_of_ids"} & options)
    if any(name in options and not needed & options for name, needed in NEEDS.items()):
        return False
    if {"extra_ids", "hard_ids"} & options and not ids:
        return False
    if {"none", "sum"} <= options or {"ids", "pair_of_ids"} <= options or {"both", "apart"} <= options:
        return False  # values of one option
    if "ids" in options and {"labels", "more_keys"} & options:
        return False  # one vector of ids is for as many keys as queries
    return not any(
        first in options and other in options
        for first, *others in APART
        for other in others
        if not (loss == "siglip_loss" and first == "matryoshka") and first != other
    ) and not (loss != "siglip_loss" and {"matryoshka", "positive"} <= options)


def add_options(case: Combination, options: frozenset[str], kind: str, r: Draw) -> None:
    n, m, e = (sum(case.sizes[name]) for name in ("query", "key", "extra"))
    h = r.random.choice([1, 2, 3])
    leaves, constants = case.leaves, case.constants
    like = next(iter(leaves.values()))
    if "pair_of_ids" in options:
        constants["ids"] = r.integers(0, 6, n), r.integers(0, 6, m)
    if "ids" in options:
        constants["ids"] = r.integers(0, r.random.choice([2, 6, 30]), n)
    if "positive" in options:
        constants["same_id"] = "positive"
    if "extra" in options:
        leaves["extra_keys"] = r.layout(r.rows(kind, e, D, like=like))
    if "hard" in options:
        leaves["hard_negatives"] = r.layout(r.rows(kind, n, h, D, like=like))
    for name, shape in (("extra_ids", (e,)), ("hard_ids", (n, h))):
        if name in options:
            constants[name] = r.integers(0, 6, *shape)
    for name, shape in (("key_bias", (m,)), ("extra_bias", (e,)), ("hard_bias", (n, h))):
        if name in options:
            leaves[name] = r.normal(*shape)
    if "hard_mask" in options:
        constants["hard_mask"] = r.some(0.8) & (r.integers(0, 3, n, h) > 0)
    if "margin" in options:
        constants["margin"] = r.random.choice([-1.0, 0.0, 2.0]) if kind == "whole" else 0.0123456789
    if "smoothing" in options:
        constants["label_smoothing"] = 0.1
    if "weights" in options:
        constants["weights"] = r.integers(0, 3, n).double() + (torch.arange(n) == 0)
    if "matryoshka" in options:
        constants["matryoshka_dims"] = r.random.choice([(2, 5, D), (3,), (D, 1), (D,)])
        if r.some(0.5):
            weights = [0.0, 1.0, 0.5, 3.0]
            constants["matryoshka_weights"] = tuple(r.random.choice(weights) for _ in constants["matryoshka_dims"])
        constants["matryoshka_normalize"] = r.some(0.5)
    if "teacher" in options:
        constants["teacher"] = r.rows("unit", n, T), r.rows("unit", m, T), r.random.choice([1.0, 50.0])
        constants |= {"teacher_weight": 0.7, "teacher_temperature": 2.0} if r.some(0.5) else {}
    if "guide" in options:
        constants["guide"] = r.rows("whole", n, G), r.rows("whole", m, G)
        constants |= {"extra_guide": r.rows("whole", e, G)} if "extra" in options else {}
        constants |= {"hard_guide": r.rows("whole", n, h, G)} if "hard" in options else {}
        constants["guide_margin"] = r.random.choice([0.0, 0.5, -1.0])
        constants["guide_margin_strategy"] = r.random.choice(["absolute", "relative"])
    if "labels" in options:
        both = zip(case.sizes["query"], case.sizes["key"], strict=True)
        dealt = [r.integers(0, max(1, keys), rows) for rows, keys in both]
        constants["labels"] = torch.cat(dealt)
    if "elsewhere" in options:
        constants["in_batch_negatives"] = False
    if "share" in options:
        constants["share_hard_negatives"] = True
    more = [name for name in ("query_to_query", "doc_to_doc") if r.some(0.6)] or ["doc_to_doc"]
    names = ["query_to_doc", *(["doc_to_query"] if {"both", "apart"} & options else [])]
    if "same_type" in options:
        names += more
    if len(names) > 1:
        constants["directions"] = tuple(names)
    if "apart" in options:
        constants["partition_mode"] = "per_direction"
    if "hardness" in options:
        modes = ["in_batch_negatives", "hard_negatives", "all_negatives"]
        constants |= {"hardness_mode": r.random.choice(modes), "hardness_strength": r.random.choice([0.5, 9.0])}
    constants["reduction"] = "none" if "none" in options else "sum" if "sum" in options else "mean"


def upstream(case: Combination) -> Tensor:
    """The gradient of the value, which is one number or one for each pair."""
    if case.constants["reduction"] != "none":
        return torch.ones((), dtype=torch.float64)
    return torch.linspace(-1, 2, sum(case.sizes["query"]), dtype=torch.float64)


def of_ours(case: Combination, rank: int = 0, **more: Any) -> Found:
    """Value and gradients of one rank."""
    leaves = {name: case.part(name, x, rank).detach().requires_grad_() for name, x in case.leaves.items()}
    constants = {name: case.part(name, x, rank) for name, x in case.constants.items()}
    value, *others = _tuple(getattr(ct, case.loss)(**leaves, **constants, **{**case.how, **more}))
    given = upstream(case)
    given = given if given.dim() == 0 else case.split(given, "query", rank)
    return Found(value.detach(), _gradients(value, leaves, given), tuple(others))


def of_reference(case: Combination) -> Found:
    """Of the whole batch. Over ranks the sum of all ranks' values is `world` times the mean."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.leaves.items()}
    constants = dict(case.constants)
    if case.loss == "info_nce":
        constants["labels"] = case.all_labels()
    value = getattr(reference, case.loss)(**leaves, **constants)
    world = len(case.sizes["query"]) if constants["reduction"] == "mean" else 1
    return Found(value.detach(), _gradients(value, leaves, upstream(case) * world), ())


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _gradients(value: Tensor, leaves: dict[str, Tensor], given: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, list(leaves.values()), given, allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(leaves.items(), found, strict=True)
    }


def smallest_norm(case: Combination) -> float:
    """Of truncated rows, and at least what a row of zeros is divided by."""
    rows = [x.flatten(0, -2) for x in case.leaves.values() if x.dim() > 1 and x.numel()]
    norms = torch.cat([x[:, :dim].norm(dim=1) for x in rows for dim in case.constants["matryoshka_dims"]])
    return float(norms.clamp(1e-12, 1).min())


def differences(case: Combination, got: Found, want: Found) -> list[str]:
    """What is not equal but for roundings."""
    norm = max(float(x.norm(dim=-1).max()) for x in case.leaves.values() if x.dim() > 1 and x.numel())
    scores = float(case.leaves["scale"].abs()) * norm * norm + 10
    size = {"value": 1.0, "scale": norm * norm, "bias": 1.0, "key_bias": 1.0, "extra_bias": 1.0, "hard_bias": 1.0}
    if case.constants.get("matryoshka_normalize"):  # gradients of a row are divided by its norms
        norm /= smallest_norm(case)
    told = []
    for name, x, y in [("value", got.value, want.value), *((n, x, want.grads[n]) for n, x in got.grads.items())]:
        if not x.numel():
            continue
        lever = size.get(name, float(case.leaves["scale"].abs()) * norm)
        limit = 1e-8 * float(y.abs().max()) + 1e-13 * scores * lever * sum(case.sizes["query"])
        error = float((x - y).abs().max()) if x.isfinite().all() else float("inf")
        if not error <= limit:
            told.append(f"{name}: {error:.3e} > {limit:.3e} of {float(y.abs().max()):.3e}")
    return told

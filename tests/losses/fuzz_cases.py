"""Random calls of every loss: what `tests.losses.fuzz` judges.

    case = draw(seed=0, number=17)      # always the same call
    print(case)

Drawn are the loss, the dtype, ragged shapes, the kind of numbers (unit rows, ties, duplicates, codes of whole numbers,
rows of very different norms), scales up to scores of 1e9, every option, tiles, caches and strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log10
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.helpers import DTYPES, accumulation

LOSSES = ["clip_loss", "info_nce", "nt_xent", "sup_con", "siglip_loss", "pair_lse"]
KINDS = ["unit", "unit", "gauss", "aligned", "duplicates", "codes", "integers", "norms", "equal"]
WHOLE = ("codes", "integers")
"""Products of these are whole numbers, exact in every dtype: ties are ties, and so is a similarity at its margin."""

TIED = (*WHOLE, "equal", "duplicates")
NUMBERS = {"scale", "bias", "temperature"}
SIZES = [1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 48, 51, 64, 65, 70]
T = TypeVar("T")


@dataclass
class Case:
    """One call: `leaves` get gradients, `constants` are the other keywords, `how` those of the library alone."""

    name: str
    loss: str
    dtype: torch.dtype
    kind: str
    leaves: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> list[float]:
        """The largest norms of the rows of all features."""
        return [float(x.double().norm(dim=-1).max()) for x in self.leaves.values() if x.dim() and x.numel()]

    @property
    def rows(self) -> int:
        return max(x.flatten(0, -2).shape[0] for x in self.leaves.values() if x.dim())

    @property
    def scale(self) -> float:
        temperature = self.number("temperature")
        return abs(float(self.number("scale") if temperature is None else 1 / temperature))

    @property
    def product(self) -> float:
        """No product of features is larger."""
        if self.constants.get("matryoshka_normalize"):
            return 1.0
        first, *others = self.sizes
        return first * max(others or [first]) if "directions" not in self.constants else max(self.sizes) ** 2

    @property
    def factor(self) -> float:
        """No score is larger than this times a product. Rows read those of hard negatives with another factor."""
        return self.scale + float(self.constants.get("hardness_strength", 0.0))

    @property
    def reach(self) -> float:
        """No derivative of a product by a feature is larger."""
        if not self.constants.get("matryoshka_normalize"):
            return max(self.sizes)
        rows = [x.double().flatten(0, -2) for x in self.leaves.values() if x.dim() and x.numel()]
        norms = [x[:, :dim].norm(dim=1).min() for x in rows for dim in self.constants["matryoshka_dims"]]
        many: int = self.rows if self.loss == "siglip_loss" else 1  # weights of a softmax add up to 1
        return many / max(1e-12, float(torch.stack(norms).min()))

    @property
    def losses(self) -> float:
        """How many losses are added, each with its weight."""
        dims = self.constants.get("matryoshka_dims", (0,))
        teacher = self.constants.get("teacher_weight", 1.0) if "teacher" in self.constants else 0.0
        return float(sum(self.constants.get("matryoshka_weights", [1.0] * len(dims))) + teacher)

    @property
    def bound(self) -> float:
        """No score is larger."""
        return self.factor * self.product + abs(float(self.number("bias") or 0))

    @property
    def score(self) -> float:
        """The largest score, positives and negatives of every kind."""
        if {"matryoshka_dims", "directions"} & self.constants.keys():
            return self.bound
        first, *others = (x.double().flatten(0, -2) for x in self.leaves.values() if x.dim() and x.numel())
        largest = max(float((first @ x.T).abs().max()) for x in others or [first])
        return self.factor * largest + abs(float(self.number("bias") or 0))

    def terms(self, what: str) -> int:
        """How many terms a result is a sum of: those of numbers run over all pairs."""
        return self.rows**2 if what.split()[1] in NUMBERS else self.rows

    def lever(self, what: str) -> float:
        """How far an error of 1 in the logarithm or the weight of one row moves a result."""
        n = len(next(iter(self.leaves.values())))
        share = self.losses * {"mean": 1 / n, "sum": 1.0}.get(self.constants.get("reduction", ""), 3.0)
        name = what.split()[1]
        if what.startswith("gradient") and name not in NUMBERS:
            return share * self.scale * self.reach
        # Sums over rows, whose errors may all have one sign.
        share = share if what.startswith("value") and self.constants.get("reduction") == "none" else share * n
        levers = {"scale": self.product, "temperature": self.product * self.scale**2}
        return share * levers.get(name, 1.0)

    def number(self, name: str) -> Any:
        return self.leaves.get(name, self.constants.get(name))

    def __str__(self) -> str:
        shapes = " ".join(f"{name}{list(x.shape)}" for name, x in self.leaves.items() if x.dim())
        numbers = {name: x.item() for name, x in self.leaves.items() if not x.dim()} | self.constants
        given = " ".join(
            name if isinstance(x, Tensor | tuple) else f"{name}={x:.6g}" if isinstance(x, float) else f"{name}={x}"
            for name, x in (numbers | self.how).items()
        )
        return f"{self.name} {self.loss} {str(self.dtype)[6:]} {self.kind}: {shapes} {given}"


class Draw:
    """Random numbers of one case."""

    def __init__(self, seed: int, number: int) -> None:
        self.python = Random(seed * 1_000_003 + number)
        self.torch = torch.Generator().manual_seed(seed * 1_000_003 + number)

    def one(self, choices: Sequence[T]) -> T:
        return self.python.choice(choices)

    def chance(self, share: float) -> bool:
        return self.python.random() < share

    def log_uniform(self, low: float, high: float) -> float:
        return float(10 ** self.python.uniform(log10(low), log10(high)))

    def size(self, most: int = 70) -> int:
        size = self.one(SIZES) if self.chance(0.6) else self.python.randint(1, most)
        return min(size, most)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.torch)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.torch, dtype=torch.float64)

    def rows(self, n: int, d: int, kind: str, dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """Features of one kind, in any layout; those "aligned" are near the rows of `like`."""
        if kind == "codes":
            x = 2.0 * self.integers(0, 2, n, d) - 1
        elif kind == "integers":
            x = self.integers(-2, 3, n, d).double()
        elif kind == "equal":
            x = torch.ones(n, d, dtype=torch.float64) * (self.python.random() + 0.5)
        else:
            x = self.normal(n, d)
            if kind != "gauss":
                x = torch.nn.functional.normalize(x)
            if kind == "aligned" and like is not None:
                at = torch.arange(n) % len(like)
                x = torch.nn.functional.normalize(like.double()[at] + 0.05 * x)
            if kind == "duplicates":
                x = x[self.integers(0, max(1, n // 3), n)]
            if kind == "norms":
                reach = 1.5 if dtype == torch.float16 else 4.0
                x = x * torch.logspace(-reach, reach, n, dtype=torch.float64).unsqueeze(1)
        return self.layout(x.to(dtype))

    def layout(self, x: Tensor) -> Tensor:
        """The same numbers, contiguous or not."""
        layout = self.one(["plain", "plain", "columns", "strided", "offset"])
        if layout == "columns":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "strided":
            return x.repeat_interleave(2, -1)[..., ::2]
        if layout == "offset":
            return torch.cat([x[:1], x])[1:]
        return x


def draw(seed: int, number: int) -> Case:
    """The case of this number."""
    r = Draw(seed, number)
    loss, dtype, kind = r.one(LOSSES), r.one(DTYPES), r.one(KINDS)
    case = Case(f"{seed}:{number}", loss, dtype, kind)
    n, d = r.size(), r.size(40)
    case.how = {"tile": r.one([None, None, 16, 17, 5, 33]), "cache_bytes": r.one([0, 0, 3000, 1 << 20])}
    if loss in ("clip_loss", "siglip_loss", "info_nce", "pair_lse"):
        _two_sets(case, r, n, d)
    elif loss == "nt_xent":
        case.leaves["z1"] = r.rows(n, d, kind, dtype)
        case.leaves["z2"] = r.rows(n, d, kind, dtype, like=case.leaves["z1"])
    else:
        case.leaves["z"] = r.rows(n, d, kind, dtype)
        case.constants["labels"] = r.integers(0, r.one([1, 2, max(1, n // 4), n]), n)
    _scale(case, r)
    if loss in ("clip_loss", "info_nce"):
        _options(case, r)
    elif loss == "siglip_loss" and r.chance(0.5):
        case.constants |= {"ids": r.integers(0, r.one([1, 3, n + 1]), n), "same_id": r.one(["exclude", "positive"])}
    if loss in ("clip_loss", "info_nce", "siglip_loss"):
        _objective(case, r)
    if loss == "pair_lse":
        rows, cols = r.one([(True, True), (True, False), (False, True)])
        case.constants |= {"rows": rows, "cols": cols}
    else:
        case.constants["reduction"] = r.one(["mean", "sum", "none"])
    return case


def _two_sets(case: Case, r: Draw, n: int, d: int) -> None:
    names = ("image", "text") if case.loss in ("clip_loss", "siglip_loss") else ("query", "key")
    m = n
    if case.loss == "pair_lse":
        m = r.size()
    elif case.loss == "info_nce":
        labelled = r.chance(0.5)
        m = r.size() if labelled else n + r.one([0, 0, 1, r.size()])
        if labelled:
            case.constants["labels"] = r.integers(0, m, n)
    case.leaves[names[0]] = r.rows(n, d, case.kind, case.dtype)
    if case.loss == "pair_lse" and r.chance(0.5):
        case.constants["key"] = None
        return
    case.leaves[names[1]] = r.rows(m, d, case.kind, case.dtype, like=case.leaves[names[0]])


def _scale(case: Case, r: Draw) -> None:
    """Of any size, or such that the largest score is 1e4, 1e6 or 1e9; a number, or learned in some dtype."""
    first, *others = (x.double() for x in case.leaves.values())
    largest = float((first @ (others[0] if others else first).T).abs().max())
    scale = r.log_uniform(1e-3, 1e6) if r.chance(0.4) else r.one([1.0, 10.0, 14.3, 20.0, 100.0])
    if r.chance(0.3) and largest > 0:
        scale = r.one([1e4, 1e6, 1e9]) / largest
    if case.loss == "siglip_loss":
        bias = r.one([-10.0, 0.0, r.python.uniform(-20, 5), -scale * largest])
        _number(case, r, "bias", bias)
    if case.loss in ("nt_xent", "sup_con"):
        _number(case, r, "temperature", 1 / scale)
    else:
        _number(case, r, "scale", scale)


def _number(case: Case, r: Draw, name: str, value: float) -> None:
    if r.chance(0.25):
        case.constants[name] = value
        return
    low = case.dtype if r.chance(0.2) and 1e-4 < abs(value) < 6e4 else accumulation(case.dtype)
    case.leaves[name] = torch.tensor(value, dtype=low)


def _options(case: Case, r: Draw) -> None:
    query, key = list(case.leaves.values())[:2]
    (n, d), m = query.shape, len(key)
    options = case.constants
    of_queries = r.integers(0, r.one([1, 3, n + 1]), n)
    extra = r.one([0, 1, 16, 19, 40])
    if r.chance(0.3):
        of_keys = r.integers(0, int(of_queries.max()) + 1, m)
        options["ids"] = (of_queries, of_keys) if m != n or r.chance(0.5) else of_queries
    if r.chance(0.3):
        case.leaves["extra_keys"] = r.rows(extra, d, case.kind, case.dtype, like=query)
        if "ids" in options and r.chance(0.6):
            options["extra_ids"] = r.integers(0, int(of_queries.max()) + 1, extra)
    if r.chance(0.3):
        hard = r.one([1, 2, 5])
        own = r.rows(n * hard, d, case.kind, case.dtype, like=query)
        case.leaves["hard_negatives"] = r.layout(own.reshape(n, hard, d))
        if r.chance(0.5):
            options["hard_mask"] = r.integers(0, 2, n, hard).bool()
    if r.chance(0.3):
        options["weights"] = r.integers(0, 4, n).float() / 4 + (torch.arange(n) == 0)
    if r.chance(0.3):
        margin = float(r.one([-2, -1, 0, 1, 2])) if case.kind in WHOLE else r.python.uniform(-0.5, 0.5)
        if case.kind in WHOLE or _is_clear(case, margin):
            options["margin"] = margin
    elif r.chance(0.3):
        options["label_smoothing"] = r.one([0.05, 0.1, 0.5])
    if "label_smoothing" not in options and r.chance(0.3):
        options["key_bias"] = r.normal(m).to(accumulation(case.dtype))
    elif "ids" in options and not {"margin", "label_smoothing"} & set(options) and r.chance(0.5):
        options["same_id"] = "positive"


OBJECTIVES = "", "", "directions", "hardness", "matryoshka", "guide", "teacher", "elsewhere"
APART = {
    "directions": {"label_smoothing", "same_id", "key_bias", "labels", "margin", "hard_mask"},
    "hardness": {"label_smoothing", "same_id", "margin"},
    "matryoshka": {"label_smoothing", "same_id", "margin"},
    "guide": {"label_smoothing", "same_id", "margin"},
    "teacher": {"label_smoothing", "same_id", "margin", "extra_keys", "extra_ids", "hard_negatives", "hard_mask"},
}
"""What the options of an objective do not stand beside."""


def _objective(case: Case, r: Draw) -> None:
    """More than one softmax of scores, in place of the options that it refuses."""
    query, key = list(case.leaves.values())[:2]
    (n, d), m, options = query.shape, len(key), case.constants
    of = {"info_nce": OBJECTIVES, "clip_loss": ("", "", *OBJECTIVES[4:7]), "siglip_loss": ("", "matryoshka")}
    objective = r.one(of[case.loss])
    if objective == "directions" and m != n:
        return
    for name in APART.get(objective, set()) - ({"same_id"} if case.loss == "siglip_loss" else set()):
        case.leaves.pop(name, None)
        options.pop(name, None)
    hard, extra = case.leaves.get("hard_negatives"), case.leaves.get("extra_keys")
    if hard is not None and objective in ("directions", "hardness", "elsewhere"):
        if "ids" in options and "same_id" not in options and r.chance(0.5):
            options["hard_ids"] = r.integers(0, 3, *hard.shape[:2])
        if not {"hard_mask", "same_id"} & options.keys() and r.chance(0.5):
            options["share_hard_negatives"] = True
    if objective == "directions":
        more = [name for name in ("query_to_query", "doc_to_query", "doc_to_doc") if r.chance(0.6)]
        more = ["doc_to_query"] if r.chance(0.3) else more
        options["directions"] = ("query_to_doc", *more)
        if more == ["doc_to_query"]:
            options["partition_mode"] = r.one(["joint", "per_direction"])
    if objective == "hardness" or (objective == "directions" and r.chance(0.5)):
        options["hardness_mode"] = r.one(["in_batch_negatives", "hard_negatives", "all_negatives"])
        options["hardness_strength"] = r.one([0.5, 9.0])
    if objective == "elsewhere" and not (hard is None and extra is None):
        options["in_batch_negatives"] = False
    if objective == "matryoshka":
        case.how.pop("cache_bytes")
        if case.dtype == torch.float16 and abs(case.scale) > 1e3:
            return  # gradients of short truncated rows would be beyond the dtype's range
        options["matryoshka_dims"] = tuple(r.python.sample(range(1, d + 1), r.one([1, min(2, d), min(5, d)])))
        options["matryoshka_normalize"] = r.chance(0.6)
        if r.chance(0.5):
            options["matryoshka_weights"] = tuple(r.one([0.5, 1.0, 2.0]) for _ in options["matryoshka_dims"])
    if objective == "guide":  # of whole numbers, so that it decides alike everywhere
        options["guide"] = (r.rows(n, 5, "integers", case.dtype), r.rows(m, 5, "integers", case.dtype))
        if extra is not None:
            options["extra_guide"] = r.rows(len(extra), 5, "integers", case.dtype)
        if hard is not None:
            rows = r.rows(n * hard.shape[1], 5, "integers", case.dtype)
            options["hard_guide"] = rows.reshape(n, hard.shape[1], 5)
        options["guide_margin"] = r.one([0.0, 0.5, -1.0])
        options["guide_margin_strategy"] = r.one(["absolute", "relative"])
    if objective == "teacher":
        sides = r.rows(n, 7, "unit", case.dtype), r.rows(m, 7, "unit", case.dtype)
        options["teacher"] = (*sides, r.one([1.0, 10.0, 100.0]))
        if r.chance(0.5):
            options |= {"teacher_weight": 0.5, "teacher_temperature": 2.0}


def _is_clear(case: Case, margin: float) -> bool:
    """No similarity is so near to its positive's less the margin that rounding decides between them."""
    query, key = (x.double() for x in list(case.leaves.values())[:2])
    labels = case.constants.get("labels", torch.arange(len(query)))
    blocks = [query @ key.T]
    pos = blocks[0].gather(1, labels.unsqueeze(1))
    if "extra_keys" in case.leaves:
        blocks.append(query @ case.leaves["extra_keys"].double().T)
    if "hard_negatives" in case.leaves:
        blocks.append(torch.einsum("nd,nhd->nh", query, case.leaves["hard_negatives"].double()))
    gaps = [(pos - x - margin).abs() for x in blocks]
    if case.loss == "clip_loss":
        gaps.append((pos.T - blocks[0] - margin).abs())
    largest = float(query.norm(dim=1).max()) * max(float(x.abs().max()) for x in (query, key)) * query.shape[1]
    rounding = 16 * query.shape[1] * torch.finfo(accumulation(case.dtype)).eps * (largest + abs(margin))
    return min(float(x.min()) for x in gaps if x.numel()) > rounding

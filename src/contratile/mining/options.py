"""Options of mining: which of a query's nearest keys are hard negatives, as sentence-transformers defines them.

window = Window.of(Rules(num_negatives=5, relative_margin=0.05), positives=1, keys=1000)
window.search                                   # nearest keys to examine
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from contratile.errors import bad_type, bad_value, check_choice, check_count

Sampling: TypeAlias = Literal["top", "random"]
MOST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of `mine_hard_negatives`. The fields are its arguments."""

    num_negatives: int = 5
    range_min: int = 0
    range_max: int | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    min_score: float | None = None
    max_score: float | None = None
    sampling: Sampling = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("num_negatives", self.num_negatives, least=1)
        check_count("range_min", self.range_min, least=0)
        check_count("seed", self.seed, least=0)
        check_choice("sampling", self.sampling, get_args(Sampling))
        if self.seed > MOST_SEED:
            bad_value("seed", expected=f"at most {MOST_SEED}", got=self.seed, remedy="Choose a smaller one.")
        if self.seed and self.sampling != "random":
            remedy = "Drop it, or pass sampling='random' (--sampling random): nothing else is random."
            bad_value("seed", expected="random sampling with it", got=f"sampling {self.sampling!r}", remedy=remedy)
        if self.range_max is not None:
            check_count("range_max", self.range_max, least=1)
            if self.num_negatives > self.range_max - self.range_min:
                least = self.range_min + self.num_negatives
                remedy = "Raise it, or lower num_negatives or range_min."
                expected = f"at least range_min + num_negatives = {least}"
                bad_value("range_max", expected=expected, got=self.range_max, remedy=remedy)
        for name in ("absolute_margin", "relative_margin", "min_score", "max_score"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                bad_type(name, expected="a number", got=type(value).__name__, remedy="Leave it out for no such limit.")
            if not math.isfinite(value):
                bad_value(name, expected="a finite number", got=value, remedy="Leave it out for no such limit.")
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            expected, remedy = f"at most max_score = {self.max_score}", "No score lies between them: change one."
            bad_value("min_score", expected=expected, got=self.min_score, remedy=remedy)


class Window(NamedTuple):
    """How many of the nearest keys are examined, and which of the remaining ones are used."""

    search: int
    """Nearest keys of each query that are examined, positives included."""

    end: int
    """Only this many of the keys that pass the rules are used."""

    @classmethod
    def of(cls, rules: Rules, positives: int, keys: int) -> "Window":
        """The window, for queries with at most `positives` positives; sized as in sentence-transformers by default.

        Args:
            rules: The rules.
            positives: The largest number of positives of a query.
            keys: The number of keys, which limits the window.
        """
        end = rules.range_max
        if end is None:
            strict = any(x is not None for x in (rules.absolute_margin, rules.relative_margin, rules.max_score))
            # With a margin some candidates are skipped: look at more.
            end = rules.range_min + rules.num_negatives * (10 if strict else 1) + positives
        return cls(min(end + positives, keys), end)

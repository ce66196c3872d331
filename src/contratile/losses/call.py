"""How every loss starts: check the arguments, and agree with the other ranks on the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from contratile.engine.backends import BACKENDS, registry
from contratile.engine.backends.precision import PRECISIONS
from contratile.engine.spec import PairStats, Spec
from contratile.errors import bad_value, check_choice, check_count, check_features, check_scale, check_transform
from contratile.losses.cross_entropy import Rings
from contratile.losses.normalized import look_once
from contratile.losses.options import PairOptions
from contratile.reference import REDUCTIONS, Reduction
from contratile.ring.ring import Ring
from contratile.ring.team import Facts, Group, Team


@dataclass(frozen=True)
class Call:
    """A call of a loss, as the user made it."""

    name: str
    features: dict[str, Tensor]
    numbers: dict[str, Tensor | float]
    spec: Spec
    reduction: Reduction = "none"
    options: PairOptions | None = None
    views: int = 1
    """The loss concatenates its features to one set, with `views` times as many rows."""

    def start(self, group: Group, check: Callable[[], None] = lambda: None) -> Rings:
        """Check the arguments, by `check` those of this loss alone, and meet the other ranks.

        If one rank's arguments are bad, every rank raises: none is left waiting.
        """
        team = Team.of(group)
        try:
            self._check(team, check)
        except Exception as error:
            team.refuse(error)
            raise
        query, *others = self.features.values()
        key = others[0] if others and self.views == 1 else query
        extra = None if self.options is None else self.options.extra_keys
        mine = self.views * query.shape[0], self.views * key.shape[0], 0 if extra is None else extra.shape[0]
        sizes = [mine]
        if team.size > 1:
            facts = team.handshake(self._facts(*mine))
            sizes = [(fact.queries, fact.keys, fact.extra) for fact in facts]
        queries, keys, extras = zip(*sizes, strict=True)
        if team.size > 1 and not (sum(queries) and sum(keys)):
            remedy = "An empty batch has no loss; skip it or use drop_last=True in the loader."
            got = f"none on any of {team.size} ranks"
            bad_value("global batch", expected="at least one row", got=got, remedy=remedy)
        return Rings(
            keys=Ring.flat(team, keys, total=sum(queries)),
            extra=None if extra is None else Ring.flat(team, extras, total=sum(queries)),
        )

    def _check(self, team: Team, check: Callable[[], None]) -> None:
        spec = self.spec
        more = () if self.options is None else (self.options.extra_keys, self.options.hard_negatives)
        check_transform(self.name, spec.backend, (*self.features.values(), *self.numbers.values(), *more))
        check_features(self.features, empty=team.size > 1)
        check_choice("reduction", self.reduction, REDUCTIONS)
        for name, number in self.numbers.items():
            check_scale(number, name)
        check()
        check_choice("backend", spec.backend, BACKENDS)
        check_count("cache_bytes", spec.cache_bytes, least=0)
        if spec.precision is not None:
            check_choice("precision", spec.precision, PRECISIONS)
        if spec.tile is not None:
            check_count("tile", spec.tile, least=1)
        registry.check(spec.backend, next(iter(self.features.values())).device, team.size)
        if self.name != "pair_lse":  # it makes no claim about what its scores are
            look_once(self.name, tuple(self.features.values()), self.numbers)

    def _facts(self, queries: int, keys: int, extra: int) -> Facts:
        """What the ranks compare."""
        query, options, spec = next(iter(self.features.values())), self.options, self.spec
        inputs = {**self.features, "extra_keys": None if options is None else options.extra_keys, **self.numbers}
        wanting = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]
        sides = [name for name, asked in (("rows", spec.rows), ("cols", spec.cols)) if asked]
        return Facts(
            queries=queries,
            keys=keys,
            extra=extra,
            features=query.shape[1],
            dtype=str(query.dtype).removeprefix("torch."),
            device=query.device.type,
            call=" ".join([self.name, *sides, self.reduction, "" if options is None else options.named()]),
            gradient=" ".join(wanting) if torch.is_grad_enabled() and wanting else "none",
        )

    def reduce(self, per_row: Tensor, stats: PairStats, ring: Ring, *, share: float = 1.0) -> Tensor:
        """`share` times the rows, their sum, or their share of the global mean, weighted, in nats."""
        weights = None if self.options is None else self.options.weights
        if weights is not None:
            weights = weights.to(per_row.dtype)
            per_row = per_row * weights
        if self.reduction == "none":
            return stats.nats(per_row, share)
        if self.reduction == "sum":
            return stats.nats(per_row.sum(), share)
        if weights is None:
            return stats.nats(per_row.sum(), share * ring.team.size, ring.total)
        total = ring.team.sum(weights.sum(dtype=per_row.dtype))
        return stats.nats(per_row.sum(), share * ring.team.size, torch.where(total == 0, 1, total))

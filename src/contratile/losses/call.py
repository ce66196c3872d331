"""The start of every call: its arguments are checked, and all ranks agree on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from contratile.engine.backends import BACKENDS, registry
from contratile.engine.backends.precision import PRECISIONS
from contratile.engine.spec import PairStats, Spec
from contratile.errors import bad_value, check_choice, check_count, check_features, check_scale, check_transform
from contratile.losses.beside import features_of
from contratile.losses.normalized import look_once
from contratile.losses.options import PairOptions
from contratile.reference import REDUCTIONS, Reduction
from contratile.ring.nodes import RINGS, Home, here, schedule_for
from contratile.ring.ring import Ring
from contratile.ring.schedule import ONE_RANK
from contratile.ring.team import Facts, Group, Team


class Rings(NamedTuple):
    """How the keys travel and, if there are any, the extra keys and the queries' own hard negatives."""

    keys: Ring
    extra: Ring | None = None
    hard: Ring | None = None
    """One column of hard negatives, if they are shared."""


class Call(NamedTuple):
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
        """Check the arguments (`check` adds those of this loss), then do the handshake with the other ranks.

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
        queries: tuple[int, ...] = (mine[0],)
        keys: tuple[int, ...] = (mine[1],)
        extras: tuple[int, ...] = (mine[2],)
        schedule = ONE_RANK
        if team.size > 1:
            facts = team.handshake(self._facts(*mine))
            queries, keys = tuple(fact.queries for fact in facts), tuple(fact.keys for fact in facts)
            extras = tuple(fact.extra for fact in facts)
            if not (sum(queries) and sum(keys)):
                remedy = "An empty batch has no loss; skip it or use drop_last=True in the loader."
                got = f"none on any of {team.size} ranks"
                bad_value("global batch", expected="at least one row", got=got, remedy=remedy)
            schedule = schedule_for(self.spec.ring, [Home(fact.node, fact.local) for fact in facts])
            if len(schedule.nodes) > 1:
                team = team.with_lane()
        total, shared = sum(queries), self.options is not None and self.options.more.share_hard_negatives
        return Rings(
            keys=Ring(team, keys, total, schedule),
            extra=None if extra is None else Ring(team, extras, total, schedule),
            hard=Ring(team, queries, total, schedule) if shared else None,
        )

    def _check(self, team: Team, check: Callable[[], None]) -> None:
        spec = self.spec
        check_transform(self.name, spec.backend, self._tensors)
        check_features(self.features, empty=team.size > 1)
        check_choice("reduction", self.reduction, REDUCTIONS)
        for name, number in self.numbers.items():
            check_scale(number, name)
        check()
        check_choice("ring", spec.ring, RINGS)
        check_choice("backend", spec.backend, BACKENDS)
        check_count("cache_bytes", spec.cache_bytes, least=0)
        if spec.precision is not None:
            check_choice("precision", spec.precision, PRECISIONS)
        if spec.tile is not None:
            check_count("tile", spec.tile, least=1)
        registry.check(spec.backend, next(iter(self.features.values())).device, team.size)
        normalizes = self.options is not None and self.options.normalizes
        if self.name != "pair_lse" and not normalizes:  # pair_lse takes any products
            look_once(self.name, tuple(self.features.values()), self.numbers)

    def _tensors(self) -> list[object]:
        """All that may have gradients."""
        names = "extra_keys", "hard_negatives", "key_bias", "extra_bias", "hard_bias"
        more = [getattr(self.options, name, None) for name in names]
        more += [] if self.options is None else features_of(self.options)
        return [*self.features.values(), *self.numbers.values(), *more]

    def _facts(self, queries: int, keys: int, extra: int) -> Facts:
        """What the ranks compare in the handshake."""
        query, options, spec = next(iter(self.features.values())), self.options, self.spec
        more = ["extra_keys", "key_bias", "extra_bias"]
        if options is not None and options.more.share_hard_negatives:  # their gradients travel, too
            more += ["hard_negatives", "hard_bias"]
        inputs = {**self.features, **{name: getattr(options, name, None) for name in more}, **self.numbers}
        wanting = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.requires_grad]
        sides = [name for name, asked in (("rows", spec.rows), ("cols", spec.cols)) if asked]
        return Facts(
            queries=queries,
            keys=keys,
            extra=extra,
            features=query.shape[1],
            dtype=str(query.dtype).removeprefix("torch."),
            device=query.device.type,
            call=" ".join([self.name, *sides, self.reduction, spec.ring, "" if options is None else options.named()]),
            gradient=" ".join(wanting) if torch.is_grad_enabled() and wanting else "none",
            **here()._asdict(),
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

"""Decides which inputs are sorted by length and cut."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from contratile.errors import check_choice
from contratile.grad_cache.agreement import disagreement
from contratile.grad_cache.chunks import Encoder, Nest
from contratile.grad_cache.encoded import EncoderSide
from contratile.grad_cache.lengths import (
    OVERHEAD_ACCELERATOR,
    OVERHEAD_CPU,
    POWERS,
    ByLength,
    Pool,
    can_join,
    check_named,
    has_lengths,
)
from contratile.grad_cache.wrappers import is_collective
from contratile.ring.team import Group, Team


class Sorting:
    """The option `lengths` of `GradCache`, and what the comparison with and without padding found."""

    def __init__(self, lengths: Literal["auto", "off"] | ByLength, group: Group = "auto") -> None:
        if not isinstance(lengths, ByLength):
            check_choice("lengths", lengths, ("auto", "off"))
        self.rule = ByLength() if lengths == "auto" else None if lengths == "off" else lengths
        self.group = group
        self.agreed: dict[Encoder, bool] = {}
        """Whether features agree with and without padding."""

    def check_named(self, inputs: Sequence[Nest]) -> None:
        """Raise if the mask that the rule names is in none of the inputs of a step."""
        if self.rule is not None:
            check_named(inputs, self.rule)

    def pools(self, side: EncoderSide, nests: Sequence[Nest]) -> list[Pool]:
        """The rows of some nests: one pool with lengths if they are sorted and cut, otherwise a pool for each."""
        rule = self._rule(side, nests)
        if rule is not None:
            pool = Pool(nests, rule, f"input {side.index}")
            if self._agrees(side, pool):
                return [pool]
        return [Pool([nest], None, f"input {side.index}") for nest in nests]

    def joined(self, side: EncoderSide, nests: Sequence[Nest]) -> Pool | None:
        """The rows of several inputs of one encoder; None if they cannot be in one chunk."""
        if not self.can_join(side, nests):
            return None
        pool, *more = self.pools(side, nests)
        return None if more else pool

    def can_join(self, side: EncoderSide, nests: Sequence[Nest]) -> bool:
        rule = self._rule(side, nests)
        return rule is not None and can_join(nests, rule)

    def window(self, side: EncoderSide, block: Nest) -> int:
        """Blocks of an iterator that are read before the first is encoded."""
        rule = self._rule(side, [block])
        if rule is None or not self.agreed.get(side.encoder, True):
            return 1
        return rule.window

    def buckets(self, side: EncoderSide, rule: ByLength) -> tuple[int, ...]:
        """Lengths that chunks may have."""
        if rule.buckets != "auto":
            return rule.buckets
        return POWERS if any(map(_is_compiled, side.owner.modules())) else ()

    def overhead(self, side: EncoderSide, rule: ByLength) -> int | None:
        """The fixed cost of a chunk, in tokens; None: chunks are as large as allowed."""
        if rule.overhead != "auto":
            return rule.overhead
        if any(map(is_collective, side.wrappers)) or any(map(_is_compiled, side.owner.modules())):
            return None  # shards need equally many chunks on every rank, a compiler few sizes
        return OVERHEAD_CPU if side.device.type == "cpu" else OVERHEAD_ACCELERATOR

    def _rule(self, side: EncoderSide, nests: Sequence[Nest]) -> ByLength | None:
        if self.rule is None or not all(has_lengths(nest, self.rule) for nest in nests):
            return None
        if self.rule.check and any(isinstance(x, _BatchNorm) and x.training for x in side.owner.modules()):
            return None  # a chunk's statistics would be those of texts of one length
        return self.rule

    def _agrees(self, side: EncoderSide, pool: Pool) -> bool:
        assert self.rule is not None
        if not self.rule.check:
            return True
        if side.encoder not in self.agreed:
            found = self._compared(side, pool)
            if found is None:
                return True  # no row has padding: there is nothing to cut
            self.agreed[side.encoder] = not found
            if found:
                warnings.warn(
                    f"features of input {side.index} are not the same without padding ({found}), so its rows are "
                    "neither sorted nor cut by length. Does the encoder use its attention mask? Positions of left "
                    "padded rows must not depend on the padding. GradCache(lengths='off') avoids this message, in a "
                    "training run --lengths off.",
                    stacklevel=2,
                )
        return self.agreed[side.encoder]

    def _compared(self, side: EncoderSide, pool: Pool) -> str | None:
        """The result of `disagreement`. Ranks that share shards encode together, so they decide together."""
        team = Team.of(self.group)
        if team.size == 1 or not any(map(is_collective, side.wrappers)):
            return disagreement(side, pool)
        found = disagreement(side, pool, always=True)
        facts = torch.tensor([found is not None, bool(found)], dtype=torch.float32, device=side.device)
        padded, wrong = team.sum(facts).tolist()
        if not padded:
            return None
        return found or ("those of another rank differ" if wrong else "")


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None

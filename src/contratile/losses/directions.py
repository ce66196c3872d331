"""More negatives from the batch itself: `directions`, `partition_mode`, `hardness_mode` and `hardness_strength`.

Names, values, defaults and refusals are those of sentence-transformers' MultipleNegativesRankingLoss. Query i has the
positive document i, and s(a, b) = scale * <a, b>:

    query_to_doc      s(query i, every document)          the softmax of InfoNCE
    doc_to_query      s(every query, document i)          counts the positive a second time
    query_to_query    s(query i, other queries)
    doc_to_doc        s(document i, documents of others)

    joint             loss_i = log-sum-exp over all of these - s(query i, document i)
    per_direction     loss_i = mean of a log-sum-exp for each direction - s(query i, document i)

One call of the engine computes the first two (rows and columns of the same scores). Each of the others takes a call at
half the work, because the scores of a set with itself are symmetric.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from contratile.errors import bad_type, bad_value, check_choice

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
PartitionMode = Literal["joint", "per_direction"]
HardnessMode = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]
DIRECTIONS: tuple[str, ...] = get_args(Direction)
PARTITION_MODES: tuple[str, ...] = get_args(PartitionMode)
HARDNESS_MODES: tuple[str, ...] = get_args(HardnessMode)
ONE_TYPE = ("query_to_query", "doc_to_doc")
"""Directions between texts of one type, which never contain the positive."""


class Directions(NamedTuple):
    """Which pairs of a batch are negatives, and how much hard ones count. `info_nce` explains each option."""

    directions: tuple[Direction, ...] = ("query_to_doc",)
    partition_mode: PartitionMode = "joint"
    hardness_mode: HardnessMode | None = None
    hardness_strength: float = 0.0
    share_hard_negatives: bool = False

    @property
    def plain(self) -> bool:
        """Whether all options have their defaults, which are InfoNCE."""
        return self == PLAIN

    @property
    def names(self) -> frozenset[str]:
        """The directions; empty if the option was given something that is not a collection of names."""
        given: object = self.directions
        if given is PLAIN.directions:
            return ONE_WAY
        return frozenset(map(str, given)) if isinstance(given, tuple | list | set | frozenset) else frozenset()

    @property
    def several(self) -> bool:
        return self.names != ONE_WAY

    @property
    def back(self) -> bool:
        return "doc_to_query" in self.names

    @property
    def hardness(self) -> float:
        """The strength; 0 without a mode."""
        return 0.0 if self.hardness_mode is None else float(self.hardness_strength)

    @property
    def in_batch(self) -> float:
        """The strength for documents of other queries."""
        return 0.0 if self.hardness_mode == "hard_negatives" else self.hardness

    @property
    def own(self) -> float:
        """The strength for a query's own hard negatives."""
        return 0.0 if self.hardness_mode == "in_batch_negatives" else self.hardness

    def check(self) -> None:
        """Refuse options that cannot be used, whatever the other arguments are."""
        if self.plain:
            return
        check_directions(self.directions, self.partition_mode)
        check_hardness(self.hardness_mode, self.hardness_strength)
        if not isinstance(self.share_hard_negatives, bool):
            got, remedy = type(self.share_hard_negatives).__name__, "True compares all queries with them."
            bad_type("share_hard_negatives", expected="True or False", got=got, remedy=remedy)
        if self.hardness_strength and self.hardness_mode is None:
            remedy = f"Pass hardness_mode=, one of {', '.join(map(repr, HARDNESS_MODES))}."
            bad_value("hardness_strength", expected="hardness_mode= with it", got="none", remedy=remedy)


PLAIN = Directions()
ONE_WAY = frozenset({"query_to_doc"})


def check_directions(directions: object, partition_mode: str) -> tuple[str, ...]:
    """Return the directions as a tuple; raise a ValueError if they cannot be used."""
    if isinstance(directions, str) or not isinstance(directions, tuple | list | set | frozenset) or not directions:
        remedy = "Pass a tuple, for example ('query_to_doc',)."
        bad_value("directions", expected="a tuple of names", got=repr(directions), remedy=remedy)
    for direction in directions:
        check_choice("directions", direction, DIRECTIONS)
    if "query_to_doc" not in directions:
        remedy = "Add it: it contains the positives."
        bad_value("directions", expected="'query_to_doc' among them", got=directions, remedy=remedy)
    check_choice("partition_mode", partition_mode, PARTITION_MODES)
    for direction in ONE_TYPE:
        if direction in directions and partition_mode == "per_direction":
            remedy = (
                f"Every softmax needs the positive, and {direction!r} never contains it. Pass partition_mode='joint', "
                f"or drop {direction!r}."
            )
            expected = "'query_to_doc' or both ways for 'per_direction'"
            bad_value("directions and partition_mode", expected=expected, got=directions, remedy=remedy)
    return tuple(directions)


def check_hardness(mode: str | None, strength: float) -> None:
    """Raise a ValueError or a TypeError for an unknown mode or an impossible strength."""
    if mode is not None:
        check_choice("hardness_mode", mode, HARDNESS_MODES)
    remedy = "It multiplies the similarity of negatives; 0 means no weighting."
    if isinstance(strength, bool) or not isinstance(strength, int | float):
        bad_type("hardness_strength", expected="a number", got=type(strength).__name__, remedy=remedy)
    if not 0 <= strength < float("inf"):
        bad_value("hardness_strength", expected="a number from 0 up", got=strength, remedy=remedy)

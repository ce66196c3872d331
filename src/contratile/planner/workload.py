"""A training step in numbers: encoders, loss, optimiser, and how the batch is cut and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from contratile.losses.directions import ONE_TYPE, Direction
from contratile.planner.cpu_rates import OperatorClock
from contratile.planner.encoder_cost import EncoderCost, EncoderPrecision, fake_module, fake_tensors
from contratile.planner.live_bytes import LiveBytes
from contratile.ring.nodes import RingKind

Offload = Literal["none", "host", "disk"]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """An update of all trained weights."""

    name: str
    state_bytes: float
    """Held between steps."""

    temporary_bytes: float
    """Additionally held during the update."""

    moved: float
    """Bytes read and written."""

    seconds: float = 0.0
    """On a CPU whose rates are known."""


@dataclass(frozen=True, kw_only=True)
class LossFacts:
    """What the loss compares, and the memory it may use."""

    views: int = 1
    """2 if both sides of a pair are compared with everything (NT-Xent, SupCon)."""

    negatives: int = 0
    """Hard negatives of each pair."""

    shared_negatives: bool = True
    """Hard negatives are compared with all pairs, not only with their own."""

    cache_bytes: int = 0
    """What may be spent on keeping score tiles from forward to backward."""

    dense: bool = False
    """All scores are held at once."""

    ring: RingKind = "auto"
    """How blocks travel between ranks; auto: over nodes if there are several with more than one device each."""

    directions: tuple[Direction, ...] = ("query_to_doc",)
    """What is compared; "doc_to_query" comes with "query_to_doc"."""

    prefixes: int = 0
    """Widths of features that have a loss of their own (Matryoshka)."""

    @property
    def key_sets(self) -> int:
        """Sets of as many keys as pairs that queries are compared with: documents, shared hard negatives."""
        return 1 + (self.negatives if self.shared_negatives else 0)

    @property
    def same_type(self) -> int:
        """Directions that compare a set with itself."""
        return len(set(ONE_TYPE) & set(self.directions))

    def blocks(self, ranks: int) -> float:
        """Blocks of one rank's rows against as many keys that it computes, each the four products of `clip_loss`.

        A set with itself is half a block on one process. Over ranks no gradient of keys is needed: three products.
        """
        of_one_set = 0.5 if ranks == 1 else 0.75
        documents = self.key_sets * (of_one_set if self.views == 2 else 1.0)
        more = self.same_type * of_one_set
        if "doc_to_doc" in self.directions:  # documents with hard negatives
            more += self.key_sets - 1
        return ranks * (documents + more)


@dataclass(frozen=True, kw_only=True)
class SecondCost:
    """A frozen model that encodes each batch too, without gradients."""

    role: str
    """What the plan calls it: guide or teacher."""

    sides: tuple[EncoderCost, EncoderCost]
    """Its encoders; the same object if they share one."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Measured bytes as a line of the counted ones."""

    slope: float
    offset: float

    def __call__(self, counted: float) -> float:
        return max(0.0, self.slope * counted + self.offset)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step over all ranks."""

    batch: int
    chunk: int
    ranks: int
    precision: EncoderPrecision = "fp32"
    fsdp: bool = False
    offload: Offload = "none"
    sides: tuple[EncoderCost, EncoderCost]
    """The encoders of the left and the right side; the same object if they share one."""

    negative_side: int = 1
    """The side whose encoder also encodes hard negatives."""

    second: SecondCost | None = None
    loss: LossFacts = LossFacts()
    optimizer: OptimizerCost
    measured: Line | None = None
    """What chunks take on this machine, from a calibration; None: what was counted."""

    host_bytes: float = 0.0
    """Kept in host memory by each process throughout, such as outputs of locked backbones."""

    @property
    def share(self) -> int:
        """Pairs of one rank."""
        return -(-self.batch // self.ranks)

    @property
    def encoders(self) -> tuple[EncoderCost, ...]:
        """Distinct encoders."""
        left, right = self.sides
        return (left,) if left is right else self.sides

    @property
    def width(self) -> int:
        return self.sides[0].width

    @property
    def rows(self) -> tuple[tuple[EncoderCost, int], ...]:
        """Encoders with the rows that a rank gives each of them in a step."""
        return self._rows_of(self.sides)

    @property
    def second_rows(self) -> tuple[tuple[EncoderCost, int], ...]:
        """Encoders of the frozen model with their rows; empty without such a model."""
        return () if self.second is None else self._rows_of(self.second.sides)

    def _rows_of(self, sides: tuple[EncoderCost, EncoderCost]) -> tuple[tuple[EncoderCost, int], ...]:
        left, right = sides
        hard = [(sides[self.negative_side], self.share * self.loss.negatives)] if self.loss.negatives else []
        return ((left, self.share), (right, self.share), *hard)

    @property
    def feature_itemsize(self) -> float:
        """Bytes of one number of a feature, as the encoders return it."""
        one = self.sides[0].large
        return one.feature_bytes / (one.rows * self.width)


def count_optimizer(
    modules: Iterable[nn.Module], make: MakeOptimizer, name: str, clock: OperatorClock | None = None
) -> OptimizerCost:
    """Count what an optimiser holds and moves, by running one update on fake tensors.

    Args:
        modules: What is trained.
        make: Makes the optimiser of a module.
        name: What the plan calls it.
        clock: Estimates the seconds of operators on a CPU; those of the second update count, and
            of clipping the gradients.
    """
    with fake_tensors():
        model = fake_module(nn.ModuleList(dict.fromkeys(modules)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        live = LiveBytes(clock=clock)
        with live, torch.no_grad():
            optimizer = make(model)
            optimizer.step()
            held, first = live.now, live.seconds
            found = OptimizerCost(
                name=name, state_bytes=held, temporary_bytes=max(0, live.peak - held), moved=float(live.moved)
            )
            if clock is not None:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                found = replace(found, seconds=live.seconds - first)
        del optimizer
    return found


def by_name(name: str) -> MakeOptimizer:
    """A class of torch.optim by its name, with its default options."""
    known = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}

    def make(model: nn.Module) -> torch.optim.Optimizer:
        trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        made: torch.optim.Optimizer = known[name.lower()](trained, lr=1e-3)
        return made

    return make

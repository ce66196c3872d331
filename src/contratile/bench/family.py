"""`contratile bench family`: time, memory and accuracy of each loss against the package people use for it today.

recording = run(BENCH, FamilyBenchConfig(losses=("nt_xent",), sizes=(2048,)), command="...")
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contratile.bench.contestants import packages_of
from contratile.bench.contestants.family import CASES, FAMILY
from contratile.bench.loss import LossBenchConfig, LossSeries
from contratile.bench.runner import Benchmark, Measured
from contratile.errors import bad_value, check_choice

LOSSES = tuple(case.name for case in FAMILY)
FAMILY_CONTESTANTS = tuple(
    sorted({name: 0 for case in FAMILY for name in case.contestants}, key=lambda name: name == "dense")
)
"""The contestants of all losses, the dense formula last."""


@dataclass(frozen=True, kw_only=True)
class FamilyBenchConfig(LossBenchConfig):
    """Time, memory and accuracy of each loss, forward and backward, against the package people use for it today."""

    losses: tuple[str, ...] = LOSSES
    """Which losses to measure."""

    sizes: tuple[int, ...] = (2048, 8192)
    """Batch sizes N to time."""

    memory_sizes: tuple[int, ...] = (2048, 8192, 32768)
    """Batch sizes N to measure peak memory at; may be larger than those that are timed."""

    dims: tuple[int, ...] = (256,)
    """Feature sizes D."""

    contestants: tuple[str, ...] = FAMILY_CONTESTANTS
    """Which implementations to compare, each in the losses that it has. One whose package is not installed gets a row
    that says so."""

    rounds: int = 3
    """How often each contestant is timed at each size; the best and the median are reported."""

    out: Path = Path("bench-family")
    """Folder for family.csv, family.json and family.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.losses:
            check_choice("losses", name, LOSSES)
        if not self.losses:
            bad_value("losses", expected="at least one", got="none", remedy="Leave it out for the default.")

    def contestants_of(self, loss: str) -> tuple[str, ...]:
        """Return the chosen contestants that have this loss, and unknown names, which get a row that says so."""
        known = CASES[loss].contestants
        return tuple(name for name in self.contestants if name in known or name not in FAMILY_CONTESTANTS)


class FamilySeries(LossSeries):
    """A series of a case, with columns for the loss, its products and its package."""

    def columns(self, name: str, n: int, measured: Measured) -> dict[str, Any]:
        case = self.case
        known = case.contestants.get(name)
        about = {"loss": case.name, "views": case.views, "products": case.products}
        about |= {"beside_products": case.beside_products, "beside_d": case.beside_d(self.d)}
        return {**super().columns(name, n, measured), **about, "package": known.package if known else None}


def _series(config: FamilyBenchConfig) -> Sequence[FamilySeries]:
    return [
        FamilySeries(config, CASES[loss], config.contestants_of(loss), d) for loss in config.losses for d in config.dims
    ]


BENCH = Benchmark(
    kind="family",
    default=FamilyBenchConfig(),
    quick=FamilyBenchConfig(
        sizes=(1024, 2048),
        memory_sizes=(2048, 8192),
        contestants=tuple(
            name for name in FAMILY_CONTESTANTS if name == "contratile" or not name.startswith("contratile")
        ),
        losses=tuple(name for name in LOSSES if name != "info_nce"),
        rounds=2,
        patience=10.0,
        quick=True,
    ),
    series=_series,
    packages=packages_of(contestant for case in FAMILY for contestant in case.contestants.values()),
)

"""The run over the family of losses: time, memory and errors of each against the package people use today.

recording = run(FamilyConfig(losses=("nt_xent",), sizes=(2048,)), command="...")
save(recording, config.out)
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contratile.bench.contestants.family import CASES, FAMILY
from contratile.bench.contestants.loss import packages
from contratile.bench.harness import Notify, environment
from contratile.bench.loss import LossConfig, measure
from contratile.bench.rows import FamilyRow, Recording
from contratile.errors import bad_value, check_choice

LOSSES = tuple(case.name for case in FAMILY)
CONTESTANTS = tuple(sorted({name: 0 for case in FAMILY for name in case.contestants}, key=lambda name: name == "dense"))
"""Of all losses, the formula last."""


@dataclass(frozen=True, kw_only=True)
class FamilyConfig(LossConfig):
    """Time, memory and accuracy of each loss, forward and backward, against the package people use for it today."""

    losses: tuple[str, ...] = LOSSES
    """Which losses."""

    sizes: tuple[int, ...] = (2048, 8192)
    """Batch sizes N to time."""

    memory_sizes: tuple[int, ...] = (2048, 8192, 32768)
    """Batch sizes N whose peak memory is measured; may go beyond those that are timed."""

    dims: tuple[int, ...] = (256,)
    """Feature sizes D."""

    contestants: tuple[str, ...] = CONTESTANTS
    """Who takes part, each in the losses that it has. Packages that are not installed get a row that says so."""

    rounds: int = 3
    """Turns of each contestant at each size; the best and the median are reported."""

    out: Path = Path("bench-family")
    """Folder for family.csv, family.json and family.png."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.losses:
            check_choice("losses", name, LOSSES)
        if not self.losses:
            bad_value("losses", expected="at least one", got="none", remedy="Leave it out for the default.")

    def contestants_of(self, loss: str) -> list[str]:
        """Those that have this loss, and those that nobody knows."""
        return [name for name in self.contestants if name in CASES[loss].contestants or name not in CONTESTANTS]


QUICK = FamilyConfig(
    sizes=(1024, 2048),
    memory_sizes=(2048, 8192),
    contestants=tuple(name for name in CONTESTANTS if name == "contratile" or not name.startswith("contratile")),
    losses=tuple(name for name in LOSSES if name != "info_nce"),
    rounds=2,
    patience=10.0,
    quick=True,
)


def run(
    config: FamilyConfig,
    *,
    command: str,
    notify: Notify = lambda text: None,
    keep: Callable[[Recording[FamilyRow]], object] = lambda recording: None,
) -> Recording[FamilyRow]:
    """Measure everything that the config asks for, loss by loss; `keep` is given all rows whenever there are more."""
    torch.set_num_threads(config.threads)
    cases = [CASES[name] for name in config.losses]
    facts = environment(packages(*cases))
    rows: list[FamilyRow] = []
    total = len(config.dims) * len(config.all_sizes) * sum(len(config.contestants_of(case.name)) for case in cases)

    def progress(text: str) -> None:
        notify(f"{len(rows)} of {total} rows done · {text}")

    for case in cases:
        about: dict[str, Any] = {"loss": case.name, "views": case.views, "products": case.products}
        for row in measure(case, config, config.contestants_of(case.name), facts, command, progress):
            known = case.contestants.get(row.contestant)
            rows.append(FamilyRow(**vars(row), **about, package=known.package if known else None))
            keep(Recording(tuple(rows), facts, command, "family"))
    return Recording(tuple(rows), facts, command, "family")

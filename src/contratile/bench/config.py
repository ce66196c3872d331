"""The options that all benchmarks share."""

from dataclasses import dataclass
from pathlib import Path

from contratile.errors import bad_value, check_count


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is measured, of whom, and how often. Options of the command line are these fields."""

    contestants: tuple[str, ...]
    """Who takes part."""

    dims: tuple[int, ...] = (512,)
    """Feature sizes D."""

    rounds: int
    """Turns of each contestant at each size."""

    scale: float = 14.3
    """Factor on the scores (the inverse temperature)."""

    threads: int
    """Threads of torch."""

    patience: float = 60.0
    """Seconds: a step that is predicted, from smaller sizes, to take longer is skipped."""

    out: Path
    """Folder for the results."""

    quick: bool = False
    """Smaller defaults, done in two minutes; other options still apply on top."""

    def __post_init__(self) -> None:
        for d in self.dims:
            check_count("dims", d, least=1)
        check_count("rounds", self.rounds, least=1)
        check_count("threads", self.threads, least=1)
        if not self.scale > 0:
            bad_value("scale", expected="a positive number", got=self.scale, remedy="CLIP starts at 14.3.")
        for name in ("dims", "contestants"):
            if not getattr(self, name):
                bad_value(name, expected="at least one", got="none", remedy="Leave it out for the default.")
